//! Benchmark program.
fn main() {}

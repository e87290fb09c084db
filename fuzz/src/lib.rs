//! What the fuzz targets share: how an input is read, the engines that hear it, and what the fuzzer begins with.

pub mod input;
pub mod script;
pub mod seeds;
pub mod world;

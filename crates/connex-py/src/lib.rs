//! The Python module `connex_rs._connex_rs`: conversion of arguments and results, and the handling of the
//! interpreter lock. All behaviour is in the `connex-rs` crate.
//!
//! Rules that hold throughout: whatever can wait runs without the interpreter lock (`waiting`); no thread of an engine
//! ever takes it (`mailbox`); statics of this module are locked only by threads that hold it, so that
//! they are free whenever Python forks.

mod args;
mod channel;
mod convert;
mod engine;
mod errors;
mod exit;
mod host;
mod mailbox;
mod transfer;
mod waiting;

use pyo3::prelude::*;

/// Nanoseconds of CLOCK_MONOTONIC, the clock of the events' `ts_ns`.
#[pyfunction]
fn now_ns() -> u64 {
    connex_rs::now_ns()
}

#[pymodule]
fn _connex_rs(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<engine::Engine>()?;
    module.add_class::<transfer::Transfer>()?;
    module.add_class::<mailbox::Mailbox>()?;
    module.add_class::<channel::ChannelSender>()?;
    module.add_class::<channel::ChannelReceiver>()?;
    module.add_class::<channel::ChannelStep>()?;
    module.add_function(wrap_pyfunction!(now_ns, module)?)?;
    module.add_function(wrap_pyfunction!(host::set_ucx_wheel, module)?)?;
    module.add_function(wrap_pyfunction!(host::ucx, module)?)?;
    module.add_function(wrap_pyfunction!(host::ucx_plan, module)?)?;
    module.add_function(wrap_pyfunction!(host::interfaces, module)?)?;
    module.add_function(wrap_pyfunction!(host::default_ip, module)?)?;
    exit::register(module)
}

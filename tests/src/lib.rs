//! The fault lab: engines in processes of their own, in network namespaces joined by a cable that can be cut.

pub mod agent;
pub mod net;
pub mod relay;
pub mod streams;

//! What the fuzz targets share: how an input is read, and the engines that hear it.

pub mod input;
pub mod world;

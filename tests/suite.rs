//! Every cross-crate test, in one binary.

mod contract;
mod ep;
mod training;
mod checkpoint;

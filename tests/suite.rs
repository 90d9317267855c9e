//! Every cross-crate test, in one binary.

mod training;
mod contract;
mod ep;

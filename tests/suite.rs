//! Every cross-crate test, in one binary.

mod cases;
mod checkpoint;
mod contract;
mod ep;
mod generation;
mod parity;
mod training;

//! Every cross-crate test, in one binary.

mod checkpoint;
mod contract;
mod ep;
mod training;
mod cases;
mod generation;

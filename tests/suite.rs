//! Every cross-crate test, in one binary.

#[cfg(feature = "cuda")]
mod backends;
mod cases;
mod checkpoint;
mod contract;
mod ep;
mod generation;
mod parity;
mod training;

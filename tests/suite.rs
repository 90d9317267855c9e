//! Every cross-crate test, in one binary.

mod training;

//! Shared test helpers.

pub mod fixture;

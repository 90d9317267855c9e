//! Shared test helpers.

pub mod fixture;
pub mod tiny;

//! Shared test helpers.

pub mod fixture;
pub mod fixture_model;
pub mod tiny;

//! Checkpoints: exact round trips, strictness, shards, damaged input.

mod damaged;
mod families;
mod fp8;
mod hub;
mod quantised;
mod roundtrip;
mod sharded;
mod strict;
pub mod toy;

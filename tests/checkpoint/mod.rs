//! Checkpoints: exact round trips, strictness, shards, damaged input.

mod damaged;
mod families;
mod fp8;
mod hub;
mod roundtrip;
mod sharded;
mod strict;
mod toy;

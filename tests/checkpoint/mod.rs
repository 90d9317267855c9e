//! Checkpoints: exact round trips, strictness, shards, damaged input.

mod damaged;
mod roundtrip;
mod sharded;
mod strict;
mod toy;

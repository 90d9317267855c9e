//! Threads of one process as ranks: the transport of CPU tests and of ep = 1.
#![allow(unused)]
use super::Communicator;
use crate::error::Result;

/// One rank of an in-process group.
#[derive(Debug)]
pub struct LocalCommunicator {}

impl LocalCommunicator {
    /// A group of `world` ranks; give one communicator to each thread.
    pub fn group(world: usize) -> Vec<Self> {
        todo!()
    }

    /// A group of one.
    pub fn single() -> Self {
        todo!()
    }
}

impl Communicator for LocalCommunicator {
    fn rank(&self) -> usize {
        todo!()
    }
    fn world(&self) -> usize {
        todo!()
    }
    fn all_to_all(&self, send: Vec<Vec<u8>>) -> Result<Vec<Vec<u8>>> {
        todo!()
    }
    fn all_gather(&self, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        todo!()
    }
    fn all_reduce_sum(&self, values: &mut [f32]) -> Result<()> {
        todo!()
    }
    fn all_reduce_sum_f64(&self, values: &mut [f64]) -> Result<()> {
        todo!()
    }
    fn barrier(&self) -> Result<()> {
        todo!()
    }
    fn abort(&self, why: &str) {
        todo!()
    }
}

//! Tensors between GPUs, one process for each.
//!
//! - `nccl/` (feature `nccl`): NVIDIA's library, found at run time, within and across hosts.
//! - `peer/`: buffers of one host that all its GPUs can write, opened through CUDA IPC; kernels of ours.
//! - `watch.rs`: notices operations that do not end, and ends the job.
//!
//! Both stand on a host communicator, which carries counts and news of failures. Nothing here makes the host wait for the device.

#[cfg(feature = "nccl")]
pub mod nccl;
pub mod peer;
mod runner;
mod watch;

use std::any::Any;

use burn_backend::TensorMetadata;

use crate::comm::{CommHandle, ExchangePlan};
use crate::error::Result;
use crate::kernels::raw::{self, CudaTensor};

/// What a device transport does with tensors. Every rank calls the same operations in the same order.
trait DeviceCommunicator {
    fn exchange_rows(&self, rows: CudaTensor, plan: &ExchangePlan) -> Result<CudaTensor>;
    fn all_reduce(&self, flat: CudaTensor) -> Result<CudaTensor>;
    fn reduce_scatter(&self, flat: CudaTensor) -> Result<CudaTensor>;
    fn all_gather(&self, share: CudaTensor) -> Result<CudaTensor>;
}

/// The device transport behind a handle, if there is one.
fn device(comm: &CommHandle) -> Option<&dyn DeviceCommunicator> {
    let any: &dyn Any = comm.get();
    #[cfg(feature = "nccl")]
    if let Some(nccl) = any.downcast_ref::<nccl::NcclCommunicator>() {
        return Some(nccl);
    }
    any.downcast_ref::<peer::PeerCommunicator>()
        .map(|peer| peer as &dyn DeviceCommunicator)
}

/// [`raw::dense`]; without elements there is nothing to copy, and a copy of nothing is an invalid launch.
fn dense(tensor: CudaTensor) -> CudaTensor {
    match tensor.shape().num_elements() {
        0 => output(&tensor, tensor.shape().as_slice()),
        _ => raw::dense(tensor),
    }
}

/// A dense tensor of `shape`; one without elements has an address, too.
fn output(like: &CudaTensor, shape: &[usize]) -> CudaTensor {
    let bytes = (shape.iter().product::<usize>() * like.dtype.size()).max(16);
    let handle = like.client.empty(bytes);
    CudaTensor::new_contiguous(like.client.clone(), like.device.clone(), shape.to_vec().into(), handle, like.dtype)
}

/// [`Communicator`](crate::comm::Communicator) through the field `host`; groups by the method `of_ranks`.
macro_rules! communicate_through_host {
    ($name:ty) => {
        impl $crate::comm::Communicator for $name {
            fn rank(&self) -> usize {
                self.host.rank()
            }

            fn world(&self) -> usize {
                self.host.world()
            }

            fn all_to_all(&self, send: Vec<Vec<u8>>) -> $crate::error::Result<Vec<Vec<u8>>> {
                self.host.all_to_all(send)
            }

            fn all_gather(&self, bytes: Vec<u8>) -> $crate::error::Result<Vec<Vec<u8>>> {
                self.host.all_gather(bytes)
            }

            fn all_reduce_sum(&self, values: &mut [f32]) -> $crate::error::Result<()> {
                self.host.all_reduce_sum(values)
            }

            fn all_reduce_sum_f64(&self, values: &mut [f64]) -> $crate::error::Result<()> {
                self.host.all_reduce_sum_f64(values)
            }

            fn barrier(&self) -> $crate::error::Result<()> {
                self.host.barrier()
            }

            fn abort(&self, why: &str) {
                self.host.abort(why);
            }

            fn failure(&self) -> Option<String> {
                self.host.failure()
            }

            fn lost(&self) -> Option<String> {
                self.host.lost()
            }

            fn in_process(&self) -> bool {
                self.host.in_process()
            }

            fn subgroup(&self, ranks: $crate::comm::Ranks) -> $crate::error::Result<std::sync::Arc<dyn $crate::comm::Communicator>> {
                Ok(std::sync::Arc::new(self.of_ranks(ranks)?))
            }
        }
    };
}
use communicate_through_host;

/// Runs `op` on the device transport; None where the tensor has to go through the host.
fn on_device(comm: &CommHandle, op: impl FnOnce(&dyn DeviceCommunicator) -> Result<CudaTensor>) -> Option<CudaTensor> {
    let transport = device(comm)?;
    match comm.check().and_then(|()| op(transport)) {
        Ok(tensor) => Some(tensor),
        // The way through the host fails as well, at once, and gives the zeros that the contract asks for.
        Err(error) => {
            comm.poison(error);
            None
        }
    }
}

/// [`MoeBackend::exchange_rows`](crate::MoeBackend::exchange_rows).
pub(crate) fn exchange_rows(rows: &CudaTensor, plan: &ExchangePlan, comm: &CommHandle) -> Option<CudaTensor> {
    on_device(comm, |transport| transport.exchange_rows(rows.clone(), plan))
}

/// [`MoeBackend::all_reduce`](crate::MoeBackend::all_reduce).
pub(crate) fn all_reduce(flat: &CudaTensor, comm: &CommHandle) -> Option<CudaTensor> {
    on_device(comm, |transport| transport.all_reduce(flat.clone()))
}

/// [`MoeBackend::reduce_scatter`](crate::MoeBackend::reduce_scatter).
pub(crate) fn reduce_scatter(flat: &CudaTensor, comm: &CommHandle) -> Option<CudaTensor> {
    on_device(comm, |transport| transport.reduce_scatter(flat.clone()))
}

/// [`MoeBackend::all_gather`](crate::MoeBackend::all_gather).
pub(crate) fn all_gather(share: &CudaTensor, comm: &CommHandle) -> Option<CudaTensor> {
    on_device(comm, |transport| transport.all_gather(share.clone()))
}

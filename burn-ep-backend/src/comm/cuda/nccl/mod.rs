//! Tensors by NCCL, on a stream beside CubeCL's (see `kernels/vendor/side_stream.rs`).
//!
//! The library's communicator of a group of ranks is made at the first operation of the group; its id travels through the host
//! communicator. Calls do not block: on CubeCL's runner thread they are asked for their outcome until they are enqueued, the
//! process's own threads only wait for each other when a group meets. `watch.rs` notices operations that do not end.

mod api;
mod group;

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use burn_backend::{DType, TensorMetadata};
use cubecl::cuda::CudaDevice;

use api::Elem;
use group::Group;

use super::{DeviceCommunicator, dense, output};
use crate::comm::{Communicator, ExchangePlan, Ranks};
use crate::error::{OpError, Result};
use crate::kernels::raw::CudaTensor;

/// Longest wait for the other ranks on the device unless told otherwise.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(600);

type Groups = Arc<Mutex<HashMap<Ranks, Arc<Group>>>>;

/// One rank with one GPU. Host bytes go through the communicator it stands on.
pub struct NcclCommunicator {
    host: Arc<dyn Communicator>,
    group: Arc<Group>,
    /// All groups of this rank: the library is asked once for each.
    groups: Groups,
    device: CudaDevice,
    job_rank: usize,
    timeout: Duration,
}

impl std::fmt::Debug for NcclCommunicator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NcclCommunicator")
            .field("host", &self.host)
            .field("device", &self.device)
            .finish()
    }
}

/// Whether libnccl can be used; the reason if not.
///
/// # Errors
/// Where it was looked for, or which version was found.
pub fn available() -> Result<(), &'static str> {
    api::api().map(|_| ())
}

impl NcclCommunicator {
    /// All ranks of `host`, each with its own `device`.
    ///
    /// # Errors
    /// Without libnccl (with where it was looked for), or with a driver that cannot order streams.
    pub fn new(host: impl Communicator, device: CudaDevice) -> Result<Self> {
        Self::with_timeout(host, device, DEFAULT_TIMEOUT)
    }

    /// [`NcclCommunicator::new`] with another limit for each operation (10 minutes by default).
    ///
    /// # Errors
    /// As [`NcclCommunicator::new`].
    pub fn with_timeout(host: impl Communicator, device: CudaDevice, timeout: Duration) -> Result<Self> {
        let host: Arc<dyn Communicator> = Arc::new(host);
        let groups = Groups::default();
        let all = Ranks::all(host.world());
        let job_rank = host.rank();
        Self::of(host, all, groups, device, job_rank, timeout)
    }

    fn of(
        host: Arc<dyn Communicator>,
        ranks: Ranks,
        groups: Groups,
        device: CudaDevice,
        job_rank: usize,
        timeout: Duration,
    ) -> Result<Self> {
        let known = groups.lock().unwrap_or_else(|e| e.into_inner()).get(&ranks).cloned();
        let group = match known {
            Some(group) => group,
            None => {
                let made = Group::new(host.clone(), device.clone(), job_rank, timeout).map_err(|why| OpError::Comm {
                    rank: job_rank,
                    world: host.world(),
                    op: "nccl",
                    why,
                });
                let group = Arc::new(made?);
                groups.lock().unwrap_or_else(|e| e.into_inner()).insert(ranks, group.clone());
                group
            }
        };
        Ok(Self {
            host,
            group,
            groups,
            device,
            job_rank,
            timeout,
        })
    }

    /// `tensor` of rank `root` on every rank; the others give one of the same shape and dtype.
    ///
    /// # Errors
    /// When the job has ended.
    pub fn broadcast(&self, tensor: CudaTensor, root: usize) -> Result<CudaTensor> {
        let tensor = dense(tensor);
        let out = output(&tensor, tensor.shape().as_slice());
        let bytes = tensor.shape().num_elements() * tensor.dtype.size();
        self.group.enqueue(
            format!("broadcast of {bytes} bytes"),
            vec![tensor, out.clone()],
            move |queue, at| queue.broadcast(at[0], at[1], bytes, Elem::U8, root),
        )?;
        Ok(out)
    }

    /// Makes later work of this device wait until all ranks have come here. The host does not wait.
    ///
    /// # Errors
    /// When the job has ended.
    pub fn device_barrier(&self) -> Result<()> {
        let client = <cubecl::cuda::CudaRuntime as cubecl::Runtime>::client(&self.device);
        let handle = client.empty(16);
        let word = CudaTensor::new_contiguous(client, self.device.clone(), [1].into(), handle, DType::F32);
        self.group.enqueue("barrier".into(), vec![word], |queue, at| {
            queue.all_reduce(at[0], at[0], 1, Elem::F32)
        })
    }
}

fn elem(dtype: DType) -> Elem {
    match dtype {
        DType::F64 => Elem::F64,
        _ => Elem::F32,
    }
}

impl DeviceCommunicator for NcclCommunicator {
    fn exchange_rows(&self, rows: CudaTensor, plan: &ExchangePlan) -> Result<CudaTensor> {
        let rows = dense(rows);
        let width = rows.shape()[1];
        let row = width * rows.dtype.size();
        let out = output(&rows, &[plan.recv.iter().sum(), width]);
        let plan = plan.clone();
        let what = format!(
            "exchange of {} rows for {}",
            plan.send.iter().sum::<usize>(),
            plan.recv.iter().sum::<usize>()
        );
        self.group.enqueue(what, vec![rows, out.clone()], move |queue, at| {
            let blocks = |counts: &[usize], mut at: u64| {
                let next = |&count: &usize| {
                    let block = (at, count * row);
                    at += block.1 as u64;
                    block
                };
                counts.iter().map(next).collect::<Vec<_>>()
            };
            queue.all_to_all(&blocks(&plan.send, at[0]), &blocks(&plan.recv, at[1]))
        })?;
        Ok(out)
    }

    fn all_reduce(&self, flat: CudaTensor) -> Result<CudaTensor> {
        let flat = dense(flat);
        let (count, elem) = (flat.shape().num_elements(), elem(flat.dtype));
        let out = output(&flat, &[count]);
        self.group.enqueue(
            format!("all_reduce of {count} values"),
            vec![flat, out.clone()],
            move |queue, at| queue.all_reduce(at[0], at[1], count, elem),
        )?;
        Ok(out)
    }

    fn reduce_scatter(&self, flat: CudaTensor) -> Result<CudaTensor> {
        let flat = dense(flat);
        let (share, elem) = (flat.shape().num_elements() / self.world(), elem(flat.dtype));
        let out = output(&flat, &[share]);
        self.group.enqueue(
            format!("reduce_scatter to {share} values"),
            vec![flat, out.clone()],
            move |queue, at| queue.reduce_scatter(at[0], at[1], share, elem),
        )?;
        Ok(out)
    }

    fn all_gather(&self, share: CudaTensor) -> Result<CudaTensor> {
        let share = dense(share);
        let count = share.shape().num_elements();
        let bytes = count * share.dtype.size();
        let out = output(&share, &[count * self.world()]);
        self.group.enqueue(
            format!("all_gather of {count} values"),
            vec![share, out.clone()],
            move |queue, at| queue.all_gather(at[0], at[1], bytes, Elem::U8),
        )?;
        Ok(out)
    }
}

super::communicate_through_host!(NcclCommunicator);

impl NcclCommunicator {
    fn of_ranks(&self, ranks: Ranks) -> Result<Self> {
        let host = self.host.subgroup(ranks)?;
        Self::of(host, ranks, self.groups.clone(), self.device.clone(), self.job_rank, self.timeout)
    }
}

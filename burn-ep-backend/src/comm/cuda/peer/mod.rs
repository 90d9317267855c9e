//! Tensors between GPUs of one host through memory that all of them can write, by kernels of ours.
//!
//! Each rank owns a buffer (`arena.rs`) that the others have opened through CUDA IPC, which also works between processes that share
//! one GPU. A kernel writes rows straight into the buffer of the rank that gets them; how many come from whom is known on the
//! device only. Everything runs on CubeCL's stream. Waits of kernels end when the host says so, so a lost rank holds nobody.

mod arena;
mod kernels;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

use burn_backend::{DType, TensorMetadata};
use cubecl::cuda::CudaDevice;

use arena::Arena;
use kernels::{Exchange, MAX_RANKS, unit};

use super::watch::{Watch, place};
use super::{DeviceCommunicator, dense, output, runner};
use crate::comm::{Communicator, ExchangePlan, Ranks};
use crate::error::{OpError, Result};
use crate::kernels::raw::CudaTensor;

/// Longest wait for the other ranks on the device unless told otherwise.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(600);
/// Bytes that a rank can receive at once unless told otherwise.
const DEFAULT_CAPACITY: usize = 512 << 20;

type Groups = Arc<Mutex<HashMap<Ranks, Arc<Group>>>>;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Settings of [`PeerCommunicator`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerOptions {
    /// Limit of each wait (10 minutes by default).
    pub timeout: Duration,
    /// Bytes that a rank can receive in one exchange (512 MiB by default); each group of ranks takes twice as much on every GPU.
    pub capacity: usize,
}

impl Default for PeerOptions {
    fn default() -> Self {
        Self {
            timeout: DEFAULT_TIMEOUT,
            capacity: DEFAULT_CAPACITY,
        }
    }
}

/// One rank of up to 16 on one host. Host bytes go through the communicator it stands on.
pub struct PeerCommunicator {
    host: Arc<dyn Communicator>,
    group: Arc<Group>,
    groups: Groups,
    device: CudaDevice,
    job_rank: usize,
    options: PeerOptions,
}

impl std::fmt::Debug for PeerCommunicator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PeerCommunicator")
            .field("host", &self.host)
            .field("device", &self.device)
            .finish()
    }
}

/// Buffers and operations of one group of ranks; the buffers are made at its first operation.
struct Group {
    host: Arc<dyn Communicator>,
    device: CudaDevice,
    job_rank: usize,
    options: PeerOptions,
    arena: OnceLock<(Arc<Arena>, Watch)>,
    sequence: Mutex<u64>,
    /// Counts blocks of launches, on the device.
    done: OnceLock<CudaTensor>,
}

/// What one operation moves; sizes in bytes.
struct Move<'a> {
    what: String,
    source: &'a CudaTensor,
    destination: &'a CudaTensor,
    unit: usize,
    bytes: Vec<usize>,
    offsets: Vec<usize>,
    dst_stride: usize,
    dst_offset: usize,
    expected: usize,
}

impl Group {
    fn error(&self, why: String) -> OpError {
        OpError::Comm {
            rank: self.job_rank,
            world: self.host.world(),
            op: "peer exchange",
            why,
        }
    }

    fn arena(&self) -> Result<&(Arc<Arena>, Watch)> {
        if let Some(made) = self.arena.get() {
            return Ok(made);
        }
        let arena = Arena::new(&*self.host, &self.device, self.options.capacity).map_err(|why| self.error(why))?;
        let arena = Arc::new(arena);
        let (ended, asked) = (arena.clone(), arena.clone());
        let members = self.host.world();
        let capacity = self.options.capacity;
        let trouble = move || {
            asked.status().map(|(code, rank, sequence)| match code {
                1 => format!("exchange {sequence}: no sign of rank {rank} of the {members} of the group"),
                2 => format!("exchange {sequence}: rank {rank} of the group would receive more than the {capacity} bytes of its buffer; make PeerOptions::capacity larger"),
                _ => format!("exchange {sequence}: the ranks sent another number of bytes than this one expects"),
            })
        };
        let watch = Watch::new(
            self.host.clone(),
            place(self.job_rank, self.device.index),
            self.options.timeout,
            Box::new(move || ended.give_up()),
            Box::new(trouble),
        );
        let watch = watch.map_err(|e| self.error(format!("starting a thread: {e}")))?;
        Ok(self.arena.get_or_init(|| (arena, watch)))
    }

    fn run(&self, step: Move<'_>) -> Result<()> {
        let (arena, watch) = self.arena()?;
        // Also serialises launches: all ranks must enqueue the same operations in the same order.
        let mut sequence = lock(&self.sequence);
        *sequence += 1;
        let client = &step.source.client;
        let done = self.done.get_or_init(|| zero(step.source, &self.device));
        let exchange = Exchange {
            sequence: *sequence,
            rank: self.host.rank(),
            arenas: &arena.addresses,
            capacity: arena.capacity,
            limit_ns: self.options.timeout.as_nanos().min(u128::from(u64::MAX)) as u64,
            control: arena.control_address,
            unit: step.unit,
            bytes: &step.bytes,
            offsets: &step.offsets,
            dst_stride: step.dst_stride,
            dst_offset: step.dst_offset,
            expected: Some(step.expected),
        };
        exchange.launch(client, step.source, step.destination, done);
        watch.add_queued(&self.device, step.what);
        Ok(())
    }
}

/// A counter at zero.
fn zero(like: &CudaTensor, device: &CudaDevice) -> CudaTensor {
    let handle = like.client.create_from_slice(&[0; 16]);
    CudaTensor::new_contiguous(like.client.clone(), device.clone(), [2].into(), handle, DType::I64)
}

impl Drop for Group {
    fn drop(&mut self) {
        if let Some((_, watch)) = self.arena.get() {
            // What was launched must be enqueued before the look-out can tell when it has ended.
            let _ = runner::call(&self.device, || Ok(()));
            watch.drain();
        }
    }
}

impl PeerCommunicator {
    /// All ranks of `host`, processes of one machine that each have a `device` (which they may share).
    ///
    /// # Errors
    /// More than 16 ranks, or ranks on different machines.
    pub fn new(host: impl Communicator, device: CudaDevice, options: PeerOptions) -> Result<Self> {
        let host: Arc<dyn Communicator> = Arc::new(host);
        let (rank, world) = (host.rank(), host.world());
        let error = |why: String| OpError::Comm {
            rank,
            world,
            op: "peer exchange",
            why,
        };
        if world > MAX_RANKS {
            return Err(error(format!(
                "{world} ranks, at most {MAX_RANKS} can share the memory of one host; use NCCL"
            )));
        }
        let machine = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let machines = host.all_gather(machine.into_bytes())?;
        if let Some(other) = machines.iter().position(|machine| *machine != machines[rank]) {
            return Err(error(format!("rank {other} runs on another machine; use NCCL")));
        }
        let groups = Groups::default();
        Ok(Self::of(host, Ranks::all(world), groups, device, rank, options))
    }

    fn of(host: Arc<dyn Communicator>, ranks: Ranks, groups: Groups, device: CudaDevice, job_rank: usize, options: PeerOptions) -> Self {
        let mut known = lock(&groups);
        let group = known.entry(ranks).or_insert_with(|| {
            Arc::new(Group {
                host: host.clone(),
                device: device.clone(),
                job_rank,
                options,
                arena: OnceLock::new(),
                sequence: Mutex::new(0),
                done: OnceLock::new(),
            })
        });
        let group = group.clone();
        drop(known);
        Self {
            host,
            group,
            groups,
            device,
            job_rank,
            options,
        }
    }

    /// Elements of a share that fit into the buffers when every rank sends that many to every other.
    fn chunk(&self, share: usize, size: usize) -> usize {
        let fits = self.options.capacity / self.world() / size / 16 * 16;
        share.min(fits.max(1))
    }
}

impl DeviceCommunicator for PeerCommunicator {
    fn exchange_rows(&self, rows: CudaTensor, plan: &ExchangePlan) -> Result<CudaTensor> {
        let rows = dense(rows);
        let width = rows.shape()[1];
        let row = width * rows.dtype.size();
        let received: usize = plan.recv.iter().sum();
        let out = output(&rows, &[received, width]);
        let mut next = 0;
        let offsets = plan.send.iter().map(|count| {
            let offset = next;
            next += count * row;
            offset
        });
        self.group.run(Move {
            what: format!("exchange of {} rows for {received}", plan.send.iter().sum::<usize>()),
            source: &rows,
            destination: &out,
            unit: unit(row),
            offsets: offsets.collect(),
            bytes: plan.send.iter().map(|count| count * row).collect(),
            dst_stride: 0,
            dst_offset: 0,
            expected: received * row,
        })?;
        Ok(out)
    }

    fn all_reduce(&self, flat: CudaTensor) -> Result<CudaTensor> {
        let (len, world) = (flat.shape().num_elements(), self.world());
        let flat = dense(flat);
        // Shares of equal length; the last ones may reach behind the end, into padding of the copy.
        let share = len.div_ceil(world).next_multiple_of(4);
        let padded = output(&flat, &[share * world]);
        kernels::sum(&flat.client, &flat, &padded, 1, len, 0);
        let own = self.reduce_scatter(padded)?;
        let all = DeviceCommunicator::all_gather(self, own)?;
        Ok(CudaTensor::new_contiguous(
            all.client.clone(),
            all.device.clone(),
            [len].into(),
            all.handle.clone(),
            all.dtype,
        ))
    }

    fn reduce_scatter(&self, flat: CudaTensor) -> Result<CudaTensor> {
        let flat = dense(flat);
        let (world, size) = (self.world(), flat.dtype.size());
        let share = flat.shape().num_elements() / world;
        let out = output(&flat, &[share]);
        let step = self.chunk(share, size);
        for start in (0..share).step_by(step.max(1)) {
            let count = step.min(share - start);
            let parts = output(&flat, &[count * world]);
            self.group.run(Move {
                what: format!("reduce_scatter to {share} values"),
                source: &flat,
                destination: &parts,
                // Shares begin at multiples of their own length.
                unit: unit(count * size).min(unit(share * size)).min(unit(start * size)),
                bytes: vec![count * size; world],
                offsets: (0..world).map(|rank| (rank * share + start) * size).collect(),
                dst_stride: 0,
                dst_offset: 0,
                expected: world * count * size,
            })?;
            kernels::sum(&flat.client, &parts, &out, world, count, start);
        }
        Ok(out)
    }

    fn all_gather(&self, share: CudaTensor) -> Result<CudaTensor> {
        let share = dense(share);
        let (world, size) = (self.world(), share.dtype.size());
        let len = share.shape().num_elements();
        let out = output(&share, &[len * world]);
        let step = self.chunk(len, size);
        for start in (0..len).step_by(step.max(1)) {
            let count = step.min(len - start);
            self.group.run(Move {
                what: format!("all_gather of {len} values"),
                source: &share,
                destination: &out,
                unit: unit(count * size).min(unit(len * size)).min(unit(start * size)),
                bytes: vec![count * size; world],
                offsets: vec![start * size; world],
                dst_stride: len * size,
                dst_offset: start * size,
                expected: world * count * size,
            })?;
        }
        Ok(out)
    }
}

super::communicate_through_host!(PeerCommunicator);

impl PeerCommunicator {
    fn of_ranks(&self, ranks: Ranks) -> Result<Self> {
        let host = self.host.subgroup(ranks)?;
        Ok(Self::of(
            host,
            ranks,
            self.groups.clone(),
            self.device.clone(),
            self.job_rank,
            self.options,
        ))
    }
}

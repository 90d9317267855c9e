//! Uploads through pinned memory that several threads fill.
//!
//! CubeCL's own upload copies the data once more on the calling thread and then hands the driver pageable memory, which it
//! copies a second time. Here every thread owns two pinned buffers: it fills one while the device copies the other.

use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock};

use burn_backend::DType;
use cubecl::Runtime;
use cubecl::cuda::{CudaDevice, CudaRuntime};
use cubecl::server::ComputeServer;
use cubecl_common::device::Device;
use cubecl_common::device_handle::DeviceHandle;
use cubecl_common::stream_id::StreamId;
use cudarc::driver::{DriverError, sys as cu};

use super::raw::CudaTensor;
use crate::upload::{Fill, FirstError, chunk_bytes};

type Server = <CudaRuntime as Runtime>::Server;

/// Below this many bytes CubeCL's upload is as good.
const SMALL: usize = 1 << 20;
/// Pinned memory of a device, unless a single chunk asks for more.
const BUDGET: usize = 256 << 20;
/// Threads that fill buffers: more do not make a bus faster.
const MAX_THREADS: usize = 32;
/// Buffers of one thread.
const TURNS: usize = 2;

/// Whether [`fill`] should carry a tensor.
pub fn is_worth_it(shape: &[usize], dtype: DType) -> bool {
    shape.iter().product::<usize>() * dtype.size() >= SMALL
}

/// Writes a dense tensor; it is complete when this returns. The outer error says why pinned memory cannot be used; the tensor
/// is undefined then.
pub fn fill<E: Send>(tensor: &CudaTensor, unit: usize, fill: &Fill<'_, E>) -> Result<Result<(), E>, String> {
    let device = &tensor.device;
    let binding = tensor.handle.clone().binding();
    let stream_id = StreamId::current();
    let place = DeviceHandle::<Server>::new(device.to_id()).submit_blocking(move |server: &mut Server| {
        let resource = server.get_resource(binding, stream_id).map_err(|error| format!("{error:?}"))?;
        let mut context = ptr::null_mut();
        // SAFETY: on CubeCL's runner thread the device's context is current. Memory is allocated and recycled in the order of
        // CubeCL's stream: once everything enqueued there is done, the buffer belongs to this tensor alone.
        unsafe {
            cu::cuCtxGetCurrent(&mut context)
                .result()
                .and_then(|()| cu::cuCtxSynchronize().result())
        }
        .map_err(text)?;
        Ok::<_, String>((resource.resource().ptr, Context(context)))
    });
    let (to, context) = place.map_err(|error| format!("{error:?}"))??;
    let bytes = tensor.meta.shape().iter().product::<usize>() * tensor.dtype.size();

    let mut all = staging();
    let step = chunk_bytes(unit);
    if all.get(&device.index).is_some_and(|staging| staging.size < step) {
        all.remove(&device.index);
    }
    let staging = match all.entry(device.index) {
        std::collections::hash_map::Entry::Occupied(entry) => entry.into_mut(),
        std::collections::hash_map::Entry::Vacant(entry) => entry.insert(Staging::new(context, step).map_err(text)?),
    };
    staging.copy(to, bytes, step, fill).map_err(text)
}

/// Frees the pinned memory of a device.
pub fn release(device: &CudaDevice) {
    staging().remove(&device.index);
}

fn staging() -> MutexGuard<'static, HashMap<usize, Staging>> {
    static STAGING: OnceLock<Mutex<HashMap<usize, Staging>>> = OnceLock::new();
    let all = STAGING.get_or_init(Default::default);
    all.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn text(error: DriverError) -> String {
    format!("{error:?}")
}

#[derive(Clone, Copy)]
struct Context(cu::CUcontext);

// SAFETY: a context handle may be used from any thread.
unsafe impl Send for Context {}
// SAFETY: as above; the handle is only read.
unsafe impl Sync for Context {}

impl Context {
    /// Makes the context current on this thread until the guard is dropped.
    fn enter(self) -> Result<Entered, DriverError> {
        // SAFETY: the handle is that of a primary context, which CubeCL keeps for the whole process.
        unsafe { cu::cuCtxPushCurrent_v2(self.0).result() }?;
        Ok(Entered(ptr::null()))
    }
}

/// Stays on its thread: the raw pointer keeps it from being sent.
struct Entered(#[allow(dead_code, reason = "only makes the type stay on its thread")] *const ());

impl Drop for Entered {
    fn drop(&mut self) {
        let mut context = ptr::null_mut();
        // SAFETY: takes off what `Context::enter` put on the stack of this thread.
        let _ = unsafe { cu::cuCtxPopCurrent_v2(&mut context) };
    }
}

/// Pinned memory, and an event behind the last copy out of it.
struct Buffer {
    memory: *mut u8,
    copied: cu::CUevent,
}

// SAFETY: pinned memory and driver handles may be used from any thread, and a buffer has one owner.
unsafe impl Send for Buffer {}

/// Pinned buffers of one device and the stream that copies out of them.
struct Staging {
    context: Context,
    stream: Stream,
    buffers: Vec<Buffer>,
    /// Bytes of every buffer.
    size: usize,
}

#[derive(Clone, Copy)]
struct Stream(cu::CUstream);

// SAFETY: a stream handle may be used from any thread.
unsafe impl Send for Stream {}
// SAFETY: as above; the driver serialises what is enqueued.
unsafe impl Sync for Stream {}

impl Stream {
    /// By a method, so that a closure takes the wrapper along and not its field.
    fn handle(self) -> cu::CUstream {
        self.0
    }
}

impl Staging {
    fn new(context: Context, size: usize) -> Result<Self, DriverError> {
        const NON_BLOCKING: u32 = 1;
        const NO_TIMING: u32 = 2;
        /// Every context of the process may copy from it.
        const PORTABLE: u32 = 1;
        let _entered = context.enter()?;
        let mut staging = Self {
            context,
            stream: Stream(ptr::null_mut()),
            buffers: Vec::new(),
            size,
        };
        let threads = rayon::current_num_threads().min(MAX_THREADS).min(BUDGET / (TURNS * size)).max(1);
        // SAFETY: every call writes one handle into a variable of its type; the memory has `size` bytes. What exists when a
        // call fails is freed by `Drop`.
        unsafe {
            cu::cuStreamCreate(&mut staging.stream.0, NON_BLOCKING).result()?;
            for _ in 0..TURNS * threads {
                let mut memory: *mut c_void = ptr::null_mut();
                cu::cuMemHostAlloc(&mut memory, size, PORTABLE).result()?;
                let memory = memory.cast::<u8>();
                memory.write_bytes(0, size);
                staging.buffers.push(Buffer {
                    memory,
                    copied: ptr::null_mut(),
                });
                if let Some(buffer) = staging.buffers.last_mut() {
                    cu::cuEventCreate(&mut buffer.copied, NO_TIMING).result()?;
                }
            }
        }
        Ok(staging)
    }

    /// Fills `bytes` bytes of device memory in chunks of `step`, at most the size of a buffer.
    fn copy<E: Send>(&mut self, to: u64, bytes: usize, step: usize, fill: &Fill<'_, E>) -> Result<Result<(), E>, DriverError> {
        let (context, stream) = (self.context, self.stream);
        let next = AtomicUsize::new(0);
        let (first, broken) = (FirstError::new(), Mutex::new(None));
        let chunks = bytes.div_ceil(step);
        rayon::in_place_scope(|scope| {
            for own in self.buffers.chunks_exact_mut(TURNS).take(chunks) {
                let (next, first, broken) = (&next, &first, &broken);
                scope.spawn(move |_| {
                    let mut work = || -> Result<(), DriverError> {
                        let _entered = context.enter()?;
                        for turn in 0.. {
                            if first.is_set() {
                                break;
                            }
                            let offset = next.fetch_add(1, Ordering::Relaxed) * step;
                            if offset >= bytes {
                                break;
                            }
                            let buffer = &mut own[turn % TURNS];
                            let length = step.min(bytes - offset);
                            // SAFETY: the buffer is this thread's, has at least `step` initialised bytes, and the device has
                            // read them: an event that was never recorded counts as passed.
                            let out = unsafe {
                                cu::cuEventSynchronize(buffer.copied).result()?;
                                std::slice::from_raw_parts_mut(buffer.memory, length)
                            };
                            if let Err(error) = fill(offset, out) {
                                first.set(offset, error);
                                break;
                            }
                            // SAFETY: `offset + length` lies inside the tensor of `bytes` bytes at `to`, and the buffer is not
                            // touched before its event has passed.
                            unsafe {
                                cu::cuMemcpyHtoDAsync_v2(to + offset as u64, buffer.memory.cast(), length, stream.handle()).result()?;
                                cu::cuEventRecord(buffer.copied, stream.handle()).result()?;
                            }
                        }
                        Ok(())
                    };
                    if let Err(error) = work() {
                        *broken.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = Some(error);
                        // Others need not go on.
                        next.store(chunks, Ordering::Relaxed);
                    }
                });
            }
        });
        let _entered = context.enter()?;
        // SAFETY: the stream is ours. After this the device has every byte, and no buffer is in use.
        unsafe { cu::cuStreamSynchronize(stream.handle()).result() }?;
        match broken.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner()) {
            Some(error) => Err(error),
            None => Ok(first.into_result()),
        }
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        let Ok(_entered) = self.context.enter() else { return };
        // SAFETY: everything here was made by `new` and is used by nobody: `copy` waits for the device.
        unsafe {
            for buffer in self.buffers.drain(..) {
                if !buffer.copied.is_null() {
                    let _ = cu::cuEventDestroy_v2(buffer.copied);
                }
                let _ = cu::cuMemFreeHost(buffer.memory.cast());
            }
            if !self.stream.0.is_null() {
                let _ = cu::cuStreamDestroy_v2(self.stream.0);
            }
        }
    }
}

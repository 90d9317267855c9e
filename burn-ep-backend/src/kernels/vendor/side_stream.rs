//! A CUDA stream beside CubeCL's, ordered with all of them by events of the whole context.

use std::ptr;

use cudarc::driver::{DriverError, sys as cu};

/// First driver with `cuCtxRecordEvent` and `cuCtxWaitEvent`.
const MIN_DRIVER: i32 = 12_050;

/// Why the driver cannot order a stream of ours with CubeCL's, if it cannot.
pub fn driver_refuses() -> Option<String> {
    let mut version = 0;
    // SAFETY: the call writes one integer.
    match unsafe { cu::cuDriverGetVersion(&mut version) }.result() {
        Ok(()) if version >= MIN_DRIVER => None,
        Ok(()) => Some(format!("the driver supports CUDA {version}, context events need {MIN_DRIVER}")),
        Err(error) => Some(format!("cuDriverGetVersion: {error:?}")),
    }
}

/// A non-blocking stream of the current context. Lives as long as the process.
pub struct SideStream {
    context: cu::CUcontext,
    stream: cu::CUstream,
    ready: cu::CUevent,
    done: cu::CUevent,
}

// SAFETY: driver handles may be used from any thread; nothing here depends on the creating one.
unsafe impl Send for SideStream {}

impl SideStream {
    /// On a thread whose current context is the device's primary one, as on CubeCL's runner thread.
    pub fn new() -> Result<Self, DriverError> {
        const NON_BLOCKING: u32 = 1;
        const NO_TIMING: u32 = 2;
        let mut side = Self {
            context: ptr::null_mut(),
            stream: ptr::null_mut(),
            ready: ptr::null_mut(),
            done: ptr::null_mut(),
        };
        // SAFETY: every call writes one handle into a field of its type.
        unsafe {
            cu::cuCtxGetCurrent(&mut side.context).result()?;
            cu::cuStreamCreate(&mut side.stream, NON_BLOCKING).result()?;
            cu::cuEventCreate(&mut side.ready, NO_TIMING).result()?;
            cu::cuEventCreate(&mut side.done, NO_TIMING).result()?;
        }
        Ok(side)
    }

    /// Enqueues `work` on the stream: behind everything that the context has been given, before everything it will be given.
    ///
    /// CubeCL's memory is recycled in the order of its streams, so buffers may be freed as soon as this returns.
    pub fn ordered<R>(&self, work: impl FnOnce(cu::CUstream) -> R) -> Result<R, DriverError> {
        // SAFETY: the handles are those of `new`. The driver copies the state of an event when it is waited for, so both
        // events can be recorded again by the next call.
        unsafe {
            cu::cuCtxRecordEvent(self.context, self.ready).result()?;
            cu::cuStreamWaitEvent(self.stream, self.ready, 0).result()?;
            let result = work(self.stream);
            cu::cuEventRecord(self.done, self.stream).result()?;
            cu::cuCtxWaitEvent(self.context, self.done).result()?;
            Ok(result)
        }
    }
}

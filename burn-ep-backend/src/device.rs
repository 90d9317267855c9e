//! Memory of a device as its driver counts it, and how often the host waits for it.

use std::cell::Cell;

use serde::{Deserialize, Serialize};

thread_local! {
    static READS: Cell<u64> = const { Cell::new(0) };
}

/// How often this thread has waited for a device so far: tensors read to the host and synchronisations through
/// [`EpBackend`](crate::EpBackend), and the reads inside this crate's reference ops. The difference over a step tells whether
/// anything in it keeps the device waiting.
pub fn host_reads() -> u64 {
    READS.get()
}

/// Counts one.
pub(crate) fn note_read() {
    READS.set(READS.get() + 1);
}

/// Device memory of this process, in bytes. `used` is what the backend holds from the driver (pages of its pools included),
/// `reserved` what the driver holds for it; the peaks are since the last reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct DeviceMemory {
    pub used: u64,
    pub reserved: u64,
    pub peak_used: u64,
    pub peak_reserved: u64,
}

/// Number of GPUs that this process can use.
///
/// # Errors
/// Why the driver cannot tell.
#[cfg(feature = "cuda")]
pub fn visible_gpus() -> Result<usize, String> {
    init_driver()?;
    let count = cudarc::driver::result::device::get_count();
    count.map(|count| count.max(0) as usize).map_err(|error| format!("{error:?}"))
}

/// Before the first call of the driver; calling it again does nothing.
#[cfg(feature = "cuda")]
fn init_driver() -> Result<(), String> {
    // SAFETY: opens and closes the driver library; its initialisers touch nothing of ours.
    if !unsafe { cudarc::driver::sys::is_culib_present() } {
        return Err("no driver (libcuda is not on the library path)".into());
    }
    cudarc::driver::result::init().map_err(|error| format!("{error:?}"))
}

#[cfg(feature = "cuda")]
mod kernel_cache;

/// Bytes of memory of GPU `ordinal`; None when the driver cannot tell.
#[cfg(feature = "cuda")]
pub fn gpu_memory(ordinal: usize) -> Option<u64> {
    use cudarc::driver::result;
    init_driver().ok()?;
    let device = result::device::get(i32::try_from(ordinal).ok()?).ok()?;
    // SAFETY: the driver has just returned this device.
    unsafe { result::device::total_mem(device) }.ok().map(|bytes| bytes as u64)
}

#[cfg(feature = "cuda")]
pub(crate) mod cuda {
    //! Settings of CubeCL and the counters of the CUDA memory pool.

    use std::sync::Once;

    use cubecl::cuda::{CudaDevice, CudaRuntime};
    use cubecl_common::config::RuntimeConfig;
    use cubecl_common::device::Device;
    use cubecl_common::device_handle::DeviceHandle;
    use cubecl_runtime::config::CubeClRuntimeConfig;
    use cubecl_runtime::config::cache::CacheConfig;
    use cubecl_runtime::config::memory::PersistentMemory;
    use cubecl_runtime::config::profiling::ProfilingLogLevel;
    use cubecl_runtime::config::streaming::StreamingConfig;
    use cudarc::driver::sys::{self, CUmemPool_attribute as Attribute, CUmemoryPool};

    use super::{DeviceMemory, kernel_cache};
    use crate::kernels::profile;

    /// Settings of the process before CubeCL's first use; later nothing changes. What `cubecl.toml` sets wins.
    ///
    /// All threads share one stream with one set of memory pools: data loaders and metrics would otherwise open pools of their
    /// own. Compiled kernels are kept on disk, see [`kernel_cache`]. A profile is written if one is asked for.
    ///
    /// `BURN_MOE_EXACT_BUFFERS=1` gives every buffer an allocation of its own size, kept for the next buffer of that size, instead
    /// of a slice of a page many times as large: least memory where all steps have one shape, more and more memory where they
    /// do not.
    pub fn configure(ordinal: usize) {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            let mut config = CubeClRuntimeConfig::from_current_dir().override_from_env();
            if config.streaming.max_streams == StreamingConfig::default().max_streams {
                config.streaming.max_streams = 1;
            }
            if std::env::var_os("BURN_MOE_EXACT_BUFFERS").is_some_and(|value| value == "1") {
                config.memory.persistent_memory = PersistentMemory::Enforced;
            }
            if config.compilation.cache.is_none() {
                config.compilation.cache = kernel_cache::folder(ordinal).map(CacheConfig::File);
            }
            if let Some(file) = profile::file() {
                config.profiling.logger.level = ProfilingLogLevel::Full;
                config.profiling.logger.file = Some(file.clone());
            }
            let mut current = CubeClRuntimeConfig::storage().lock();
            if current.is_none() {
                *current = Some(std::sync::Arc::new(config));
            } else {
                tracing::debug!("CubeCL was configured before: its settings stay");
            }
        });
    }

    /// Waits for CubeCL's runner thread to have launched what it was given.
    pub fn flush(device: &CudaDevice) {
        type Server = <CudaRuntime as cubecl::Runtime>::Server;
        if let Err(error) = DeviceHandle::<Server>::new(device.to_id()).submit_blocking(|_| ()) {
            tracing::error!(?error, "CubeCL's runner thread did not answer");
        }
    }

    fn pool(ordinal: usize) -> Option<CUmemoryPool> {
        let device = cudarc::driver::result::device::get(i32::try_from(ordinal).ok()?).ok()?;
        let mut pool = std::ptr::null_mut();
        // SAFETY: the driver fills `pool` for a device it returned; CubeCL allocates from this pool.
        let result = unsafe { sys::cuDeviceGetMemPool(&mut pool, device) };
        (result == sys::CUresult::CUDA_SUCCESS).then_some(pool)
    }

    /// The pool's counters; None when the driver does not answer.
    pub fn memory(ordinal: usize) -> Option<DeviceMemory> {
        let pool = pool(ordinal)?;
        let read = |attribute: Attribute| {
            let mut value = 0u64;
            // SAFETY: the four attributes read here are of type cuuint64_t.
            let result = unsafe { sys::cuMemPoolGetAttribute(pool, attribute, (&raw mut value).cast()) };
            (result == sys::CUresult::CUDA_SUCCESS).then_some(value)
        };
        Some(DeviceMemory {
            used: read(Attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?,
            reserved: read(Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?,
            peak_used: read(Attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH)?,
            peak_reserved: read(Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH)?,
        })
    }

    /// Sets the high-water marks to the present values.
    pub fn reset_peak(ordinal: usize) {
        let Some(pool) = pool(ordinal) else { return };
        for attribute in [
            Attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH,
            Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH,
        ] {
            // Zero is the only value that may be set.
            let mut zero = 0u64;
            // SAFETY: both attributes are of type cuuint64_t.
            let result = unsafe { sys::cuMemPoolSetAttribute(pool, attribute, (&raw mut zero).cast()) };
            if result != sys::CUresult::CUDA_SUCCESS {
                tracing::warn!(?attribute, ?result, "the peak of device memory could not be reset");
            }
        }
    }
}

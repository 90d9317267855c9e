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

#[cfg(feature = "cuda")]
pub(crate) mod cuda {
    //! Settings of CubeCL and the counters of the CUDA memory pool.

    use std::sync::Once;

    use cubecl_common::config::RuntimeConfig;
    use cubecl_runtime::config::CubeClRuntimeConfig;
    use cubecl_runtime::config::streaming::StreamingConfig;
    use cudarc::driver::sys::{self, CUmemPool_attribute as Attribute, CUmemoryPool};

    use super::DeviceMemory;

    /// Puts all threads of the process on one stream with one set of memory pools: data loaders and metrics would otherwise
    /// open pools of their own. A number of streams given in `cubecl.toml` wins; after CubeCL's first use nothing changes.
    pub fn use_one_stream() {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            let mut config = CubeClRuntimeConfig::from_current_dir().override_from_env();
            if config.streaming.max_streams == StreamingConfig::default().max_streams {
                config.streaming.max_streams = 1;
            }
            let mut current = CubeClRuntimeConfig::storage().lock();
            if current.is_none() {
                *current = Some(std::sync::Arc::new(config));
            } else {
                tracing::debug!("CubeCL was configured before: the number of streams stays");
            }
        });
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

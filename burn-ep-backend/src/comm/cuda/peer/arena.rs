//! Memory that all GPUs of a host can write.

use std::ffi::c_void;

use cubecl::cuda::CudaDevice;
use cudarc::driver::sys as cu;

use crate::comm::Communicator;
use crate::comm::cuda::runner;
use crate::error::Result;

/// Flags and counts before the data (`DATA` in `kernels/comm/peer.cu`).
const HEADER: usize = 8192;
const ALIGN: usize = 2 << 20;

/// The buffers of a group and the words that host and kernels share.
pub(super) struct Arena {
    device: CudaDevice,
    own: u64,
    /// Address of every rank's buffer in this process.
    pub addresses: Vec<u64>,
    /// Bytes of each half.
    pub capacity: usize,
    control: *mut u64,
    /// Address of the words for kernels: abort, status.
    pub control_address: u64,
}

// SAFETY: addresses; the two words are only accessed by volatile reads and writes of whole words.
unsafe impl Send for Arena {}
// SAFETY: as above.
unsafe impl Sync for Arena {}

impl Arena {
    /// All ranks of `host` come here together.
    pub fn new(host: &dyn Communicator, device: &CudaDevice, capacity: usize) -> Result<Self, String> {
        let bytes = (HEADER + 2 * capacity).next_multiple_of(ALIGN);
        let made = runner::call(device, move || allocate(bytes));
        // Every rank must hear of a failure here: an empty handle says so.
        let handle = made.as_ref().map(|made| made.handle.to_vec()).unwrap_or_default();
        let handles = host.all_gather(handle).map_err(|e| e.to_string())?;
        let made = made?;
        let own_rank = host.rank();
        let opened = runner::call(device, || open(&handles, own_rank, made.buffer));
        // Nobody writes before all have opened.
        host.barrier().map_err(|e| e.to_string())?;
        Ok(Self {
            device: device.clone(),
            own: made.buffer,
            addresses: opened?,
            capacity,
            control: made.control as *mut u64,
            control_address: made.control_address,
        })
    }

    /// Makes every waiting kernel of this rank end.
    pub fn give_up(&self) {
        // SAFETY: the word lives as long as the arena.
        unsafe { self.control.write_volatile(1) };
    }

    /// What a kernel reported: code, rank, operation.
    pub fn status(&self) -> Option<(u64, u64, u64)> {
        // SAFETY: the word lives as long as the arena.
        let status = unsafe { self.control.add(1).read_volatile() };
        (status != 0).then_some((status & 0xff, status >> 8 & 0xff, status >> 16))
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        let (own, control, addresses) = (self.own, self.control as usize, self.addresses.clone());
        let _ = runner::call(&self.device, move || {
            // SAFETY: nothing of the group is under way any more (its `Drop` has waited), and the addresses are not used again.
            unsafe {
                for address in addresses.into_iter().filter(|address| *address != own) {
                    let _ = cu::cuIpcCloseMemHandle(address);
                }
                let _ = cu::cuMemFree_v2(own);
                let _ = cu::cuMemFreeHost(control as *mut c_void);
            }
            Ok(())
        });
    }
}

struct Made {
    buffer: u64,
    handle: [u8; 64],
    control: usize,
    control_address: u64,
}

fn failed(what: &'static str) -> impl Fn(cudarc::driver::DriverError) -> String {
    move |error| format!("{what}: {error:?}")
}

fn allocate(bytes: usize) -> Result<Made, String> {
    const MAPPED: u32 = 2;
    let (mut buffer, mut control_address) = (0, 0);
    let mut control = std::ptr::null_mut();
    let mut handle = cu::CUipcMemHandle { reserved: [0; 64] };
    // SAFETY: every call writes one value of its type; the memory is zero before its address leaves this function.
    unsafe {
        cu::cuMemAlloc_v2(&mut buffer, bytes)
            .result()
            .map_err(failed("memory for the exchange"))?;
        cu::cuMemsetD8_v2(buffer, 0, HEADER).result().map_err(failed("clearing it"))?;
        cu::cuMemHostAlloc(&mut control, 64, MAPPED)
            .result()
            .map_err(failed("host memory"))?;
        std::ptr::write_bytes(control.cast::<u8>(), 0, 64);
        cu::cuMemHostGetDevicePointer_v2(&mut control_address, control, 0)
            .result()
            .map_err(failed("host memory"))?;
        cu::cuIpcGetMemHandle(&mut handle, buffer)
            .result()
            .map_err(failed("cuIpcGetMemHandle"))?;
        cu::cuCtxSynchronize().result().map_err(failed("clearing it"))?;
    }
    Ok(Made {
        buffer,
        handle: handle.reserved.map(|byte| byte as u8),
        control: control as usize,
        control_address,
    })
}

fn open(handles: &[Vec<u8>], own_rank: usize, own: u64) -> Result<Vec<u64>, String> {
    const LAZY_PEER_ACCESS: u32 = 1;
    let mut addresses = Vec::with_capacity(handles.len());
    for (rank, bytes) in handles.iter().enumerate() {
        if rank == own_rank {
            addresses.push(own);
            continue;
        }
        let bytes: [u8; 64] = bytes
            .as_slice()
            .try_into()
            .map_err(|_| format!("rank {rank} of the group has no buffer for the exchange"))?;
        let mut handle = cu::CUipcMemHandle { reserved: [0; 64] };
        for (to, from) in handle.reserved.iter_mut().zip(bytes) {
            *to = from as _;
        }
        let mut address = 0;
        // SAFETY: writes one address; the handle is what the other process was given for its buffer.
        unsafe { cu::cuIpcOpenMemHandle_v2(&mut address, handle, LAZY_PEER_ACCESS) }
            .result()
            .map_err(|error| format!("cuIpcOpenMemHandle of the buffer of rank {rank} of the group: {error:?}"))?;
        addresses.push(address);
    }
    Ok(addresses)
}

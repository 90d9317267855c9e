//! Work on CubeCL's runner thread, where the device's context is current and its memory has addresses.

use cubecl::Runtime;
use cubecl::cuda::{CudaDevice, CudaRuntime};
use cubecl::server::ComputeServer;
use cubecl_common::device::Device;
use cubecl_common::device_handle::DeviceHandle;
use cubecl_common::stream_id::StreamId;

use crate::kernels::raw::CudaTensor;

type Server = <CudaRuntime as Runtime>::Server;

/// Queues `work` behind everything that this thread has queued. It gets the addresses of `tensors`, whose memory stays until it
/// returns, or the reason why there are none.
pub(super) fn submit(device: &CudaDevice, tensors: Vec<CudaTensor>, work: impl FnOnce(Result<Vec<u64>, String>) + Send + 'static) {
    let stream = StreamId::current();
    let runner = DeviceHandle::<Server>::new(device.to_id());
    runner.submit(move |server: &mut Server| {
        let resources = tensors
            .iter()
            .map(|tensor| server.get_resource(tensor.handle.clone().binding(), stream));
        match resources.collect::<Result<Vec<_>, _>>() {
            Ok(resources) => work(Ok(resources.iter().map(|resource| resource.resource().ptr).collect())),
            Err(error) => work(Err(format!("a buffer is gone: {error:?}"))),
        }
    });
    // Other ranks wait for this one: nothing may lie in the queue until more work comes.
    runner.flush_queue();
}

/// Runs `work` there and waits for it.
pub(super) fn call<R: Send>(device: &CudaDevice, work: impl FnOnce() -> Result<R, String> + Send) -> Result<R, String> {
    let runner = DeviceHandle::<Server>::new(device.to_id());
    match runner.submit_blocking(|_: &mut Server| work()) {
        Ok(result) => result,
        Err(error) => Err(format!("CubeCL's runner thread did not answer: {error:?}")),
    }
}

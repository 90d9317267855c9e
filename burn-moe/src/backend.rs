//! The concrete backend, chosen once by feature so that models are compiled once.
//!
//! Without GPU features this is Flex, Burn's CPU backend in pure Rust; with the feature `cuda` it is CubeCL's CUDA backend.

use burn::backend::Autodiff;
use burn_ep_backend::EpBackend;
use burn_ep_backend::comm::{CommHandle, TcpCommunicator};

#[cfg(feature = "cuda")]
use burn_ep_backend::Cuda as Base;
#[cfg(not(feature = "cuda"))]
use burn_flex::Flex as Base;

use crate::error::Result;

/// Name of the backend this build runs on.
pub const NAME: &str = if cfg!(feature = "cuda") { "cuda" } else { "flex" };

/// Backend for training.
pub type Train = EpBackend<Autodiff<Base>>;
/// Backend for evaluation and generation: what [`Train`] records gradients over.
pub type Infer = EpBackend<Base>;
/// Device of both.
pub type Device = burn::tensor::Device<Train>;

/// The device of the process that is number `local_rank` on its host.
///
/// # Errors
/// On CUDA, when the process sees fewer GPUs. A process that sees one GPU only (`CUDA_VISIBLE_DEVICES`) takes that one.
pub fn local_device(local_rank: usize) -> Result<Device> {
    #[cfg(feature = "cuda")]
    {
        let visible =
            burn_ep_backend::visible_gpus().map_err(|why| crate::Error::config("device", why, "an NVIDIA GPU with its driver"))?;
        match visible {
            1 => Ok(Device::new(0)),
            n if local_rank < n => Ok(Device::new(local_rank)),
            n => Err(crate::Error::config(
                "LOCAL_RANK",
                local_rank,
                format!("below {n}, the GPUs that this process sees: start at most one process for each GPU of a host"),
            )),
        }
    }
    #[cfg(not(feature = "cuda"))]
    {
        let _ = local_rank;
        Ok(Device::default())
    }
}

/// Bytes of memory that a device has, whoever uses them; None where that cannot be told. On the CPU: what the machine has.
pub fn device_capacity(device: &Device) -> Option<u64> {
    #[cfg(feature = "cuda")]
    {
        burn_ep_backend::gpu_memory(device.index)
    }
    #[cfg(not(feature = "cuda"))]
    {
        let _ = device;
        let text = std::fs::read_to_string("/proc/meminfo").ok()?;
        let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
        line.split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib * 1024)
    }
}

/// How the tensors of the processes of a job travel between their devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Transport {
    /// NCCL on builds with the feature `nccl`, else through the host.
    #[default]
    Auto,
    /// NCCL, or an error where it cannot be used.
    Nccl,
    /// Through memory that the GPUs of one host share (CUDA builds; processes may also share a GPU).
    Peer,
    /// Over TCP between the hosts' memories.
    Host,
}

impl std::str::FromStr for Transport {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "auto" => Ok(Self::Auto),
            "nccl" => Ok(Self::Nccl),
            "peer" => Ok(Self::Peer),
            "host" => Ok(Self::Host),
            other => Err(format!("`{other}`, expected auto, nccl, peer or host")),
        }
    }
}

/// The communicator of a process with `device`, standing on its connections to the others.
///
/// # Errors
/// [`Transport::Nccl`] on a build without the feature `nccl` or a machine without the library; [`Transport::Peer`] on a build without
/// the feature `cuda` or with ranks on different hosts.
pub fn communicator(host: TcpCommunicator, device: &Device, transport: Transport) -> Result<CommHandle> {
    match transport {
        Transport::Auto if cfg!(feature = "nccl") => nccl(host, device),
        Transport::Nccl => nccl(host, device),
        Transport::Peer => peer(host, device),
        Transport::Auto | Transport::Host => Ok(CommHandle::new(host)),
    }
}

#[cfg(feature = "nccl")]
fn nccl(host: TcpCommunicator, device: &Device) -> Result<CommHandle> {
    use burn_ep_backend::comm::cuda::nccl::NcclCommunicator;
    Ok(CommHandle::new(NcclCommunicator::new(host, device.clone())?))
}

#[cfg(not(feature = "nccl"))]
fn nccl(_: TcpCommunicator, _: &Device) -> Result<CommHandle> {
    Err(crate::Error::config(
        "transport",
        "nccl",
        "`host`, or a build with `--features nccl`",
    ))
}

#[cfg(feature = "cuda")]
fn peer(host: TcpCommunicator, device: &Device) -> Result<CommHandle> {
    use burn_ep_backend::comm::cuda::peer::{PeerCommunicator, PeerOptions};
    Ok(CommHandle::new(PeerCommunicator::new(
        host,
        device.clone(),
        PeerOptions::default(),
    )?))
}

#[cfg(not(feature = "cuda"))]
fn peer(_: TcpCommunicator, _: &Device) -> Result<CommHandle> {
    Err(crate::Error::config(
        "transport",
        "peer",
        "`host`, or a build with `--features cuda`",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transports_have_names() {
        assert_eq!("host".parse(), Ok(Transport::Host));
        assert_eq!("auto".parse(), Ok(Transport::default()));
        let error = "mpi".parse::<Transport>().unwrap_err();
        assert!(error.contains("`mpi`") && error.contains("nccl"), "{error}");
    }
}

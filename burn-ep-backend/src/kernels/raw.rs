//! Kernels given as CUDA C++ source, run by CubeCL: same stream, same memory pools, compiled by NVRTC for the device.

use std::hash::{DefaultHasher, Hash, Hasher};

use burn_cubecl::tensor::CubeTensor;
use cubecl::cuda::{CudaCompiler, CudaComputeKernel, CudaRuntime};
use cubecl::ir::{ElemType, FloatKind, Scope, StorageType, UIntKind};
use cubecl::prelude::*;
use cubecl::server::{Handle, KernelArguments, MetadataBindingInfo, TensorMapBinding, TensorMapMeta};
use cubecl::zspace::metadata::Metadata;
use cubecl::{CompilationError, Compiler, CubeTask};
use cubecl_cpp::shared::{Elem, Item, SharedMemory};

/// A CUDA tensor as Burn's CubeCL backend stores it.
pub type CudaTensor = CubeTensor<CudaRuntime>;
/// Client of one CUDA device.
pub type Client = cubecl::client::ComputeClient<CudaRuntime>;

/// A kernel given as source. The launch arguments are, in this order: tensor maps, one backing pointer per map, buffers,
/// and the scalars as one struct of `u64` by value.
#[derive(Clone)]
pub struct RawKernel {
    source: String,
    entry: &'static str,
    /// Hash of the source: CubeCL caches compiled kernels by id, not by text.
    key: u64,
    threads: u32,
    smem: usize,
    /// What a profile calls it.
    label: &'static str,
}

impl RawKernel {
    /// `threads` per block, `smem` bytes of dynamic shared memory.
    pub fn new(source: String, entry: &'static str, threads: u32, smem: usize) -> Self {
        let mut hasher = DefaultHasher::new();
        source.hash(&mut hasher);
        Self {
            key: hasher.finish(),
            source,
            entry,
            threads,
            smem,
            label: entry,
        }
    }

    /// The complete source, for compile checks without a GPU.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Enqueue on the client's stream; errors surface at the next synchronisation, as with every CubeCL kernel.
    pub fn launch(&self, client: &Client, grid: u32, maps: Vec<TensorMapBinding>, buffers: &[&Handle], scalars: Vec<u64>) {
        let by_value = scalars.len();
        let mut kernel = self.clone();
        if super::profile::file().is_some() {
            let mapped = maps.iter().map(|map| map.binding.size_in_used()).sum::<u64>();
            let bytes = buffers.iter().map(|buffer| buffer.size_in_used()).sum::<u64>() + mapped;
            kernel.label = super::profile::label(self.entry, grid, bytes);
        }
        let args = KernelArguments::new()
            .with_buffers(buffers.iter().map(|h| (*h).clone().binding()).collect())
            .with_info(MetadataBindingInfo::new(scalars, by_value))
            .with_tensor_maps(maps);
        // SAFETY: the callers in this module pass buffers of the sizes that the kernel's contract names.
        unsafe { client.launch_unchecked(Box::new(kernel), CubeCount::Static(grid, 1, 1), args) };
    }
}

impl KernelMetadata for RawKernel {
    fn name(&self) -> &'static str {
        self.label
    }

    fn id(&self) -> KernelId {
        KernelId::new::<Self>()
            .cube_dim(CubeDim::new_1d(self.threads))
            .info((self.entry, self.key, self.smem))
    }

    fn address_type(&self) -> StorageType {
        StorageType::Scalar(ElemType::UInt(UIntKind::U64))
    }
}

impl CubeTask<CudaCompiler> for RawKernel {
    fn compile(
        &self,
        compiler: &mut CudaCompiler,
        options: &<CudaCompiler as Compiler>::CompilationOptions,
        mode: ExecutionMode,
        address: StorageType,
    ) -> Result<CompiledKernel<CudaCompiler>, CompilationError> {
        // CubeCL reads the shared-memory size off its own representation, so an empty kernel is compiled to carry it.
        let cube_dim = CubeDim::new_1d(self.threads);
        let empty = KernelDefinition {
            buffers: vec![],
            tensor_maps: vec![],
            scalars: vec![],
            cube_dim,
            body: Scope::root(false),
            options: KernelOptions {
                kernel_name: self.entry.into(),
                debug_symbols: false,
                cluster_dim: None,
            },
        };
        let mut repr: CudaComputeKernel = compiler.compile(empty, options, mode, address)?;
        if self.smem > 0 {
            repr.body.shared_memories.push(SharedMemory::Array {
                index: 0,
                item: Item::scalar(Elem::U8, true),
                length: self.smem,
                align: 1024,
                offset: 0,
            });
        }
        Ok(CompiledKernel {
            entrypoint_name: self.entry.into(),
            debug_name: Some(self.entry),
            source: self.source.clone(),
            repr: Some(repr),
            cube_dim,
            debug_info: None,
        })
    }
}

/// Element type of a tensor map.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum MapElem {
    Bf16,
    F16,
    F32,
}

/// TMA descriptor with 128-byte swizzle; shape and strides in elements, outermost first.
pub fn tensor_map(handle: &Handle, shape: Vec<usize>, strides: Vec<usize>, tile: &[usize], elem: MapElem) -> TensorMapBinding {
    let rank = shape.len();
    let kind = match elem {
        MapElem::Bf16 => FloatKind::BF16,
        MapElem::F16 => FloatKind::F16,
        MapElem::F32 => FloatKind::F32,
    };
    TensorMapBinding {
        binding: handle.clone().binding(),
        map: TensorMapMeta {
            format: TensorMapFormat::Tiled(TiledArgs {
                tile_size: tile.to_vec().into(),
            }),
            metadata: Metadata::new(shape, strides),
            elem_stride: vec![1usize; rank].into(),
            interleave: TensorMapInterleave::None,
            swizzle: TensorMapSwizzle::B128,
            prefetch: TensorMapPrefetch::B256,
            oob_fill: OobFill::Zero,
            storage_ty: StorageType::Scalar(ElemType::Float(kind)),
        },
    }
}

/// [`tensor_map`] of a dense row-major tensor.
pub fn dense_map(handle: &Handle, shape: &[usize], tile: &[usize], elem: MapElem) -> TensorMapBinding {
    let mut strides = vec![1usize; shape.len()];
    for axis in (0..shape.len().saturating_sub(1)).rev() {
        strides[axis] = strides[axis + 1] * shape[axis + 1];
    }
    tensor_map(handle, shape.to_vec(), strides, tile, elem)
}

/// [`tensor_map`] of a tensor by its own strides, which [`mappable`] has made fit.
pub fn strided_map(tensor: &CudaTensor, tile: &[usize], elem: MapElem) -> TensorMapBinding {
    let shape: Vec<usize> = tensor.meta.shape().iter().copied().collect();
    let mut strides: Vec<usize> = tensor.meta.strides().iter().copied().collect();
    for (stride, &size) in strides.iter_mut().zip(&shape) {
        if size == 1 {
            // never used, but the driver wants a multiple of 16 bytes
            *stride = 8;
        }
    }
    tensor_map(&tensor.handle, shape, strides, tile, elem)
}

/// The tensor itself if TMA can read it as it lies (16-bit elements, dense last axis, other strides in multiples of 16
/// bytes, aligned start), else a dense copy. A view into a fused product passes.
pub fn mappable(tensor: CudaTensor) -> CudaTensor {
    let (shape, strides) = (tensor.meta.shape(), tensor.meta.strides());
    let inner = shape.num_dims() - 1;
    let fits = (0..inner).all(|axis| shape[axis] == 1 || (strides[axis] > 0 && strides[axis].is_multiple_of(8)));
    let aligned = tensor.handle.offset_start.unwrap_or(0).is_multiple_of(16);
    if fits && aligned && (strides[inner] == 1 || shape[inner] == 1) {
        return tensor;
    }
    dense(tensor)
}

/// The tensor itself if it is dense, row-major and 16-byte aligned, else a dense copy. CubeCL pads the rows of uploads
/// and of eager outputs, so a raw kernel may not assume anything.
pub fn dense(tensor: CudaTensor) -> CudaTensor {
    let aligned = tensor.handle.offset_start.unwrap_or(0).is_multiple_of(16);
    if tensor.is_contiguous() && aligned {
        return tensor;
    }
    let (client, device, dtype) = (tensor.client.clone(), tensor.device.clone(), tensor.dtype);
    let shape = tensor.meta.shape().clone();
    let copy = cubecl::std::tensor::into_contiguous(&client, tensor.binding(), dtype.into());
    CubeTensor::new_contiguous(client, device, shape, copy.handle, dtype)
}

/// A dense tensor with undefined contents.
pub fn empty(like: &CudaTensor, shape: &[usize], dtype: burn_backend::DType) -> CudaTensor {
    let bytes = shape.iter().product::<usize>() * dtype.size();
    let handle = like.client.empty(bytes);
    CubeTensor::new_contiguous(like.client.clone(), like.device.clone(), shape.to_vec().into(), handle, dtype)
}

/// A dense tensor with undefined contents on a device.
pub fn empty_on(device: &cubecl::cuda::CudaDevice, shape: &[usize], dtype: burn_backend::DType) -> CudaTensor {
    let client = <CudaRuntime as cubecl::Runtime>::client(device);
    let handle = client.empty(shape.iter().product::<usize>() * dtype.size());
    CubeTensor::new_contiguous(client, device.clone(), shape.to_vec().into(), handle, dtype)
}

/// Host data as a dense tensor, unlike Burn's own upload, which pads rows.
pub fn from_data(data: burn_backend::TensorData, device: &cubecl::cuda::CudaDevice) -> CudaTensor {
    let client = <CudaRuntime as cubecl::Runtime>::client(device);
    let handle = client.create(data.bytes);
    CubeTensor::new_contiguous(client, device.clone(), data.shape, handle, data.dtype)
}

/// Number of multiprocessors, the grid of persistent kernels.
pub fn multiprocessors(client: &Client) -> u32 {
    client.properties().hardware.num_streaming_multiprocessors.unwrap_or(132)
}

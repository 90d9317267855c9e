//! Compiles CubeCL kernels for sm_90a without a GPU; see `kernels/nvrtc.rs` for what that needs.

use cubecl::cuda::{CudaCompiler, CudaRuntime};
use cubecl::ir::{DeviceProperties, HardwareProperties, MemoryDeviceProperties};
use cubecl::prelude::*;
use cubecl::{Compiler, Runtime};
use cubecl_cpp::shared::{CompilationOptions, CppSupportedFeatures, register_supported_types};

use super::super::nvrtc::compile_for_sm_90a;

/// A read-only tensor argument.
pub fn input<C: CubePrimitive>(builder: &mut KernelBuilder) -> NativeExpand<Tensor<C>> {
    <Tensor<C> as LaunchArg>::expand(&TensorCompilationArg { inplace: None }, builder)
}

/// A mutable tensor argument.
pub fn output<C: CubePrimitive>(builder: &mut KernelBuilder) -> NativeExpand<Tensor<C>> {
    output_at(builder, None)
}

/// A mutable tensor argument that may be the buffer of an earlier one.
pub fn output_at<C: CubePrimitive>(builder: &mut KernelBuilder, inplace: Option<usize>) -> NativeExpand<Tensor<C>> {
    let inplace = inplace.map(|position| position as cubecl::ir::Id);
    <Tensor<C> as LaunchArg>::expand_output(&TensorCompilationArg { inplace }, builder)
}

/// A number given at launch.
pub fn scalar<S: LaunchArg<CompilationArg = ()>>(builder: &mut KernelBuilder) -> S::ExpandType {
    S::expand(&(), builder)
}

/// Expands a kernel with 32 and 64-bit indices, compiles both and panics with the compiler's log if that fails.
pub fn compile(units: u32, expand: impl Fn(&mut KernelBuilder)) {
    for address in [AddressType::U32, AddressType::U64] {
        let mut builder = KernelBuilder::default();
        builder.runtime_properties(CudaRuntime::target_properties());
        builder.device_properties(&device());
        address.register(&mut builder.scope);
        expand(&mut builder);
        let settings = KernelSettings::default()
            .cube_dim(CubeDim::new_1d(units))
            .address_type(address)
            .kernel_name("kernel");
        let definition = builder.build(settings);
        let options = CompilationOptions {
            warp_size: 32,
            supports_features: CppSupportedFeatures {
                grid_constants: true,
                clusters: true,
                fast_math: true,
                fast_tanh: true,
                elect_sync: true,
            },
        };
        let source = CudaCompiler::default()
            .compile(definition, &options, ExecutionMode::Unchecked, address.unsigned_type())
            .expect("CubeCL compiles the kernel")
            .to_string();
        compile_for_sm_90a(&source);
    }
}

/// A Hopper device as far as code generation asks.
fn device() -> DeviceProperties {
    let hardware = HardwareProperties {
        load_width: 128,
        plane_size_min: 32,
        plane_size_max: 32,
        max_bindings: 1024,
        max_shared_memory_size: 232_448,
        max_cube_count: (i32::MAX as u32, 65_535, 65_535),
        max_units_per_cube: 1024,
        max_cube_dim: (1024, 1024, 64),
        num_streaming_multiprocessors: Some(132),
        num_cpu_cores: None,
        num_tensor_cores: Some(4),
        min_tensor_cores_dim: Some(8),
        max_vector_size: usize::MAX,
    };
    let memory = MemoryDeviceProperties {
        max_page_size: 1 << 34,
        alignment: 512,
    };
    let mut properties = DeviceProperties::new(Default::default(), memory, hardware, cubecl_common::profile::TimingMethod::System);
    register_supported_types(&mut properties);
    properties
}

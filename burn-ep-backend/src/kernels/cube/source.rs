//! CUDA source of the CubeCL kernels without a device, for compile checks.

use cubecl::cuda::CudaCompiler;
use cubecl::ir::{AddressType, StorageType, Type};
use cubecl::prelude::*;
use cubecl::{Compiler, KernelSettings};

/// Declares a kernel's parameters in order.
#[derive(Default)]
pub struct Parameters(pub KernelBuilder);

impl Parameters {
    pub fn new() -> Self {
        let mut builder = KernelBuilder::default();
        AddressType::U64.register(&mut builder.scope);
        Self(builder)
    }

    pub fn input<T: CubePrimitive>(&mut self) -> NativeExpand<Tensor<T>> {
        let item: Type = T::as_type(&self.0.scope);
        self.0.input_tensor(item).into()
    }

    pub fn output<T: CubePrimitive>(&mut self) -> NativeExpand<Tensor<T>> {
        let item: Type = T::as_type(&self.0.scope);
        self.0.output_tensor(item).into()
    }

    pub fn scalar<T: CubePrimitive>(&mut self) -> NativeExpand<T> {
        let storage: StorageType = T::as_type(&self.0.scope).storage_type();
        self.0.scalar(storage).into()
    }

    /// The source, after the kernel's `expand` filled the scope.
    pub fn source(self, name: &str, cube_dim: CubeDim) -> String {
        let settings = KernelSettings::default()
            .cube_dim(cube_dim)
            .address_type(AddressType::U64)
            .kernel_name(name);
        let definition = self.0.build(settings);
        let address = AddressType::U64.unsigned_type();
        let kernel = CudaCompiler::default()
            .compile(definition, &Default::default(), ExecutionMode::Unchecked, address)
            .expect("valid kernel");
        kernel.to_string()
    }
}

/// Compiles every variant for sm_90a. Needs libnvrtc on the library path and `CUDA_PATH` at the CUDA headers, no GPU.
#[test]
fn every_cube_kernel_compiles_for_sm_90a() {
    use cudarc::nvrtc::result as nvrtc;
    let include = format!("--include-path={}/include", std::env::var("CUDA_PATH").expect("CUDA_PATH"));
    let variants = [
        super::rms_norm::variants(),
        super::gated_rms_norm::variants(),
        super::rope::variants(),
        super::causal_conv1d::variants(),
    ]
    .concat();
    for source in &variants {
        let text = std::ffi::CString::new(source.as_str()).expect("source without NUL");
        let program = nvrtc::create_program(&text, None).expect("libnvrtc on LD_LIBRARY_PATH");
        // SAFETY: `program` came from create_program above and is destroyed once, below.
        unsafe {
            let compiled = nvrtc::compile_program(program, &["--gpu-architecture=sm_90a", &include]);
            let log = std::ffi::CStr::from_ptr(nvrtc::get_program_log(program).expect("log").as_ptr())
                .to_string_lossy()
                .into_owned();
            assert!(compiled.is_ok(), "{log}\n{source}");
            nvrtc::destroy_program(program).expect("destroy");
        }
    }
}

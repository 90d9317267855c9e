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

#[test]
fn every_cube_kernel_compiles_for_sm_90a() {
    let variants = [super::column_sums::variants(), super::rms_norm::variants(), super::rope::variants()].concat();
    for source in &variants {
        super::super::nvrtc::compile_for_sm_90a(source);
    }
}

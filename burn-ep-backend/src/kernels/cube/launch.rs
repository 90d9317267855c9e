//! What launches have in common.

use burn_backend::{DType, TensorMetadata};
use cubecl::prelude::*;

use super::super::raw::{CudaTensor, dense};

/// Units of a cube that works on one wide row.
pub const ROW_UNITS: u32 = 256;

/// Width of the indices that reach every element of `tensors`.
pub fn addresses(tensors: &[&CudaTensor]) -> AddressType {
    tensors
        .iter()
        .map(|tensor| tensor.required_address_type())
        .max()
        .unwrap_or_default()
}

/// Elements per memory access: up to 16 bytes, a divisor of the row width.
pub fn vector_size(dtype: DType, width: usize) -> usize {
    let mut size = 16 / dtype.size();
    while !width.is_multiple_of(size) {
        size /= 2;
    }
    size
}

/// Units of a cube that works on a row of `vectors` accesses: whole planes, [`ROW_UNITS`] at most.
pub fn row_units(vectors: usize) -> u32 {
    (vectors.next_multiple_of(PLANE as usize) as u32).clamp(PLANE, ROW_UNITS)
}

/// Units of a plane on every CUDA device.
pub const PLANE: u32 = 32;

/// A dense copy in fp32, or the tensor itself.
pub fn dense_f32(tensor: CudaTensor) -> CudaTensor {
    dense(burn_cubecl::kernel::cast(tensor, DType::F32))
}

/// Sizes of a matrix.
pub fn matrix_dims(tensor: &CudaTensor) -> [usize; 2] {
    tensor.shape().dims::<2>()
}

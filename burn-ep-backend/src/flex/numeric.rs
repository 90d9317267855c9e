//! Arithmetic types of the CPU kernels: f32 for f32, bf16 and f16 tensors, f64 for f64 tensors.
//!
//! Kernels read tensors through [`wide`], compute in `A: Real`, and round once in [`float_tensor`].

use std::borrow::Cow;
use std::ops::{AddAssign, Range};

use burn_backend::{DType, Element, TensorMetadata};
use burn_flex::{FlexTensor, Layout};
use burn_std::{Bytes, Shape, bf16, f16};
use bytemuck::Pod;
use half::slice::HalfFloatSliceExt;
use rayon::prelude::*;

use super::lanes;
use super::slice::rounded;

/// Elements per conversion task.
const CONVERT_BLOCK: usize = 1 << 16;

/// A float type the kernels compute in.
pub(crate) trait Real: num_traits::Float + Element + Pod + AddAssign + Send + Sync + 'static {
    const DTYPE: DType;

    /// Borrows on when the element type is `Self`.
    fn from_f32s(values: Cow<'_, [f32]>) -> Cow<'_, [Self]>;
    fn from_f64s(values: &[f64]) -> Cow<'_, [Self]>;
    fn into_f32s(values: Vec<Self>) -> Vec<f32>;
    /// Sum of products, and sum; faster and more accurate than one running sum.
    fn dot(a: &[Self], b: &[Self]) -> Self;
    fn sum(a: &[Self]) -> Self;
    /// `e^self` in a form that loops vectorise, within 2 units in the last place.
    fn lane_exp(self) -> Self;
    fn of(value: f64) -> Self;
    fn as_f32(self) -> f32;
    fn as_f64(self) -> f64;
}

impl Real for f32 {
    const DTYPE: DType = DType::F32;

    fn from_f32s(values: Cow<'_, [f32]>) -> Cow<'_, [f32]> {
        values
    }

    fn from_f64s(values: &[f64]) -> Cow<'_, [f32]> {
        values.iter().map(|&v| v as f32).collect()
    }

    fn into_f32s(values: Vec<f32>) -> Vec<f32> {
        values
    }

    fn dot(a: &[f32], b: &[f32]) -> f32 {
        lanes::dot(a, b)
    }

    fn sum(a: &[f32]) -> f32 {
        lanes::sum(a)
    }

    #[inline]
    fn lane_exp(self) -> f32 {
        lanes::exp(self)
    }

    fn of(value: f64) -> f32 {
        value as f32
    }

    fn as_f32(self) -> f32 {
        self
    }

    fn as_f64(self) -> f64 {
        f64::from(self)
    }
}

impl Real for f64 {
    const DTYPE: DType = DType::F64;

    fn from_f32s(values: Cow<'_, [f32]>) -> Cow<'_, [f64]> {
        values.iter().map(|&v| f64::from(v)).collect()
    }

    fn from_f64s(values: &[f64]) -> Cow<'_, [f64]> {
        Cow::Borrowed(values)
    }

    fn into_f32s(values: Vec<f64>) -> Vec<f32> {
        values.into_iter().map(|v| v as f32).collect()
    }

    fn dot(a: &[f64], b: &[f64]) -> f64 {
        a.iter().zip(b).map(|(x, y)| x * y).sum()
    }

    fn sum(a: &[f64]) -> f64 {
        a.iter().sum()
    }

    #[inline]
    fn lane_exp(self) -> f64 {
        self.exp()
    }

    fn of(value: f64) -> f64 {
        value
    }

    fn as_f32(self) -> f32 {
        self as f32
    }

    fn as_f64(self) -> f64 {
        self
    }
}

/// Runs `$body` with the type alias `$A` set to the arithmetic type of a dtype.
macro_rules! with_real {
    ($dtype:expr, $A:ident => $body:expr) => {
        match $dtype {
            burn_backend::DType::F64 => {
                type $A = f64;
                $body
            }
            _ => {
                type $A = f32;
                $body
            }
        }
    };
}
pub(crate) use with_real;

/// Row-major tensor that starts at offset 0 of its own buffer; consumes `tensor`, so a unique buffer stays unique.
pub(crate) fn dense(tensor: FlexTensor) -> FlexTensor {
    tensor.to_contiguous()
}

/// All elements of a dense tensor in the arithmetic type.
pub(crate) fn wide<A: Real>(tensor: &FlexTensor) -> Cow<'_, [A]> {
    wide_range(tensor, 0..tensor.layout().num_elements())
}

/// Elements `range` of a dense tensor in the arithmetic type.
///
/// # Panics
/// If the dtype is not f64, f32, f16 or bf16: Flex has no other float dtype.
pub(crate) fn wide_range<A: Real>(tensor: &FlexTensor, range: Range<usize>) -> Cow<'_, [A]> {
    match tensor.dtype() {
        DType::F32 => A::from_f32s(Cow::Borrowed(&tensor.storage::<f32>()[range])),
        DType::F64 => A::from_f64s(&tensor.storage::<f64>()[range]),
        DType::BF16 => A::from_f32s(tensor.storage::<bf16>()[range].iter().map(|v| v.to_f32()).collect()),
        DType::F16 => A::from_f32s(tensor.storage::<f16>()[range].iter().map(|v| v.to_f32()).collect()),
        other => panic!("{other:?} is not a float dtype of the Flex backend"),
    }
}

/// Dense tensor of `dtype` from values in the arithmetic type: the one rounding of a kernel.
pub(crate) fn float_tensor<A: Real>(values: Vec<A>, shape: impl Into<Shape>, dtype: DType) -> FlexTensor {
    let bytes = match dtype {
        same if same == A::DTYPE => Bytes::from_elems(values),
        DType::F64 => Bytes::from_elems(values.iter().map(|v| v.as_f64()).collect()),
        DType::F32 => Bytes::from_elems(A::into_f32s(values)),
        DType::BF16 => Bytes::from_elems(narrow(&A::into_f32s(values), |from, to: &mut [bf16]| {
            to.convert_from_f32_slice(from)
        })),
        DType::F16 => Bytes::from_elems(narrow(&A::into_f32s(values), |from, to: &mut [f16]| {
            to.convert_from_f32_slice(from)
        })),
        other => panic!("{other:?} is not a float dtype of the Flex backend"),
    };
    FlexTensor::new(bytes, Layout::contiguous(shape.into()), dtype)
}

/// Rounds values to what a tensor of `dtype` can hold, staying in the arithmetic type.
pub(crate) fn round_all<A: Real>(values: &mut [A], dtype: DType) {
    if dtype != A::DTYPE && dtype != DType::F64 {
        values.iter_mut().for_each(|v| *v = A::of(rounded(v.as_f32(), dtype).into()));
    }
}

/// Dense i32 tensor, the int dtype of Flex.
pub(crate) fn int_tensor(values: Vec<i32>, shape: impl Into<Shape>) -> FlexTensor {
    FlexTensor::new(Bytes::from_elems(values), Layout::contiguous(shape.into()), DType::I32)
}

fn narrow<E: Pod + Send>(from: &[f32], convert: impl Fn(&[f32], &mut [E]) + Sync) -> Vec<E> {
    let mut to = vec![E::zeroed(); from.len()];
    to.par_chunks_mut(CONVERT_BLOCK)
        .zip(from.par_chunks(CONVERT_BLOCK))
        .for_each(|(to, from)| convert(from, to));
    to
}

/// Sizes of a tensor of known rank.
pub(crate) fn dims<const D: usize>(tensor: &FlexTensor) -> [usize; D] {
    tensor.shape().dims()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn widening_and_rounding_keep_representable_values() {
        let values = [1.0f32, -2.5, 0.0, 65536.0];
        for dtype in [DType::F32, DType::F64, DType::BF16] {
            let tensor = float_tensor(values.to_vec(), [2, 2], dtype);
            assert_eq!(tensor.dtype(), dtype);
            assert_eq!(wide::<f32>(&tensor).as_ref(), values);
            assert_eq!(wide_range::<f64>(&tensor, 1..2).as_ref(), [-2.5]);
        }
    }

    #[test]
    fn rounding_to_bf16_is_round_to_nearest_even() {
        // 1 + 2^-8 lies half way between 1 and the next bf16, 1 + 2^-7: the even neighbour is 1.
        let mut values = [1.0f32 + 2f32.powi(-8), 1.0 + 3.0 * 2f32.powi(-8)];
        round_all(&mut values, DType::BF16);
        assert_eq!(values, [1.0, 1.0 + 2f32.powi(-6)]);
    }
}

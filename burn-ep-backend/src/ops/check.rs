//! Shape checks and primitive conversions shared by the ops.

use burn_backend::tensor::{FloatTensor, IntTensor};
use burn_tensor::{Int, Tensor, TensorPrimitive, backend::Backend};

use crate::error::{OpError, Result};

pub(super) fn float<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> FloatTensor<B> {
    tensor.into_primitive().tensor()
}

pub(super) fn tensor<B: Backend, const D: usize>(primitive: FloatTensor<B>) -> Tensor<B, D> {
    Tensor::from_primitive(TensorPrimitive::Float(primitive))
}

pub(super) fn int<B: Backend, const D: usize>(tensor: Tensor<B, D, Int>) -> IntTensor<B> {
    tensor.into_primitive()
}

pub(super) fn int_tensor<B: Backend, const D: usize>(primitive: IntTensor<B>) -> Tensor<B, D, Int> {
    Tensor::from_primitive(primitive)
}

/// Fails unless `found == expected`; `legend` names the axes, e.g. `"[T, D]"`.
pub(super) fn shape<const D: usize>(
    op: &'static str,
    tensor: &'static str,
    found: [usize; D],
    expected: [usize; D],
    legend: &str,
) -> Result<()> {
    if found == expected {
        return Ok(());
    }
    Err(OpError::Shape {
        op,
        tensor,
        found: found.to_vec(),
        expected: format!("{legend} = {expected:?}"),
    })
}

/// Fails unless `ok`.
pub(super) fn setting(op: &'static str, field: &'static str, ok: bool, found: impl ToString, expected: impl ToString) -> Result<()> {
    if ok {
        return Ok(());
    }
    Err(OpError::Setting {
        op,
        field,
        found: found.to_string(),
        expected: expected.to_string(),
    })
}

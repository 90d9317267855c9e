//! Linear layer with the weight as in the files.

use burn::module::{Module, Param};
use burn::tensor::{DType, FloatDType, Tensor, backend::Backend};
use burn_ep_backend::{MoeBackend, OpError};

use super::{Init, ParamBuilder};
use crate::error::Result;

/// `y = x · W^T + b`, weight `[out, in]` as in Hugging Face files (Burn's own `Linear` keeps the transpose).
#[derive(Module, Debug)]
pub struct Linear<B: Backend> {
    /// `[out, in]`.
    pub weight: Param<Tensor<B, 2>>,
    /// `[out]`.
    pub bias: Option<Param<Tensor<B, 1>>>,
}

impl<B: MoeBackend> Linear<B> {
    /// Weight drawn from `init`, bias 0.
    pub fn new(pb: &ParamBuilder<B>, inputs: usize, outputs: usize, bias: bool, init: Init) -> Self {
        Self {
            weight: pb.param("weight", [outputs, inputs], init),
            bias: bias.then(|| pb.param("bias", [outputs], Init::Zeros)),
        }
    }

    /// `[.., in]` to `[.., out]`, in the dtype of x.
    pub fn forward<const R: usize>(&self, x: Tensor<B, R>) -> Result<Tensor<B, R>> {
        let out = linear(x, self.weight.val())?;
        Ok(match &self.bias {
            Some(bias) => {
                let mut shape = [1; R];
                shape[R - 1] = bias.dims()[0];
                let bias = as_dtype(bias.val(), out.dtype()).reshape(shape);
                out + bias
            }
            None => out,
        })
    }
}

/// `x · W^T`: `[.., in]` and `[out, in]` to `[.., out]`, in the dtype of x.
///
/// # Errors
/// When the last axis of x is not the weight's `in`.
pub fn linear<B: Backend, const R: usize>(x: Tensor<B, R>, weight_oi: Tensor<B, 2>) -> Result<Tensor<B, R>> {
    let mut dims = x.dims();
    let [out, inputs] = weight_oi.dims();
    if dims[R - 1] != inputs {
        return Err(OpError::Shape {
            op: "linear",
            tensor: "x",
            found: dims.to_vec(),
            expected: format!("[.., in] with in = {inputs} of the weight [out, in] = [{out}, {inputs}]"),
        }
        .into());
    }
    let rows = dims[..R - 1].iter().product::<usize>();
    dims[R - 1] = out;
    let weight = as_dtype(weight_oi, x.dtype());
    // One flat product: a broadcast weight would be multiplied, and its gradient summed, per batch row.
    Ok(x.reshape([rows, inputs]).matmul(weight.transpose()).reshape(dims))
}

/// `tensor` in `dtype`; free when it already is.
pub(crate) fn as_dtype<B: Backend, const R: usize>(tensor: Tensor<B, R>, dtype: DType) -> Tensor<B, R> {
    if tensor.dtype() == dtype {
        tensor
    } else {
        tensor.cast(FloatDType::from(dtype))
    }
}

#[cfg(test)]
mod tests {
    use burn_flex::Flex;

    use super::*;

    #[test]
    fn multiplies_by_the_transposed_weight_and_adds_the_bias() {
        let device = Default::default();
        let pb = ParamBuilder::<Flex>::new(&device, FloatDType::F32);
        let mut layer = Linear::new(&pb, 2, 3, true, Init::Zeros);
        layer.weight = Param::from_data([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], &device);
        layer.bias = Some(Param::from_data([0.5, 0.0, -0.5], &device));
        let x = Tensor::<Flex, 3>::from_data([[[1.0, 0.0], [0.0, 1.0]], [[1.0, 1.0], [2.0, -1.0]]], &device);
        let y = layer.forward(x).unwrap().into_data();
        let expected = [1.5, 3.0, 4.5, 2.5, 4.0, 5.5, 3.5, 7.0, 10.5, 0.5, 2.0, 3.5];
        assert_eq!(y.to_vec::<f32>().unwrap(), expected);
    }

    #[test]
    fn wrong_width_is_an_error_with_both_widths() {
        let device = Default::default();
        let pb = ParamBuilder::<Flex>::new(&device, FloatDType::F32);
        let layer = Linear::new(&pb, 4, 3, false, Init::Zeros);
        let error = layer.forward(Tensor::<Flex, 2>::zeros([2, 5], &device)).unwrap_err().to_string();
        assert!(error.contains("[2, 5]") && error.contains("in = 4"), "{error}");
    }
}

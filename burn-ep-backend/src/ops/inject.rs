//! The start of a backward pass in the middle of a model.

use burn_tensor::Tensor;

use super::check;
use crate::{MoeBackend, Result};

/// Zero, `[1]` fp32, whose gradient for `y` is `grad`, whatever is done with the zero. `grad` itself gets no gradient.
///
/// # Errors
/// When the two shapes or dtypes differ.
pub fn inject_gradient<B: MoeBackend, const D: usize>(y: Tensor<B, D>, grad: Tensor<B, D>) -> Result<Tensor<B, 1>> {
    let op = "inject_gradient";
    check::shape(op, "grad", grad.dims(), y.dims(), "the shape of y")?;
    let dtype = y.dtype();
    check::setting(
        op,
        "grad",
        grad.dtype() == dtype,
        format!("{:?}", grad.dtype()),
        format!("{dtype:?}, the dtype of y"),
    )?;
    Ok(check::tensor(B::inject_gradient(check::float(y), check::float(grad))))
}

#[cfg(test)]
mod tests {
    use burn_backend::DType;

    use super::*;
    use crate::testing::*;

    #[test]
    fn gradients_are_those_of_the_product_with_the_gradient() {
        let (x, upstream) = (values(1, 6), values(2, 6));
        let leaf = || tensor::<Ad, 2>(&x, [2, 3], DType::F64).require_grad();
        let (a, b) = (leaf(), leaf());
        let upstream = || tensor::<Ad, 2>(&upstream, [2, 3], DType::F64);
        let expected = (a.clone().exp() * upstream()).sum().backward();
        let found = (inject_gradient(b.clone().exp(), upstream()).unwrap() * 3.0).backward();
        assert_eq!(f64s(b.grad(&found).unwrap()), f64s(a.grad(&expected).unwrap()));
    }

    #[test]
    fn another_shape_or_dtype_is_refused() {
        let y = tensor::<Ad, 2>(&values(1, 6), [2, 3], DType::F32);
        let error = inject_gradient(y.clone(), y.clone().transpose()).unwrap_err().to_string();
        assert!(error.contains("[3, 2]"), "{error}");
        let error = inject_gradient(y.clone(), y.cast(DType::BF16)).unwrap_err().to_string();
        assert!(error.contains("BF16") && error.contains("F32"), "{error}");
    }
}

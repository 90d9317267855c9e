//! Rows per expert.

use burn_backend::TensorMetadata;
use burn_tensor::{Int, Tensor};

use super::check;
use crate::{MoeBackend, Result};

/// Rows per expert `[E]` fp32 of `ids_tk [T, K]`; `mask_t [T]` weighs the rows of each token. Not differentiable.
///
/// # Errors
/// When the mask is not `[T]`.
pub fn count_experts<B: MoeBackend>(ids_tk: Tensor<B, 2, Int>, mask_t: Option<Tensor<B, 1>>, num_experts: usize) -> Result<Tensor<B, 1>> {
    if let Some(mask) = &mask_t {
        check::shape("count_experts", "mask", mask.dims(), [ids_tk.dims()[0]], "[T] of the ids [T, K]")?;
    }
    let counts = B::count_experts(ids_tk.into_primitive(), mask_t.map(check::float), num_experts);
    debug_assert_eq!(counts.shape().num_elements(), num_experts);
    Ok(check::tensor(counts))
}

#[cfg(test)]
mod tests {
    use burn_backend::DType;
    use burn_flex::Flex;

    use super::*;
    use crate::testing::*;

    #[test]
    fn experts_are_counted_with_and_without_a_mask() {
        let ids = || ints::<Flex, 2>(&[0, 2, 2, 1, 2, 0], [3, 2]);
        assert_eq!(f64s(count_experts(ids(), None, 4).unwrap()), [2.0, 1.0, 3.0, 0.0]);
        let mask = tensor::<Flex, 1>(&[1.0, 0.0, 1.0], [3], DType::F32);
        assert_eq!(f64s(count_experts(ids(), Some(mask.clone()), 4).unwrap()), [2.0, 0.0, 2.0, 0.0]);
        assert!(
            count_experts(ids(), Some(mask.slice(0..2)), 4)
                .unwrap_err()
                .to_string()
                .contains("mask")
        );
    }

    #[test]
    fn squares_are_summed_per_tensor() {
        let a = tensor::<Flex, 1>(&[3.0, 4.0], [2], DType::BF16);
        let b = tensor::<Flex, 2>(&[1.0; 6], [2, 3], DType::F32);
        let norms = Flex::squared_norms(vec![check::float(a), check::float(b)]);
        assert_eq!(f64s(check::tensor::<Flex, 1>(norms)), [25.0, 6.0]);
    }
}

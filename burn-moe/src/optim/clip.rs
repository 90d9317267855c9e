//! Global-norm gradient clipping (Pascanu, Mikolov and Bengio 2013).

use burn::tensor::backend::Backend;
use burn::tensor::{DType, FloatDType, Tensor, TensorPrimitive};
use burn_ep_backend::MoeBackend;
use burn_ep_backend::comm::EpGroup;

use super::{GradStore, ParamTable, Shards};
use crate::error::Result;

/// Euclidean norm of the whole model's gradient. Each parameter counts once: a tied one once, a replicated one on this rank
/// only (all ranks hold the same sum by now), routed experts over the ranks they are spread over.
pub fn global_norm<B: Backend>(grads: &GradStore<B>, table: &ParamTable, ep: Option<&EpGroup>) -> Result<f64> {
    let entries = table.entries();
    let squares = grads.squared_norms(entries.iter().map(|info| info.id));
    let (mut replicated, mut experts) = (0.0, 0.0);
    for (info, square) in entries.iter().zip(squares) {
        match info.is_expert() {
            true => experts += square,
            false => replicated += square,
        }
    }
    if let Some(ep) = ep.filter(|ep| ep.size() > 1) {
        let mut sum = [experts];
        ep.comm().get().all_reduce_sum_f64(&mut sum)?;
        [experts] = sum;
    }
    Ok((replicated + experts).sqrt())
}

/// [`global_norm`] after [`reduce_to_shards`](super::reduce_to_shards): every rank adds what it alone has.
pub fn sharded_norm<B: Backend>(grads: &GradStore<B>, table: &ParamTable, shards: &Shards) -> Result<f64> {
    let entries = table.entries();
    let squares = grads.squared_norms(entries.iter().map(|info| info.id));
    // What nobody else holds is here alone, too.
    let mut sum = [squares.iter().sum::<f64>()];
    shards.group().world().get().all_reduce_sum_f64(&mut sum)?;
    Ok(sum[0].sqrt())
}

/// Factor that brings a gradient of norm `norm` to at most `max_norm`: `min(1, max_norm / (norm + 1e-6))`, as in PyTorch.
pub fn clip_factor(norm: f64, max_norm: f64) -> f64 {
    (max_norm / (norm + 1e-6)).min(1.0)
}

/// [`clip_factor`] on the device, `[1]` fp32: of the norm whose parts squared are `squares [n]`, 1 without `max_norm`. It is not
/// finite when the norm or `loss [1]` is not, and an update with such a factor changes nothing.
pub fn clip_scale<B: MoeBackend>(squares: Tensor<B, 1>, loss: Tensor<B, 1>, max_norm: Option<f64>) -> Tensor<B, 1> {
    let dtype = match squares.dtype() {
        DType::F64 => FloatDType::F64,
        _ => FloatDType::F32,
    };
    // The sum of the squares of their roots: a kernel that is compiled already and sums in one order.
    let roots = squares.sqrt().into_primitive().tensor();
    let norm = Tensor::<B, 1>::from_primitive(TensorPrimitive::Float(B::squared_norms(vec![roots]))).sqrt();
    let factor = match max_norm {
        Some(max) => ((norm.clone() + 1e-6).recip() * max).clamp_max(1.0),
        None => norm.clone().ones_like(),
    };
    // Clamping may turn NaN into a number; zero times NaN or infinity is NaN again.
    let poison = (norm + loss.cast(dtype)) * 0.0;
    (factor + poison).cast(FloatDType::F32)
}

#[cfg(test)]
mod tests {
    use burn_flex::Flex;

    use super::*;

    #[test]
    fn the_factor_on_the_device_is_that_of_the_host_and_not_finite_for_bad_steps() {
        let list = |values: &[f32]| Tensor::<Flex, 1>::from_floats(values, &Default::default());
        let scale = |squares: &[f32], loss: f32, max| clip_scale(list(squares), list(&[loss]), max).into_scalar();
        for squares in [[9.0f32, 16.0], [0.0, 0.04], [0.0, 0.0]] {
            let norm = f64::from(squares[0] + squares[1]).sqrt();
            let error = f64::from(scale(&squares, 3.0, Some(1.0))) - clip_factor(norm, 1.0);
            assert!(error.abs() < 1e-6, "{squares:?}: {error}");
            assert_eq!(scale(&squares, 3.0, None), 1.0);
        }
        for (squares, loss) in [
            ([f32::NAN, 1.0], 1.0),
            ([f32::INFINITY, 1.0], 1.0),
            ([1.0, 1.0], f32::NAN),
            ([1.0, 1.0], f32::INFINITY),
        ] {
            for max in [None, Some(1.0)] {
                assert!(!scale(&squares, loss, max).is_finite(), "{squares:?} {loss} {max:?}");
            }
        }
    }

    #[test]
    fn small_gradients_pass_and_large_ones_shrink() {
        assert_eq!(clip_factor(0.5, 1.0), 1.0);
        assert_eq!(clip_factor(0.0, 1.0), 1.0);
        assert!((clip_factor(4.0, 1.0) - 0.25).abs() < 1e-6);
    }
}

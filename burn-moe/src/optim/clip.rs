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

/// Share of the old value in [`running_norm`].
const RUNNING_SHARE: f64 = 0.9;

/// Running norm after a step of gradient norm `norm`: `0.9 r + 0.1 norm`, from the first norm on. Rounded to fp32, so that it
/// survives a checkpoint to the bit.
pub fn running_norm(before: Option<f64>, norm: f64) -> f64 {
    let mean = before.map_or(norm, |before| RUNNING_SHARE * before + (1.0 - RUNNING_SHARE) * norm);
    f64::from(mean as f32)
}

/// Factor of a segment's gradient where the norm of the whole is not known yet: [`clip_factor`] of the larger of `running`, the
/// running norm of the steps before (none: the first step), and `so_far`, the norm over the segments whose backward passes are
/// done, this one included. As `so_far` is a lower bound of the true norm, no segment's scaled gradient is longer than `max_norm`;
/// and a step as large as those before it is scaled as clipping by its own norm would.
pub fn running_clip_factor(running: Option<f64>, so_far: f64, max_norm: f64) -> f64 {
    clip_factor(running.unwrap_or(0.0).max(so_far), max_norm)
}

/// [`clip_factor`] on the device, `[1]` fp32: of the norm whose parts squared are `squares [n]`, 1 without `max_norm`. It is not
/// finite when the norm or `loss [1]` is not, and an update with such a factor changes nothing.
pub fn clip_scale<B: MoeBackend>(squares: Tensor<B, 1>, loss: Tensor<B, 1>, max_norm: Option<f64>) -> Tensor<B, 1> {
    scale_of_norm(sum_squares(squares).sqrt(), loss, max_norm, None)
}

/// Sum of squares `[n]` as `[1]`.
pub(crate) fn sum_squares<B: MoeBackend>(squares: Tensor<B, 1>) -> Tensor<B, 1> {
    // The sum of the squares of their roots: a kernel that is compiled already and sums in one order.
    let roots = squares.sqrt().into_primitive().tensor();
    Tensor::from_primitive(TensorPrimitive::Float(B::squared_norms(vec![roots])))
}

/// [`clip_factor`] of `norm [1]`, or of `running` if that is larger; see [`clip_scale`].
pub(crate) fn scale_of_norm<B: MoeBackend>(
    norm: Tensor<B, 1>,
    loss: Tensor<B, 1>,
    max_norm: Option<f64>,
    running: Option<f64>,
) -> Tensor<B, 1> {
    let dtype = match norm.dtype() {
        DType::F64 => FloatDType::F64,
        _ => FloatDType::F32,
    };
    let factor = match max_norm {
        Some(max) => {
            let bound = match running {
                Some(running) => norm.clone().clamp_min(running),
                None => norm.clone(),
            };
            ((bound + 1e-6).recip() * max).clamp_max(1.0)
        }
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
    fn the_running_norm_bounds_what_is_not_known_yet() {
        assert_eq!(running_norm(None, 4.0), 4.0);
        assert!((running_norm(Some(4.0), 2.0) - 3.8).abs() < 1e-6);
        // Steps of one size: as global clipping, whatever part is known.
        for so_far in [0.1, 4.0] {
            assert_eq!(running_clip_factor(Some(4.0), so_far, 1.0), clip_factor(4.0, 1.0));
        }
        // The first step, and an outlier.
        assert_eq!(running_clip_factor(None, 0.5, 1.0), 1.0);
        assert_eq!(running_clip_factor(None, 8.0, 1.0), clip_factor(8.0, 1.0));
        assert_eq!(running_clip_factor(Some(0.5), 8.0, 1.0), clip_factor(8.0, 1.0));
        let one = |value: f32| Tensor::<Flex, 1>::from_floats([value], &Default::default());
        for (running, so_far) in [(None, 0.5), (None, 8.0), (Some(4.0), 0.1), (Some(0.5), 8.0)] {
            let found = scale_of_norm(one(so_far), one(3.0), Some(1.0), running).into_scalar();
            let error = f64::from(found) - running_clip_factor(running, f64::from(so_far), 1.0);
            assert!(error.abs() < 1e-6, "{running:?} {so_far}: {error}");
        }
        assert!(
            !scale_of_norm(one(f32::NAN), one(3.0), Some(1.0), Some(1.0))
                .into_scalar()
                .is_finite()
        );
    }

    #[test]
    fn small_gradients_pass_and_large_ones_shrink() {
        assert_eq!(clip_factor(0.5, 1.0), 1.0);
        assert_eq!(clip_factor(0.0, 1.0), 1.0);
        assert!((clip_factor(4.0, 1.0) - 0.25).abs() < 1e-6);
    }
}

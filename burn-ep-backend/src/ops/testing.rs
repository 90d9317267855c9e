//! Helpers of the op tests: reproducible values, gradient checks, the low-precision rule.

use burn_autodiff::Autodiff;
use burn_backend::{DType, TensorData};
use burn_flex::Flex;
use burn_std::FloatDType;
use burn_tensor::{Int, Tensor, backend::Backend};

/// Backend of the gradient checks.
pub(crate) type Ad = Autodiff<Flex>;

/// `n` values in `-1..1`, the same for the same seed.
pub(crate) fn values(n: usize, seed: u64) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(0x1234_5678_9ABC_DEF1);
    (0..n)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 11) as f64 / (1u64 << 52) as f64 - 1.0
        })
        .collect()
}

pub(crate) fn tensor<B: Backend, const D: usize>(values: &[f64], shape: [usize; D], dtype: DType) -> Tensor<B, D> {
    let tensor: Tensor<B, D> = Tensor::from_data(TensorData::new(values.to_vec(), shape), (&Default::default(), DType::F64));
    tensor.cast(FloatDType::from(dtype))
}

pub(crate) fn ints<B: Backend, const D: usize>(values: &[i32], shape: [usize; D]) -> Tensor<B, D, Int> {
    Tensor::from_data(TensorData::new(values.to_vec(), shape), (&Default::default(), DType::I32))
}

pub(crate) fn to_vec<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> Vec<f64> {
    tensor.into_data().iter::<f64>().collect()
}

pub(crate) fn to_ints<B: Backend, const D: usize>(tensor: Tensor<B, D, Int>) -> Vec<i64> {
    tensor.into_data().iter::<i64>().collect()
}

/// Root mean square of the differences.
pub(crate) fn rms_difference(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let sum: f64 = a.iter().zip(b).map(|(x, y)| (x - y).powi(2)).sum();
    (sum / a.len().max(1) as f64).sqrt()
}

/// Fails unless `|a - b| <= tolerance` everywhere; NaN fails.
pub(crate) fn assert_close(name: &str, found: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len(), "{name}: lengths differ");
    for (i, (f, e)) in found.iter().zip(expected).enumerate() {
        assert!((f - e).abs() <= tolerance, "{name}[{i}] is {f}, expected {e} within {tolerance}");
    }
}

/// Low-precision rule: the kernel's error against the wide result is at most twice that of the plain path, plus a floor
/// of a hundredth of the largest value's rounding step. Errors are root mean squares: the maximum of a few dozen
/// roundings says more about the draw than about the kernel.
pub(crate) fn assert_low_precision(name: &str, kernel: &[f64], plain: &[f64], wide: &[f64], dtype: DType) {
    let step = match dtype {
        DType::BF16 => 2f64.powi(-8),
        _ => 2f64.powi(-11),
    };
    let floor = wide.iter().fold(0.0, |max: f64, v| max.max(v.abs())) * step * 0.01;
    let (found, allowed) = (rms_difference(kernel, wide), 2.0 * rms_difference(plain, wide) + floor);
    assert!(found <= allowed, "{name}: error {found} exceeds {allowed}");
    assert!(kernel.iter().all(|v| v.is_finite()), "{name}: not finite");
}

/// Compares the gradients of `f` (a scalar of flat f64 inputs) with central differences.
pub(crate) fn check_gradients(name: &str, inputs: &[Vec<f64>], f: impl Fn(&[Tensor<Ad, 1>]) -> Tensor<Ad, 1>) {
    let leaves =
        |inputs: &[Vec<f64>]| -> Vec<Tensor<Ad, 1>> { inputs.iter().map(|v| tensor(v, [v.len()], DType::F64).require_grad()).collect() };
    let value = |inputs: &[Vec<f64>]| to_vec(f(&leaves(inputs)))[0];
    let tracked = leaves(inputs);
    let grads = f(&tracked).backward();
    const STEP: f64 = 1e-5;
    for (which, leaf) in tracked.iter().enumerate() {
        let found = to_vec(leaf.grad(&grads).unwrap_or_else(|| panic!("{name}: input {which} has no gradient")));
        for (i, found) in found.into_iter().enumerate() {
            let mut moved = inputs.to_vec();
            moved[which][i] += STEP;
            let high = value(&moved);
            moved[which][i] -= 2.0 * STEP;
            let expected = (high - value(&moved)) / (2.0 * STEP);
            let tolerance = 1e-7 * (1.0 + expected.abs());
            assert!(
                (found - expected).abs() <= tolerance,
                "{name}: gradient of input {which}[{i}] is {found}, finite differences give {expected}"
            );
        }
    }
}

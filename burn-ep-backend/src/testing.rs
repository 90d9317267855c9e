//! Shared by unit tests: reproducible values, comparison in f64, numerical gradients.

use burn_autodiff::Autodiff;
use burn_flex::Flex;
use burn_std::DType;
use burn_tensor::{Bool, Int, Tensor, TensorData, backend::Backend};

pub(crate) type Ad = Autodiff<Flex>;

/// `n` reproducible values in [-1, 1), exactly representable in bf16 so that every dtype sees the same input.
pub(crate) fn values(seed: u64, n: usize) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0xD1B5_4A32_D192_ED03;
    (0..n)
        .map(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            ((state >> 56) as f64) / 128.0 - 1.0
        })
        .collect()
}

pub(crate) fn tensor<B: Backend, const D: usize>(values: &[f64], shape: [usize; D], dtype: DType) -> Tensor<B, D> {
    Tensor::from_data(TensorData::new(values.to_vec(), shape), (&B::Device::default(), dtype))
}

pub(crate) fn ints<B: Backend, const D: usize>(values: &[usize], shape: [usize; D]) -> Tensor<B, D, Int> {
    let values: Vec<i64> = values.iter().map(|&v| v as i64).collect();
    Tensor::from_data(TensorData::new(values, shape), &B::Device::default())
}

pub(crate) fn bools<B: Backend, const D: usize>(values: &[bool], shape: [usize; D]) -> Tensor<B, D, Bool> {
    Tensor::from_data(TensorData::new(values.to_vec(), shape), &B::Device::default())
}

pub(crate) fn f64s<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> Vec<f64> {
    tensor.into_data().convert::<f64>().to_vec().expect("converted to f64")
}

pub(crate) fn i64s<B: Backend, const D: usize>(tensor: Tensor<B, D, Int>) -> Vec<i64> {
    tensor.into_data().convert::<i64>().to_vec().expect("converted to i64")
}

/// Largest difference relative to the largest expected magnitude (at least `1e-3`).
pub(crate) fn relative_error(found: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len(), "number of elements");
    let scale = expected.iter().filter(|v| v.is_finite()).fold(1e-3_f64, |m, v| m.max(v.abs()));
    found.iter().zip(expected).fold(0.0, |worst, (f, e)| {
        // Equal infinities agree; a NaN never does.
        let error = if f == e { 0.0 } else { (f - e).abs() / scale };
        if error.is_nan() { f64::INFINITY } else { worst.max(error) }
    })
}

#[track_caller]
pub(crate) fn assert_close(name: &str, found: &[f64], expected: &[f64], tolerance: f64) {
    let error = relative_error(found, expected);
    assert!(
        error <= tolerance,
        "{name}: relative error {error:.3e} exceeds {tolerance:.0e}\n{found:.6?}\n{expected:.6?}"
    );
}

/// The project's low-precision rule: a kernel errs at most twice as much as the plain low-precision path, plus a floor.
#[track_caller]
pub(crate) fn assert_low_precision(name: &str, kernel: &[f64], plain: &[f64], exact: &[f64]) {
    let (kernel, plain) = (relative_error(kernel, exact), relative_error(plain, exact));
    assert!(kernel <= 2.0 * plain + 5e-4, "{name}: error {kernel:.3e}, plain path {plain:.3e}");
}

/// Central differences of `loss` at `x`.
pub(crate) fn numeric_gradient(x: &[f64], loss: impl Fn(&[f64]) -> f64) -> Vec<f64> {
    let step = 1e-5;
    (0..x.len())
        .map(|i| {
            let mut moved = x.to_vec();
            moved[i] = x[i] + step;
            let up = loss(&moved);
            moved[i] = x[i] - step;
            (up - loss(&moved)) / (2.0 * step)
        })
        .collect()
}

/// Compares the gradients of `loss` (a scalar of flat f64 inputs) with central differences.
#[track_caller]
pub(crate) fn check_gradients(name: &str, inputs: &[Vec<f64>], loss: impl Fn(&[Tensor<Ad, 1>]) -> Tensor<Ad, 1>) {
    let leaves =
        |inputs: &[Vec<f64>]| -> Vec<Tensor<Ad, 1>> { inputs.iter().map(|v| tensor(v, [v.len()], DType::F64).require_grad()).collect() };
    let tracked = leaves(inputs);
    let grads = loss(&tracked).backward();
    for (which, leaf) in tracked.iter().enumerate() {
        let found = f64s(leaf.grad(&grads).unwrap_or_else(|| panic!("{name}: input {which} has no gradient")));
        let expected = numeric_gradient(&inputs[which], |moved| {
            let mut inputs = inputs.to_vec();
            inputs[which] = moved.to_vec();
            f64s(loss(&leaves(&inputs)))[0]
        });
        assert_close(&format!("{name}: gradient of input {which}"), &found, &expected, 1e-7);
    }
}

pub(crate) fn dot(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len(), "number of elements");
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

//! Inputs, the low-precision rule and the two backends that it compares.

use burn::tensor::{FloatDType, Int, Tensor, TensorData, backend::Backend};
use burn_cubecl::CubeBackend;
use burn_flex::Flex;
use cubecl::cuda::CudaRuntime;

pub type Gpu = burn::backend::Autodiff<CubeBackend<CudaRuntime, f32, i32, u8>>;
/// The same under Burn's fusion layer, which runs lazily.
pub type FusedGpu = burn::backend::Autodiff<burn_fusion::Fusion<CubeBackend<CudaRuntime, f32, i32, u8>>>;
pub type Cpu = burn::backend::Autodiff<Flex>;

/// Root mean square below which errors count as absolute: inputs have variance one, so an output under it is what cancellation
/// leaves (the gradient of a norm over one element, say) and carries the rounding of the terms, not of the result.
const CANCELLED: f64 = 0.05;

/// `||a - b|| / ||b||`, with `b` taken as at least [`CANCELLED`] in the mean.
pub fn relative(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let (mut diff, mut norm) = (0f64, 0f64);
    for (x, y) in a.iter().zip(b) {
        assert!(x.is_finite(), "not finite: {x}");
        diff += f64::from(x - y).powi(2);
        norm += f64::from(*y).powi(2);
    }
    (diff / norm.max(CANCELLED * CANCELLED * b.len() as f64).max(1e-30)).sqrt()
}

/// bf16-representable numbers around zero with variance about 1.
pub fn random(shape: &[usize], seed: u64) -> TensorData {
    // a small generator of our own: both backends must see the same numbers
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    let n = shape.iter().product();
    let values: Vec<f32> = (0..n)
        .map(|_| half::bf16::from_f32(2.0 * (next() + next() + next())).to_f32())
        .collect();
    TensorData::new(values, shape.to_vec())
}

/// Applies the rule to every output: `gpu` ran in bf16 on the GPU, `exact` in fp32 and `plain` in bf16 on the CPU.
pub fn compare(name: &str, gpu: Vec<Vec<f32>>, exact: Vec<Vec<f32>>, plain: Vec<Vec<f32>>) {
    for (i, ((g, e), p)) in gpu.iter().zip(&exact).zip(&plain).enumerate() {
        let (ours, theirs) = (relative(g, e), relative(p, e));
        println!("{name} output {i}: {ours:.2e} (plain bf16 {theirs:.2e})");
        // Of a handful of numbers (the gradient of one sink per head) neither error averages out: one rounding is up to 2^-8.
        let floor = if e.len() < 16 { 1.0 / 256.0 } else { 2e-3 };
        assert!(
            ours <= 2.0 * theirs + floor,
            "{name} output {i}: error {ours:.3e}, plain bf16 path {theirs:.3e}"
        );
    }
}

/// Every output of `found` within the relative error `tolerance` of `exact`.
pub fn close(name: &str, found: Vec<Vec<f32>>, exact: Vec<Vec<f32>>, tolerance: f64) {
    assert_eq!(found.len(), exact.len(), "{name}");
    for (i, (f, e)) in found.iter().zip(&exact).enumerate() {
        let error = relative(f, e);
        println!("{name} output {i}: {error:.2e}");
        assert!(error <= tolerance, "{name} output {i}: error {error:.3e}, allowed {tolerance:.1e}");
    }
}

/// Leaves buffers full of NaN in the memory pool, so that a kernel that does not write all of its output is found out.
pub fn poison<B: Backend>(elements: usize) {
    let device = Default::default();
    let buffers: Vec<_> = [FloatDType::F32, FloatDType::BF16]
        .into_iter()
        .flat_map(|dtype| (0..4).map(move |_| dtype))
        .map(|dtype| Tensor::<B, 1>::full([elements], f32::NAN, &device).cast(dtype))
        .collect();
    drop(buffers);
}

/// Float tensor of random numbers in `dtype`; with `strided` its last two axes lie swapped in memory.
pub fn float<B: Backend, const D: usize>(shape: [usize; D], seed: u64, strided: bool, dtype: FloatDType) -> Tensor<B, D> {
    let device = Default::default();
    if !strided {
        return Tensor::<B, D>::from_data(random(&shape, seed), &device).cast(dtype);
    }
    let mut swapped = shape;
    swapped.swap(D - 2, D - 1);
    // the numbers differ from those of the dense tensor, the layout is the point
    Tensor::<B, D>::from_data(random(&swapped, seed), &device)
        .cast(dtype)
        .swap_dims(D - 2, D - 1)
}

/// `[B, S]`: documents of `length` tokens, one token shorter in every further row.
pub fn documents<B: Backend>(batch: usize, seq: usize, length: usize) -> Tensor<B, 2, Int> {
    let starts: Vec<i32> = (0..batch * seq)
        .map(|i| {
            let (token, length) = (i % seq, length.saturating_sub(i / seq).max(1));
            (token / length * length) as i32
        })
        .collect();
    Tensor::from_data(TensorData::new(starts, [batch, seq]), &Default::default())
}

/// Values of `t` on the host, in fp32.
pub fn host<B: Backend, const D: usize>(t: Tensor<B, D>) -> Vec<f32> {
    // the bytes of an empty tensor have no alignment that a cast would accept
    if t.shape().num_elements() == 0 {
        return Vec::new();
    }
    t.cast(FloatDType::F32).into_data().convert::<f32>().into_vec().expect("fp32 data")
}

#[test]
fn random_numbers_are_spread() {
    // the comparisons above mean nothing on constant inputs
    let values = random(&[1000], 7).into_vec::<f32>().expect("fp32");
    let mean = values.iter().sum::<f32>() / 1000.0;
    let var = values.iter().map(|v| (v - mean).powi(2)).sum::<f32>() / 1000.0;
    assert!(mean.abs() < 0.15 && (0.5..2.0).contains(&var), "mean {mean}, variance {var}");
}

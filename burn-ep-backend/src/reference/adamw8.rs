//! Moments in 8 bits, in blocks of 256 elements with one fp32 scale, the largest magnitude of the block.
//!
//! Codes are logarithmic, eight to a factor of two: code c of at most `top` stands for `scale * 2^((c - top) / 8)`, code 0 for
//! zero. First moments have a sign bit and `top = 127` (down to 2^-16 of the scale), second moments `top = 255` (down to 2^-32). A
//! value is rounded to one of the two codes around it at random, with its value as the mean: rounded to the nearest, a second
//! moment that decays by 0.1 % a step would never move. A second moment that is not zero keeps at least code 1.

use burn_backend::tensor::{FloatTensor, IntTensor};
use burn_backend::{Backend, DType, IntDType, Shape, TensorMetadata};
use burn_tensor::{Int, Tensor, TensorData};

use super::prim::{primitive, tensor};
use crate::backend::MoeBackend;
use crate::backend::{AdamW8Prim, AdamWPrim, Block8Prim};
use crate::desc::AdamWDesc;
use crate::ops::{Rounded, rounding_noise};

/// Elements that share a scale.
pub const BLOCK: usize = 256;
/// Codes of a factor of two.
const STEPS: f64 = 8.0;

fn top(signed: bool) -> f64 {
    if signed { 127.0 } else { 255.0 }
}

/// `2^((code - top) / 8)`, 0 for code 0.
fn magnitude<B: Backend>(code: Tensor<B, 2>, signed: bool) -> Tensor<B, 2> {
    let zero = code.clone().equal_elem(0.0);
    ((code - top(signed)) * (core::f64::consts::LN_2 / STEPS))
        .exp()
        .mask_fill(zero, 0.0)
}

/// `[n]` values to `[blocks, 256]`, zeros at the end.
fn in_blocks<B: Backend>(values: Tensor<B, 1>) -> Tensor<B, 2> {
    let n = values.dims()[0];
    let blocks = n.div_ceil(BLOCK);
    let padded = match blocks * BLOCK - n {
        0 => values,
        missing => {
            let zeros = Tensor::zeros([missing], (&values.device(), values.dtype()));
            Tensor::cat(vec![values, zeros], 0)
        }
    };
    padded.reshape([blocks, BLOCK])
}

/// Codes and scales of `values` (any shape, read as fp32): at random by a seed, for second moments other numbers than for first
/// ones, or without a seed to the nearest code.
pub fn encode<B: Backend>(values: FloatTensor<B>, signed: bool, seed: Option<u32>) -> Block8Prim<B> {
    let n = values.shape().num_elements();
    let x = in_blocks(tensor::<B, 1>(B::float_reshape(values, Shape::new([n]))).cast(DType::F32));
    let size = x.clone().abs();
    let scale = size.clone().max_dim(1);
    let empty = scale.clone().equal_elem(0.0);
    let r = size / scale.clone().mask_fill(empty, 1.0);
    let zero = r.clone().equal_elem(0.0);
    let place = r.clone().log() * (STEPS / core::f64::consts::LN_2) + top(signed);
    let low = place.floor().mask_fill(zero.clone(), 0.0).clamp(0.0, top(signed));
    let high = (low.clone() + 1.0).clamp_max(top(signed));
    let (below, above) = (magnitude(low.clone(), signed), magnitude(high, signed));
    let gap = above - below.clone();
    let full = gap.clone().lower_equal_elem(0.0);
    let share = ((r - below) / gap.mask_fill(full.clone(), 1.0)).mask_fill(full, 0.0);
    let threshold = match seed {
        Some(seed) => {
            let tensor = if signed { Rounded::M } else { Rounded::V };
            let uniform = |index| (rounding_noise(seed, tensor, index) >> 8) as f32 / (1 << 24) as f32;
            let [blocks, _] = share.dims();
            let uniform: Vec<f32> = (0..blocks * BLOCK).map(uniform).collect();
            Tensor::from_data(TensorData::new(uniform, [blocks, BLOCK]), (&share.device(), DType::F32))
        }
        None => share.zeros_like() + 0.5,
    };
    let mut code = low + threshold.lower(share).float();
    if signed {
        let negative = x.lower_elem(0.0).float() * code.clone().greater_elem(0.0).float();
        code = code + negative * 128.0;
    } else {
        code = code.clamp_min(1.0).mask_fill(zero, 0.0);
    }
    let codes = code.reshape([-1]).slice(0..n);
    Block8Prim {
        codes: B::float_into_int(primitive(codes), IntDType::U8),
        scales: primitive::<B, 1>(scale.squeeze_dim(1)),
    }
}

/// fp32 values of codes, in `shape`.
pub fn decode<B: Backend>(block: Block8Prim<B>, signed: bool, shape: Shape) -> FloatTensor<B> {
    let n = shape.num_elements();
    let codes: IntTensor<B> = block.codes;
    let codes = Tensor::<B, 1, Int>::from_primitive(codes).float().cast(DType::F32);
    let codes = in_blocks(codes);
    let scale = tensor::<B, 1>(block.scales).unsqueeze_dim::<2>(1);
    let values = match signed {
        true => {
            let negative = codes.clone().greater_equal_elem(128.0).float().cast(DType::F32);
            let size = magnitude(codes - negative.clone() * 128.0, true);
            size * (negative * -2.0 + 1.0)
        }
        false => magnitude(codes, false),
    };
    let flat = (values * scale).reshape([-1]).slice(0..n);
    B::float_reshape(primitive::<B, 1>(flat), shape)
}

/// See [`MoeBackend::adamw8_step`].
pub fn adamw8_step<B: MoeBackend>(
    state: AdamW8Prim<B>,
    grad: FloatTensor<B>,
    grad_scale: Option<FloatTensor<B>>,
    desc: &AdamWDesc,
) -> AdamW8Prim<B> {
    let shape = grad.shape();
    let seed = Some(desc.stochastic_rounding.unwrap_or(desc.step as u32));
    let plain = AdamWPrim {
        param: state.param,
        m: decode::<B>(state.m, true, shape.clone()),
        v: decode::<B>(state.v, false, shape),
        master: state.master,
    };
    // The backend's own, whose random numbers are a function of seed and element.
    let AdamWPrim { param, m, v, master } = B::adamw_step(plain, grad, grad_scale, desc);
    AdamW8Prim {
        param,
        m: encode::<B>(m, true, seed),
        v: encode::<B>(v, false, seed),
        master,
    }
}

#[cfg(test)]
mod tests {
    use burn_flex::Flex;

    use super::*;
    use crate::testing::*;

    fn read(primitive: FloatTensor<Flex>) -> Vec<f64> {
        f64s(super::tensor::<Flex, 1>(primitive))
    }

    fn flat(values: &[f64]) -> FloatTensor<Flex> {
        super::primitive(crate::testing::tensor::<Flex, 1>(values, [values.len()], DType::F32))
    }

    #[test]
    fn values_come_back_within_half_a_code_and_codes_exactly() {
        // Two blocks and a part of one, over twelve orders of magnitude.
        let signed: Vec<f64> = (0..600).map(|i| (f64::from(i) * 0.7).sin() * 10f64.powi(-(i % 4))).collect();
        let positive: Vec<f64> = (0..600).map(|i| 10f64.powi(-(i % 9)) * (1.0 + f64::from(i) / 600.0)).collect();
        for (values, is_signed) in [(signed, true), (positive, false)] {
            let block = encode::<Flex>(flat(&values), is_signed, None);
            let found = read(decode::<Flex>(block.clone(), is_signed, Shape::new([600])));
            for (i, (f, v)) in found.iter().zip(&values).enumerate() {
                // Half the gap of 2^(1/8), and what lies below the last code of its block.
                let smallest = 2f64.powi(-15) * if is_signed { 1.0 } else { 2f64.powi(-15) };
                assert!((f - v).abs() <= 0.046 * v.abs() + smallest, "{i}: {f} for {v}");
            }
            let again = encode::<Flex>(flat(&found), is_signed, None);
            assert_eq!(read(decode::<Flex>(again, is_signed, Shape::new([600]))), found);
        }
    }

    #[test]
    fn zeros_stay_zero_and_small_second_moments_do_not_become_zero() {
        let values = [0.0, 1.0, 1e-30, 0.0];
        for seed in [None, Some(3)] {
            let found = read(decode::<Flex>(encode::<Flex>(flat(&values), false, seed), false, Shape::new([4])));
            assert_eq!([found[0], found[1], found[3]], [0.0, 1.0, 0.0]);
            assert!(found[2] > 0.0);
            let zeros = encode::<Flex>(flat(&[0.0; 300]), true, seed);
            assert_eq!(read(decode::<Flex>(zeros, true, Shape::new([300]))), [0.0; 300]);
        }
    }

    /// 200 steps on a noisy quadratic: as good as with fp32 moments; and the second moment decays at its rate.
    #[test]
    fn training_follows_fp32_moments() {
        let n = 1000;
        let desc = |step| AdamWDesc {
            lr: 1e-2,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.0,
            step,
            stochastic_rounding: None,
        };
        let target = values(1, n);
        let gradient = |param: &[f64], step: u64| -> Vec<f64> {
            let noise = values(100 + step, n);
            param.iter().zip(&target).zip(noise).map(|((p, t), e)| p - t + 0.1 * e).collect()
        };
        let distance = |param: &[f64]| (param.iter().zip(&target).map(|(p, t)| (p - t).powi(2)).sum::<f64>() / n as f64).sqrt();
        let zeros = || flat(&vec![0.0; n]);
        let mut plain = AdamWPrim::<Flex> {
            param: zeros(),
            m: zeros(),
            v: zeros(),
            master: None,
        };
        let mut small = AdamW8Prim::<Flex> {
            param: zeros(),
            m: encode::<Flex>(zeros(), true, None),
            v: encode::<Flex>(zeros(), false, None),
            master: None,
        };
        for step in 1..=200 {
            let grad = gradient(&read(plain.param.clone()), step);
            plain = Flex::adamw_step(plain, flat(&grad), None, &desc(step));
            let grad = gradient(&read(small.param.clone()), step);
            small = adamw8_step::<Flex>(small, flat(&grad), None, &desc(step));
        }
        let (plain, eight) = (distance(&read(plain.param)), distance(&read(small.param.clone())));
        assert!(plain < 0.1 && eight < 1.3 * plain, "fp32 {plain}, 8 bits {eight}");

        let before: f64 = read(decode::<Flex>(small.v.clone(), false, Shape::new([n]))).iter().sum();
        for step in 201..=300 {
            small = adamw8_step::<Flex>(small, zeros(), None, &desc(step));
        }
        let after: f64 = read(decode::<Flex>(small.v, false, Shape::new([n]))).iter().sum();
        let decay = after / before / 0.999f64.powi(100);
        assert!((decay - 1.0).abs() < 0.02, "{decay}");
    }
}

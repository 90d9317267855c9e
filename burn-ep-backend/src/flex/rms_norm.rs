//! RMSNorm on the CPU: one pass over each row in fp32.

use burn_backend::DType;
use burn_flex::{Flex, FlexTensor};
use rayon::prelude::*;

use super::lanes::dot;
use super::numeric::float_tensor;
use super::slice::{any_f64, f32s, rounded, sum_over_rows};
use crate::desc::{NormDesc, NormRounding};
use crate::reference;

pub(crate) fn rms_norm(x: FlexTensor, weight_d: FlexTensor, desc: &NormDesc) -> FlexTensor {
    if any_f64([&x, &weight_d]) {
        return reference::rms_norm::rms_norm::<Flex>(x, weight_d, desc);
    }
    let (x_rd, w_d) = (f32s(&x), f32s(&weight_d));
    let width = w_d.len();
    let y_dtype = y_dtype(x.dtype(), desc);
    let mut out_rd = vec![0.0; x_rd.len()];
    out_rd
        .par_chunks_mut(width)
        .zip(x_rd.par_chunks(width))
        .with_min_len(16)
        .for_each(|(out_d, x_d)| normalise(x_d, &w_d, out_d, y_dtype, desc.eps));
    float_tensor(out_rd, x.layout().shape().clone(), x.dtype())
}

pub(crate) fn add_rms_norm(x: FlexTensor, residual: FlexTensor, weight_d: FlexTensor, desc: &NormDesc) -> (FlexTensor, FlexTensor) {
    if any_f64([&x, &residual, &weight_d]) {
        return reference::rms_norm::add_rms_norm::<Flex>(x, residual, weight_d, desc);
    }
    let (x_rd, residual_rd, w_d) = (f32s(&x), f32s(&residual), f32s(&weight_d));
    let (width, dtype) = (w_d.len(), x.dtype());
    let y_dtype = y_dtype(dtype, desc);
    let (mut sum_rd, mut out_rd) = (vec![0.0; x_rd.len()], vec![0.0; x_rd.len()]);
    sum_rd
        .par_chunks_mut(width)
        .zip(out_rd.par_chunks_mut(width))
        .zip(x_rd.par_chunks(width).zip(residual_rd.par_chunks(width)))
        .with_min_len(16)
        .for_each(|((sum_d, out_d), (x_d, residual_d))| {
            for ((sum, x), residual) in sum_d.iter_mut().zip(x_d).zip(residual_d) {
                *sum = rounded(x + residual, dtype);
            }
            normalise(sum_d, &w_d, out_d, y_dtype, desc.eps);
        });
    let shape = x.layout().shape();
    (
        float_tensor(sum_rd, shape.clone(), dtype),
        float_tensor(out_rd, shape.clone(), dtype),
    )
}

/// Dtype of `x / rms` before it meets the weight.
fn y_dtype(x: DType, desc: &NormDesc) -> DType {
    match desc.rounding {
        NormRounding::Llama => x,
        NormRounding::Fp32Product => DType::F32,
    }
}

fn normalise(x_d: &[f32], w_d: &[f32], out_d: &mut [f32], y_dtype: DType, eps: f32) {
    let inverse = inverse_rms(x_d, eps);
    for ((out, &x), &w) in out_d.iter_mut().zip(x_d).zip(w_d) {
        *out = rounded(x * inverse, y_dtype) * w;
    }
}

/// Gradients (x, weight); `grad_x` is added to that of x.
pub(crate) fn backward(
    grad: FlexTensor,
    grad_x: Option<FlexTensor>,
    x: FlexTensor,
    weight_d: FlexTensor,
    desc: &NormDesc,
) -> (FlexTensor, FlexTensor) {
    if any_f64([&grad, &x, &weight_d].into_iter().chain(&grad_x)) {
        return match grad_x {
            Some(grad_x) => reference::rms_norm::add_rms_norm_backward::<Flex>(grad, grad_x, x, weight_d, desc),
            None => reference::rms_norm::rms_norm_backward::<Flex>(grad, x, weight_d, desc),
        };
    }
    let (grad_rd, x_rd, w_d) = (f32s(&grad), f32s(&x), f32s(&weight_d));
    let width = w_d.len();
    // Starts from what else flows into x.
    let mut dx_rd = grad_x
        .as_ref()
        .map_or_else(|| vec![0.0; x_rd.len()], |grad_x| f32s(grad_x).into_owned());
    dx_rd
        .par_chunks_mut(width)
        .zip(x_rd.par_chunks(width).zip(grad_rd.par_chunks(width)))
        .with_min_len(16)
        .for_each(|(dx_d, (x_d, grad_d))| {
            let inverse = inverse_rms(x_d, desc.eps);
            let products: f32 = x_d.iter().zip(grad_d).zip(&*w_d).map(|((x, g), w)| x * g * w).sum();
            let pull = products / width as f32 * inverse * inverse;
            for (((dx, &x), &g), &w) in dx_d.iter_mut().zip(x_d).zip(grad_d).zip(&*w_d) {
                *dx += (g * w - x * pull) * inverse;
            }
        });
    let dweight_d = sum_over_rows(x_rd.len() / width, width, |rows, sum_d| {
        for row in rows {
            let x_d = &x_rd[row * width..(row + 1) * width];
            let grad_d = &grad_rd[row * width..(row + 1) * width];
            let inverse = inverse_rms(x_d, desc.eps);
            for ((sum, &x), &g) in sum_d.iter_mut().zip(x_d).zip(grad_d) {
                *sum += g * x * inverse;
            }
        }
    });
    (
        float_tensor(dx_rd, x.layout().shape().clone(), x.dtype()),
        float_tensor(dweight_d, [width], weight_d.dtype()),
    )
}

fn inverse_rms(x_d: &[f32], eps: f32) -> f32 {
    1.0 / (dot(x_d, x_d) / x_d.len() as f32 + eps).sqrt()
}

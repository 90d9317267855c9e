//! Gated group RMSNorm on the CPU.

use burn_flex::{Flex, FlexTensor};
use rayon::prelude::*;

use super::lanes::{dot, sigmoid, silu};
use super::numeric::float_tensor;
use super::slice::{any_f64, f32s, rounded, sum_over_rows};
use crate::reference;

pub(crate) fn gated_rms_norm(y: FlexTensor, z: FlexTensor, weight_d: FlexTensor, groups: usize, eps: f32) -> FlexTensor {
    let dtype = y.dtype();
    if any_f64([&y, &z, &weight_d]) {
        return reference::gated_rms_norm::gated_rms_norm::<Flex>(y, z, weight_d, groups, eps);
    }
    let (y_rd, z_rd, w_d) = (f32s(&y), f32s(&z), f32s(&weight_d));
    let part = w_d.len() / groups;
    let mut out_rd = vec![0.0; y_rd.len()];
    out_rd
        .par_chunks_mut(part)
        .zip(y_rd.par_chunks(part).zip(z_rd.par_chunks(part)))
        .enumerate()
        .with_min_len(16)
        .for_each(|(index, (out_d, (y_d, z_d)))| {
            for ((out, &y), &z) in out_d.iter_mut().zip(y_d).zip(z_d) {
                *out = y * silu(z);
            }
            let inverse = inverse_rms(out_d, eps);
            for (out, &w) in out_d.iter_mut().zip(group_of(&w_d, index, part)) {
                *out = rounded(*out * inverse, dtype) * w;
            }
        });
    float_tensor(out_rd, y.layout().shape().clone(), dtype)
}

pub(crate) fn gated_rms_norm_backward(
    grad: FlexTensor,
    y: FlexTensor,
    z: FlexTensor,
    weight_d: FlexTensor,
    groups: usize,
    eps: f32,
) -> (FlexTensor, FlexTensor, FlexTensor) {
    if any_f64([&grad, &y, &z, &weight_d]) {
        return reference::gated_rms_norm::gated_rms_norm_backward::<Flex>(grad, y, z, weight_d, groups, eps);
    }
    let (grad_rd, y_rd, z_rd, w_d) = (f32s(&grad), f32s(&y), f32s(&z), f32s(&weight_d));
    let width = w_d.len();
    let part = width / groups;
    let (mut dy_rd, mut dz_rd) = (vec![0.0; y_rd.len()], vec![0.0; y_rd.len()]);
    dy_rd
        .par_chunks_mut(part)
        .zip(dz_rd.par_chunks_mut(part))
        .enumerate()
        .with_min_len(16)
        .for_each(|(index, (dy_d, dz_d))| {
            let at = index * part..(index + 1) * part;
            let (y_d, z_d, grad_d) = (&y_rd[at.clone()], &z_rd[at.clone()], &grad_rd[at]);
            let w_d = group_of(&w_d, index, part);
            for ((v, &y), &z) in dy_d.iter_mut().zip(y_d).zip(z_d) {
                *v = y * silu(z);
            }
            let inverse = inverse_rms(dy_d, eps);
            let products: f32 = dy_d.iter().zip(grad_d).zip(w_d).map(|((v, g), w)| v * g * w).sum();
            let pull = products / part as f32 * inverse * inverse;
            for i in 0..part {
                let dv = (grad_d[i] * w_d[i] - dy_d[i] * pull) * inverse;
                let sigma = sigmoid(z_d[i]);
                dy_d[i] = dv * z_d[i] * sigma;
                dz_d[i] = dv * y_d[i] * sigma * (1.0 + z_d[i] * (1.0 - sigma));
            }
        });
    let dweight_d = sum_over_rows(y_rd.len() / width, width, |rows, sum_d| {
        let mut v_d = vec![0.0; part];
        for row in rows {
            for (group, sum_d) in sum_d.chunks_exact_mut(part).enumerate() {
                let at = row * width + group * part..row * width + (group + 1) * part;
                for ((v, &y), &z) in v_d.iter_mut().zip(&y_rd[at.clone()]).zip(&z_rd[at.clone()]) {
                    *v = y * silu(z);
                }
                let inverse = inverse_rms(&v_d, eps);
                for ((sum, &v), &g) in sum_d.iter_mut().zip(&v_d).zip(&grad_rd[at]) {
                    *sum += g * v * inverse;
                }
            }
        }
    });
    let shape = y.layout().shape().clone();
    (
        float_tensor(dy_rd, shape.clone(), y.dtype()),
        float_tensor(dz_rd, shape, z.dtype()),
        float_tensor(dweight_d, [width], weight_d.dtype()),
    )
}

/// Weights of the group that chunk `index` of the flat `[R, G, D / G]` tensor belongs to.
fn group_of(w_d: &[f32], index: usize, part: usize) -> &[f32] {
    let first = index * part % w_d.len();
    &w_d[first..first + part]
}

fn inverse_rms(v_d: &[f32], eps: f32) -> f32 {
    1.0 / (dot(v_d, v_d) / v_d.len() as f32 + eps).sqrt()
}

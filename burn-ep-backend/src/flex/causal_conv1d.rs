//! Depthwise causal convolution on the CPU: channels innermost, taps outermost, rows in parallel.

use burn_flex::{Flex, FlexTensor};
use rayon::prelude::*;

use super::lanes::{sigmoid, silu as silu_of};
use super::numeric::float_tensor;
use super::slice::{any_f64, f32s, ints, rounded, sum_over_rows};
use crate::reference;

/// Sizes and visibility of taps.
struct Window {
    seq: usize,
    channels: usize,
    kernel: usize,
    /// `[B, S]`; empty when documents are not packed.
    doc_start_bs: Vec<i64>,
}

impl Window {
    /// Whether row `token` (flat over batch and sequence) sees the row `lag` before it.
    fn sees(&self, token: usize, lag: usize) -> bool {
        match self.doc_start_bs.get(token) {
            Some(&start) => (token % self.seq).saturating_sub(lag) as i64 >= start,
            None => true,
        }
    }
}

pub(crate) fn causal_conv1d(
    x_bsc: FlexTensor,
    weight_ck: FlexTensor,
    bias_c: Option<FlexTensor>,
    history: Option<FlexTensor>,
    doc_start_bs: Option<FlexTensor>,
    silu: bool,
) -> FlexTensor {
    let dtype = x_bsc.dtype();
    if any_f64([&x_bsc, &weight_ck].into_iter().chain(&bias_c).chain(&history)) {
        return reference::causal_conv1d::causal_conv1d::<Flex>(x_bsc, weight_ck, bias_c, history, doc_start_bs, silu);
    }
    let shape = x_bsc.layout().shape().clone();
    let window = window(&x_bsc, &weight_ck, doc_start_bs.as_ref());
    let weight_kc = taps_first(&f32s(&weight_ck), &window);
    let bias_c = bias_c.as_ref().map(f32s);
    let history = history.as_ref().map(f32s);
    let mut out_bsc = pre_activation(&f32s(&x_bsc), &weight_kc, bias_c.as_deref(), history.as_deref(), &window);
    out_bsc.par_chunks_mut(window.channels.max(1)).with_min_len(16).for_each(|row| {
        for value in row {
            let pre = rounded(*value, dtype);
            *value = if silu { silu_of(pre) } else { pre };
        }
    });
    float_tensor(out_bsc, shape, dtype)
}

pub(crate) fn causal_conv1d_backward(
    grad_bsc: FlexTensor,
    x_bsc: FlexTensor,
    weight_ck: FlexTensor,
    bias_c: Option<FlexTensor>,
    doc_start_bs: Option<FlexTensor>,
    silu: bool,
) -> (FlexTensor, FlexTensor, Option<FlexTensor>) {
    let dtype = x_bsc.dtype();
    if any_f64([&grad_bsc, &x_bsc, &weight_ck].into_iter().chain(&bias_c)) {
        return reference::causal_conv1d::causal_conv1d_backward::<Flex>(grad_bsc, x_bsc, weight_ck, bias_c, doc_start_bs, silu);
    }
    let window = window(&x_bsc, &weight_ck, doc_start_bs.as_ref());
    let (seq, channels, kernel) = (window.seq, window.channels, window.kernel);
    let weight_kc = taps_first(&f32s(&weight_ck), &window);
    let x32_bsc = f32s(&x_bsc);
    let mut g_bsc = f32s(&grad_bsc).into_owned();
    if silu {
        let bias = bias_c.as_ref().map(f32s);
        let pre_bsc = pre_activation(&x32_bsc, &weight_kc, bias.as_deref(), None, &window);
        g_bsc.par_iter_mut().zip(&pre_bsc).with_min_len(4096).for_each(|(g, &pre)| {
            let pre = rounded(pre, dtype);
            let sigma = sigmoid(pre);
            *g *= sigma * (1.0 + pre * (1.0 - sigma));
        });
    }

    let mut dx_bsc = vec![0.0; x32_bsc.len()];
    dx_bsc
        .par_chunks_mut(channels.max(1))
        .enumerate()
        .with_min_len(16)
        .for_each(|(token, dx_c)| {
            let last_lag = (kernel - 1).min(seq - 1 - token % seq);
            for lag in 0..=last_lag {
                let reader = token + lag;
                if window.sees(reader, lag) {
                    let w_c = &weight_kc[(kernel - 1 - lag) * channels..(kernel - lag) * channels];
                    let g_c = &g_bsc[reader * channels..(reader + 1) * channels];
                    for ((dx, &w), &g) in dx_c.iter_mut().zip(w_c).zip(g_c) {
                        *dx += w * g;
                    }
                }
            }
        });

    // Taps, then the bias as one more row.
    let tokens = x32_bsc.len() / channels.max(1);
    let sums_kc = sum_over_rows(tokens, (kernel + 1) * channels, |rows, sum_kc| {
        for token in rows {
            let g_c = &g_bsc[token * channels..(token + 1) * channels];
            for lag in 0..=(kernel - 1).min(token % seq) {
                if window.sees(token, lag) {
                    let x_c = &x32_bsc[(token - lag) * channels..(token - lag + 1) * channels];
                    let sum_c = &mut sum_kc[(kernel - 1 - lag) * channels..(kernel - lag) * channels];
                    for ((sum, &g), &x) in sum_c.iter_mut().zip(g_c).zip(x_c) {
                        *sum += g * x;
                    }
                }
            }
            for (sum, &g) in sum_kc[kernel * channels..].iter_mut().zip(g_c) {
                *sum += g;
            }
        }
    });
    let (dweight_kc, dbias_c) = sums_kc.split_at(kernel * channels);
    let dweight_ck = (0..channels * kernel)
        .map(|i| dweight_kc[i % kernel * channels + i / kernel])
        .collect();
    (
        float_tensor(dx_bsc, x_bsc.layout().shape().clone(), dtype),
        float_tensor(dweight_ck, [channels, kernel], weight_ck.dtype()),
        bias_c.map(|bias| float_tensor(dbias_c.to_vec(), [channels], bias.dtype())),
    )
}

fn window(x_bsc: &FlexTensor, weight_ck: &FlexTensor, doc_start_bs: Option<&FlexTensor>) -> Window {
    let (x_shape, weight_shape) = (x_bsc.layout().shape(), weight_ck.layout().shape());
    Window {
        seq: x_shape[1],
        channels: x_shape[2],
        kernel: weight_shape[1],
        doc_start_bs: doc_start_bs.map_or(Vec::new(), ints),
    }
}

/// `[C, Kw]` to `[Kw, C]`, so that the inner loop runs over adjacent channels.
fn taps_first(weight_ck: &[f32], window: &Window) -> Vec<f32> {
    let (kernel, channels) = (window.kernel, window.channels);
    (0..weight_ck.len())
        .map(|i| weight_ck[i % channels * kernel + i / channels])
        .collect()
}

fn pre_activation(x_bsc: &[f32], weight_kc: &[f32], bias_c: Option<&[f32]>, history: Option<&[f32]>, window: &Window) -> Vec<f32> {
    let (seq, channels, kernel) = (window.seq, window.channels, window.kernel);
    let mut out_bsc = vec![0.0; x_bsc.len()];
    out_bsc
        .par_chunks_mut(channels.max(1))
        .enumerate()
        .with_min_len(16)
        .for_each(|(token, out_c)| {
            if let Some(bias_c) = bias_c {
                out_c.copy_from_slice(bias_c);
            }
            let (batch, row) = (token / seq, token % seq);
            for lag in (0..kernel).rev().filter(|&lag| window.sees(token, lag)) {
                let source_c = if lag <= row {
                    &x_bsc[(token - lag) * channels..(token - lag + 1) * channels]
                } else if let Some(history) = history {
                    // Row -1 is the last of the Kw - 1 rows.
                    let at = batch * (kernel - 1) + kernel - 1 + row - lag;
                    &history[at * channels..(at + 1) * channels]
                } else {
                    continue;
                };
                let w_c = &weight_kc[(kernel - 1 - lag) * channels..(kernel - lag) * channels];
                for ((out, &w), &x) in out_c.iter_mut().zip(w_c).zip(source_c) {
                    *out += w * x;
                }
            }
        });
    out_bsc
}

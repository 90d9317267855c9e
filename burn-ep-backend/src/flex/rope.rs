//! Rotary embedding on the CPU.

use burn_flex::{Flex, FlexTensor};
use rayon::prelude::*;

use super::numeric::float_tensor;
use super::slice::{any_f64, f32s};
use crate::desc::RopeLayout;
use crate::reference;

pub(crate) fn rope(x_bshd: FlexTensor, cos: FlexTensor, sin: FlexTensor, layout: RopeLayout) -> FlexTensor {
    if any_f64([&x_bshd, &cos, &sin]) {
        return reference::rope::rope::<Flex>(x_bshd, cos, sin, layout);
    }
    let shape = x_bshd.layout().shape().clone();
    let (seq, heads, width) = (shape[1], shape[2], shape[3]);
    let angle_shape = cos.layout().shape();
    let (angle_rows, half) = (angle_shape[0] * angle_shape[1], angle_shape[2]);
    let (cos_sr, sin_sr) = (f32s(&cos), f32s(&sin));
    let mut out_bshd = f32s(&x_bshd).into_owned();
    if out_bshd.is_empty() {
        return float_tensor(out_bshd, shape, x_bshd.dtype());
    }
    out_bshd
        .par_chunks_mut(heads * width)
        .with_min_len(8)
        .enumerate()
        .for_each(|(token, x_hd)| {
            // One table for all batch rows, or one per row.
            let row = if angle_rows == seq { token % seq } else { token };
            let (cos_r, sin_r) = (&cos_sr[row * half..(row + 1) * half], &sin_sr[row * half..(row + 1) * half]);
            for x_d in x_hd.chunks_exact_mut(width) {
                match layout {
                    RopeLayout::HalfSplit => {
                        let (first, rest) = x_d.split_at_mut(half);
                        for (((a, b), &c), &s) in first.iter_mut().zip(rest).zip(cos_r).zip(sin_r) {
                            (*a, *b) = (*a * c - *b * s, *b * c + *a * s);
                        }
                    }
                    RopeLayout::Interleaved => {
                        for ((pair, &c), &s) in x_d.chunks_exact_mut(2).zip(cos_r).zip(sin_r) {
                            (pair[0], pair[1]) = (pair[0] * c - pair[1] * s, pair[1] * c + pair[0] * s);
                        }
                    }
                }
            }
        });
    float_tensor(out_bshd, shape, x_bshd.dtype())
}

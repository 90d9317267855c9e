//! Tensors as flat row-major slices, and sums over rows whose order does not depend on the thread count.

use std::borrow::Cow;
use std::ops::Range;

use burn_backend::{DType, Element};
use burn_flex::FlexTensor;
use burn_std::{bf16, f16};
use half::slice::HalfFloatSliceExt;
use rayon::prelude::*;

/// Elements per conversion task: large enough to hide the scheduling, small enough to spread over cores.
const CONVERT_BLOCK: usize = 1 << 16;
/// Rows per partial sum of [`sum_over_rows`].
const SUM_ROWS: usize = 128;

/// The elements in row-major order as f32, borrowed when they are stored that way.
///
/// # Panics
/// On f64 and non-float tensors: kernels leave f64 to the reference.
pub(crate) fn f32s(tensor: &FlexTensor) -> Cow<'_, [f32]> {
    match tensor.dtype() {
        DType::F32 => match tensor.as_slice::<f32>() {
            Some(slice) => Cow::Borrowed(slice),
            None => Cow::Owned(dense::<f32>(tensor)),
        },
        DType::BF16 => Cow::Owned(widen::<bf16>(tensor, |from, to| from.convert_to_f32_slice(to))),
        DType::F16 => Cow::Owned(widen::<f16>(tensor, |from, to| from.convert_to_f32_slice(to))),
        other => panic!("CPU kernels take f32, bf16 or f16, not {other:?}"),
    }
}

/// Whether a kernel must leave the call to the reference: kernels compute in f32.
pub(crate) fn any_f64<'a>(tensors: impl IntoIterator<Item = &'a FlexTensor>) -> bool {
    tensors.into_iter().any(|tensor| tensor.dtype() == DType::F64)
}

/// The elements of an int tensor in row-major order.
pub(crate) fn ints(tensor: &FlexTensor) -> Vec<i64> {
    match tensor.dtype() {
        DType::I64 => dense::<i64>(tensor),
        DType::I32 => dense::<i32>(tensor).into_iter().map(i64::from).collect(),
        DType::I16 => dense::<i16>(tensor).into_iter().map(i64::from).collect(),
        DType::I8 => dense::<i8>(tensor).into_iter().map(i64::from).collect(),
        DType::U32 => dense::<u32>(tensor).into_iter().map(i64::from).collect(),
        DType::U16 => dense::<u16>(tensor).into_iter().map(i64::from).collect(),
        DType::U8 => dense::<u8>(tensor).into_iter().map(i64::from).collect(),
        other => panic!("expected an int tensor, found {other:?}"),
    }
}

/// The elements of a bool tensor in row-major order.
pub(crate) fn bools(tensor: &FlexTensor) -> Vec<bool> {
    let dense = tensor.to_contiguous();
    dense.storage::<u8>().iter().map(|&v| v != 0).collect()
}

/// `value` rounded to `dtype` and widened again.
#[inline]
pub(crate) fn rounded(value: f32, dtype: DType) -> f32 {
    match dtype {
        DType::BF16 => bf16::from_f32(value).to_f32(),
        DType::F16 => f16::from_f32(value).to_f32(),
        _ => value,
    }
}

/// Sum of `add(rows, partial)` over fixed blocks of rows, added in block order: the same bits on any number of threads.
pub(crate) fn sum_over_rows(rows: usize, width: usize, add: impl Fn(Range<usize>, &mut [f32]) + Sync) -> Vec<f32> {
    let partials: Vec<Vec<f32>> = (0..rows.div_ceil(SUM_ROWS))
        .into_par_iter()
        .map(|block| {
            let mut partial = vec![0.0; width];
            let first = block * SUM_ROWS;
            add(first..(first + SUM_ROWS).min(rows), &mut partial);
            partial
        })
        .collect();
    let mut total = vec![0.0; width];
    for partial in partials {
        for (sum, value) in total.iter_mut().zip(partial) {
            *sum += value;
        }
    }
    total
}

/// `[B*H][S*D]` buffers of single heads to `[B, S, H, D]`.
pub(crate) fn interleave_heads(heads: &[Vec<f32>], batch: usize, seq: usize, width: usize) -> Vec<f32> {
    let per_row = heads.len().checked_div(batch).unwrap_or(0);
    let mut out = vec![0.0; heads.len() * seq * width];
    if out.is_empty() {
        return out;
    }
    out.par_chunks_mut(per_row * width).enumerate().for_each(|(row, out_hd)| {
        let (b, s) = (row / seq, row % seq);
        for (h, out_d) in out_hd.chunks_exact_mut(width).enumerate() {
            out_d.copy_from_slice(&heads[b * per_row + h][s * width..(s + 1) * width]);
        }
    });
    out
}

fn dense<E: Element + bytemuck::Pod>(tensor: &FlexTensor) -> Vec<E> {
    match tensor.as_slice::<E>() {
        Some(slice) => slice.to_vec(),
        None => tensor.to_contiguous().storage::<E>().to_vec(),
    }
}

fn widen<E: Element + bytemuck::Pod + Sync>(tensor: &FlexTensor, convert: impl Fn(&[E], &mut [f32]) + Sync) -> Vec<f32> {
    let copy;
    let from = match tensor.as_slice::<E>() {
        Some(slice) => slice,
        None => {
            copy = tensor.to_contiguous();
            copy.storage::<E>()
        }
    };
    let mut to = vec![0.0; from.len()];
    to.par_chunks_mut(CONVERT_BLOCK)
        .zip(from.par_chunks(CONVERT_BLOCK))
        .for_each(|(to, from)| convert(from, to));
    to
}

#[cfg(test)]
mod tests {
    use super::super::numeric::float_tensor;
    use super::*;

    #[test]
    fn sums_do_not_depend_on_thread_count() {
        let values: Vec<f32> = (0..1000).map(|i| (i as f32 * 0.37).sin() * 1e3).collect();
        let add = |rows: Range<usize>, sum: &mut [f32]| rows.for_each(|r| sum[0] += values[r]);
        let sum_on = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("thread pool");
            pool.install(|| sum_over_rows(1000, 1, add)[0])
        };
        assert_eq!(sum_on(1).to_bits(), sum_on(3).to_bits());
        let expected: f64 = values.iter().map(|&v| f64::from(v)).sum();
        assert!((f64::from(sum_on(2)) - expected).abs() < 0.05);
    }

    #[test]
    fn reads_views_in_logical_order() {
        let tensor = float_tensor((0..6).map(|i| i as f32).collect(), [2, 3], DType::BF16);
        assert_eq!(*f32s(&tensor.transpose(0, 1)), [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]);
        assert_eq!(*f32s(&tensor.narrow(0, 1, 1)), [3.0, 4.0, 5.0]);
    }

    #[test]
    fn rounds_to_nearest_even() {
        // 1 + 2^-8 lies halfway between two bf16 values; the even one is 1.
        let halfway = 1.0 + 2.0_f32.powi(-8);
        assert_eq!(rounded(halfway, DType::BF16), 1.0);
        assert_eq!(rounded(1.0 + 3.0 * 2.0_f32.powi(-8), DType::BF16), 1.0 + 2.0_f32.powi(-6));
        assert_eq!(rounded(halfway, DType::F32), halfway);
    }
}

//! Depthwise causal convolution: a unit walks along the sequence with the taps of its channels in registers.

use burn_backend::{Backend, DType, Slice, TensorMetadata, tensor::IntTensor};
use cubecl::prelude::*;

use super::super::raw::{CudaTensor, dense, empty, multiprocessors};
use super::reduce::sigmoid;
use super::{THREADS_PER_PROCESSOR, fits};

const UNITS: u32 = 128;
/// Taps that fit in registers.
const MAX_TAPS: usize = 8;
/// Tokens that a unit walks over at least; the taps before them are read twice.
const MIN_RUN: usize = 32;

/// Weights of tap `tap` for the channels of vector `column`.
#[cube]
fn tap_weights<W: Float, N: Size>(weight: &Tensor<W>, column: usize, tap: usize, #[comptime] taps: usize) -> Vector<f32, N> {
    let mut weights = Vector::<f32, N>::empty();
    #[unroll]
    for i in 0..N::value() {
        weights[i] = f32::cast_from(weight[(column * N::value() + i) * taps + tap]);
    }
    weights
}

/// Row index at which the document of `token` starts; 0 without documents.
#[cube]
fn document_start<I: Int>(doc_start: &Tensor<I>, token: usize, #[comptime] packed: bool) -> i64 {
    if comptime!(packed) {
        i64::cast_from(doc_start[token])
    } else {
        i64::new(0)
    }
}

/// Whether row `t` sees the row `lag` before it: `max(t - lag, 0) >= doc_start`.
#[cube]
fn sees(t: usize, lag: usize, doc_start: i64) -> bool {
    doc_start <= 0 || i64::cast_from(t) >= doc_start + i64::cast_from(lag)
}

#[cube(launch_unchecked, address_type = "u64")]
fn forward_kernel<T: Float, W: Float, V: Float, H: Float, I: Int, N: Size>(
    x: &Tensor<Vector<T, N>>,
    weight: &Tensor<W>,
    bias: &Tensor<Vector<V, N>>,
    history: &Tensor<Vector<H, N>>,
    doc_start: &Tensor<I>,
    out: &mut Tensor<Vector<T, N>>,
    seq: usize,
    vectors: usize,
    blocks: usize,
    runs: usize,
    run: usize,
    #[comptime] taps: usize,
    #[comptime] has_bias: bool,
    #[comptime] has_history: bool,
    #[comptime] packed: bool,
    #[comptime] silu: bool,
    #[define(T, W, V, H, I)] _dtypes: [StorageType; 5],
) {
    let column = CUBE_POS % blocks * CUBE_DIM as usize + UNIT_POS as usize;
    let slab = CUBE_POS / blocks;
    let batch = slab / runs;
    let start = slab % runs * run;
    let before = comptime!(taps - 1);
    if column < vectors {
        let mut weights = Array::<Vector<f32, N>>::new(taps);
        // the row of tap j is `t - before + j`
        let mut window = Array::<Vector<f32, N>>::new(taps);
        #[unroll]
        for j in 0..taps {
            weights[j] = tap_weights::<W, N>(weight, column, j, taps);
        }
        #[unroll]
        for j in 0..before {
            window[j] = Vector::new(0.0);
            if start + j >= before {
                window[j] = Vector::cast_from(x[(batch * seq + start + j - before) * vectors + column]);
            } else if comptime!(has_history) {
                window[j] = Vector::cast_from(history[(batch * before + start + j) * vectors + column]);
            }
        }
        let mut offset = Vector::<f32, N>::new(0.0);
        if comptime!(has_bias) {
            offset = Vector::cast_from(bias[column]);
        }
        let mut end = start + run;
        if end > seq {
            end = seq;
        }
        let mut t = start;
        while t < end {
            let at = (batch * seq + t) * vectors + column;
            let doc = document_start::<I>(doc_start, batch * seq + t, packed);
            window[before] = Vector::cast_from(x[at]);
            let mut sum = offset;
            #[unroll]
            for j in 0..taps {
                if sees(t, before - j, doc) {
                    sum += weights[j] * window[j];
                }
            }
            // rounded before the activation, like a convolution followed by one
            let mut value = Vector::<f32, N>::cast_from(Vector::<T, N>::cast_from(sum));
            if comptime!(silu) {
                value *= sigmoid(value);
            }
            out[at] = Vector::cast_from(value);
            #[unroll]
            for j in 0..before {
                window[j] = window[j + 1];
            }
            t += 1;
        }
    }
}

/// A unit walks `taps - 1` rows past its run, because these rows pull on the last rows of the run. Gradients of weight and
/// bias count the rows of the run only: `[slab, taps (then the bias), C]`.
#[cube(launch_unchecked, address_type = "u64")]
fn backward_kernel<T: Float, W: Float, V: Float, I: Int, N: Size>(
    grad: &Tensor<Vector<T, N>>,
    x: &Tensor<Vector<T, N>>,
    weight: &Tensor<W>,
    bias: &Tensor<Vector<V, N>>,
    doc_start: &Tensor<I>,
    grad_x: &mut Tensor<Vector<T, N>>,
    parts: &mut Tensor<Vector<f32, N>>,
    seq: usize,
    vectors: usize,
    blocks: usize,
    runs: usize,
    run: usize,
    #[comptime] taps: usize,
    #[comptime] has_bias: bool,
    #[comptime] packed: bool,
    #[comptime] silu: bool,
    #[define(T, W, V, I)] _dtypes: [StorageType; 4],
) {
    let column = CUBE_POS % blocks * CUBE_DIM as usize + UNIT_POS as usize;
    let slab = CUBE_POS / blocks;
    let batch = slab / runs;
    let start = slab % runs * run;
    let before = comptime!(taps - 1);
    let one = Vector::<f32, N>::new(1.0);
    if column < vectors {
        let mut weights = Array::<Vector<f32, N>>::new(taps);
        let mut window = Array::<Vector<f32, N>>::new(taps);
        // gradient so far of the row `lag` before t
        let mut pulled = Array::<Vector<f32, N>>::new(taps);
        let mut sums = Array::<Vector<f32, N>>::new(taps);
        #[unroll]
        for j in 0..taps {
            weights[j] = tap_weights::<W, N>(weight, column, j, taps);
            pulled[j] = Vector::new(0.0);
            sums[j] = Vector::new(0.0);
        }
        #[unroll]
        for j in 0..before {
            window[j] = Vector::new(0.0);
            if start + j >= before {
                window[j] = Vector::cast_from(x[(batch * seq + start + j - before) * vectors + column]);
            }
        }
        let mut offset = Vector::<f32, N>::new(0.0);
        if comptime!(has_bias) {
            offset = Vector::cast_from(bias[column]);
        }
        let mut bias_sum = Vector::<f32, N>::new(0.0);
        let mut end = start + run;
        if end > seq {
            end = seq;
        }
        let mut t = start;
        while t < end + before {
            if t < seq {
                let at = (batch * seq + t) * vectors + column;
                let doc = document_start::<I>(doc_start, batch * seq + t, packed);
                let mut g = Vector::<f32, N>::cast_from(grad[at]);
                window[before] = Vector::cast_from(x[at]);
                if comptime!(silu) {
                    let mut sum = offset;
                    #[unroll]
                    for j in 0..taps {
                        if sees(t, before - j, doc) {
                            sum += weights[j] * window[j];
                        }
                    }
                    let value = Vector::<f32, N>::cast_from(Vector::<T, N>::cast_from(sum));
                    let sigma = sigmoid(value);
                    g *= sigma * (one + value * (one - sigma));
                }
                #[unroll]
                for j in 0..taps {
                    if sees(t, before - j, doc) {
                        pulled[before - j] += weights[j] * g;
                        if t < end {
                            sums[j] += g * window[j];
                        }
                    }
                }
                if t < end {
                    bias_sum += g;
                }
                #[unroll]
                for j in 0..before {
                    window[j] = window[j + 1];
                }
            }
            // nothing after t reads the row `before` rows back
            if t >= start + before {
                grad_x[(batch * seq + t - before) * vectors + column] = Vector::cast_from(pulled[before]);
            }
            #[unroll]
            for j in 0..before {
                pulled[before - j] = pulled[before - j - 1];
            }
            pulled[0] = Vector::new(0.0);
            t += 1;
        }
        let part = slab * comptime!(taps + 1);
        #[unroll]
        for j in 0..taps {
            parts[(part + j) * vectors + column] = sums[j];
        }
        parts[(part + taps) * vectors + column] = bias_sum;
    }
}

/// How the `[B, S, C]` elements are dealt: cubes of [`UNITS`] channel vectors by runs of tokens.
struct Layout {
    seq: usize,
    channels: usize,
    taps: usize,
    vector: usize,
    /// Cubes along the channels.
    blocks: usize,
    /// Runs along the sequence, and their length.
    runs: usize,
    run: usize,
    /// Batch rows times runs.
    slabs: usize,
}

impl Layout {
    fn new(x_bsc: &CudaTensor, weight_ck: &CudaTensor) -> Self {
        let ([b, seq, channels], [_, taps]) = (x_bsc.shape().dims::<3>(), weight_ck.shape().dims::<2>());
        let vector = if channels.is_multiple_of(2) { 2 } else { 1 };
        let blocks = (channels / vector).div_ceil(UNITS as usize);
        let resident = (multiprocessors(&x_bsc.client) * (2 * THREADS_PER_PROCESSOR / UNITS)) as usize;
        let run = seq.div_ceil(resident.div_ceil(b * blocks)).max(MIN_RUN);
        let runs = seq.div_ceil(run);
        Self {
            seq,
            channels,
            taps,
            vector,
            blocks,
            runs,
            run,
            slabs: b * runs,
        }
    }

    fn cubes(&self) -> CubeCount {
        CubeCount::Static((self.blocks * self.slabs) as u32, 1, 1)
    }
}

/// Whether the kernels take these tensors.
pub fn supports<'a>(x_bsc: &'a CudaTensor, weight_ck: &'a CudaTensor, others: impl IntoIterator<Item = &'a CudaTensor>) -> bool {
    let [_, taps] = weight_ck.shape().dims::<2>();
    x_bsc.shape().num_elements() > 0
        && taps <= MAX_TAPS
        && fits([x_bsc, weight_ck].into_iter().chain(others))
        && u32::try_from(x_bsc.shape().num_elements() / MIN_RUN).is_ok()
}

/// See [`crate::MoeBackend::causal_conv1d`].
pub fn causal_conv1d<B>(
    x_bsc: CudaTensor,
    weight_ck: CudaTensor,
    bias_c: Option<CudaTensor>,
    history: Option<CudaTensor>,
    doc_start_bs: Option<IntTensor<B>>,
    silu: bool,
) -> CudaTensor
where
    B: Backend<FloatTensorPrimitive = CudaTensor, IntTensorPrimitive = CudaTensor>,
{
    let (x_bsc, weight_ck) = (dense(x_bsc), dense(weight_ck));
    let layout = Layout::new(&x_bsc, &weight_ck);
    let client = x_bsc.client.clone();
    let out = empty(&x_bsc, &x_bsc.shape().iter().copied().collect::<Vec<_>>(), x_bsc.dtype);
    let flags = [bias_c.is_some(), history.is_some(), doc_start_bs.is_some()];
    // absent tensors are bound to one that is there and never read
    let bias_c = bias_c.map_or_else(|| weight_ck.clone(), dense);
    let history = history.map_or_else(|| x_bsc.clone(), dense);
    let (doc_start_bs, doc_dtype) = documents(doc_start_bs, &x_bsc);
    let dtypes = [
        x_bsc.dtype.into(),
        weight_ck.dtype.into(),
        bias_c.dtype.into(),
        history.dtype.into(),
        doc_dtype.into(),
    ];
    // SAFETY: `ops::causal_conv1d` checked the shapes, all tensors are dense and aligned, and the layout covers `[B, S, C]`.
    unsafe {
        forward_kernel::launch_unchecked(
            &client,
            layout.cubes(),
            CubeDim::new_1d(UNITS),
            layout.vector,
            x_bsc.into_tensor_arg(),
            weight_ck.into_tensor_arg(),
            bias_c.into_tensor_arg(),
            history.into_tensor_arg(),
            doc_start_bs.into_tensor_arg(),
            out.clone().into_tensor_arg(),
            layout.seq,
            layout.channels / layout.vector,
            layout.blocks,
            layout.runs,
            layout.run,
            layout.taps,
            flags[0],
            flags[1],
            flags[2],
            silu,
            dtypes,
        );
    }
    out
}

/// See [`crate::MoeBackend::causal_conv1d_backward`]; the gradient has the dtype of `x`.
pub fn causal_conv1d_backward<B>(
    grad_bsc: CudaTensor,
    x_bsc: CudaTensor,
    weight_ck: CudaTensor,
    bias_c: Option<CudaTensor>,
    doc_start_bs: Option<IntTensor<B>>,
    silu: bool,
) -> (CudaTensor, CudaTensor, Option<CudaTensor>)
where
    B: Backend<FloatTensorPrimitive = CudaTensor, IntTensorPrimitive = CudaTensor>,
{
    let (grad_bsc, x_bsc, weight_ck) = (dense(grad_bsc), dense(x_bsc), dense(weight_ck));
    let layout = Layout::new(&x_bsc, &weight_ck);
    let (taps, channels) = (layout.taps, layout.channels);
    let client = x_bsc.client.clone();
    let grad_x = empty(&x_bsc, &x_bsc.shape().iter().copied().collect::<Vec<_>>(), x_bsc.dtype);
    let parts = empty(&x_bsc, &[layout.slabs, taps + 1, channels], DType::F32);
    let (weight_dtype, bias_dtype) = (weight_ck.dtype, bias_c.as_ref().map(|bias| bias.dtype));
    let packed = doc_start_bs.is_some();
    let bias_c = bias_c.map_or_else(|| weight_ck.clone(), dense);
    let (doc_start_bs, doc_dtype) = documents(doc_start_bs, &x_bsc);
    let dtypes = [x_bsc.dtype.into(), weight_ck.dtype.into(), bias_c.dtype.into(), doc_dtype.into()];
    // SAFETY: as in `causal_conv1d`; the parts hold `taps + 1` rows of channels for each slab.
    unsafe {
        backward_kernel::launch_unchecked(
            &client,
            layout.cubes(),
            CubeDim::new_1d(UNITS),
            layout.vector,
            grad_bsc.into_tensor_arg(),
            x_bsc.into_tensor_arg(),
            weight_ck.into_tensor_arg(),
            bias_c.into_tensor_arg(),
            doc_start_bs.into_tensor_arg(),
            grad_x.clone().into_tensor_arg(),
            parts.clone().into_tensor_arg(),
            layout.seq,
            channels / layout.vector,
            layout.blocks,
            layout.runs,
            layout.run,
            taps,
            bias_dtype.is_some(),
            packed,
            silu,
            dtypes,
        );
    }
    let sums_kc = B::float_reshape(B::float_sum_dim(parts, 0), [taps + 1, channels].into());
    let rows = |from: usize, to: usize| B::float_slice(sums_kc.clone(), &[Slice::from(from..to), Slice::full()]);
    let dweight_ck = B::float_cast(B::float_swap_dims(rows(0, taps), 0, 1), weight_dtype.into());
    let dbias_c = bias_dtype.map(|dtype| B::float_cast(B::float_reshape(rows(taps, taps + 1), [channels].into()), dtype.into()));
    (grad_x, dweight_ck, dbias_c)
}

/// The document starts with their type, or `x` in their place.
fn documents(doc_start_bs: Option<CudaTensor>, x_bsc: &CudaTensor) -> (CudaTensor, DType) {
    match doc_start_bs {
        Some(doc) => {
            let doc = dense(doc);
            let dtype = doc.dtype;
            (doc, dtype)
        }
        None => (x_bsc.clone(), DType::I32),
    }
}

#[cfg(test)]
pub(super) fn variants() -> Vec<String> {
    use super::source::Parameters;
    use half::bf16;
    type N = Const<2>;

    let dtype = bf16::as_type_native_unchecked().storage_type();
    let taps = 4;
    let mut sources = Vec::new();
    for flag in [false, true] {
        let mut p = Parameters::new();
        let (x, weight) = (p.input::<Vector<bf16, N>>(), p.input::<bf16>());
        let [bias, history] = [0; 2].map(|_| p.input::<Vector<bf16, N>>());
        let (doc_start, out) = (p.input::<i32>(), p.output::<Vector<bf16, N>>());
        let [seq, vectors, blocks, runs, run] = [0; 5].map(|_| p.scalar::<usize>());
        forward_kernel::expand::<bf16, bf16, bf16, bf16, i32, N>(
            &mut p.0.scope,
            2,
            x,
            weight,
            bias,
            history,
            doc_start,
            out,
            seq,
            vectors,
            blocks,
            runs,
            run,
            taps,
            flag,
            flag,
            flag,
            flag,
            [dtype; 5],
        );
        sources.push(p.source("causal_conv1d", CubeDim::new_1d(UNITS)));

        let mut p = Parameters::new();
        let [grad, x] = [0; 2].map(|_| p.input::<Vector<bf16, N>>());
        let (weight, bias) = (p.input::<bf16>(), p.input::<Vector<bf16, N>>());
        let doc_start = p.input::<i32>();
        let (grad_x, parts) = (p.output::<Vector<bf16, N>>(), p.output::<Vector<f32, N>>());
        let [seq, vectors, blocks, runs, run] = [0; 5].map(|_| p.scalar::<usize>());
        backward_kernel::expand::<bf16, bf16, bf16, i32, N>(
            &mut p.0.scope,
            2,
            grad,
            x,
            weight,
            bias,
            doc_start,
            grad_x,
            parts,
            seq,
            vectors,
            blocks,
            runs,
            run,
            taps,
            flag,
            flag,
            flag,
            [dtype; 4],
        );
        sources.push(p.source("causal_conv1d_backward", CubeDim::new_1d(UNITS)));
    }
    sources
}

//! Depthwise causal convolution: forward, backward, and the second stage of the weight gradient.
//!
//! Memory-bound: every row is read once (the few before a run twice) and written once. The sums for weight and bias have a
//! fixed order: runs of tokens first, then the runs.

use burn_backend::{Backend, DType, TensorMetadata, tensor::IntTensor};

use super::super::raw::{CudaTensor, RawKernel, dense, empty, multiprocessors};
use super::{Tokens, int_type, kernel, lacks_bf16};

const SOURCE: &str = include_str!("../../../kernels/mamba/causal_conv1d.cu");
const UNITS: usize = 128;
/// Taps whose weights, rows and sums fit in registers.
const MAX_TAPS: usize = 16;
/// Tokens that a thread walks over at least; the rows around them are read twice.
const MIN_RUN: usize = 32;

/// What the source is specialised for.
#[derive(Clone, Debug)]
struct Config {
    x: DType,
    weight: DType,
    bias: Option<DType>,
    history: Option<DType>,
    documents: Option<&'static str>,
    silu: bool,
    taps: usize,
    /// Channels of a thread.
    vector: usize,
}

impl Config {
    fn kernel(&self, pass: u32, entry: &'static str) -> RawKernel {
        let flag = u32::from;
        let defines = format!(
            "#define PASS {pass}\n#define T_BF16 {}\n#define VEC {}\n#define TAPS {}\n#define HAS_BIAS {}\n#define HAS_HISTORY {}\n\
             #define PACKED {}\n#define SILU {}\n#define W_T {}\n#define BIAS_T {}\n#define HISTORY_T {}\n#define DOC_T {}\n",
            flag(self.x == DType::BF16),
            self.vector,
            self.taps,
            flag(self.bias.is_some()),
            flag(self.history.is_some()),
            flag(self.documents.is_some()),
            flag(self.silu),
            float_type(self.weight),
            float_type(self.bias.unwrap_or(self.weight)),
            float_type(self.history.unwrap_or(self.x)),
            self.documents.unwrap_or("int"),
        );
        kernel(entry, defines, &[SOURCE], UNITS, 0)
    }

    fn forward(&self) -> RawKernel {
        self.kernel(0, "conv1d_forward")
    }

    fn backward(&self) -> RawKernel {
        self.kernel(1, "conv1d_backward")
    }

    fn sums(&self) -> RawKernel {
        self.kernel(2, "conv1d_sums")
    }
}

fn float_type(dtype: DType) -> &'static str {
    if dtype == DType::BF16 { "bf16" } else { "float" }
}

/// Why the reference runs instead of these kernels. `floats`: weight, bias, history, gradient.
pub fn refusal<'a>(
    x_bsc: &'a CudaTensor,
    weight_ck: &'a CudaTensor,
    floats: impl IntoIterator<Item = &'a CudaTensor>,
    doc_start_bs: Option<&CudaTensor>,
) -> Option<&'static str> {
    let [_, taps] = weight_ck.shape().dims::<2>();
    let elements = x_bsc.shape().num_elements();
    if elements == 0 {
        return Some("an empty tensor");
    }
    if taps > MAX_TAPS {
        return Some("more taps than fit in registers");
    }
    let known = |tensor: &CudaTensor| matches!(tensor.dtype, DType::F32 | DType::BF16);
    let floats: Vec<_> = floats.into_iter().chain([x_bsc, weight_ck]).collect();
    if !floats.iter().all(|tensor| known(tensor)) {
        return Some("a tensor is neither fp32 nor bf16");
    }
    if lacks_bf16(floats) {
        return Some("bf16 on a device before compute capability 8.0");
    }
    if doc_start_bs.is_some_and(|doc| int_type(doc.dtype).is_none()) {
        return Some("document starts are neither 32 nor 64-bit integers");
    }
    if i32::try_from(elements / MIN_RUN).is_err() {
        return Some("more runs than a grid has blocks");
    }
    None
}

/// How the `[B, S, C]` elements are dealt: blocks of [`UNITS`] channel vectors by runs of tokens.
struct Layout {
    batch: usize,
    seq: usize,
    channels: usize,
    taps: usize,
    vector: usize,
    /// Runs along the sequence, and their length.
    runs: usize,
    run: usize,
}

impl Layout {
    fn new(x_bsc: &CudaTensor, weight_ck: &CudaTensor) -> Self {
        let ([batch, seq, channels], [_, taps]) = (x_bsc.shape().dims::<3>(), weight_ck.shape().dims::<2>());
        let widest = match taps {
            ..=4 => 4,
            ..=8 => 2,
            _ => 1,
        };
        let vector = [widest, 2, 1].into_iter().find(|v| channels.is_multiple_of(*v)).unwrap_or(1);
        // about a thousand threads for each multiprocessor
        let wanted = multiprocessors(&x_bsc.client) as usize * 1024;
        let run = seq.div_ceil(wanted.div_ceil(batch * channels / vector)).max(MIN_RUN);
        Self {
            batch,
            seq,
            channels,
            taps,
            vector,
            runs: seq.div_ceil(run),
            run,
        }
    }

    fn slabs(&self) -> usize {
        self.batch * self.runs
    }

    fn grid(&self) -> u32 {
        ((self.channels / self.vector).div_ceil(UNITS) * self.slabs()) as u32
    }

    fn scalars(&self, x: &Tokens, grad: &Tokens) -> Vec<u64> {
        let mut scalars: Vec<u64> = [self.seq, self.channels, self.runs, self.run, self.slabs()]
            .map(|n| n as u64)
            .to_vec();
        for tokens in [x, grad] {
            scalars.extend([tokens.batch, tokens.token]);
        }
        scalars
    }
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
    let layout = Layout::new(&x_bsc, &weight_ck);
    let config = Config {
        x: x_bsc.dtype,
        weight: weight_ck.dtype,
        bias: bias_c.as_ref().map(|bias| bias.dtype),
        history: history.as_ref().map(|history| history.dtype),
        documents: doc_start_bs.as_ref().and_then(|doc| int_type(doc.dtype)),
        silu,
        taps: layout.taps,
        vector: layout.vector,
    };
    let out = empty(&x_bsc, &[layout.batch, layout.seq, layout.channels], x_bsc.dtype);
    let (x, weight_ck) = (Tokens::new(x_bsc, layout.vector), dense(weight_ck));
    // absent tensors are bound to one that is there and never read
    let [bias_c, history, doc_start_bs] = [bias_c, history, doc_start_bs].map(|t| t.map_or_else(|| weight_ck.clone(), dense));
    let buffers = [
        &x.tensor.handle,
        &weight_ck.handle,
        &bias_c.handle,
        &history.handle,
        &doc_start_bs.handle,
        &out.handle,
    ];
    config
        .forward()
        .launch(&out.client, layout.grid(), vec![], &buffers, layout.scalars(&x, &x));
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
    let layout = Layout::new(&x_bsc, &weight_ck);
    let (taps, channels) = (layout.taps, layout.channels);
    let config = Config {
        x: x_bsc.dtype,
        weight: weight_ck.dtype,
        bias: bias_c.as_ref().map(|bias| bias.dtype),
        history: None,
        documents: doc_start_bs.as_ref().and_then(|doc| int_type(doc.dtype)),
        silu,
        taps,
        vector: layout.vector,
    };
    let client = x_bsc.client.clone();
    let grad_x = empty(&x_bsc, &[layout.batch, layout.seq, channels], x_bsc.dtype);
    let parts = empty(&x_bsc, &[layout.slabs(), taps + 1, channels], DType::F32);
    let grad_weight = empty(&x_bsc, &[channels, taps], weight_ck.dtype);
    let grad_bias = bias_c.as_ref().map(|bias| empty(&x_bsc, &[channels], bias.dtype));
    let (x, grad, weight_ck) = (
        Tokens::new(x_bsc, layout.vector),
        Tokens::new(grad_bsc, layout.vector),
        dense(weight_ck),
    );
    let [bias_c, doc_start_bs] = [bias_c, doc_start_bs].map(|t| t.map_or_else(|| weight_ck.clone(), dense));
    let scalars = layout.scalars(&x, &grad);
    let buffers = [
        &grad.tensor.handle,
        &x.tensor.handle,
        &weight_ck.handle,
        &bias_c.handle,
        &doc_start_bs.handle,
        &grad_x.handle,
        &parts.handle,
    ];
    config.backward().launch(&client, layout.grid(), vec![], &buffers, scalars.clone());
    let grid = ((taps + 1) * channels).div_ceil(UNITS) as u32;
    let bias_handle = &grad_bias.as_ref().unwrap_or(&grad_weight).handle;
    let buffers = [&parts.handle, &grad_weight.handle, bias_handle];
    config.sums().launch(&client, grid, vec![], &buffers, scalars);
    (grad_x, grad_weight, grad_bias)
}

/// Kernels in both types with every option on and off, for compile checks without a GPU.
#[cfg(test)]
pub fn variants() -> Vec<RawKernel> {
    let mut all = Vec::new();
    for (x, other, on) in [
        (DType::BF16, DType::BF16, true),
        (DType::BF16, DType::F32, false),
        (DType::F32, DType::BF16, true),
    ] {
        for (taps, vector) in [(1, 1), (4, 4), (8, 2), (16, 1)] {
            let config = Config {
                x,
                weight: other,
                bias: on.then_some(other),
                history: on.then_some(other),
                documents: on.then_some("long long"),
                silu: on,
                taps,
                vector,
            };
            all.extend([config.forward(), config.backward(), config.sums()]);
        }
    }
    all
}

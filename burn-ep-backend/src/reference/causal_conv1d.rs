//! Depthwise causal convolution of Mamba-2 on plain tensors.

use burn_backend::{
    Backend, DType, TensorMetadata,
    tensor::{FloatTensor, IntTensor},
};
use burn_tensor::{Tensor, activation::sigmoid};

use super::prim::{cast, int_tensor, primitive, tensor, wide};

/// `out[t] = act(bias + sum_j weight[j] * x[t - Kw + 1 + j])`. Tap `i = t - Kw + 1 + j` is read when
/// `max(i, 0) >= doc_start[t]`; before the row it reads `history`, or zero. The sum is rounded to the dtype of x
/// before the activation, as a convolution followed by an activation would.
pub fn causal_conv1d<B: Backend>(
    x_bsc: FloatTensor<B>,
    weight_ck: FloatTensor<B>,
    bias_c: Option<FloatTensor<B>>,
    history: Option<FloatTensor<B>>,
    doc_start_bs: Option<IntTensor<B>>,
    silu: bool,
) -> FloatTensor<B> {
    let dtype = x_bsc.dtype();
    let x_bsc = wide::<B, 3>(x_bsc);
    let weight_ck = cast::<B, 2>(weight_ck, x_bsc.dtype());
    let history = history.map(|history| cast::<B, 3>(history, x_bsc.dtype()));
    let taps = Taps::new(x_bsc, history, doc_start_bs, weight_ck.dims()[1]);
    let pre_bsc = pre_activation(&taps, weight_ck, bias_c, dtype);
    let out_bsc = if silu { pre_bsc.clone() * sigmoid(pre_bsc) } else { pre_bsc };
    primitive(out_bsc.cast(dtype))
}

/// Gradients (x, weight, bias) without history: `dweight[j] = sum_t g_t x_{t-Kw+1+j}`,
/// `dx_i = sum_j weight[j] g_{i+Kw-1-j}` with `g = grad * act'(pre)`.
pub fn causal_conv1d_backward<B: Backend>(
    grad: FloatTensor<B>,
    x_bsc: FloatTensor<B>,
    weight_ck: FloatTensor<B>,
    bias_c: Option<FloatTensor<B>>,
    doc_start_bs: Option<IntTensor<B>>,
    silu: bool,
) -> (FloatTensor<B>, FloatTensor<B>, Option<FloatTensor<B>>) {
    let (dtype, weight_dtype) = (x_bsc.dtype(), weight_ck.dtype());
    let bias_dtype = bias_c.as_ref().map(TensorMetadata::dtype);
    let x_bsc = wide::<B, 3>(x_bsc);
    let weight_ck = cast::<B, 2>(weight_ck, x_bsc.dtype());
    let grad_bsc = cast::<B, 3>(grad, x_bsc.dtype());
    let [b, s, c] = x_bsc.dims();
    let [_, kernel] = weight_ck.dims();
    let taps = Taps::new(x_bsc, None, doc_start_bs, kernel);

    let grad_bsc = if silu {
        let pre_bsc = pre_activation(&taps, weight_ck.clone(), bias_c, dtype);
        let sigma_bsc = sigmoid(pre_bsc.clone());
        grad_bsc * ((pre_bsc * (sigma_bsc.clone().neg() + 1.0) + 1.0) * sigma_bsc)
    } else {
        grad_bsc
    };
    let device = grad_bsc.device();
    let mut dx_bsc = Tensor::<B, 3>::zeros([b, s, c], (&device, grad_bsc.dtype()));
    let mut dweights = Vec::with_capacity(kernel);
    for j in 0..kernel {
        let dweight_11c = (grad_bsc.clone() * taps.tap(j)).sum_dim(1).sum_dim(0);
        dweights.push(dweight_11c.reshape([c, 1]));
        let lag = kernel - 1 - j;
        if lag < s {
            let weight_11c = weight_ck.clone().narrow(1, j, 1).reshape([1, 1, c]);
            let pulled_bsc = taps.hide(grad_bsc.clone(), j) * weight_11c;
            // Row t feeds x[t - lag]: move the rows up by lag.
            let moved_bsc = pulled_bsc.narrow(1, lag, s - lag);
            let tail_bsc = Tensor::zeros([b, lag, c], (&device, moved_bsc.dtype()));
            dx_bsc = dx_bsc
                + if lag == 0 {
                    moved_bsc
                } else {
                    Tensor::cat(vec![moved_bsc, tail_bsc], 1)
                };
        }
    }
    let dbias_c = bias_dtype.map(|dtype| primitive(grad_bsc.sum_dim(1).sum_dim(0).reshape([c]).cast(dtype)));
    let dweight_ck = Tensor::cat(dweights, 1);
    (primitive(dx_bsc.cast(dtype)), primitive(dweight_ck.cast(weight_dtype)), dbias_c)
}

/// The input shifted to each tap, with taps of other documents hidden.
struct Taps<B: Backend> {
    /// `[B, Kw - 1 + S, C]`: history or zeros, then x.
    padded: Tensor<B, 3>,
    /// `[B, S, 1]`.
    doc_start: Option<Tensor<B, 3, burn_tensor::Int>>,
    kernel: usize,
    seq: usize,
}

impl<B: Backend> Taps<B> {
    fn new(x_bsc: Tensor<B, 3>, history: Option<Tensor<B, 3>>, doc_start_bs: Option<IntTensor<B>>, kernel: usize) -> Self {
        let [b, seq, c] = x_bsc.dims();
        let padded = if kernel > 1 {
            let before = history.unwrap_or_else(|| Tensor::zeros([b, kernel - 1, c], (&x_bsc.device(), x_bsc.dtype())));
            Tensor::cat(vec![before, x_bsc], 1)
        } else {
            x_bsc
        };
        Self {
            padded,
            doc_start: doc_start_bs.map(|doc| int_tensor::<B, 2>(doc).unsqueeze_dim::<3>(2)),
            kernel,
            seq,
        }
    }

    /// `x[t - Kw + 1 + j]` for every t, `[B, S, C]`.
    fn tap(&self, j: usize) -> Tensor<B, 3> {
        self.hide(self.padded.clone().narrow(1, j, self.seq), j)
    }

    /// Zero where tap j of row t lies before the document of t.
    fn hide(&self, value_bsc: Tensor<B, 3>, j: usize) -> Tensor<B, 3> {
        let Some(doc_start) = &self.doc_start else {
            return value_bsc;
        };
        let rows = Tensor::<B, 1, burn_tensor::Int>::arange(0..self.seq as i64, &doc_start.device());
        let source = (rows - (self.kernel - 1 - j) as i64)
            .clamp_min(0)
            .reshape([1, self.seq, 1])
            .cast(doc_start.dtype());
        let hidden = source.expand(doc_start.dims()).lower(doc_start.clone());
        let [_, _, c] = value_bsc.dims();
        let [b, s, _] = doc_start.dims();
        value_bsc.mask_fill(hidden.expand([b, s, c]), 0.0)
    }
}

fn pre_activation<B: Backend>(taps: &Taps<B>, weight_ck: Tensor<B, 2>, bias_c: Option<FloatTensor<B>>, dtype: DType) -> Tensor<B, 3> {
    let [c, kernel] = weight_ck.dims();
    let wide_dtype = weight_ck.dtype();
    let mut pre_bsc = None;
    for j in 0..kernel {
        let term = taps.tap(j) * weight_ck.clone().narrow(1, j, 1).reshape([1, 1, c]);
        pre_bsc = Some(match pre_bsc {
            Some(sum) => sum + term,
            None => term,
        });
    }
    let pre_bsc: Tensor<B, 3> = pre_bsc.expect("a convolution has at least one tap");
    let pre_bsc = match bias_c {
        Some(bias_c) => pre_bsc + tensor::<B, 1>(bias_c).cast(wide_dtype).reshape([1, 1, c]),
        None => pre_bsc,
    };
    pre_bsc.cast(dtype).cast(wide_dtype)
}

#[cfg(test)]
#[path = "causal_conv1d_tests.rs"]
mod tests;

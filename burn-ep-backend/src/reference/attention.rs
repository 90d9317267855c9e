//! Grouped-query attention on plain tensors, with the whole score matrix in memory.
//!
//! Sink: an extra logit in the softmax denominator (Xiao et al. 2023; GPT-OSS learns it per head).

use burn_backend::{
    DType, TensorMetadata,
    tensor::{FloatTensor, IntTensor},
};
use burn_tensor::{Bool, Int, Tensor};

use super::prim::{Times, cast, int_tensor, primitive, tensor, wide};
use crate::backend::*;
use crate::desc::*;

/// See [`MoeBackend::flash_attention`]; scores and softmax in fp32. The log-sum-exp of a row without visible key and
/// without sink is minus infinity.
pub fn attention<B: MoeBackend>(
    q: FloatTensor<B>,
    k: FloatTensor<B>,
    v: FloatTensor<B>,
    sink: Option<FloatTensor<B>>,
    mask: &AttentionMaskPrim<B>,
    desc: &AttentionDesc,
) -> AttentionPrim<B> {
    let dtype = q.dtype();
    let heads = q.shape()[2];
    let q_bhsd = wide::<B, 4>(q).swap_dims(1, 2);
    let wide_dtype = q_bhsd.dtype();
    let k_bhsd = repeat_heads(cast::<B, 4>(k, wide_dtype).swap_dims(1, 2), heads);
    let v_bhsd = repeat_heads(cast::<B, 4>(v, wide_dtype).swap_dims(1, 2), heads);

    let (scores, hidden) = scores(q_bhsd, k_bhsd, mask, desc);
    // A finite stand-in for -inf keeps `score - maximum` defined in rows that see nothing.
    let scores = scores.mask_fill(hidden.clone(), f32::MIN);
    let mut maximum_bhs1 = scores.clone().max_dim(3);
    if let Some(sink) = &sink {
        maximum_bhs1 = maximum_bhs1.clone().max_pair(sink_like::<B>(sink.clone(), &maximum_bhs1));
    }
    let exp = (scores - maximum_bhs1.clone()).exp().mask_fill(hidden, 0.0);
    let mut denominator_bhs1 = exp.clone().sum_dim(3);
    if let Some(sink) = sink {
        denominator_bhs1 = denominator_bhs1 + (sink_like::<B>(sink, &maximum_bhs1) - maximum_bhs1.clone()).exp();
    }
    let lse_bhs = (denominator_bhs1.clone().log() + maximum_bhs1).squeeze_dim::<3>(3);
    // Rows that see nothing have a zero numerator: any positive denominator gives zeros.
    let empty_bhs1 = denominator_bhs1.clone().equal_elem(0.0);
    let probabilities = exp / denominator_bhs1.mask_fill(empty_bhs1, 1.0);
    let out_bshd = probabilities.times(v_bhsd).swap_dims(1, 2);
    AttentionPrim {
        out_bshd: primitive(out_bshd.cast(dtype)),
        lse_bhs: primitive(lse_bhs),
    }
}

/// With `p = exp(s - lse)`, `dp = dO V^T` and `delta = dO · O`: `ds = p * (dp - delta)`, `dsink = -sum exp(sink - lse) delta`.
pub fn attention_backward<B: MoeBackend>(
    grad: FloatTensor<B>,
    q: FloatTensor<B>,
    k: FloatTensor<B>,
    v: FloatTensor<B>,
    sink: Option<FloatTensor<B>>,
    mask: &AttentionMaskPrim<B>,
    out: &AttentionPrim<B>,
    desc: &AttentionDesc,
) -> AttentionGrads<B> {
    let dtypes = [q.dtype(), k.dtype(), v.dtype()];
    let (heads, kv_heads) = (q.shape()[2], k.shape()[2]);
    let q_bhsd = wide::<B, 4>(q).swap_dims(1, 2);
    let wide_dtype = q_bhsd.dtype();
    let k_bhsd = repeat_heads(cast::<B, 4>(k, wide_dtype).swap_dims(1, 2), heads);
    let v_bhsd = repeat_heads(cast::<B, 4>(v, wide_dtype).swap_dims(1, 2), heads);
    let grad_bhsd = cast::<B, 4>(grad, wide_dtype).swap_dims(1, 2);
    let out_bhsd = cast::<B, 4>(out.out_bshd.clone(), wide_dtype).swap_dims(1, 2);
    let lse_bhs1 = tensor::<B, 3>(out.lse_bhs.clone()).unsqueeze_dim::<4>(3);

    let (scores, hidden) = scores(q_bhsd.clone(), k_bhsd.clone(), mask, desc);
    let probabilities = (scores - lse_bhs1.clone()).exp().mask_fill(hidden, 0.0);
    let delta_bhs1 = (grad_bhsd.clone() * out_bhsd).sum_dim(3);
    let dv_bhsd = probabilities.clone().swap_dims(2, 3).times(grad_bhsd.clone());
    let dscores = (grad_bhsd.times(v_bhsd.swap_dims(2, 3)) - delta_bhs1.clone()) * probabilities * desc.scale;
    let dq_bhsd = dscores.clone().times(k_bhsd);
    let dk_bhsd = dscores.swap_dims(2, 3).times(q_bhsd);
    let dsink_h = sink.map(|sink| {
        let dtype = sink.dtype();
        let share_bhs1 = (sink_like::<B>(sink, &lse_bhs1) - lse_bhs1).exp();
        let dsink = (share_bhs1 * delta_bhs1).sum_dim(2).sum_dim(0).neg().reshape([heads]);
        primitive(dsink.cast(dtype))
    });
    let finish = |grad_bhsd: Tensor<B, 4>, dtype: DType| primitive(grad_bhsd.swap_dims(1, 2).cast(dtype));
    AttentionGrads {
        q: finish(dq_bhsd, dtypes[0]),
        k: finish(sum_heads(dk_bhsd, kv_heads), dtypes[1]),
        v: finish(sum_heads(dv_bhsd, kv_heads), dtypes[2]),
        sink: dsink_h,
    }
}

/// Scaled scores `[B, H, Sq, Skv]` and where they are hidden.
fn scores<B: MoeBackend>(
    q_bhsd: Tensor<B, 4>,
    k_bhsd: Tensor<B, 4>,
    mask: &AttentionMaskPrim<B>,
    desc: &AttentionDesc,
) -> (Tensor<B, 4>, Tensor<B, 4, Bool>) {
    let [b, h, sq, _] = q_bhsd.dims();
    let [_, _, skv, _] = k_bhsd.dims();
    let scores = q_bhsd.times(k_bhsd.swap_dims(2, 3)) * desc.scale;
    let hidden = hidden::<B>([b, sq, skv], mask, desc, &scores.device());
    (scores, hidden.unsqueeze_dim::<4>(1).expand([b, h, sq, skv]))
}

/// `[B, Sq, Skv]`: true where the key must not be seen. Query i has row index `i + Skv - Sq`.
fn hidden<B: MoeBackend>(
    [b, sq, skv]: [usize; 3],
    mask: &AttentionMaskPrim<B>,
    desc: &AttentionDesc,
    device: &B::Device,
) -> Tensor<B, 3, Bool> {
    let shape = [b, sq, skv];
    let first = (skv - sq) as i64;
    let rows = Tensor::<B, 1, Int>::arange(first..skv as i64, device)
        .reshape([1, sq, 1])
        .expand(shape);
    let keys = Tensor::<B, 1, Int>::arange(0..skv as i64, device)
        .reshape([1, 1, skv])
        .expand(shape);
    let mut hidden = if desc.causal {
        keys.clone().greater(rows.clone())
    } else {
        keys.clone().lower_elem(0)
    };
    if let Some(window) = desc.window {
        let behind = rows.clone() - keys.clone();
        // A window beyond the row hides nothing; the bound keeps it inside the int dtype.
        hidden = hidden.bool_or(behind.greater_equal_elem(window.min(skv) as i64));
    }
    if let Some(doc) = &mask.doc_start_bs {
        let doc = int_of::<B>(doc.clone(), &rows);
        hidden = hidden.bool_or(keys.lower(doc.clone().unsqueeze_dim::<3>(2).expand(shape)));
        if !desc.causal {
            // Keys of later documents start after the query. Keys before the first query row belong to no later one.
            let before = Tensor::<B, 2, Int>::zeros([b, skv - sq], (device, doc.dtype()));
            let key_doc = if skv > sq { Tensor::cat(vec![before, doc], 1) } else { doc };
            hidden = hidden.bool_or(key_doc.unsqueeze_dim::<3>(1).expand(shape).greater(rows));
        }
    }
    if let Some(visible) = &mask.key_visible_bs {
        let visible: Tensor<B, 2, Bool> = Tensor::from_primitive(visible.clone());
        hidden = hidden.bool_or(visible.bool_not().unsqueeze_dim::<3>(1).expand(shape));
    }
    hidden
}

/// Comparisons need equal int dtypes.
fn int_of<B: MoeBackend>(doc: IntTensor<B>, like: &Tensor<B, 3, Int>) -> Tensor<B, 2, Int> {
    int_tensor::<B, 2>(doc).cast(like.dtype())
}

/// `[H]` as `[B, H, S, 1]`, shaped and typed like `like`.
fn sink_like<B: MoeBackend>(sink: FloatTensor<B>, like: &Tensor<B, 4>) -> Tensor<B, 4> {
    let heads = like.dims()[1];
    cast::<B, 1>(sink, like.dtype()).reshape([1, heads, 1, 1]).expand(like.dims())
}

/// Key head g serves query heads `g * r .. (g + 1) * r`.
fn repeat_heads<B: MoeBackend>(kv_bhsd: Tensor<B, 4>, heads: usize) -> Tensor<B, 4> {
    let [b, kv_heads, s, d] = kv_bhsd.dims();
    let repeat = heads / kv_heads;
    kv_bhsd
        .unsqueeze_dim::<5>(2)
        .expand([b, kv_heads, repeat, s, d])
        .reshape([b, heads, s, d])
}

fn sum_heads<B: MoeBackend>(grad_bhsd: Tensor<B, 4>, kv_heads: usize) -> Tensor<B, 4> {
    let [b, heads, s, d] = grad_bhsd.dims();
    grad_bhsd
        .reshape([b, kv_heads, heads / kv_heads, s, d])
        .sum_dim(2)
        .squeeze_dim::<4>(2)
}

#[cfg(test)]
#[path = "attention_case.rs"]
mod case;
#[cfg(test)]
#[path = "attention_tests.rs"]
mod tests;

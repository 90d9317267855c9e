//! Grouped-query attention with causality, window, sink, packed documents and padding.

use burn_tensor::{Bool, Int, Tensor};

use super::check;
use crate::{AttentionDesc, AttentionMaskPrim, MoeBackend, Result};

/// Which keys a query sees, beyond causality and window.
#[derive(Debug, Clone)]
pub struct AttentionMask<B: MoeBackend> {
    /// `[B, S]`: row index at which the document of each token starts.
    pub doc_start_bs: Option<Tensor<B, 2, Int>>,
    /// `[B, Skv]`: true where the key may be seen.
    pub key_visible_bs: Option<Tensor<B, 2, Bool>>,
}

impl<B: MoeBackend> Default for AttentionMask<B> {
    fn default() -> Self {
        Self {
            doc_start_bs: None,
            key_visible_bs: None,
        }
    }
}

/// Output of [`attention`].
#[derive(Debug, Clone)]
pub struct Attention<B: MoeBackend> {
    /// `[B, S, H, Dv]`.
    pub out_bshd: Tensor<B, 4>,
    /// `[B, H, S]` fp32 log-sum-exp of the scores. Not differentiable.
    pub lse_bhs: Tensor<B, 3>,
}

/// q `[B, Sq, H, Dk]`, k `[B, Skv, Hkv, Dk]`, v `[B, Skv, Hkv, Dv]`; see [`MoeBackend::flash_attention`].
///
/// # Errors
/// A shape or setting that does not fit, by name.
pub fn attention<B: MoeBackend>(
    q_bshd: Tensor<B, 4>,
    k_bshd: Tensor<B, 4>,
    v_bshd: Tensor<B, 4>,
    sink_h: Option<Tensor<B, 1>>,
    mask: &AttentionMask<B>,
    desc: &AttentionDesc,
) -> Result<Attention<B>> {
    let op = "attention";
    let [b, sq, h, dk] = q_bshd.dims();
    let [kb, skv, hkv, kd] = k_bshd.dims();
    let [.., dv] = v_bshd.dims();
    check::shape(op, "k", [kb, skv, hkv, kd], [b, skv, hkv, dk], "[B, Skv, Hkv, Dk]")?;
    check::shape(op, "v", v_bshd.dims(), [b, skv, hkv, dv], "[B, Skv, Hkv, Dv]")?;
    check::setting(
        op,
        "key heads",
        hkv > 0 && h.is_multiple_of(hkv),
        hkv,
        format!("a divisor of the {h} query heads"),
    )?;
    check::setting(op, "key length", skv >= sq, skv, format!("at least the query length {sq}"))?;
    check::setting(op, "window", desc.window != Some(0), "0", "at least 1, or none")?;
    if let Some(sink) = &sink_h {
        check::shape(op, "sink", sink.dims(), [h], "[H]")?;
    }
    if let Some(doc) = &mask.doc_start_bs {
        check::shape(op, "doc_start", doc.dims(), [b, sq], "[B, S]")?;
    }
    if let Some(keys) = &mask.key_visible_bs {
        check::shape(op, "key_visible", keys.dims(), [b, skv], "[B, Skv]")?;
    }
    let mask = AttentionMaskPrim {
        doc_start_bs: mask.doc_start_bs.clone().map(Tensor::into_primitive),
        key_visible_bs: mask.key_visible_bs.clone().map(Tensor::into_primitive),
    };
    let out = B::flash_attention(
        check::float(q_bshd),
        check::float(k_bshd),
        check::float(v_bshd),
        sink_h.map(check::float),
        &mask,
        desc,
    );
    Ok(Attention {
        out_bshd: check::tensor(out.out_bshd),
        lse_bhs: check::tensor(out.lse_bhs),
    })
}

#[cfg(test)]
mod tests {
    use burn_flex::Flex;
    use burn_std::DType;

    use super::*;
    use crate::testing::{bools, ints, tensor};

    type Shape = [usize; 4];

    fn message(q: Shape, k: Shape, v: Shape, sink: usize, mask: &AttentionMask<Flex>, window: Option<usize>) -> String {
        let zeros = |shape: Shape| tensor::<Flex, 4>(&vec![0.0; shape.iter().product()], shape, DType::F32);
        let sink = tensor::<Flex, 1>(&vec![0.0; sink], [sink], DType::F32);
        let desc = AttentionDesc {
            causal: true,
            window,
            scale: 1.0,
        };
        let out = attention(zeros(q), zeros(k), zeros(v), Some(sink), mask, &desc);
        out.map_or_else(|error| error.to_string(), |_| "accepted".into())
    }

    #[test]
    fn misfits_are_named() {
        let (q, kv) = ([1, 3, 4, 8], [1, 5, 2, 8]);
        let none = AttentionMask::default();
        assert_eq!(message(q, kv, kv, 4, &none, Some(1)), "accepted");
        let docs = AttentionMask {
            doc_start_bs: Some(ints(&[0; 5], [1, 5])),
            key_visible_bs: None,
        };
        let keys = AttentionMask {
            doc_start_bs: None,
            key_visible_bs: Some(bools(&[true; 3], [1, 3])),
        };
        for (found, name) in [
            (message(q, [1, 5, 2, 7], kv, 4, &none, None), "`k`"),
            (message(q, kv, [1, 4, 2, 8], 4, &none, None), "`v`"),
            (message(q, [1, 5, 3, 8], [1, 5, 3, 8], 4, &none, None), "`key heads`"),
            (message(q, [1, 2, 2, 8], [1, 2, 2, 8], 4, &none, None), "`key length`"),
            (message(q, kv, kv, 4, &none, Some(0)), "`window`"),
            (message(q, kv, kv, 3, &none, None), "`sink`"),
            (message(q, kv, kv, 4, &docs, None), "`doc_start`"),
            (message(q, kv, kv, 4, &keys, None), "`key_visible`"),
        ] {
            assert!(found.contains(name), "{found}");
        }
    }
}

//! The one place where a Burn op takes another path than to the wrapped backend's op of the same name.
//!
//! Every decision is logged at debug level with its reason, and [`with_routing`] overrides it.

use core::cell::Cell;

use burn_backend::ops::AttentionModuleOptions;
use burn_backend::tensor::{BoolTensor, FloatTensor, IntTensor};
use burn_backend::{DType, Shape, TensorMetadata};

use crate::{AttentionDesc, AttentionMaskPrim, MoeBackend, scoped};

/// What [`EpBackend`](crate::EpBackend) does with the Burn ops that it can reroute: `attention`, `embedding`, `float_matmul`, `linear`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Routing {
    /// The op of [`MoeBackend`] where it can express the call, else Burn's.
    #[default]
    Auto,
    /// Always the wrapped backend's own Burn op.
    BurnOnly,
}

thread_local! {
    static ROUTING: Cell<Routing> = const { Cell::new(Routing::Auto) };
}

/// Runs `f` with another routing on this thread, for tests and comparisons.
pub fn with_routing<R>(routing: Routing, f: impl FnOnce() -> R) -> R {
    scoped::with(&ROUTING, routing, f)
}

pub(super) fn float_matmul<B: MoeBackend>(lhs: FloatTensor<B>, rhs: FloatTensor<B>) -> FloatTensor<B> {
    match ROUTING.get() {
        Routing::Auto => B::routed_matmul(lhs, rhs),
        Routing::BurnOnly => B::float_matmul(lhs, rhs),
    }
}

pub(super) fn linear<B: MoeBackend>(x: FloatTensor<B>, weight: FloatTensor<B>, bias: Option<FloatTensor<B>>) -> FloatTensor<B> {
    match ROUTING.get() {
        Routing::Auto => B::routed_linear(x, weight, bias),
        Routing::BurnOnly => B::linear(x, weight, bias),
    }
}

pub(super) fn embedding<B: MoeBackend>(weights: FloatTensor<B>, indices: IntTensor<B>) -> FloatTensor<B> {
    match ROUTING.get() {
        Routing::Auto => B::routed_embedding(weights, indices),
        Routing::BurnOnly => B::embedding(weights, indices),
    }
}

/// Burn's attention over `[B, H, S, D]`; `mask` is true where a key is hidden.
pub(super) fn attention<B: MoeBackend>(
    query: FloatTensor<B>,
    key: FloatTensor<B>,
    value: FloatTensor<B>,
    mask: Option<BoolTensor<B>>,
    attn_bias: Option<FloatTensor<B>>,
    options: AttentionModuleOptions,
) -> FloatTensor<B> {
    let call = AttentionCall {
        query: query.shape().dims(),
        key: key.shape().dims(),
        mask: mask.as_ref().map(|m| m.shape().dims()),
        bias: attn_bias.is_some(),
        dtype: query.dtype(),
    };
    match call.flash(&options) {
        Ok(desc) => {
            tracing::debug!(op = "attention", route = "flash_attention", shape = ?call.query);
            let [b, .., s_kv, _] = call.key;
            let mask = AttentionMaskPrim {
                doc_start_bs: None,
                key_visible_bs: mask.map(|m| key_visible::<B>(m, b, s_kv)),
            };
            let to_bshd = |t| B::float_swap_dims(t, 1, 2);
            let out = B::flash_attention(to_bshd(query), to_bshd(key), to_bshd(value), None, &mask, &desc);
            B::float_swap_dims(out.out_bshd, 1, 2)
        }
        Err(reason) => {
            tracing::debug!(op = "attention", route = "burn", reason, shape = ?call.query);
            B::attention(query, key, value, mask, attn_bias, options)
        }
    }
}

/// `[B or 1, 1, 1, Skv]` hidden keys to `[B, Skv]` visible keys.
fn key_visible<B: MoeBackend>(mask: BoolTensor<B>, b: usize, s_kv: usize) -> BoolTensor<B> {
    let rows = mask.shape().dims::<4>()[0];
    let visible = B::bool_not(B::bool_reshape(mask, Shape::new([rows, s_kv])));
    B::bool_expand(visible, Shape::new([b, s_kv]))
}

/// The parts of an attention call that decide its path.
struct AttentionCall {
    query: [usize; 4],
    key: [usize; 4],
    mask: Option<[usize; 4]>,
    bias: bool,
    dtype: DType,
}

impl AttentionCall {
    /// The flash attention that computes this call, or why none does.
    fn flash(&self, options: &AttentionModuleOptions) -> Result<AttentionDesc, &'static str> {
        let [b, h, s_q, d] = self.query;
        let [key_b, h_kv, s_kv, _] = self.key;
        if ROUTING.get() == Routing::BurnOnly {
            return Err("rerouting is switched off");
        }
        if !options.is_causal {
            return Err("not causal");
        }
        if options.softcap.is_some() {
            return Err("soft cap");
        }
        if self.bias {
            return Err("additive bias");
        }
        if self.dtype == DType::F64 {
            return Err("flash attention sums in fp32, the call is fp64");
        }
        if s_kv < s_q {
            return Err("fewer keys than queries");
        }
        if key_b != b || h_kv == 0 || !h.is_multiple_of(h_kv) {
            return Err("batches or heads of query and key differ");
        }
        match self.mask {
            None => {}
            Some([rows, 1, 1, keys]) if keys == s_kv && (rows == b || rows == 1) => {}
            Some(_) => return Err("the mask is not a key mask [B or 1, 1, 1, Skv]"),
        }
        let scale = options.scale.unwrap_or_else(|| (d as f64).powf(-0.5));
        Ok(AttentionDesc {
            causal: true,
            window: None,
            scale: scale as f32,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call() -> AttentionCall {
        AttentionCall {
            query: [2, 4, 3, 16],
            key: [2, 4, 5, 16],
            mask: None,
            bias: false,
            dtype: DType::F32,
        }
    }

    fn causal() -> AttentionModuleOptions {
        AttentionModuleOptions {
            is_causal: true,
            ..Default::default()
        }
    }

    #[test]
    fn causal_attention_becomes_flash_attention_with_the_default_scale() {
        let desc = call().flash(&causal()).unwrap();
        assert_eq!((desc.causal, desc.window, desc.scale), (true, None, 0.25));
    }

    #[test]
    fn an_explicit_scale_is_kept() {
        let options = AttentionModuleOptions {
            scale: Some(3.0),
            ..causal()
        };
        assert_eq!(call().flash(&options).unwrap().scale, 3.0);
    }

    #[test]
    fn key_masks_fit_and_full_masks_do_not() {
        for mask in [[2, 1, 1, 5], [1, 1, 1, 5]] {
            assert!(
                AttentionCall {
                    mask: Some(mask),
                    ..call()
                }
                .flash(&causal())
                .is_ok()
            );
        }
        let full = AttentionCall {
            mask: Some([2, 4, 3, 5]),
            ..call()
        };
        assert!(full.flash(&causal()).unwrap_err().contains("mask"));
    }

    #[test]
    fn what_flash_attention_cannot_express_stays_with_burn() {
        let refused = [
            (call(), AttentionModuleOptions::default(), "not causal"),
            (
                call(),
                AttentionModuleOptions {
                    softcap: Some(5.0),
                    ..causal()
                },
                "soft cap",
            ),
            (AttentionCall { bias: true, ..call() }, causal(), "bias"),
            (
                AttentionCall {
                    dtype: DType::F64,
                    ..call()
                },
                causal(),
                "fp64",
            ),
            (
                AttentionCall {
                    key: [2, 4, 2, 16],
                    ..call()
                },
                causal(),
                "fewer keys",
            ),
            (
                AttentionCall {
                    key: [2, 3, 5, 16],
                    ..call()
                },
                causal(),
                "heads",
            ),
        ];
        for (call, options, word) in refused {
            let reason = call.flash(&options).unwrap_err();
            assert!(reason.contains(word), "{reason}");
        }
        let off = with_routing(Routing::BurnOnly, || call().flash(&causal()).unwrap_err());
        assert!(off.contains("switched off"));
        assert!(call().flash(&causal()).is_ok(), "the override ends with its closure");
    }
}

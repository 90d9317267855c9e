//! What a layer keeps for its backward pass and moves between ranks, for one token.

use crate::AutoConfig;
use crate::nemotron_h::LayerKind;

/// Tokens per chunk of the selective scan, which keeps one state for each.
const SCAN_CHUNK: usize = 64;

/// One layer, numbers per token.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct LayerSize {
    /// Elements in the dtype of the model that the backward pass needs.
    pub kept: usize,
    /// The same in fp32.
    pub kept_fp32: usize,
    /// Experts per token and width of the rows they work on; None without routed experts.
    pub routed: Option<(usize, usize)>,
    /// Heads times head size times states of the selective scan.
    pub scan: usize,
}

impl LayerSize {
    fn with(self, other: Self) -> Self {
        Self {
            kept: self.kept + other.kept,
            kept_fp32: self.kept_fp32 + other.kept_fp32,
            routed: self.routed.or(other.routed),
            scan: self.scan + other.scan,
        }
    }
}

/// Input of a part and its norm's result.
fn normed(hidden: usize) -> usize {
    2 * hidden
}

/// Projections, rotated queries and keys, the result and its log-sum-exp.
fn attention(hidden: usize, heads: usize, kv_heads: usize, head_dim: usize) -> LayerSize {
    LayerSize {
        kept: normed(hidden) + (3 * heads + 3 * kv_heads) * head_dim,
        kept_fp32: heads,
        ..LayerSize::default()
    }
}

/// Up product (`up` times the inner width) and activation.
fn mlp(hidden: usize, inner: usize, up: usize) -> LayerSize {
    LayerSize {
        kept: normed(hidden) + (up + 1) * inner,
        ..LayerSize::default()
    }
}

struct Experts {
    hidden: usize,
    experts: usize,
    top_k: usize,
    inner: usize,
    /// Times the inner width that the up product has.
    up: usize,
    /// Width at which the routed experts work.
    width: usize,
    /// Inner width of the shared expert.
    shared: usize,
}

/// The routed experts keep only their input and the up product; logits and routing weights are fp32.
fn experts(e: &Experts) -> LayerSize {
    let latent = if e.width == e.hidden { 0 } else { 2 * e.width };
    LayerSize {
        kept: normed(e.hidden) + e.top_k * e.inner * e.up + latent + (e.up + 1) * e.shared,
        kept_fp32: 2 * e.experts + 2 * e.top_k,
        routed: Some((e.top_k, e.width)),
        scan: 0,
    }
}

/// Every layer of a model.
pub(super) fn layer_sizes(config: &AutoConfig) -> Vec<LayerSize> {
    match config {
        AutoConfig::NemotronH(c) => c.layers.iter().map(|kind| nemotron_layer(c, *kind)).collect(),
        AutoConfig::Sparse(c) => {
            let d = &c.decoder;
            let layer = |i| {
                let ffn = if c.is_sparse(i) {
                    experts(&Experts {
                        hidden: d.hidden_size,
                        experts: c.num_experts,
                        top_k: c.num_experts_per_tok,
                        inner: c.moe_intermediate_size,
                        up: 2,
                        width: d.hidden_size,
                        shared: c.shared_intermediate_size.unwrap_or(0),
                    })
                } else {
                    mlp(d.hidden_size, c.intermediate_size, 2)
                };
                attention(d.hidden_size, d.num_attention_heads, d.num_key_value_heads, d.head_dim).with(ffn)
            };
            (0..d.num_hidden_layers).map(layer).collect()
        }
        AutoConfig::Dense(c) => {
            let d = &c.decoder;
            let layer = attention(d.hidden_size, d.num_attention_heads, d.num_key_value_heads, d.head_dim);
            vec![layer.with(mlp(d.hidden_size, c.intermediate_size, 2)); d.num_hidden_layers]
        }
        AutoConfig::GptOss(c) => {
            let ffn = experts(&Experts {
                hidden: c.hidden_size,
                experts: c.num_local_experts,
                top_k: c.num_experts_per_tok,
                inner: c.intermediate_size,
                up: 2,
                width: c.hidden_size,
                shared: 0,
            });
            let layer = attention(c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim);
            vec![layer.with(ffn); c.num_hidden_layers]
        }
        AutoConfig::Glm4Moe(c) => {
            let layer = |i| {
                let ffn = if c.is_sparse(i) {
                    experts(&Experts {
                        hidden: c.hidden_size,
                        experts: c.router.num_experts,
                        top_k: c.router.top_k,
                        inner: c.moe_intermediate_size,
                        up: 2,
                        width: c.hidden_size,
                        shared: c.n_shared_experts * c.moe_intermediate_size,
                    })
                } else {
                    mlp(c.hidden_size, c.intermediate_size, 2)
                };
                attention(c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim).with(ffn)
            };
            (0..c.num_hidden_layers).map(layer).collect()
        }
        AutoConfig::DeepseekV3(c) => {
            let layer = |i| {
                let ffn = if c.is_sparse(i) {
                    experts(&Experts {
                        hidden: c.hidden_size,
                        experts: c.router.num_experts,
                        top_k: c.router.top_k,
                        inner: c.moe_intermediate_size,
                        up: 2,
                        width: c.hidden_size,
                        shared: c.n_shared_experts * c.moe_intermediate_size,
                    })
                } else {
                    mlp(c.hidden_size, c.intermediate_size, 2)
                };
                let heads = c.num_attention_heads;
                let key = c.qk_nope_head_dim + c.qk_rope_head_dim;
                // compressed vectors before and behind their norms; queries and keys before and behind the rotation
                let compressed = 2 * (c.q_lora_rank.unwrap_or(0) + c.kv_lora_rank) + c.qk_rope_head_dim;
                let attention = LayerSize {
                    kept: normed(c.hidden_size) + compressed + heads * (3 * key + c.qk_nope_head_dim + 3 * c.v_head_dim),
                    kept_fp32: heads,
                    ..LayerSize::default()
                };
                attention.with(ffn)
            };
            (0..c.num_hidden_layers).map(layer).collect()
        }
    }
}

fn nemotron_layer(c: &crate::nemotron_h::NemotronHConfig, kind: LayerKind) -> LayerSize {
    match kind {
        LayerKind::Mamba => {
            let m = &c.mamba;
            let inner = m.num_heads * m.head_dim;
            let channels = inner + 2 * m.n_groups * m.state_size;
            let scan = inner * m.state_size;
            LayerSize {
                // projection, convolved channels, result of the scan and of the gated norm
                kept: normed(c.hidden_size) + (inner + channels + m.num_heads) + channels + 2 * inner,
                kept_fp32: scan / SCAN_CHUNK,
                routed: None,
                scan,
            }
        }
        LayerKind::Attention => attention(c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim),
        LayerKind::Moe => experts(&Experts {
            hidden: c.hidden_size,
            experts: c.moe.router.num_experts,
            top_k: c.moe.router.top_k,
            inner: c.moe.intermediate_size,
            up: 1,
            width: c.moe.latent_size.unwrap_or(c.hidden_size),
            shared: c.moe.shared_intermediate_size,
        }),
        LayerKind::Mlp => mlp(c.hidden_size, c.intermediate_size, 1),
    }
}

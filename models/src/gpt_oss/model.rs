//! The GPT-OSS model: `x <- x + attention(norm(x))`, `x <- x + experts(norm(x))` for every block.

use burn::module::Module;
use burn::tensor::{FloatDType, Int, Tensor};
use burn_ep_backend::{ExpertActivation, MoeBackend, NormRounding, RouterDesc, RouterScore};
use burn_moe::Result;
use burn_moe::batch::HostBatch;
use burn_moe::dispatch::routed_experts;
use burn_moe::layers::{
    Attention, AttentionConfig, Embedding, Experts, ExpertsConfig, Linear, ParamBuilder, QkNorm, RmsNorm, Router, RouterConfig,
    RouterPrecision,
};
use burn_moe::model::{AuxLossSettings, BlockOutput, CausalLm, Head, LayerCache, ModelInput, RouterOutput, block_at};

use super::config::{GptOssConfig, LayerAttention};

/// Factor inside the sigmoid of the gate.
const ALPHA: f32 = 1.702;
/// Largest gate, and largest magnitude of up.
pub(super) const LIMIT: f32 = 7.0;

/// Router and experts. The layer of the other families, under the name that the router has in this one.
#[derive(Module, Debug)]
pub struct SparseMlp<B: MoeBackend> {
    pub router: Router<B>,
    pub experts: Experts<B>,
}

impl<B: MoeBackend> SparseMlp<B> {
    fn new(config: &GptOssConfig, pb: &ParamBuilder<B>) -> Result<Self> {
        let router = RouterConfig {
            hidden: config.hidden_size,
            desc: RouterDesc {
                score: RouterScore::TopKSoftmax,
                ..RouterDesc::softmax(config.num_local_experts, config.num_experts_per_tok, false)
            },
            precision: RouterPrecision::Model,
            bias: true,
            selection_bias: false,
            init: config.matrix_init(),
        };
        let experts = ExpertsConfig {
            num_experts: config.num_local_experts,
            width: config.hidden_size,
            inner: config.intermediate_size,
            activation: ExpertActivation::ClampedSwiGlu {
                alpha: ALPHA,
                limit: LIMIT,
            },
            bias: true,
            init: config.matrix_init(),
        };
        Ok(Self {
            router: Router::new(&pb.at("router"), &router)?,
            experts: Experts::new(&pb.at("experts"), &experts)?,
        })
    }

    /// `[B, S, D]` to `[B, S, D]`, with what the router decided. `replay_tk` fixes the routing.
    fn forward(
        &self,
        x_bsd: Tensor<B, 3>,
        input: &ModelInput<B>,
        replay_tk: Option<&Tensor<B, 2, Int>>,
    ) -> Result<(Tensor<B, 3>, RouterOutput<B>)> {
        let [b, s, d] = x_bsd.dims();
        let h_td = x_bsd.reshape([b * s, d]);
        let (route, router) = self.router.forward(h_td.clone(), replay_tk.cloned(), input.force_balanced)?;
        let out_td = routed_experts(
            h_td,
            route,
            self.experts.weights(),
            self.experts.activation(),
            self.router.num_experts(),
            input.ep.as_ref(),
        )?;
        Ok((out_td.reshape([b, s, d]), router))
    }
}

/// Attention and experts with a norm before each.
#[derive(Module, Debug)]
pub struct Block<B: MoeBackend> {
    pub input_layernorm: RmsNorm<B>,
    pub self_attn: Attention<B>,
    pub post_attention_layernorm: RmsNorm<B>,
    pub mlp: SparseMlp<B>,
}

/// GPT-OSS for causal language modelling.
#[derive(Module, Debug)]
pub struct GptOss<B: MoeBackend> {
    /// `[V, D]`.
    pub embed_tokens: Embedding<B>,
    pub layers: Vec<Block<B>>,
    pub norm: RmsNorm<B>,
    /// `[V, D]`; absent when the embedding serves as the head.
    pub lm_head: Option<Linear<B>>,
    config: GptOssConfig,
}

impl<B: MoeBackend> GptOss<B> {
    /// A model whose parameters are drawn when they are first read.
    ///
    /// # Errors
    /// When the experts do not divide over the ranks of the builder.
    pub fn new(config: &GptOssConfig, pb: &ParamBuilder<B>) -> Result<Self> {
        let (h, v) = (config.hidden_size, config.vocab_size);
        let padding = config.common.pad_token_id.map(|id| id as usize);
        let layers = config.layer_types.iter().enumerate();
        Ok(Self {
            embed_tokens: Embedding::new(&pb.at("embed_tokens"), v, h, config.initializer_range, padding),
            layers: layers
                .map(|(index, kind)| Block::new(config, *kind, &pb.at("layers").at(index)))
                .collect::<Result<_>>()?,
            norm: norm(config, &pb.at("norm")),
            lm_head: (!config.tie_word_embeddings).then(|| Linear::new(&pb.at("lm_head"), h, v, false, config.matrix_init())),
            config: config.clone(),
        })
    }

    /// The config the model was built from.
    pub fn config(&self) -> &GptOssConfig {
        &self.config
    }

    /// Dtype of the residual stream.
    pub fn dtype(&self) -> FloatDType {
        self.embed_tokens.weight.dtype().into()
    }
}

impl<B: MoeBackend> Block<B> {
    fn new(config: &GptOssConfig, kind: LayerAttention, pb: &ParamBuilder<B>) -> Result<Self> {
        Ok(Self {
            input_layernorm: norm(config, &pb.at("input_layernorm")),
            self_attn: Attention::new(&pb.at("self_attn"), &attention(config, kind)),
            post_attention_layernorm: norm(config, &pb.at("post_attention_layernorm")),
            mlp: SparseMlp::new(config, &pb.at("mlp"))?,
        })
    }

    fn forward(
        &self,
        x_bsd: Tensor<B, 3>,
        input: &ModelInput<B>,
        replay: Option<&Tensor<B, 2, Int>>,
        cache: Option<&mut LayerCache<B>>,
    ) -> Result<BlockOutput<B>> {
        let h_bsd = self.input_layernorm.forward(x_bsd.clone())?;
        let out_bsd = self.self_attn.forward(h_bsd, input, cache)?;
        let (x_bsd, h_bsd) = self.post_attention_layernorm.forward_sum(x_bsd, out_bsd)?;
        let (out_bsd, router) = self.mlp.forward(h_bsd, input, replay)?;
        Ok(BlockOutput {
            x_bsd: x_bsd + out_bsd,
            router: Some(router),
        })
    }
}

impl<B: MoeBackend> CausalLm<B> for GptOss<B> {
    fn prepare(&self, batch: &HostBatch, past: usize, device: &B::Device) -> Result<ModelInput<B>> {
        batch.validate(self.config.vocab_size)?;
        let table = self.config.rope.table(batch, past, self.config.max_position_embeddings)?;
        let mut input = ModelInput::new(batch, device);
        input.rope = Some(table.tensors(device, self.dtype()));
        Ok(input)
    }

    fn num_blocks(&self) -> usize {
        self.layers.len()
    }

    fn vocab_size(&self) -> usize {
        self.config.vocab_size
    }

    fn embed(&self, input: &ModelInput<B>) -> Result<Tensor<B, 3>> {
        Ok(self.embed_tokens.forward(input.ids_bs.clone()))
    }

    fn block(
        &self,
        index: usize,
        x_bsd: Tensor<B, 3>,
        input: &ModelInput<B>,
        replay: Option<&Tensor<B, 2, Int>>,
        cache: Option<&mut LayerCache<B>>,
    ) -> Result<BlockOutput<B>> {
        block_at(&self.layers, index)?.forward(x_bsd, input, replay, cache)
    }

    fn head(&self, x_bsd: Tensor<B, 3>) -> Result<Head<B>> {
        Ok(Head::new(self.norm.forward(x_bsd)?, self.lm_head.as_ref(), &self.embed_tokens))
    }

    fn aux_loss(&self) -> Option<AuxLossSettings> {
        self.config.aux_loss()
    }
}

/// The product with the weight is in fp32, with one rounding after it.
fn norm<B: MoeBackend>(config: &GptOssConfig, pb: &ParamBuilder<B>) -> RmsNorm<B> {
    RmsNorm::new(pb, config.hidden_size, config.rms_norm_eps).with_rounding(NormRounding::Fp32Product)
}

fn attention(config: &GptOssConfig, kind: LayerAttention) -> AttentionConfig {
    AttentionConfig {
        hidden: config.hidden_size,
        heads: config.num_attention_heads,
        kv_heads: config.num_key_value_heads,
        head_dim: config.head_dim,
        qkv_bias: config.attention_bias,
        o_bias: config.attention_bias,
        qk_norm: QkNorm::None,
        clip_qkv: None,
        sinks: true,
        window: match kind {
            LayerAttention::Sliding => Some(config.sliding_window),
            LayerAttention::Full => None,
        },
        rotary: true,
        init: config.matrix_init(),
    }
}

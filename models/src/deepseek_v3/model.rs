//! The DeepSeek model: `x <- x + attention(norm(x))`, `x <- x + feed_forward(norm(x))` for every block.

use burn::module::Module;
use burn::tensor::{FloatDType, Int, Tensor};
use burn_ep_backend::{ExpertActivation, MoeBackend, RopeLayout};
use burn_moe::Result;
use burn_moe::batch::HostBatch;
use burn_moe::layers::{
    Embedding, ExpertsConfig, FeedForward, Linear, Mla, MlaConfig, Mlp, MlpActivation, MlpConfig, Moe, MoeConfig, ParamBuilder, RmsNorm,
    RouterConfig, RouterPrecision,
};
use burn_moe::model::{BlockOutput, CausalLm, Head, LayerCache, ModelInput, block_at};

use super::config::{DeepseekV3Config, Generation};

/// Attention and feed-forward with a norm before each.
#[derive(Module, Debug)]
pub struct Block<B: MoeBackend> {
    pub input_layernorm: RmsNorm<B>,
    pub self_attn: Mla<B>,
    pub post_attention_layernorm: RmsNorm<B>,
    pub mlp: FeedForward<B>,
}

/// DeepSeek-V3 and its relatives for causal language modelling.
#[derive(Module, Debug)]
pub struct DeepseekV3<B: MoeBackend> {
    /// `[V, D]`.
    pub embed_tokens: Embedding<B>,
    pub layers: Vec<Block<B>>,
    pub norm: RmsNorm<B>,
    /// `[V, D]`; absent when the embedding serves as the head.
    pub lm_head: Option<Linear<B>>,
    config: DeepseekV3Config,
}

impl<B: MoeBackend> DeepseekV3<B> {
    /// A model whose parameters are drawn when they are first read.
    ///
    /// # Errors
    /// When the experts do not divide over the ranks of the builder.
    pub fn new(config: &DeepseekV3Config, pb: &ParamBuilder<B>) -> Result<Self> {
        let (h, v) = (config.hidden_size, config.vocab_size);
        let padding = config.common.pad_token_id.map(|id| id as usize);
        Ok(Self {
            embed_tokens: Embedding::new(&pb.at("embed_tokens"), v, h, config.initializer_range, padding),
            layers: (0..config.num_hidden_layers)
                .map(|index| Block::new(config, index, &pb.at("layers").at(index)))
                .collect::<Result<_>>()?,
            norm: RmsNorm::new(&pb.at("norm"), h, config.rms_norm_eps),
            lm_head: (!config.tie_word_embeddings).then(|| Linear::new(&pb.at("lm_head"), h, v, false, config.matrix_init())),
            config: config.clone(),
        })
    }

    /// The config the model was built from.
    pub fn config(&self) -> &DeepseekV3Config {
        &self.config
    }

    /// Dtype of the residual stream.
    pub fn dtype(&self) -> FloatDType {
        self.embed_tokens.weight.dtype().into()
    }
}

impl<B: MoeBackend> Block<B> {
    fn new(config: &DeepseekV3Config, index: usize, pb: &ParamBuilder<B>) -> Result<Self> {
        let norm = |name: &str| RmsNorm::new(&pb.at(name), config.hidden_size, config.rms_norm_eps);
        let mlp = pb.at("mlp");
        Ok(Self {
            input_layernorm: norm("input_layernorm"),
            self_attn: Mla::new(&pb.at("self_attn"), &attention(config)),
            post_attention_layernorm: norm("post_attention_layernorm"),
            mlp: if config.is_sparse(index) {
                FeedForward::Moe(Moe::new(&mlp, &moe(config))?)
            } else {
                FeedForward::Mlp(Mlp::new(&mlp, &dense(config, config.intermediate_size)))
            },
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
            router,
        })
    }
}

impl<B: MoeBackend> CausalLm<B> for DeepseekV3<B> {
    fn prepare(&self, batch: &HostBatch, past: usize, device: &B::Device) -> Result<ModelInput<B>> {
        batch.validate(self.config.vocab_size)?;
        let table = self.config.rope.table(batch, past, self.config.max_position_embeddings)?;
        // V2 rotates with fp32 tables, V3 with tables in the dtype of the model.
        let dtype = match self.config.generation {
            Generation::V2 => FloatDType::F32,
            Generation::V3 | Generation::KimiK2 | Generation::Glm4MoeLite => self.dtype(),
        };
        let mut input = ModelInput::new(batch, device);
        input.rope = Some(table.tensors(device, dtype));
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
}

fn attention(config: &DeepseekV3Config) -> MlaConfig {
    MlaConfig {
        hidden: config.hidden_size,
        heads: config.num_attention_heads,
        q_rank: config.q_lora_rank,
        kv_rank: config.kv_lora_rank,
        nope_dim: config.qk_nope_head_dim,
        rope_dim: config.qk_rope_head_dim,
        value_dim: config.v_head_dim,
        bias: config.attention_bias,
        scale: config.score_scale,
        layout: if config.rope_interleave {
            RopeLayout::Interleaved
        } else {
            RopeLayout::HalfSplit
        },
        init: config.matrix_init(),
    }
}

fn dense(config: &DeepseekV3Config, inner: usize) -> MlpConfig {
    MlpConfig {
        hidden: config.hidden_size,
        inner,
        activation: MlpActivation::SwiGlu,
        bias: config.mlp_bias,
        init: config.matrix_init(),
    }
}

fn moe(config: &DeepseekV3Config) -> MoeConfig {
    let shared = config.shared_width();
    MoeConfig {
        router: RouterConfig {
            hidden: config.hidden_size,
            desc: config.router.clone(),
            precision: RouterPrecision::Fp32,
            bias: false,
            selection_bias: config.has_correction_bias(),
            init: config.matrix_init(),
        },
        experts: ExpertsConfig {
            num_experts: config.router.num_experts,
            width: config.hidden_size,
            inner: config.moe_intermediate_size,
            activation: ExpertActivation::SwiGlu,
            bias: false,
            init: config.matrix_init(),
        },
        shared: (shared > 0).then(|| dense(config, shared)),
        gated_shared: None,
        latent: None,
    }
}

//! The GLM-4-MoE model: `x <- x + attention(norm(x))`, `x <- x + feed_forward(norm(x))` for every block.

use burn::module::Module;
use burn::tensor::{FloatDType, Int, Tensor};
use burn_ep_backend::{ExpertActivation, MoeBackend};
use burn_moe::Result;
use burn_moe::batch::HostBatch;
use burn_moe::layers::{
    Attention, AttentionConfig, Embedding, ExpertsConfig, FeedForward, Linear, Mlp, MlpActivation, MlpConfig, Moe, MoeConfig, ParamBuilder,
    QkNorm, RmsNorm, RouterConfig, RouterPrecision,
};
use burn_moe::model::{BlockOutput, CausalLm, Head, LayerCache, ModelInput, block_at};

use super::config::Glm4MoeConfig;

/// Attention and feed-forward with a norm before each.
#[derive(Module, Debug)]
pub struct Block<B: MoeBackend> {
    pub input_layernorm: RmsNorm<B>,
    pub self_attn: Attention<B>,
    pub post_attention_layernorm: RmsNorm<B>,
    pub mlp: FeedForward<B>,
}

/// GLM-4-MoE for causal language modelling.
#[derive(Module, Debug)]
pub struct Glm4Moe<B: MoeBackend> {
    /// `[V, D]`.
    pub embed_tokens: Embedding<B>,
    pub layers: Vec<Block<B>>,
    pub norm: RmsNorm<B>,
    /// `[V, D]`; absent when the embedding serves as the head.
    pub lm_head: Option<Linear<B>>,
    config: Glm4MoeConfig,
}

impl<B: MoeBackend> Glm4Moe<B> {
    /// A model whose parameters are drawn when they are first read.
    ///
    /// # Errors
    /// When the experts do not divide over the ranks of the builder.
    pub fn new(config: &Glm4MoeConfig, pb: &ParamBuilder<B>) -> Result<Self> {
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
    pub fn config(&self) -> &Glm4MoeConfig {
        &self.config
    }

    /// Dtype of the residual stream.
    pub fn dtype(&self) -> FloatDType {
        self.embed_tokens.weight.dtype().into()
    }
}

impl<B: MoeBackend> Block<B> {
    fn new(config: &Glm4MoeConfig, index: usize, pb: &ParamBuilder<B>) -> Result<Self> {
        let norm = |name: &str| RmsNorm::new(&pb.at(name), config.hidden_size, config.rms_norm_eps);
        let mlp = pb.at("mlp");
        Ok(Self {
            input_layernorm: norm("input_layernorm"),
            self_attn: Attention::new(&pb.at("self_attn"), &attention(config)),
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

impl<B: MoeBackend> CausalLm<B> for Glm4Moe<B> {
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
}

fn attention(config: &Glm4MoeConfig) -> AttentionConfig {
    AttentionConfig {
        hidden: config.hidden_size,
        heads: config.num_attention_heads,
        kv_heads: config.num_key_value_heads,
        head_dim: config.head_dim,
        qkv_bias: config.attention_bias,
        o_bias: false,
        qk_norm: if config.use_qk_norm {
            QkNorm::Head { eps: config.rms_norm_eps }
        } else {
            QkNorm::None
        },
        clip_qkv: None,
        sinks: false,
        window: None,
        rotary: true,
        init: config.matrix_init(),
    }
}

fn dense(config: &Glm4MoeConfig, inner: usize) -> MlpConfig {
    MlpConfig {
        hidden: config.hidden_size,
        inner,
        activation: MlpActivation::SwiGlu,
        bias: false,
        init: config.matrix_init(),
    }
}

fn moe(config: &Glm4MoeConfig) -> MoeConfig {
    let shared = config.shared_width();
    MoeConfig {
        router: RouterConfig {
            hidden: config.hidden_size,
            desc: config.router.clone(),
            precision: RouterPrecision::Fp32,
            bias: false,
            selection_bias: true,
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

//! The sparse decoder: `x <- x + attention(norm(x))`, `x <- x + feed_forward(norm(x))` for every block.

use burn::module::Module;
use burn::tensor::{FloatDType, Int, Tensor};
use burn_ep_backend::{ExpertActivation, MoeBackend, RouterDesc};
use burn_moe::Result;
use burn_moe::batch::HostBatch;
use burn_moe::layers::{
    Attention, Embedding, ExpertsConfig, FeedForward, Linear, Mlp, MlpActivation, MlpConfig, Moe, MoeConfig, ParamBuilder, RmsNorm,
    RouterConfig, RouterPrecision,
};
use burn_moe::model::{AuxLossSettings, BlockOutput, CausalLm, Head, LayerCache, ModelInput, block_at};

use super::config::SparseConfig;

/// Attention and feed-forward with a norm before each.
#[derive(Module, Debug)]
pub struct Block<B: MoeBackend> {
    pub input_layernorm: RmsNorm<B>,
    pub self_attn: Attention<B>,
    pub post_attention_layernorm: RmsNorm<B>,
    pub mlp: FeedForward<B>,
}

/// Qwen3-MoE, Qwen2-MoE, Mixtral or OLMoE for causal language modelling.
#[derive(Module, Debug)]
pub struct SparseDecoder<B: MoeBackend> {
    /// `[V, D]`.
    pub embed_tokens: Embedding<B>,
    pub layers: Vec<Block<B>>,
    pub norm: RmsNorm<B>,
    /// `[V, D]`; absent when the embedding serves as the head.
    pub lm_head: Option<Linear<B>>,
    config: SparseConfig,
}

impl<B: MoeBackend> SparseDecoder<B> {
    /// A model whose parameters are drawn when they are first read.
    ///
    /// # Errors
    /// When the experts do not divide over the ranks of the builder.
    pub fn new(config: &SparseConfig, pb: &ParamBuilder<B>) -> Result<Self> {
        let c = &config.decoder;
        let (h, v) = (c.hidden_size, c.vocab_size);
        Ok(Self {
            embed_tokens: Embedding::new(&pb.at("embed_tokens"), v, h, c.initializer_range, c.padding_row()),
            layers: (0..c.num_hidden_layers)
                .map(|index| Block::new(config, index, &pb.at("layers").at(index)))
                .collect::<Result<_>>()?,
            norm: RmsNorm::new(&pb.at("norm"), h, c.rms_norm_eps),
            lm_head: (!c.tie_word_embeddings).then(|| Linear::new(&pb.at("lm_head"), h, v, false, config.matrix_init())),
            config: config.clone(),
        })
    }

    /// The config the model was built from.
    pub fn config(&self) -> &SparseConfig {
        &self.config
    }

    /// Dtype of the residual stream.
    pub fn dtype(&self) -> FloatDType {
        self.embed_tokens.weight.dtype().into()
    }
}

impl<B: MoeBackend> Block<B> {
    fn new(config: &SparseConfig, index: usize, pb: &ParamBuilder<B>) -> Result<Self> {
        let c = &config.decoder;
        let norm = |name: &str| RmsNorm::new(&pb.at(name), c.hidden_size, c.rms_norm_eps);
        let mlp = pb.at("mlp");
        Ok(Self {
            input_layernorm: norm("input_layernorm"),
            self_attn: Attention::new(&pb.at("self_attn"), &c.attention(index, config.matrix_init())),
            post_attention_layernorm: norm("post_attention_layernorm"),
            mlp: if config.is_sparse(index) {
                FeedForward::Moe(Moe::new(&mlp, &moe(config))?)
            } else {
                FeedForward::Mlp(Mlp::new(&mlp, &mlp_config(config, config.intermediate_size)))
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

impl<B: MoeBackend> CausalLm<B> for SparseDecoder<B> {
    fn prepare(&self, batch: &HostBatch, past: usize, device: &B::Device) -> Result<ModelInput<B>> {
        let c = &self.config.decoder;
        batch.validate(c.vocab_size)?;
        let table = c.rope.table(batch, past, c.max_position_embeddings)?;
        let mut input = ModelInput::new(batch, device);
        input.rope = Some(table.tensors(device, self.dtype()));
        Ok(input)
    }

    fn num_blocks(&self) -> usize {
        self.layers.len()
    }

    fn vocab_size(&self) -> usize {
        self.config.decoder.vocab_size
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

fn mlp_config(config: &SparseConfig, inner: usize) -> MlpConfig {
    MlpConfig {
        hidden: config.decoder.hidden_size,
        inner,
        activation: MlpActivation::SwiGlu,
        bias: false,
        init: config.matrix_init(),
    }
}

fn moe(config: &SparseConfig) -> MoeConfig {
    MoeConfig {
        router: RouterConfig {
            hidden: config.decoder.hidden_size,
            desc: RouterDesc::softmax(config.num_experts, config.num_experts_per_tok, config.norm_topk_prob),
            precision: RouterPrecision::Model,
            bias: false,
            selection_bias: false,
            init: config.matrix_init(),
        },
        experts: ExpertsConfig {
            num_experts: config.num_experts,
            width: config.decoder.hidden_size,
            inner: config.moe_intermediate_size,
            activation: ExpertActivation::SwiGlu,
            bias: false,
            init: config.matrix_init(),
        },
        shared: None,
        gated_shared: config.shared_intermediate_size.map(|inner| mlp_config(config, inner)),
        latent: None,
    }
}

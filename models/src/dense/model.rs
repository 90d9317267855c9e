//! The dense decoder: `x <- x + attention(norm(x))`, `x <- x + mlp(norm(x))` for every block.

use burn::module::Module;
use burn::tensor::{FloatDType, Int, Tensor};
use burn_ep_backend::MoeBackend;
use burn_moe::Result;
use burn_moe::batch::HostBatch;
use burn_moe::layers::{Attention, Embedding, Linear, Mlp, MlpActivation, MlpConfig, ParamBuilder, RmsNorm};
use burn_moe::model::{BlockOutput, CausalLm, Head, LayerCache, ModelInput, block_at};

use super::config::DenseConfig;

/// Attention and feed-forward with a norm before each.
#[derive(Module, Debug)]
pub struct Block<B: MoeBackend> {
    pub input_layernorm: RmsNorm<B>,
    pub self_attn: Attention<B>,
    pub post_attention_layernorm: RmsNorm<B>,
    pub mlp: Mlp<B>,
}

/// Llama, Qwen2, Qwen3 or Mistral for causal language modelling.
#[derive(Module, Debug)]
pub struct DenseDecoder<B: MoeBackend> {
    /// `[V, D]`.
    pub embed_tokens: Embedding<B>,
    pub layers: Vec<Block<B>>,
    pub norm: RmsNorm<B>,
    /// `[V, D]`; absent when the embedding serves as the head.
    pub lm_head: Option<Linear<B>>,
    config: DenseConfig,
}

impl<B: MoeBackend> DenseDecoder<B> {
    /// A model whose parameters are drawn when they are first read.
    ///
    /// # Errors
    /// Never; the signature is that of all families.
    pub fn new(config: &DenseConfig, pb: &ParamBuilder<B>) -> Result<Self> {
        let c = &config.decoder;
        let (h, v) = (c.hidden_size, c.vocab_size);
        Ok(Self {
            embed_tokens: Embedding::new(&pb.at("embed_tokens"), v, h, c.initializer_range, c.padding_row()),
            layers: (0..c.num_hidden_layers)
                .map(|index| Block::new(config, index, &pb.at("layers").at(index)))
                .collect(),
            norm: RmsNorm::new(&pb.at("norm"), h, c.rms_norm_eps),
            lm_head: (!c.tie_word_embeddings).then(|| Linear::new(&pb.at("lm_head"), h, v, false, config.matrix_init())),
            config: config.clone(),
        })
    }

    /// The config the model was built from.
    pub fn config(&self) -> &DenseConfig {
        &self.config
    }

    /// Dtype of the residual stream.
    pub fn dtype(&self) -> FloatDType {
        self.embed_tokens.weight.dtype().into()
    }
}

impl<B: MoeBackend> Block<B> {
    fn new(config: &DenseConfig, index: usize, pb: &ParamBuilder<B>) -> Self {
        let c = &config.decoder;
        let norm = |name: &str| RmsNorm::new(&pb.at(name), c.hidden_size, c.rms_norm_eps);
        let mlp = MlpConfig {
            hidden: c.hidden_size,
            inner: config.intermediate_size,
            activation: MlpActivation::SwiGlu,
            bias: config.mlp_bias,
            init: config.matrix_init(),
        };
        Self {
            input_layernorm: norm("input_layernorm"),
            self_attn: Attention::new(&pb.at("self_attn"), &c.attention(index, config.matrix_init())),
            post_attention_layernorm: norm("post_attention_layernorm"),
            mlp: Mlp::new(&pb.at("mlp"), &mlp),
        }
    }

    fn forward(&self, x_bsd: Tensor<B, 3>, input: &ModelInput<B>, cache: Option<&mut LayerCache<B>>) -> Result<Tensor<B, 3>> {
        let h_bsd = self.input_layernorm.forward(x_bsd.clone())?;
        let out_bsd = self.self_attn.forward(h_bsd, input, cache)?;
        let (x_bsd, h_bsd) = self.post_attention_layernorm.forward_sum(x_bsd, out_bsd)?;
        Ok(x_bsd + self.mlp.forward(h_bsd)?)
    }
}

impl<B: MoeBackend> CausalLm<B> for DenseDecoder<B> {
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
        _replay: Option<&Tensor<B, 2, Int>>,
        cache: Option<&mut LayerCache<B>>,
    ) -> Result<BlockOutput<B>> {
        let block = block_at(&self.layers, index)?;
        Ok(BlockOutput {
            x_bsd: block.forward(x_bsd, input, cache)?,
            router: None,
        })
    }

    fn head(&self, x_bsd: Tensor<B, 3>) -> Result<Head<B>> {
        Ok(Head::new(self.norm.forward(x_bsd)?, self.lm_head.as_ref(), &self.embed_tokens))
    }
}

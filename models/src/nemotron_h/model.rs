//! The Nemotron-H model: `x <- x + mixer(norm(x))` for every block.

use burn::module::Module;
use burn::tensor::{FloatDType, Int, Tensor};
use burn_ep_backend::{ExpertActivation, MoeBackend, SsdDesc};
use burn_moe::Result;
use burn_moe::batch::HostBatch;
use burn_moe::layers::{
    Attention, AttentionConfig, Embedding, ExpertsConfig, LatentConfig, Linear, Mamba2, Mamba2Config, Mlp, MlpActivation, MlpConfig, Moe,
    MoeConfig, ParamBuilder, QkNorm, RmsNorm, RouterConfig, RouterPrecision,
};
use burn_moe::model::{BlockOutput, CausalLm, Head, LayerCache, ModelInput, block_at};

use super::config::NemotronHConfig;
use super::schedule::LayerKind;

/// Mixer of a block.
// A model holds a handful of blocks; their size does not matter, the variant's name in the module path does not either.
#[allow(clippy::large_enum_variant)]
#[derive(Module, Debug)]
pub enum Mixer<B: MoeBackend> {
    Mamba(Mamba2<B>),
    Attention(Attention<B>),
    Moe(Moe<B>),
    Mlp(Mlp<B>),
}

/// Norm and mixer.
#[derive(Module, Debug)]
pub struct Block<B: MoeBackend> {
    pub norm: RmsNorm<B>,
    pub mixer: Mixer<B>,
}

/// Nemotron-H for causal language modelling.
#[derive(Module, Debug)]
pub struct NemotronH<B: MoeBackend> {
    /// `[V, D]`.
    pub embeddings: Embedding<B>,
    pub layers: Vec<Block<B>>,
    pub norm_f: RmsNorm<B>,
    /// `[V, D]`, never tied.
    pub lm_head: Linear<B>,
    config: NemotronHConfig,
}

impl<B: MoeBackend> NemotronH<B> {
    /// A model whose parameters are drawn when they are first read.
    ///
    /// # Errors
    /// When the experts do not divide over the ranks of the builder.
    pub fn new(config: &NemotronHConfig, pb: &ParamBuilder<B>) -> Result<Self> {
        let std = config.initializer_range;
        let layers = config.layers.iter().enumerate();
        Ok(Self {
            embeddings: Embedding::new(&pb.at("embeddings"), config.vocab_size, config.hidden_size, std, None),
            layers: layers
                .map(|(index, kind)| Block::new(config, *kind, &pb.at("layers").at(index)))
                .collect::<Result<_>>()?,
            norm_f: RmsNorm::new(&pb.at("norm_f"), config.hidden_size, config.norm_eps),
            lm_head: Linear::new(
                &pb.at("lm_head"),
                config.hidden_size,
                config.vocab_size,
                false,
                config.matrix_init(),
            ),
            config: config.clone(),
        })
    }

    /// The config the model was built from.
    pub fn config(&self) -> &NemotronHConfig {
        &self.config
    }

    /// Dtype of the residual stream.
    pub fn dtype(&self) -> FloatDType {
        self.embeddings.weight.dtype().into()
    }
}

impl<B: MoeBackend> Block<B> {
    fn new(config: &NemotronHConfig, kind: LayerKind, pb: &ParamBuilder<B>) -> Result<Self> {
        let mixer = pb.at("mixer");
        Ok(Self {
            norm: RmsNorm::new(&pb.at("norm"), config.hidden_size, config.norm_eps),
            mixer: match kind {
                LayerKind::Mamba => Mixer::Mamba(Mamba2::new(&mixer, &mamba(config))),
                LayerKind::Attention => Mixer::Attention(Attention::new(&mixer, &attention(config))),
                LayerKind::Moe => Mixer::Moe(Moe::new(&mixer, &moe(config))?),
                LayerKind::Mlp => Mixer::Mlp(Mlp::new(&mixer, &mlp(config, config.intermediate_size))),
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
        let h_bsd = self.norm.forward(x_bsd.clone())?;
        let (out_bsd, router) = match &self.mixer {
            Mixer::Mamba(mixer) => (mixer.forward(h_bsd, input, cache)?, None),
            Mixer::Attention(mixer) => (mixer.forward(h_bsd, input, cache)?, None),
            Mixer::Moe(mixer) => {
                let (out, router) = mixer.forward(h_bsd, input, replay)?;
                (out, Some(router))
            }
            Mixer::Mlp(mixer) => (mixer.forward(h_bsd)?, None),
        };
        Ok(BlockOutput {
            x_bsd: x_bsd + out_bsd,
            router,
        })
    }
}

impl<B: MoeBackend> CausalLm<B> for NemotronH<B> {
    fn prepare(&self, batch: &HostBatch, _past: usize, device: &B::Device) -> Result<ModelInput<B>> {
        batch.validate(self.config.vocab_size)?;
        Ok(ModelInput::new(batch, device))
    }

    fn num_blocks(&self) -> usize {
        self.layers.len()
    }

    fn vocab_size(&self) -> usize {
        self.config.vocab_size
    }

    fn embed(&self, input: &ModelInput<B>) -> Result<Tensor<B, 3>> {
        Ok(self.embeddings.forward(input.ids_bs.clone()))
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
        Ok(Head {
            hidden_td: self.norm_f.forward(x_bsd)?.flatten(0, 1),
            weight_vd: self.lm_head.weight.val(),
        })
    }
}

fn mamba(config: &NemotronHConfig) -> Mamba2Config {
    let m = &config.mamba;
    let (dt_min, dt_max) = config.dt_bounds();
    Mamba2Config {
        hidden: config.hidden_size,
        heads: m.num_heads,
        head_dim: m.head_dim,
        groups: m.n_groups,
        state: m.state_size,
        conv_kernel: m.conv_kernel,
        conv_bias: m.conv_bias,
        proj_bias: m.proj_bias,
        norm_eps: config.norm_eps,
        scan: SsdDesc {
            chunk: m.chunk_size,
            dt_min: dt_min as f32,
            dt_max: dt_max as f32,
        },
        reset_documents: config.parity.mamba_document_reset,
        init: config.matrix_init(),
        out_init: config.mamba_out_init(),
        dt_init: config.dt_init(),
    }
}

fn attention(config: &NemotronHConfig) -> AttentionConfig {
    AttentionConfig {
        hidden: config.hidden_size,
        heads: config.num_attention_heads,
        kv_heads: config.num_key_value_heads,
        head_dim: config.head_dim,
        qkv_bias: false,
        o_bias: false,
        qk_norm: QkNorm::None,
        clip_qkv: None,
        sinks: false,
        window: None,
        rotary: false,
        init: config.matrix_init(),
    }
}

fn mlp(config: &NemotronHConfig, inner: usize) -> MlpConfig {
    MlpConfig {
        hidden: config.hidden_size,
        inner,
        activation: MlpActivation::Relu2,
        bias: config.mlp_bias,
        init: config.matrix_init(),
    }
}

fn moe(config: &NemotronHConfig) -> MoeConfig {
    let settings = &config.moe;
    MoeConfig {
        router: RouterConfig {
            hidden: config.hidden_size,
            desc: settings.router.clone(),
            precision: RouterPrecision::Fp32,
            bias: false,
            selection_bias: true,
            init: config.matrix_init(),
        },
        experts: ExpertsConfig {
            num_experts: settings.router.num_experts,
            width: config.expert_width(),
            inner: settings.intermediate_size,
            activation: ExpertActivation::Relu2,
            bias: false,
            init: config.matrix_init(),
        },
        shared: Some(mlp(config, settings.shared_intermediate_size)),
        gated_shared: None,
        latent: settings.latent_size.map(|_| LatentConfig {
            bias: config.mlp_bias,
            init: config.matrix_init(),
        }),
    }
}

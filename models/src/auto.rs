//! One model type for all families.

use burn::module::Module;
use burn::tensor::{FloatDType, Int, Tensor};
use burn_ep_backend::MoeBackend;
use burn_ep_backend::comm::EpGroup;
use burn_moe::Result;
use burn_moe::batch::HostBatch;
use burn_moe::layers::ParamBuilder;
use burn_moe::model::{AuxLossSettings, BlockOutput, CausalLm, Head, LayerCache, ModelInput};

use crate::nemotron_h::NemotronH;
use crate::qwen3_moe::Qwen3Moe;
use crate::registry::{AutoConfig, Capabilities};

/// A causal language model of any known family.
// A program holds one; the size of the variants does not matter.
#[allow(clippy::large_enum_variant)]
#[derive(Module, Debug)]
pub enum AutoModelForCausalLm<B: MoeBackend> {
    NemotronH(NemotronH<B>),
    Qwen3Moe(Qwen3Moe<B>),
}

/// How to build a model without a checkpoint.
#[derive(Debug, Clone, Default)]
pub struct FromConfigOptions {
    /// Dtype of the parameters; None: the config's, or fp32 when it names none.
    pub dtype: Option<FloatDType>,
    /// Seed of the initial values.
    pub seed: u64,
    /// Hold only this rank's experts.
    pub ep: Option<EpGroup>,
}

impl<B: MoeBackend> AutoModelForCausalLm<B> {
    /// A model with the family's initial values. They are drawn when they are first read, so building is free, and depend on
    /// the seed alone: any number of ranks holds slices of the same model.
    ///
    /// # Errors
    /// When the experts do not divide evenly over the ranks.
    pub fn from_config(config: &AutoConfig, options: &FromConfigOptions, device: &B::Device) -> Result<Self> {
        if let Some(ep) = &options.ep {
            config.check_expert_parallel(ep.size())?;
        }
        let dtype = options.dtype.or(config.common().dtype).unwrap_or(FloatDType::F32);
        let pb = ParamBuilder::new(device, dtype).with_seed(options.seed).with_ep(options.ep.clone());
        Ok(match config {
            AutoConfig::NemotronH(config) => Self::NemotronH(NemotronH::new(config, &pb)?),
            AutoConfig::Qwen3Moe(config) => Self::Qwen3Moe(Qwen3Moe::new(config, &pb)?),
        })
    }

    /// The config the model was built from.
    pub fn config(&self) -> AutoConfig {
        match self {
            Self::NemotronH(model) => AutoConfig::NemotronH(model.config().clone()),
            Self::Qwen3Moe(model) => AutoConfig::Qwen3Moe(model.config().clone()),
        }
    }

    /// What the model can do.
    pub fn capabilities(&self) -> Capabilities {
        self.config().capabilities()
    }

    /// Dtype of the residual stream.
    pub fn dtype(&self) -> FloatDType {
        match self {
            Self::NemotronH(model) => model.dtype(),
            Self::Qwen3Moe(model) => model.dtype(),
        }
    }
}

/// Calls a method on the model inside, whatever its family.
macro_rules! delegate {
    ($self:ident, $model:ident => $call:expr) => {
        match $self {
            Self::NemotronH($model) => $call,
            Self::Qwen3Moe($model) => $call,
        }
    };
}

impl<B: MoeBackend> CausalLm<B> for AutoModelForCausalLm<B> {
    fn prepare(&self, batch: &HostBatch, past: usize, device: &B::Device) -> Result<ModelInput<B>> {
        delegate!(self, model => model.prepare(batch, past, device))
    }

    fn num_blocks(&self) -> usize {
        delegate!(self, model => model.num_blocks())
    }

    fn vocab_size(&self) -> usize {
        delegate!(self, model => model.vocab_size())
    }

    fn embed(&self, input: &ModelInput<B>) -> Result<Tensor<B, 3>> {
        delegate!(self, model => model.embed(input))
    }

    fn block(
        &self,
        index: usize,
        x_bsd: Tensor<B, 3>,
        input: &ModelInput<B>,
        replay: Option<&Tensor<B, 2, Int>>,
        cache: Option<&mut LayerCache<B>>,
    ) -> Result<BlockOutput<B>> {
        delegate!(self, model => model.block(index, x_bsd, input, replay, cache))
    }

    fn head(&self, x_bsd: Tensor<B, 3>) -> Result<Head<B>> {
        delegate!(self, model => model.head(x_bsd))
    }

    fn aux_loss(&self) -> Option<AuxLossSettings> {
        delegate!(self, model => model.aux_loss())
    }
}

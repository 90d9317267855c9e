//! What every family says about itself from its config alone.

use burn_moe::checkpoint::WeightMap;
use serde_json::{Map, Value};

use crate::counts::ParamCount;
use crate::json::CommonConfig;

/// The config of one family. Beside these methods each has, as plain items, `NAMES` (pairs of `model_type` and
/// architecture) and `parse_as(model_type, raw)`; the table in `registry.rs` asks for both.
pub trait FamilyConfig {
    /// Value of `model_type`, one of the family's `NAMES`.
    fn model_type(&self) -> &'static str;
    /// Token ids and dtype.
    fn common(&self) -> &CommonConfig;
    /// The file as read, unknown fields included.
    fn raw(&self) -> &Map<String, Value>;
    /// Vocabulary size V.
    fn vocab_size(&self) -> usize;
    /// Names of the weights in the files.
    fn weight_map(&self) -> WeightMap;
    /// Parameters by part.
    fn parameters(&self) -> ParamCount;
    /// Operations per token of one training step over sequences of `seq` tokens.
    fn flops_per_token(&self, seq: usize) -> f64;
    /// What the model can do.
    fn capabilities(&self) -> Capabilities;
    /// The switch that makes input and output embedding one matrix, for families that honour it.
    fn tied_mut(&mut self) -> Option<&mut bool> {
        None
    }
}

/// What a model can do, for programs that must decide before they run it. A family states what differs from
/// [`Capabilities::default`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capabilities {
    /// Routed experts per MoE layer, with the config field that holds the number; None for a dense model. They can be divided
    /// over expert-parallel ranks.
    pub routed_experts: Option<(&'static str, usize)>,
    /// Blocks with a router.
    pub moe_blocks: usize,
    /// The config switches an auxiliary load-balancing loss on.
    pub aux_loss: bool,
    /// A correction bias shifts the choice of experts and can be moved by load statistics.
    pub router_bias: bool,
    /// Input and output embedding are one matrix.
    pub tied_embeddings: bool,
    /// Longest sequence, for models whose positions end somewhere.
    pub max_positions: Option<usize>,
    /// Several documents per row do not see each other.
    pub packing: bool,
    /// Low-rank adapters.
    pub lora: bool,
    /// Values of `quantization_config.quant_method` that are read (and decoded to the dtype of the model).
    pub quantized_load: &'static [&'static str],
    /// Layouts that `save_pretrained` writes, the published one first.
    pub export: &'static [ExportLayout],
}

/// How routed experts lie in saved files. Loading accepts every layout that a family's weight map knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExportLayout {
    /// No routed experts: one tensor per parameter.
    Plain,
    /// One tensor per expert and matrix.
    PerExpert,
    /// The matrices of all experts in one tensor.
    Stacked,
    /// Packed weights with their scales, in the format of `quantized_load`; written with `SaveOptions::quantised`.
    Quantised,
}

impl Default for Capabilities {
    /// A dense model in bf16, fp16 or fp32.
    fn default() -> Self {
        Self {
            routed_experts: None,
            moe_blocks: 0,
            aux_loss: false,
            router_bias: false,
            tied_embeddings: false,
            max_positions: None,
            packing: true,
            lora: false,
            quantized_load: &[],
            export: &[ExportLayout::Plain],
        }
    }
}

impl Capabilities {
    /// Experts can be divided over ranks.
    pub fn expert_parallel(&self) -> bool {
        self.routed_experts.is_some()
    }
}

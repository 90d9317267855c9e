//! Descriptors: the host-side settings of each op, one printable struct per op family.

use serde::{Deserialize, Serialize};

/// How router logits become scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RouterScore {
    /// Softmax over all experts in fp32, then top-k (Qwen3-MoE, Mixtral).
    Softmax,
    /// Top-k on the logits, then softmax over the chosen k (GPT-OSS).
    TopKSoftmax,
    /// Sigmoid per expert; a selection bias may shift the choice but never the weights (Nemotron-H, DeepSeek-V3).
    Sigmoid,
}

/// What a group of experts is ranked by when only some groups are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupScore {
    /// Its best score (DeepSeek-V2).
    Best,
    /// The sum of its two best scores (DeepSeek-V3).
    TwoBest,
}

/// Settings of [`crate::ops::route`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RouterDesc {
    pub num_experts: usize,
    pub top_k: usize,
    pub score: RouterScore,
    /// Divide the k weights by their sum. Softmax: no epsilon. Sigmoid: `sum + 1e-20`.
    pub renormalize: bool,
    /// Multiply the weights at the end (`routed_scaling_factor`).
    pub scale: f32,
    /// Expert groups (`n_group`); 1 switches group limiting off.
    pub groups: usize,
    /// Groups kept (`topk_group`), by their biased scores.
    pub top_groups: usize,
    pub group_score: GroupScore,
    /// Ignore the logits for the choice: slot j of token t takes expert `(t*K + j) mod E`, weights from the scores.
    pub force_balanced: bool,
}

impl RouterDesc {
    /// Softmax routing without groups, scale 1.
    pub fn softmax(num_experts: usize, top_k: usize, renormalize: bool) -> Self {
        Self {
            num_experts,
            top_k,
            score: RouterScore::Softmax,
            renormalize,
            scale: 1.0,
            groups: 1,
            top_groups: 1,
            group_score: GroupScore::TwoBest,
            force_balanced: false,
        }
    }
}

/// Expert activation between the up and the down product.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExpertActivation {
    /// `silu(gate) * up`; the up weight is `[E, 2F, D]`, gate rows first.
    SwiGlu,
    /// `max(x, 0)^2` without gate; the up weight is `[E, F, D]`.
    Relu2,
    /// GPT-OSS: gate capped at `limit`, up clamped to `±limit`, `(up + 1) * gate * sigmoid(alpha * gate)`;
    /// rows of the up weight alternate gate, up.
    ClampedSwiGlu { alpha: f32, limit: f32 },
}

impl ExpertActivation {
    /// Rows of the up weight per unit of expert width F.
    pub fn up_factor(self) -> usize {
        match self {
            Self::Relu2 => 1,
            Self::SwiGlu | Self::ClampedSwiGlu { .. } => 2,
        }
    }
}

/// Settings of [`crate::ops::attention`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct AttentionDesc {
    pub causal: bool,
    /// Keys `j > i - window` are visible; the window counts the token itself. None: no window.
    pub window: Option<usize>,
    /// Multiplies the scores; usually `head_dim^-0.5`.
    pub scale: f32,
}

/// Where an RMSNorm rounds (spec README, "Common building blocks").
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum NormRounding {
    /// `w * cast(y)`: Llama, Qwen, DeepSeek, Nemotron-H.
    Llama,
    /// `cast(w32 * y)`: GPT-OSS.
    Fp32Product,
}

/// Settings of [`crate::ops::rms_norm`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct NormDesc {
    pub eps: f32,
    pub rounding: NormRounding,
}

/// Which channel pairs a rotary embedding turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum RopeLayout {
    /// Channel j with j + d/2 ("rotate half").
    HalfSplit,
    /// Channel 2j with 2j + 1.
    Interleaved,
}

/// Settings of [`crate::ops::ssd_scan`] (Mamba-2).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct SsdDesc {
    /// Chunk length Q of the chunked algorithm; any value gives the same result. The CUDA kernels always take 64.
    pub chunk: usize,
    /// Clamp of the step `delta = softplus(dt + dt_bias)`.
    pub dt_min: f32,
    pub dt_max: f32,
}

/// Settings of [`crate::ops::linear_cross_entropy`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CrossEntropyDesc {
    /// Rows with this label do not count (-100 in Hugging Face data).
    pub ignore_index: i64,
    /// Rows of fp32 logits in memory at a time; a kernel that keeps them in 16 bits takes twice as many. More rows round the
    /// weight's gradient less often on backends that add it up in its own dtype.
    pub chunk: usize,
}

impl Default for CrossEntropyDesc {
    fn default() -> Self {
        Self {
            ignore_index: -100,
            // 428 MB beside a vocabulary of 152k
            chunk: 704,
        }
    }
}

/// Settings of one AdamW update (decoupled weight decay, bias-corrected moments).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct AdamWDesc {
    pub lr: f64,
    pub beta1: f32,
    pub beta2: f32,
    pub eps: f32,
    pub weight_decay: f32,
    /// 1 for the first update.
    pub step: u64,
    /// Seed of stochastic rounding: bf16 moments, and a bf16 parameter without fp32 copy, are rounded up or down with
    /// probabilities that keep the mean, so that changes below half a unit in the last place add up over the steps. None: to
    /// nearest.
    pub stochastic_rounding: Option<u32>,
}

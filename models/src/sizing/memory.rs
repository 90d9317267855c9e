//! Memory of one rank, before anything is allocated.

use std::fmt;

use burn::tensor::FloatDType;
use burn_ep_backend::CrossEntropyDesc;
use burn_moe::optim::{AdamWConfig, MomentDType};
use burn_moe::train::Recompute;
use burn_moe::{Error, Result};
use serde::Serialize;

use super::layers::layer_sizes;
use crate::AutoConfig;

/// Name of the routed experts among the parts of a model.
const EXPERTS: &str = "routed experts";
const GIB: f64 = (1u64 << 30) as f64;

/// What decides how much memory a rank needs, besides the model.
#[derive(Debug, Clone)]
pub struct MemorySettings {
    /// Dtype of the parameters.
    pub dtype: FloatDType,
    /// None: no optimizer, and no gradients kept for one.
    pub optimizer: Option<AdamWConfig>,
    /// Micro-batches per step: from two on, gradients are summed in fp32.
    pub micro_batches: usize,
    /// Rows of a micro-batch on this rank.
    pub rows: usize,
    /// Tokens per row.
    pub seq: usize,
    pub recompute: Recompute,
    /// Ranks of the job.
    pub world: usize,
    /// Ranks that share the experts.
    pub ep: usize,
    /// The optimizer state is dealt over the ranks that hold the same parameter.
    pub shard_optimizer: bool,
    /// All gradients are there at once, before the update; with the optimizer in the backward those of one segment are.
    pub gradients_kept: bool,
}

impl MemorySettings {
    /// One rank with all experts, bf16 parameters, AdamW with its defaults, nothing recomputed.
    pub fn new(rows: usize, seq: usize) -> Self {
        Self {
            dtype: FloatDType::BF16,
            optimizer: Some(AdamWConfig::default()),
            micro_batches: 1,
            rows,
            seq,
            recompute: Recompute::None,
            world: 1,
            ep: 1,
            shard_optimizer: true,
            gradients_kept: true,
        }
    }

    /// Bytes of optimizer state for each parameter.
    fn state_bytes(&self) -> f64 {
        let Some(optimizer) = &self.optimizer else { return 0.0 };
        let moments = match optimizer.moments {
            MomentDType::F32 => 8.0,
            MomentDType::Param => 2.0 * bytes(self.dtype),
            // a code each, and a scale for 256 of them
            MomentDType::Block8 => 2.0 * (1.0 + 4.0 / 256.0),
        };
        let master = optimizer.master_weights && !matches!(self.dtype, FloatDType::F32 | FloatDType::F64);
        moments + if master { 4.0 } else { 0.0 }
    }
}

pub(super) fn bytes(dtype: FloatDType) -> f64 {
    match dtype {
        FloatDType::F64 => 8.0,
        FloatDType::F32 | FloatDType::Flex32 => 4.0,
        FloatDType::F16 | FloatDType::BF16 => 2.0,
    }
}

/// Bytes that one rank needs at the height of a step. What the allocator, the driver and its kernels hold besides is not in it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct MemoryPlan {
    /// Parameters that every rank holds.
    pub dense_parameters: u64,
    /// Routed experts of this rank.
    pub expert_parameters: u64,
    pub weights: u64,
    pub gradients: u64,
    pub optimizer: u64,
    /// Estimate: what the backward pass needs, with routing spread evenly.
    pub activations: u64,
    /// Estimate: logits of a chunk of the loss, a recomputed layer, rows under way between ranks.
    pub workspace: u64,
}

impl MemoryPlan {
    /// The plan of any rank: all need the same.
    ///
    /// # Errors
    /// Experts that do not divide over `ep`, or a world that is no multiple of it.
    pub fn new(config: &AutoConfig, settings: &MemorySettings) -> Result<Self> {
        let (world, ep) = (settings.world, settings.ep);
        if ep == 0 || world == 0 || !world.is_multiple_of(ep) {
            return Err(Error::config(
                "ep",
                ep,
                format!("a positive divisor of the {world} ranks of the job"),
            ));
        }
        config.check_expert_parallel(ep)?;
        let count = config.parameters();
        let all_experts = count.parts.iter().filter(|(part, _)| *part == EXPERTS).map(|(_, n)| n).sum::<u64>();
        let dense = count.total() - all_experts;
        let experts = all_experts / ep as u64;
        let parameters = (dense + experts) as f64;
        let width = bytes(settings.dtype);

        let sum_width = if settings.micro_batches > 1 { 4.0f64.max(width) } else { width };
        let gradients = match (&settings.optimizer, settings.gradients_kept) {
            (Some(_), true) => parameters * sum_width,
            (Some(_), false) => largest_segment(config, dense as f64, experts as f64) * width,
            (None, _) => 0.0,
        };
        let holders = |ranks: usize| if settings.shard_optimizer { ranks as f64 } else { 1.0 };
        let optimizer = (dense as f64 / holders(world) + experts as f64 / holders(world / ep)) * settings.state_bytes();

        let tokens = (settings.rows * settings.seq) as f64;
        let hidden = hidden_size(config) as f64;
        let layers = layer_sizes(config);
        let layer = |size: &super::layers::LayerSize| {
            // Across ranks the rows that arrived and the results that came back are kept as well.
            let moved = size.routed.filter(|_| ep > 1).map_or(0, |(k, row)| 2 * k * row);
            tokens * ((size.kept + moved) as f64 * width + 4.0 * size.kept_fp32 as f64)
        };
        let mut activations = 0.0;
        let mut recomputed = 0.0f64;
        for (index, size) in layers.iter().enumerate() {
            match settings.recompute.recomputes(index) {
                true => {
                    activations += tokens * hidden * width;
                    recomputed = recomputed.max(layer(size));
                }
                false => activations += layer(size),
            }
        }
        let rows = CrossEntropyDesc::default().chunk.min(settings.rows * settings.seq);
        let logits = (rows * config.vocab_size()) as f64 * (4.0 + width);
        let moving = layers
            .iter()
            .filter_map(|size| size.routed)
            .map(|(k, row)| k * row)
            .max()
            .unwrap_or(0);
        // permuted rows and their gradients, in a layer
        let moving = 2.0 * tokens * moving as f64 * width;
        Ok(Self {
            dense_parameters: dense,
            expert_parameters: experts,
            weights: (parameters * width) as u64,
            gradients: gradients as u64,
            optimizer: optimizer as u64,
            activations: activations as u64,
            workspace: (recomputed + logits + moving) as u64,
        })
    }

    /// Weights, gradients and optimizer state, which are known exactly.
    pub fn fixed(&self) -> u64 {
        self.weights + self.gradients + self.optimizer
    }

    /// Everything.
    pub fn total(&self) -> u64 {
        self.fixed() + self.activations + self.workspace
    }

    /// Compares with what a device has: an error when not even weights, gradients and optimizer state fit, a warning in the log
    /// when they fit but the estimated rest does not.
    ///
    /// # Errors
    /// With the largest part and what would make it smaller.
    pub fn check(&self, available: u64) -> Result<()> {
        let gib = |bytes: u64| bytes as f64 / GIB;
        if self.total() > available {
            tracing::warn!(
                planned_gib = gib(self.total()),
                available_gib = gib(available),
                "the memory plan is larger than the device; activations are an estimate"
            );
        }
        if self.fixed() <= available {
            return Ok(());
        }
        Err(Error::config(
            "memory",
            format!(
                "{:.1} GiB for weights ({:.1}), gradients ({:.1}) and optimizer state ({:.1}) of each rank",
                gib(self.fixed()),
                gib(self.weights),
                gib(self.gradients),
                gib(self.optimizer)
            ),
            format!(
                "at most the {:.1} GiB of the device: spread the experts over more ranks, keep moments in the dtype of the parameters or in 8 bits, leave the fp32 copy of the weights out, or update in the backward",
                gib(available)
            ),
        ))
    }
}

/// Parameters of the largest segment: embedding, head, or a block with experts.
fn largest_segment(config: &AutoConfig, dense: f64, experts: f64) -> f64 {
    let table = (config.vocab_size() * hidden_size(config)) as f64;
    let can = config.capabilities();
    let block = (dense - table).max(0.0) / layer_sizes(config).len().max(1) as f64;
    table.max(block + experts / can.moe_blocks.max(1) as f64)
}

fn hidden_size(config: &AutoConfig) -> usize {
    match config {
        AutoConfig::NemotronH(c) => c.hidden_size,
        AutoConfig::Sparse(c) => c.decoder.hidden_size,
        AutoConfig::Dense(c) => c.decoder.hidden_size,
        AutoConfig::GptOss(c) => c.hidden_size,
        AutoConfig::Glm4Moe(c) => c.hidden_size,
        AutoConfig::DeepseekV3(c) => c.hidden_size,
    }
}

impl fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (unit, size) = if self.total() >= 1 << 30 {
            ("GiB", GIB)
        } else {
            ("MiB", GIB / 1024.0)
        };
        let mut row = |name: &str, bytes: u64| writeln!(f, "{name:<18} {:>9.2} {unit}", bytes as f64 / size);
        row("weights", self.weights)?;
        row("gradients", self.gradients)?;
        row("optimizer state", self.optimizer)?;
        row("activations, about", self.activations)?;
        row("workspace, about", self.workspace)?;
        write!(f, "{:<18} {:>9.2} {unit} a rank", "together", self.total() as f64 / size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::benchmark::Preset;

    fn preset(name: &str, layers: Option<usize>) -> AutoConfig {
        Preset::find(name).unwrap().config(layers, None).unwrap()
    }

    /// AdamW with moments in the dtype of the parameters, as the benchmark measures.
    fn benchmarked(rows: usize) -> MemorySettings {
        MemorySettings {
            optimizer: Some(AdamWConfig {
                master_weights: false,
                moments: MomentDType::Param,
                ..AdamWConfig::default()
            }),
            ..MemorySettings::new(rows, 4096)
        }
    }

    /// Peaks of `benches/RESULTS.md`, 2026-12-01, one H200, in GiB.
    #[test]
    fn plans_are_within_five_percent_of_what_was_measured() {
        for (name, layers, rows, measured) in [
            ("qwen3_30b_a3b", 8, 4, 51.4),
            ("qwen3_30b_a3b", 8, 2, 47.7),
            ("nemotron3_nano", 14, 1, 71.2),
        ] {
            let plan = MemoryPlan::new(&preset(name, Some(layers)), &benchmarked(rows)).unwrap();
            let planned = plan.total() as f64 / GIB;
            assert!(
                (planned / measured - 1.0).abs() < 0.05,
                "{name}, {rows} rows: planned {planned:.1}, measured {measured}\n{plan}"
            );
        }
    }

    #[test]
    fn parts_follow_from_parameters_and_mesh() {
        let config = preset("qwen3_30b_a3b", None);
        let on = |world: usize, ep: usize| {
            let settings = MemorySettings {
                world,
                ep,
                ..benchmarked(1)
            };
            MemoryPlan::new(&config, &settings).unwrap()
        };
        let (one, eight, mesh) = (on(1, 1), on(8, 8), on(16, 8));
        assert_eq!(one.dense_parameters + one.expert_parameters, config.parameters().total());
        assert_eq!(eight.expert_parameters * 8, one.expert_parameters);
        assert_eq!(one.weights, 2 * config.parameters().total());
        assert_eq!(one.optimizer, 2 * one.weights);
        let dense = one.dense_parameters as f64;
        assert!((eight.optimizer as f64 / (4.0 * (dense / 8.0 + eight.expert_parameters as f64)) - 1.0).abs() < 1e-9);
        // Replicas of the experts halve their state.
        assert!((mesh.optimizer as f64 / (4.0 * (dense / 16.0 + mesh.expert_parameters as f64 / 2.0)) - 1.0).abs() < 1e-9);
        assert_eq!((mesh.weights, mesh.gradients), (eight.weights, eight.gradients));
        let settings = MemorySettings {
            recompute: Recompute::All,
            ..benchmarked(1)
        };
        let recomputed = MemoryPlan::new(&config, &settings).unwrap();
        assert!(recomputed.activations * 10 < one.activations && recomputed.workspace > one.workspace);
        let sums = MemorySettings {
            micro_batches: 2,
            ..benchmarked(1)
        };
        assert_eq!(MemoryPlan::new(&config, &sums).unwrap().gradients, 2 * one.gradients);
    }

    /// By hand: 30.53e9 parameters; a block of 0.623e9; 2 bytes each, and 2 + 8/256 for 8-bit moments.
    #[test]
    fn a_complete_model_fits_one_device_with_the_optimizer_in_the_backward() {
        let config = preset("qwen3_30b_a3b", None);
        let settings = MemorySettings {
            optimizer: Some(AdamWConfig {
                master_weights: false,
                moments: MomentDType::Block8,
                ..AdamWConfig::default()
            }),
            recompute: Recompute::All,
            gradients_kept: false,
            ..benchmarked(4)
        };
        let plan = MemoryPlan::new(&config, &settings).unwrap();
        let parameters = 30_532_122_624u64;
        assert_eq!((plan.weights, plan.optimizer), (2 * parameters, 2 * parameters + parameters / 32));
        // 128 experts of 3 * 768 * 2048, attention, router and norms; the plan also spreads one of the two vocabulary tables.
        let block = 128 * 3 * 768 * 2048 + 2 * 2048 * 4096 + 2 * 2048 * 512 + 128 * 2048 + 2 * 2048 + 2 * 128;
        assert!((plan.gradients as f64 / (2.0 * f64::from(block)) - 1.0).abs() < 0.02, "{plan}");
        assert!(plan.total() < 135 << 30, "{plan}");
        plan.check(139 << 30).unwrap();
    }

    #[test]
    fn what_cannot_fit_is_refused_with_both_sizes() {
        let plan = MemoryPlan::new(&preset("qwen3_30b_a3b", None), &MemorySettings::new(1, 4096)).unwrap();
        let error = plan.check(141 << 30).unwrap_err().to_string();
        // 30.5 billion parameters of 2 + 2 + 12 bytes
        assert!(error.contains("455.0 GiB") && error.contains("141.0 GiB"), "{error}");
        plan.check(500 << 30).unwrap();
        let text = plan.to_string();
        assert!(text.contains("weights") && text.contains("GiB a rank"), "{text}");
    }

    #[test]
    fn meshes_that_do_not_fit_are_refused_with_both_numbers() {
        let config = preset("qwen3_30b_a3b", None);
        for (world, ep, parts) in [(8, 3, ["`ep`", "8 ranks"]), (24, 24, ["128", "24"])] {
            let settings = MemorySettings {
                world,
                ep,
                ..benchmarked(1)
            };
            let error = MemoryPlan::new(&config, &settings).unwrap_err().to_string();
            assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        }
    }
}

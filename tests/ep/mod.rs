//! Expert parallelism gives the results of one rank.
//!
//! Ranks are threads with a [`LocalCommunicator`].

mod checkpoint;
mod faults;
mod layer;
mod low_precision;
mod mesh;
mod model;
mod processes;

use std::collections::BTreeMap;
use std::ops::Range;
use std::thread;
use std::time::Duration;

use burn::tensor::{Device, FloatDType};
use burn_ep_backend::comm::{CommHandle, EpGroup, LocalCommunicator};
use burn_moe::backend::Train;
use burn_moe::batch::{HostBatch, IGNORE_INDEX};
use burn_moe::optim::AdamWConfig;
use burn_moe::train::{Decay, Schedule, Trainer, TrainerConfig};
use burn_moe_models::{AutoConfig, AutoModelForCausalLm, FromConfigOptions};

/// Routed experts of every model below.
const EXPERTS: usize = 8;
/// Rows and tokens per row of the global batch.
const ROWS: usize = 4;
const SEQ: usize = 7;
/// Small, like the initial values of the models: with twice the initial range, fp32 rounding alone moves gradients of the
/// second step by more than the tolerance of 1e-5 (measured).
const LEARNING_RATE: f64 = 0.01;

type Model = AutoModelForCausalLm<Train>;

/// Every kind of layer that Nemotron-H has; experts at a latent width.
const NEMOTRON: &str = r#"{
    "model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"], "dtype": "float32",
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "moe"],
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 20, "head_dim": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2,
    "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 8, "conv_kernel": 4, "chunk_size": 4,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "moe_latent_size": 8,
    "moe_shared_expert_intermediate_size": 12, "n_shared_experts": 1, "norm_topk_prob": true,
    "routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1, "initializer_range": 0.15
}"#;

/// With the load-balancing loss, whose statistics are those of all ranks.
const QWEN: &str = r#"{
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "dtype": "float32",
    "num_hidden_layers": 2, "vocab_size": 64, "hidden_size": 16, "intermediate_size": 20, "head_dim": 8,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": true,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "output_router_logits": true, "router_aux_loss_coef": 0.05,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": false, "initializer_range": 0.15
}"#;

/// Compressed attention, a dense layer, groups of experts, two shared experts, correction bias.
const DEEPSEEK: &str = r#"{
    "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "dtype": "float32",
    "num_hidden_layers": 3, "first_k_dense_replace": 1, "vocab_size": 64, "hidden_size": 16, "intermediate_size": 20,
    "num_attention_heads": 2, "q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 6, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2, "n_shared_experts": 2,
    "moe_intermediate_size": 12, "initializer_range": 0.15
}"#;

/// A shared expert with a gate, one dense layer.
const QWEN2_MOE: &str = r#"{
    "model_type": "qwen2_moe", "dtype": "float32", "num_hidden_layers": 3, "vocab_size": 64, "hidden_size": 16,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 10, "intermediate_size": 20,
    "mlp_only_layers": [1], "output_router_logits": true, "router_aux_loss_coef": 0.05, "initializer_range": 0.15
}"#;

const MIXTRAL: &str = r#"{
    "model_type": "mixtral", "dtype": "float32", "num_hidden_layers": 2, "vocab_size": 64, "hidden_size": 16,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "num_local_experts": 8,
    "num_experts_per_tok": 2, "intermediate_size": 12, "sliding_window": 5, "output_router_logits": true,
    "router_aux_loss_coef": 0.05, "rope_theta": 10000.0, "initializer_range": 0.15
}"#;

/// Weights are not renormalised.
const OLMOE: &str = r#"{
    "model_type": "olmoe", "dtype": "float32", "num_hidden_layers": 2, "vocab_size": 64, "hidden_size": 16,
    "num_attention_heads": 2, "max_position_embeddings": 64, "num_experts": 8, "num_experts_per_tok": 2,
    "intermediate_size": 12, "output_router_logits": true, "router_aux_loss_coef": 0.05, "initializer_range": 0.15
}"#;

/// Biases in every part, sinks and a window.
const GPT_OSS: &str = r#"{
    "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "dtype": "float32",
    "num_hidden_layers": 2, "vocab_size": 64, "hidden_size": 16, "intermediate_size": 12, "head_dim": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 3, "max_position_embeddings": 64,
    "num_local_experts": 8, "num_experts_per_tok": 2, "output_router_logits": true, "router_aux_loss_coef": 0.05,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": false, "initializer_range": 0.15
}"#;

/// The models with their names.
const MODELS: &[(&str, &str)] = &[
    ("nemotron_h", NEMOTRON),
    ("qwen3_moe", QWEN),
    ("qwen2_moe", QWEN2_MOE),
    ("mixtral", MIXTRAL),
    ("olmoe", OLMOE),
    ("deepseek_v3", DEEPSEEK),
    ("gpt_oss", GPT_OSS),
];

/// Runs `f` on `world` ranks at once; results in rank order. A rank that fails ends the others within seconds.
pub fn on_ranks<T: Send>(world: usize, f: impl Fn(EpGroup) -> T + Sync) -> Vec<T> {
    on_mesh(world, world, f)
}

/// [`on_ranks`] with the experts spread over every `ep` ranks.
pub fn on_mesh<T: Send>(world: usize, ep: usize, f: impl Fn(EpGroup) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let threads: Vec<_> = LocalCommunicator::group(world)
            .into_iter()
            .map(|comm| {
                let ep = EpGroup::mesh(CommHandle::new(comm.with_timeout(Duration::from_secs(30))), ep).unwrap();
                scope.spawn(|| f(ep))
            })
            .collect();
        threads
            .into_iter()
            .map(|t| t.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    })
}

/// Largest difference, relative to the largest expected value.
fn max_error(found: &[f32], expected: &[f32]) -> f64 {
    max_error_above(0.0, found, expected)
}

/// As [`max_error`], but relative to at least `floor`: for values that are sums whose terms nearly cancel.
fn max_error_above(floor: f64, found: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let scale = expected.iter().fold(floor, |m, v| m.max(f64::from(v.abs())));
    let worst = found
        .iter()
        .zip(expected)
        .map(|(f, e)| (f64::from(*f) - f64::from(*e)).abs())
        .fold(0.0f64, |m, d| if d.is_nan() { f64::NAN } else { m.max(d) });
    if worst == 0.0 { 0.0 } else { worst / scale }
}

/// This rank's slice of an fp32 model whose values depend on the seed alone.
fn model(config: &str, ep: &EpGroup) -> Model {
    model_in(FloatDType::F32, config, ep)
}

fn model_in(dtype: FloatDType, config: &str, ep: &EpGroup) -> Model {
    let options = FromConfigOptions {
        dtype: Some(dtype),
        seed: 11,
        ep: Some(ep.clone()),
    };
    Model::from_config(&AutoConfig::from_text(config).unwrap(), &options, &Device::<Train>::default()).unwrap()
}

/// Some rows of the global batch of a step. Labels of `ignored` rows do not count.
fn batch(step: usize, rows: Range<usize>, ignored: &[usize]) -> HostBatch {
    let token = |row: usize, i: usize| ((step * 29 + row * 13 + i * i * 7 + i * 3) % 64) as i32;
    let tokens: Vec<(usize, i32)> = rows.clone().flat_map(|row| (0..SEQ).map(move |i| (row, token(row, i)))).collect();
    HostBatch {
        batch: rows.len(),
        seq: SEQ,
        input_ids: tokens.iter().map(|(_, id)| *id).collect(),
        labels: tokens
            .iter()
            .map(|(row, id)| if ignored.contains(row) || id % 11 == 0 { IGNORE_INDEX } else { *id })
            .collect(),
        ..HostBatch::default()
    }
}

/// The rows of one rank, an equal share of all.
fn share(ep: &EpGroup) -> Range<usize> {
    let rows = ROWS / ep.world_size();
    ep.world_rank() * rows..(ep.world_rank() + 1) * rows
}

/// Constant learning rate; an epsilon at which the update is not just the sign of the gradient, so that rounding noise in
/// tiny gradients stays tiny.
fn trainer_config(lr: f64) -> TrainerConfig {
    TrainerConfig {
        schedule: Schedule {
            lr,
            decay: Decay::Constant,
            ..Schedule::default()
        },
        optimizer: AdamWConfig {
            eps: 1e-2,
            ..AdamWConfig::default()
        },
        ..TrainerConfig::default()
    }
}

fn trainer(model: Model, lr: f64, ep: &EpGroup) -> Trainer<Train, Model> {
    Trainer::new(model, trainer_config(lr), Device::<Train>::default(), Some(ep.clone())).unwrap()
}

/// Values of every parameter by path.
fn parameters(model: &Model) -> BTreeMap<String, Vec<f32>> {
    use burn::module::{Module, ModuleVisitor, Param};
    use burn::tensor::Tensor;
    use burn_moe::optim::PathStack;

    #[derive(Default)]
    struct Reader {
        path: PathStack,
        values: BTreeMap<String, Vec<f32>>,
    }

    impl ModuleVisitor<Train> for Reader {
        fn enter_module(&mut self, name: &str, container_type: &str) {
            self.path.enter(name, container_type);
        }

        fn exit_module(&mut self, _name: &str, container_type: &str) {
            self.path.exit(container_type);
        }

        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<Train, D>>) {
            let values = param.val().into_data().to_vec().unwrap();
            self.values.insert(self.path.path(), values);
        }
    }

    let mut reader = Reader::default();
    model.visit(&mut reader);
    reader.values
}

fn is_expert(path: &str) -> bool {
    path.split('.').any(|name| name == "experts")
}

/// One map of whole tensors from the maps of the ranks that share the experts: experts joined in rank order, the others as rank 0
/// has them.
fn join(ranks: &[BTreeMap<String, Vec<f32>>]) -> BTreeMap<String, Vec<f32>> {
    let whole = |(path, values): (&String, &Vec<f32>)| {
        let values = match is_expert(path) {
            true => ranks.iter().flat_map(|rank| rank[path].clone()).collect(),
            false => values.clone(),
        };
        (path.clone(), values)
    };
    ranks[0].iter().map(whole).collect()
}

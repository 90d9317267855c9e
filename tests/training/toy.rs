//! A toy mixture-of-experts language model: the smallest complete [`CausalLm`].
//!
//! Embedding; blocks `x + mlp(x)`, the MLP dense or routed; a norm weight; a head, tied or not. Tokens do not see each other,
//! so position, attention and padding play no role beyond the masks of the losses.

use burn::module::{Module, Param};
use burn::tensor::activation::relu;
use burn::tensor::backend::Backend;
use burn::tensor::{FloatDType, Int, Tensor, TensorData};
use burn_ep_backend::{MoeBackend, RouterDesc, RouterScore, ops};
use burn_moe::batch::HostBatch;
use burn_moe::error::Result;
use burn_moe::model::{AuxLossSettings, BlockOutput, CausalLm, Head, LayerCache, ModelInput, RouterOutput};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Backend of the toy tests.
pub type B = burn_moe::backend::Train;
/// The same without gradient recording.
pub type Inner = burn_moe::backend::Infer;

pub const VOCAB: usize = 11;
const HIDDEN: usize = 6;
const WIDTH: usize = 5;
pub const EXPERTS: usize = 4;
pub const TOP_K: usize = 2;

#[derive(Module, Debug)]
pub struct Weight<B: Backend> {
    pub weight: Param<Tensor<B, 2>>,
}

#[derive(Module, Debug)]
pub struct Norm<B: Backend> {
    pub weight: Param<Tensor<B, 1>>,
}

#[derive(Module, Debug)]
pub struct Router<B: Backend> {
    /// `[E, D]`.
    pub weight: Param<Tensor<B, 2>>,
    pub e_score_correction_bias: Option<Param<Tensor<B, 1>>>,
}

#[derive(Module, Debug)]
pub struct Experts<B: Backend> {
    /// `[E, F, D]`.
    pub up_proj: Param<Tensor<B, 3>>,
    /// `[E, D, F]`.
    pub down_proj: Param<Tensor<B, 3>>,
}

#[derive(Module, Debug)]
pub struct Moe<B: Backend> {
    pub gate: Router<B>,
    pub experts: Experts<B>,
}

#[derive(Module, Debug)]
pub struct Dense<B: Backend> {
    pub up_proj: Weight<B>,
    pub down_proj: Weight<B>,
}

// A model has few blocks; boxing one would only hide the module.
#[allow(clippy::large_enum_variant)]
#[derive(Module, Debug)]
pub enum Mixer<B: Backend> {
    Dense(Dense<B>),
    Moe(Moe<B>),
}

#[derive(Module, Debug)]
pub struct Layer<B: Backend> {
    pub mixer: Mixer<B>,
}

#[derive(Module, Debug)]
pub struct ToyLm<B: Backend> {
    pub embed_tokens: Weight<B>,
    pub layers: Vec<Layer<B>>,
    pub norm: Norm<B>,
    pub lm_head: Option<Weight<B>>,
    #[module(skip)]
    pub config: ToyConfig,
}

/// What the toy model is made of.
#[derive(Debug, Clone)]
pub struct ToyConfig {
    /// Kind of each block, one letter each: `d` dense, `m` softmax-routed, `b` sigmoid-routed with selection bias.
    pub layers: &'static str,
    pub tied: bool,
    pub aux: Option<f64>,
    pub dtype: FloatDType,
}

impl Default for ToyConfig {
    fn default() -> Self {
        Self {
            layers: "dmm",
            tied: false,
            aux: None,
            dtype: FloatDType::F32,
        }
    }
}

impl ToyConfig {
    /// Random weights from a seed.
    pub fn init<B: Backend>(&self, seed: u64) -> ToyLm<B> {
        let mut weights = Weights {
            rng: StdRng::seed_from_u64(seed),
            dtype: self.dtype,
        };
        let embed_tokens = Weight {
            weight: weights.normal([VOCAB, HIDDEN]),
        };
        let layers = self
            .layers
            .chars()
            .map(|kind| Layer {
                mixer: weights.mixer(kind),
            })
            .collect();
        ToyLm {
            embed_tokens,
            layers,
            norm: Norm {
                weight: weights.normal([HIDDEN]),
            },
            lm_head: (!self.tied).then(|| Weight {
                weight: weights.normal([VOCAB, HIDDEN]),
            }),
            config: self.clone(),
        }
    }
}

struct Weights {
    rng: StdRng,
    dtype: FloatDType,
}

impl Weights {
    fn normal<B: Backend, const D: usize>(&mut self, shape: [usize; D]) -> Param<Tensor<B, D>> {
        let values: Vec<f32> = (0..shape.iter().product()).map(|_| self.rng.random_range(-1.0..1.0)).collect();
        Param::from_tensor(Tensor::<B, D>::from_data(TensorData::new(values, shape), &Default::default()).cast(self.dtype))
    }

    fn mixer<B: Backend>(&mut self, kind: char) -> Mixer<B> {
        if kind == 'd' {
            return Mixer::Dense(Dense {
                up_proj: Weight {
                    weight: self.normal([WIDTH, HIDDEN]),
                },
                down_proj: Weight {
                    weight: self.normal([HIDDEN, WIDTH]),
                },
            });
        }
        let bias = (kind == 'b').then(|| {
            let zeros = Tensor::<B, 1>::zeros([EXPERTS], &Default::default());
            Param::from_tensor(zeros).set_require_grad(false)
        });
        Mixer::Moe(Moe {
            gate: Router {
                weight: self.normal([EXPERTS, HIDDEN]),
                e_score_correction_bias: bias,
            },
            experts: Experts {
                up_proj: self.normal([EXPERTS, WIDTH, HIDDEN]),
                down_proj: self.normal([EXPERTS, HIDDEN, WIDTH]),
            },
        })
    }
}

impl<B: MoeBackend> Moe<B> {
    /// Every expert on every token, weighted by the routing: slow and plain.
    fn forward(&self, x_td: Tensor<B, 2>, replay: Option<&Tensor<B, 2, Int>>) -> Result<(Tensor<B, 2>, RouterOutput<B>)> {
        let logits_te = x_td.clone().matmul(self.gate.weight.val().transpose());
        let bias = self.gate.e_score_correction_bias.as_ref().map(|bias| bias.val());
        let mut desc = RouterDesc::softmax(EXPERTS, TOP_K, true);
        if bias.is_some() {
            desc.score = RouterScore::Sigmoid;
        }
        let route = ops::route(logits_te.clone(), bias, replay.cloned(), &desc)?;
        let mut out_td = x_td.zeros_like();
        for expert in 0..EXPERTS {
            let chosen_tk = route.ids_tk.clone().equal_elem(expert as i32).float().cast(FloatDType::F32);
            let weight_t1 = (route.weights_tk.clone() * chosen_tk).sum_dim(1).cast(self.dtype());
            let up_fd = self.experts.up_proj.val().narrow(0, expert, 1).squeeze_dim::<2>(0);
            let down_df = self.experts.down_proj.val().narrow(0, expert, 1).squeeze_dim::<2>(0);
            let hidden = relu(x_td.clone().matmul(up_fd.transpose()));
            out_td = out_td + hidden.clone().mul(hidden).matmul(down_df.transpose()) * weight_t1;
        }
        let ids_tk = route.ids_tk;
        Ok((out_td, RouterOutput { logits_te, ids_tk }))
    }

    fn dtype(&self) -> FloatDType {
        self.gate.weight.val().dtype().into()
    }
}

impl<B: MoeBackend> CausalLm<B> for ToyLm<B> {
    fn prepare(&self, batch: &HostBatch, _past: usize, device: &B::Device) -> Result<ModelInput<B>> {
        Ok(ModelInput::new(batch, device))
    }

    fn num_blocks(&self) -> usize {
        self.layers.len()
    }

    fn vocab_size(&self) -> usize {
        VOCAB
    }

    fn embed(&self, input: &ModelInput<B>) -> Result<Tensor<B, 3>> {
        let [b, s] = input.ids_bs.dims();
        let rows = self.embed_tokens.weight.val().select(0, input.ids_bs.clone().reshape([b * s]));
        Ok(rows.reshape([b, s, HIDDEN]))
    }

    fn block(
        &self,
        index: usize,
        x_bsd: Tensor<B, 3>,
        _input: &ModelInput<B>,
        replay: Option<&Tensor<B, 2, Int>>,
        _cache: Option<&mut LayerCache<B>>,
    ) -> Result<BlockOutput<B>> {
        let [b, s, d] = x_bsd.dims();
        let x_td = x_bsd.reshape([b * s, d]);
        let (y_td, router) = match &self.layers[index].mixer {
            Mixer::Dense(dense) => {
                let hidden = relu(x_td.clone().matmul(dense.up_proj.weight.val().transpose()));
                (hidden.matmul(dense.down_proj.weight.val().transpose()), None)
            }
            Mixer::Moe(moe) => {
                let (y_td, router) = moe.forward(x_td.clone(), replay)?;
                (y_td, Some(router))
            }
        };
        Ok(BlockOutput {
            x_bsd: (x_td + y_td).reshape([b, s, d]),
            router,
        })
    }

    fn head(&self, x_bsd: Tensor<B, 3>) -> Result<Head<B>> {
        let [b, s, d] = x_bsd.dims();
        let weight = self.lm_head.as_ref().unwrap_or(&self.embed_tokens);
        Ok(Head {
            hidden_td: x_bsd.reshape([b * s, d]) * self.norm.weight.val().unsqueeze(),
            weight_vd: weight.weight.val(),
        })
    }

    fn aux_loss(&self) -> Option<AuxLossSettings> {
        self.config.aux.map(|coefficient| AuxLossSettings {
            coefficient,
            num_experts: EXPERTS,
            top_k: TOP_K,
        })
    }
}

/// Rows of random tokens; every third label is ignored.
pub fn random_batch(rows: usize, seq: usize, seed: u64) -> HostBatch {
    let mut rng = StdRng::seed_from_u64(seed);
    let input_ids: Vec<i32> = (0..rows * seq).map(|_| rng.random_range(0..VOCAB as i32)).collect();
    let labels = input_ids
        .iter()
        .enumerate()
        .map(|(i, &id)| if i % 3 == 2 { -100 } else { id })
        .collect();
    HostBatch {
        batch: rows,
        seq,
        input_ids,
        labels,
        ..HostBatch::default()
    }
}

/// Rows `from..to` of a batch.
pub fn rows(batch: &HostBatch, from: usize, to: usize) -> HostBatch {
    let part = from * batch.seq..to * batch.seq;
    HostBatch {
        batch: to - from,
        seq: batch.seq,
        input_ids: batch.input_ids[part.clone()].to_vec(),
        labels: batch.labels[part.clone()].to_vec(),
        attention_mask: batch.attention_mask.as_ref().map(|mask| mask[part].to_vec()),
        ..HostBatch::default()
    }
}

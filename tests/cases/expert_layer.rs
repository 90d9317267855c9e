//! The expert layer against a layer of plain Burn ops that runs every expert on every token.

use burn::backend::Autodiff;
use burn::tensor::activation::{relu, silu};
use burn::tensor::{DType, Int, Tensor, TensorData};
use burn_ep_backend::{ExpertActivation, ops};
use burn_flex::Flex;
use rand::{Rng, SeedableRng, rngs::StdRng};

type Ad = Autodiff<Flex>;

/// Tokens with their choice, and the weights of the experts, by name.
struct Layer {
    ids: Vec<i32>,
    top_k: usize,
    experts: usize,
    d: usize,
    f: usize,
    activation: ExpertActivation,
    /// x, routing weights, up, down.
    values: [Vec<f32>; 4],
}

impl Layer {
    fn random(tokens: usize, d: usize, f: usize, activation: ExpertActivation) -> Self {
        let (experts, top_k) = (5, 2);
        let mut rng = StdRng::seed_from_u64(7);
        let sizes = [
            tokens * d,
            tokens * top_k,
            experts * f * activation.up_factor() * d,
            experts * d * f,
        ];
        Self {
            ids: (0..tokens * top_k).map(|slot| ((slot * 3 + slot / 4) % experts) as i32).collect(),
            top_k,
            experts,
            d,
            f,
            activation,
            // Multiples of 1/64 are exact in bf16, so both precisions see the same layer.
            values: sizes.map(|n| (0..n).map(|_| rng.random_range(-64i32..64) as f32 / 64.0).collect()),
        }
    }

    fn tokens(&self) -> usize {
        self.ids.len() / self.top_k
    }

    fn leaves(&self, dtype: DType) -> (Tensor<Ad, 2>, Tensor<Ad, 2>, Tensor<Ad, 3>, Tensor<Ad, 3>) {
        let (t, d, e, f_up) = (self.tokens(), self.d, self.experts, self.f * self.activation.up_factor());
        let [x, weights, up, down] = &self.values;
        let two = |values: &[f32], shape: [usize; 2], dtype| {
            Tensor::<Ad, 2>::from_data(TensorData::new(values.to_vec(), shape), (&Default::default(), dtype)).require_grad()
        };
        let three = |values: &[f32], shape: [usize; 3]| {
            Tensor::<Ad, 3>::from_data(TensorData::new(values.to_vec(), shape), (&Default::default(), dtype)).require_grad()
        };
        (
            two(x, [t, d], dtype),
            two(weights, [t, self.top_k], DType::F32),
            three(up, [e, f_up, d]),
            three(down, [e, d, self.f]),
        )
    }

    /// Output and gradients (x, routing weights, up, down) for the upstream gradient `x + 1`.
    fn run(&self, dtype: DType, op: bool) -> [Vec<f32>; 5] {
        let (x, weights, up, down) = self.leaves(dtype);
        let ids = Tensor::<Ad, 2, Int>::from_data(TensorData::new(self.ids.clone(), [self.tokens(), self.top_k]), &Default::default());
        let out = if op {
            let order = ops::sort_by_expert(ids, self.experts).expect("valid ids");
            let experts = ops::ExpertWeights {
                up: up.clone(),
                up_bias: None,
                down: down.clone(),
                down_bias: None,
            };
            ops::expert_mlp(x.clone(), &order, Some(weights.clone()), experts, self.activation).expect("valid shapes")
        } else {
            self.every_expert_on_every_token(&x, ids, &weights, &up, &down)
        };
        let upstream = x.clone().detach().add_scalar(1.0);
        let grads = (out.clone() * upstream).sum().backward();
        let read = |data: TensorData| data.convert::<f32>().to_vec::<f32>().expect("f32");
        [
            read(out.into_data()),
            read(x.grad(&grads).expect("x").into_data()),
            read(weights.grad(&grads).expect("weights").into_data()),
            read(up.grad(&grads).expect("up").into_data()),
            read(down.grad(&grads).expect("down").into_data()),
        ]
    }

    fn every_expert_on_every_token(
        &self,
        x: &Tensor<Ad, 2>,
        ids: Tensor<Ad, 2, Int>,
        weights: &Tensor<Ad, 2>,
        up: &Tensor<Ad, 3>,
        down: &Tensor<Ad, 3>,
    ) -> Tensor<Ad, 2> {
        let mut out = x.zeros_like().cast(DType::F32);
        for e in 0..self.experts {
            let up = up.clone().narrow(0, e, 1).squeeze_dim::<2>(0);
            let down = down.clone().narrow(0, e, 1).squeeze_dim::<2>(0);
            let h = x.clone().matmul(up.transpose());
            let act = match self.activation {
                ExpertActivation::SwiGlu => silu(h.clone().narrow(1, 0, self.f)) * h.narrow(1, self.f, self.f),
                _ => relu(h).powi_scalar(2),
            };
            let y = act.matmul(down.transpose()).cast(DType::F32);
            let chosen = ids.clone().equal_elem(e as i32).float();
            out = out + y * (weights.clone() * chosen).sum_dim(1);
        }
        out.cast(x.dtype())
    }
}

fn rms(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    (a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum::<f32>() / a.len() as f32).sqrt()
}

const NAMES: [&str; 5] = ["out", "x", "routing weights", "up", "down"];

fn assert_parity(layer: &Layer) {
    let exact = layer.run(DType::F32, false);
    let op = layer.run(DType::F32, true);
    let (op_bf16, plain_bf16) = (layer.run(DType::BF16, true), layer.run(DType::BF16, false));
    for i in 0..NAMES.len() {
        let scale = exact[i].iter().fold(0f32, |max, v| max.max(v.abs()));
        assert!(rms(&op[i], &exact[i]) < 1e-6 * scale, "{} in fp32", NAMES[i]);
        let (found, plain) = (rms(&op_bf16[i], &exact[i]), rms(&plain_bf16[i], &exact[i]));
        assert!(found <= 2.0 * plain + 1e-4 * scale, "{} in bf16: {found}, plain {plain}", NAMES[i]);
    }
}

/// huggingface/transformers#42697: widths that are not multiples of 16.
#[test]
fn odd_widths_in_bf16() {
    for activation in [ExpertActivation::SwiGlu, ExpertActivation::Relu2] {
        assert_parity(&Layer::random(33, 24, 20, activation));
    }
}

/// mobiusml/mobius#188, vllm-project/llm-compressor#3173: Nemotron-H experts square a ReLU, have no gate, and work at a
/// latent width that is not the hidden one.
#[test]
fn relu2_experts_have_no_gate() {
    let layer = Layer::random(19, 12, 40, ExpertActivation::Relu2);
    assert_eq!(layer.values[2].len(), 5 * 40 * 12);
    assert_parity(&layer);

    let gated = Layer::random(19, 12, 40, ExpertActivation::SwiGlu);
    let (x, weights, up, down) = gated.leaves(DType::F32);
    let ids = Tensor::<Ad, 2, Int>::from_data(TensorData::new(gated.ids.clone(), [19, 2]), &Default::default());
    let order = ops::sort_by_expert(ids, 5).expect("valid ids");
    let experts = ops::ExpertWeights {
        up,
        up_bias: None,
        down,
        down_bias: None,
    };
    let error = ops::expert_mlp(x, &order, Some(weights), experts, ExpertActivation::Relu2).expect_err("gate rows");
    assert!(
        error
            .to_string()
            .contains("tensor `down` has shape [5, 12, 40], expected [E, D, F] = [5, 12, 80]"),
        "{error}"
    );
}

/// kvcache-ai/ktransformers#1862, PrimeIntellect-ai/prime-rl#2365: gate and up alternate; the gate is capped above only,
/// up on both sides.
#[test]
fn interleaved_gate_and_up_are_clamped() {
    let device = Default::default();
    let expert = |pair: [f32; 2]| {
        let order = ops::sort_by_expert(Tensor::<Flex, 2, Int>::from_ints([[0]], &device), 1).expect("valid ids");
        let experts = ops::ExpertWeights {
            up: Tensor::<Flex, 3>::from_floats([[[1.0, 0.0], [0.0, 1.0]]], &device),
            up_bias: None,
            down: Tensor::<Flex, 3>::from_floats([[[1.0], [0.0]]], &device),
            down_bias: None,
        };
        let activation = ExpertActivation::ClampedSwiGlu { alpha: 1.702, limit: 7.0 };
        let x = Tensor::<Flex, 2>::from_floats([pair], &device);
        let out = ops::expert_mlp(x, &order, None, experts, activation).expect("valid shapes");
        out.into_data().to_vec::<f32>().expect("f32")[0]
    };
    assert!((expert([8.0, -9.0]) + 41.9997).abs() < 1e-4, "{}", expert([8.0, -9.0]));
    assert!((expert([-8.0, 0.0]) + 9.77e-6).abs() < 1e-8, "{}", expert([-8.0, 0.0]));
}

//! Dense feed-forward layer, also used as the shared expert.

use burn::module::Module;
use burn::tensor::{Tensor, activation};
use burn_ep_backend::MoeBackend;

use super::{Init, Linear, ParamBuilder};
use crate::error::Result;

/// Activation of a dense feed-forward layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MlpActivation {
    /// `silu(x · Wg^T) * (x · Wu^T)`.
    SwiGlu,
    /// `max(x · Wu^T, 0)^2`, no gate.
    Relu2,
}

/// Settings of [`Mlp`].
#[derive(Debug, Clone, Copy)]
pub struct MlpConfig {
    /// Input and output width D.
    pub hidden: usize,
    /// Inner width F.
    pub inner: usize,
    pub activation: MlpActivation,
    /// Bias of every matrix.
    pub bias: bool,
    pub init: Init,
}

/// `down(act(up(x)))`.
#[derive(Module, Debug)]
pub struct Mlp<B: MoeBackend> {
    /// `[F, D]`, only with SwiGLU.
    pub gate_proj: Option<Linear<B>>,
    /// `[F, D]`.
    pub up_proj: Linear<B>,
    /// `[D, F]`.
    pub down_proj: Linear<B>,
}

impl<B: MoeBackend> Mlp<B> {
    /// A layer of `config`.
    pub fn new(pb: &ParamBuilder<B>, config: &MlpConfig) -> Self {
        let MlpConfig {
            hidden,
            inner,
            activation,
            bias,
            init,
        } = *config;
        Self {
            gate_proj: (activation == MlpActivation::SwiGlu).then(|| Linear::new(&pb.at("gate_proj"), hidden, inner, bias, init)),
            up_proj: Linear::new(&pb.at("up_proj"), hidden, inner, bias, init),
            down_proj: Linear::new(&pb.at("down_proj"), inner, hidden, bias, init),
        }
    }

    /// `[.., D]` to `[.., D]`.
    pub fn forward<const R: usize>(&self, x: Tensor<B, R>) -> Result<Tensor<B, R>> {
        let inner = match &self.gate_proj {
            Some(gate_proj) => activation::silu(gate_proj.forward(x.clone())?) * self.up_proj.forward(x)?,
            None => {
                let up = activation::relu(self.up_proj.forward(x)?);
                up.clone() * up
            }
        };
        self.down_proj.forward(inner)
    }
}

#[cfg(test)]
mod tests {
    use burn::module::Param;
    use burn::tensor::FloatDType;
    use burn_flex::Flex;

    use super::*;

    #[test]
    fn both_activations_match_a_hand_computation() {
        let device = Default::default();
        let pb = ParamBuilder::<Flex>::new(&device, FloatDType::F32);
        let mut config = MlpConfig {
            hidden: 1,
            inner: 2,
            activation: MlpActivation::Relu2,
            bias: false,
            init: Init::Zeros,
        };
        let up = || Param::from_data([[2.0], [-3.0]], &device);
        let down = || Param::from_data([[1.0, 10.0]], &device);
        let x = || Tensor::<Flex, 2>::from_data([[1.5], [-1.0]], &device);

        let mut relu2 = Mlp::new(&pb, &config);
        assert!(relu2.gate_proj.is_none());
        (relu2.up_proj.weight, relu2.down_proj.weight) = (up(), down());
        let y = relu2.forward(x()).unwrap().into_data().to_vec::<f32>().unwrap();
        assert_eq!(y, [9.0, 90.0]);

        config.activation = MlpActivation::SwiGlu;
        let mut swiglu = Mlp::new(&pb, &config);
        (swiglu.up_proj.weight, swiglu.down_proj.weight) = (up(), down());
        swiglu.gate_proj.as_mut().unwrap().weight = Param::from_data([[1.0], [2.0]], &device);
        let y = swiglu.forward(x()).unwrap().into_data().to_vec::<f32>().unwrap();
        let silu = |v: f32| v / (1.0 + (-v).exp());
        let expected = [1.5f32, -1.0].map(|v| silu(v) * 2.0 * v + 10.0 * silu(2.0 * v) * -3.0 * v);
        for (a, b) in y.iter().zip(expected) {
            assert!((a - b).abs() < 1e-4 * b.abs(), "{a} {b}");
        }
    }
}

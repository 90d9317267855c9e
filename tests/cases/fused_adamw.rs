//! Weight decay of the fused AdamW.

use burn::tensor::Tensor;
use burn_ep_backend::{AdamWDesc, ops};
use burn_flex::Flex;

/// tracel-ai/burn#5228, pytorch/torchtitan#2859: decay is decoupled from the gradient, and weight 0 switches it off.
/// Which parameters are in which group is the optimizer's matter; this is what the op does to each of them.
#[test]
fn zero_gradients_decay_only_where_asked() {
    let device = Default::default();
    let step = |weight_decay: f32| {
        let zeros = || Tensor::<Flex, 1>::zeros([2], &device);
        let state = ops::AdamWState {
            param: Tensor::from_floats([2.0, -0.5], &device),
            m: zeros(),
            v: zeros(),
            master: None,
        };
        let desc = AdamWDesc {
            lr: 1.0,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay,
            step: 1,
            stochastic_rounding: None,
        };
        let out = ops::adamw_step(state, zeros(), None, &desc).expect("valid settings");
        out.param.into_data().to_vec::<f32>().expect("f32")
    };
    assert_eq!(step(0.0), [2.0, -0.5]);
    assert_eq!(step(0.1), [1.8, -0.45]);
}

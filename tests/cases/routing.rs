//! Router weights by hand.

use burn::tensor::Tensor;
use burn_ep_backend::{RouterDesc, RouterScore, ops};
use burn_flex::Flex;

fn routed(logits: &[f32], bias: Option<&[f32]>, desc: &RouterDesc) -> (Vec<f32>, Vec<i32>) {
    let device = Default::default();
    let logits_te = Tensor::<Flex, 1>::from_floats(logits, &device).unsqueeze::<2>();
    let bias_e = bias.map(|bias| Tensor::<Flex, 1>::from_floats(bias, &device));
    let route = ops::route(logits_te, bias_e, None, desc).expect("valid settings");
    (
        route.weights_tk.into_data().to_vec().expect("fp32 weights"),
        route.ids_tk.into_data().to_vec().expect("i32 ids"),
    )
}

fn assert_weights(found: &[f32], expected: [f32; 2]) {
    assert!(
        found.iter().zip(expected).all(|(f, e)| (f - e).abs() < 5e-5),
        "{found:?}, expected {expected:?}"
    );
}

/// vllm-project/vllm#12002, huggingface/transformers#41647: the correction bias moves the choice, never the weights.
#[test]
fn selection_bias_does_not_enter_the_weights() {
    let scores = [0.6f32, 0.5, 0.1];
    let logits = scores.map(|s| (s / (1.0 - s)).ln());
    let desc = RouterDesc {
        score: RouterScore::Sigmoid,
        ..RouterDesc::softmax(3, 2, true)
    };
    let (weights, ids) = routed(&logits, Some(&[0.0, 0.0, 1.0]), &desc);
    assert_eq!(ids, [2, 0]);
    assert_weights(&weights, [0.1429, 0.8571]);
}

/// sgl-project/sglang#35160, pytorch/torchtitan#1448, NVIDIA/Megatron-LM#955: the order of softmax and top-k, and
/// whether the weights are divided by their sum.
#[test]
fn renormalisation_and_softmax_order() {
    let logits = [2.0, 1.0, 0.0, -1.0];
    let top_k_first = RouterDesc {
        score: RouterScore::TopKSoftmax,
        ..RouterDesc::softmax(4, 2, false)
    };
    for (desc, expected) in [
        (RouterDesc::softmax(4, 2, true), [0.7311, 0.2689]),
        (RouterDesc::softmax(4, 2, false), [0.6439, 0.2369]),
        (top_k_first, [0.7311, 0.2689]),
    ] {
        let (weights, ids) = routed(&logits, None, &desc);
        assert_eq!(ids, [0, 1]);
        assert_weights(&weights, expected);
    }
}

//! prime-rl#3000, Megatron-Bridge#3484: of two documents packed into a row, the second must not notice the first, neither in
//! attention nor in Mamba, neither in its outputs nor in its gradients.

use std::collections::BTreeMap;

use burn::tensor::{Tensor, TensorData};
use burn_moe::backend::{Device, Train};
use burn_moe::model::CausalLm;
use burn_moe_models::AutoConfig;
use burn_moe_tests::fixture::relative_error;
use burn_moe_tests::tiny;

const A: [i32; 5] = [7, 3, 9, 1, 4];
const B: [i32; 6] = [5, 2, 8, 6, 11, 10];

/// Logits of the last document, and gradients of a weighted sum of them.
fn run(config: &AutoConfig, ids: &[i32], doc_start: Option<Vec<i32>>) -> (Vec<f32>, BTreeMap<String, Vec<f32>>) {
    let device = Device::default();
    let model = tiny::model(config);
    let input = model.prepare(&tiny::row(ids, doc_start), 0, &device).unwrap();
    let logits = model.logits(&input).unwrap().narrow(1, ids.len() - B.len(), B.len());
    let n = B.len() * model.vocab_size();
    let weights: Vec<f32> = (0..n).map(|i| (1.3 * i as f32).sin()).collect();
    let weights = Tensor::<Train, 3>::from_data(TensorData::new(weights, [1, B.len(), model.vocab_size()]), &device);
    let grads = (logits.clone() * weights).sum().backward();
    (logits.into_data().to_vec().unwrap(), tiny::gradients::<Train, _>(&model, &grads))
}

fn packed(config: &AutoConfig, last_of_a: i32) -> (Vec<f32>, BTreeMap<String, Vec<f32>>) {
    let mut ids: Vec<i32> = A.iter().chain(&B).copied().collect();
    ids[A.len() - 1] = last_of_a;
    let doc_start = (0..ids.len()).map(|i| if i < A.len() { 0 } else { A.len() as i32 }).collect();
    run(config, &ids, Some(doc_start))
}

fn worst(a: &BTreeMap<String, Vec<f32>>, b: &BTreeMap<String, Vec<f32>>) -> (f64, String) {
    assert_eq!(a.keys().collect::<Vec<_>>(), b.keys().collect::<Vec<_>>());
    a.iter()
        .map(|(name, grad)| (relative_error(grad, &b[name]), name.clone()))
        .max_by(|x, y| x.0.total_cmp(&y.0))
        .unwrap()
}

#[test]
fn the_second_document_does_not_notice_the_first() {
    for text in [
        tiny::NEMOTRON_H.replace("ME*-MEM*", "ME-M"),
        tiny::NEMOTRON_H.replace("ME*-MEM*", "*E-*"),
        tiny::NEMOTRON_H.to_string(),
        tiny::QWEN3_MOE.to_string(),
        tiny::DEEPSEEK_V3.to_string(),
        tiny::QWEN2_MOE.to_string(),
        tiny::MIXTRAL.to_string(),
        tiny::OLMOE.to_string(),
        tiny::LLAMA.to_string(),
        tiny::QWEN2.to_string(),
        tiny::GLM4_MOE.to_string(),
        tiny::GPT_OSS.to_string(),
    ] {
        let config = AutoConfig::from_text(text.clone()).unwrap();
        let (logits, grads) = packed(&config, A[4]);
        let (other_logits, other_grads) = packed(&config, 20);
        assert!(relative_error(&other_logits, &logits) < 1e-6, "{text}");
        let (error, name) = worst(&other_grads, &grads);
        assert!(error < 1e-5, "{text}: gradient of {name} moved by {error:e}");

        // Rotary attention only knows distances, so the document alone gives the same up to rounding.
        let (alone, alone_grads) = run(&config, &B, None);
        assert!(relative_error(&alone, &logits) < 1e-5, "{text}");
        let (error, name) = worst(&alone_grads, &grads);
        assert!(error < 1e-4, "{text}: gradient of {name} differs by {error:e}");
    }
}

/// The same comparison sees a leak when there is one.
#[test]
fn without_the_reset_the_state_leaks() {
    let mut config = AutoConfig::from_text(tiny::NEMOTRON_H).unwrap();
    if let AutoConfig::NemotronH(config) = &mut config {
        config.parity.mamba_document_reset = false;
    }
    let (logits, grads) = packed(&config, A[4]);
    let (other_logits, other_grads) = packed(&config, 20);
    assert!(relative_error(&other_logits, &logits) > 1e-3);
    assert!(worst(&other_grads, &grads).0 > 1e-3);
}

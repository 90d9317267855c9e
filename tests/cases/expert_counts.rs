//! torchtitan#4258, axolotl#3461: 63 experts over 8 ranks, and more experts per token than experts, are errors with the
//! field and both values, before any weight is read.

use burn_ep_backend::comm::{CommHandle, EpGroup, LocalCommunicator};
use burn_moe::backend::{Device, Infer};
use burn_moe_models::{AutoConfig, AutoModelForCausalLm, FromConfigOptions, FromPretrainedOptions};
use burn_moe_tests::fixture;

/// One rank of eight; the others are never asked.
fn one_of_eight() -> Option<EpGroup> {
    let mut ranks = LocalCommunicator::group(8);
    Some(EpGroup::new(CommHandle::new(ranks.remove(0))))
}

#[test]
fn experts_that_do_not_divide_over_the_ranks() {
    for (text, field) in [
        (r#"{"model_type": "qwen3_moe", "num_experts": 63}"#, "num_experts"),
        (r#"{"model_type": "mixtral", "num_experts": 63}"#, "num_local_experts"),
        (r#"{"model_type": "nemotron_h", "n_routed_experts": 63}"#, "n_routed_experts"),
    ] {
        let config = AutoConfig::from_text(text).unwrap();
        let options = FromConfigOptions {
            ep: one_of_eight(),
            ..Default::default()
        };
        let error = AutoModelForCausalLm::<Infer>::from_config(&config, &options, &Device::default())
            .unwrap_err()
            .to_string();
        assert!(error.contains(field) && error.contains("63") && error.contains('8'), "{error}");
    }
}

/// The weight file is cut off after its header: reading any weight would fail with another error.
#[test]
fn a_checkpoint_is_refused_before_its_weights_are_read() {
    let original = fixture::root().join("qwen3_moe/base");
    let refuse = |edit: &dyn Fn(String) -> String, options: &FromPretrainedOptions, parts: [&str; 3]| {
        let dir = tempfile::tempdir().unwrap();
        let config = std::fs::read_to_string(original.join("config.json")).unwrap();
        std::fs::write(dir.path().join("config.json"), edit(config)).unwrap();
        std::fs::copy(original.join("model.safetensors"), dir.path().join("model.safetensors")).unwrap();
        let error = AutoModelForCausalLm::<Infer>::from_pretrained(dir.path(), options, &Device::default())
            .unwrap_err()
            .to_string();
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    };
    let ranks = FromPretrainedOptions {
        ep: one_of_eight(),
        ..Default::default()
    };
    refuse(&|config| config, &ranks, ["num_experts", "6", "size 8"]);
    refuse(
        &|config| config.replace(r#""num_experts_per_tok": 2"#, r#""num_experts_per_tok": 7"#),
        &Default::default(),
        ["num_experts_per_tok", "7", "num_experts = 6"],
    );
}

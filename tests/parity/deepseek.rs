//! Every fixture of the families deepseek_v3, deepseek_v2, glm4_moe_lite and glm4_moe.

use burn::tensor::FloatDType;
use burn_moe_tests::fixture::{Fixture, cases, relative_error};
use burn_moe_tests::fixture_model::{Model, logits, open};

/// One test per fixture, and one that fails when a folder has none.
macro_rules! fixtures {
    ($family:ident: $($case:ident),* $(,)?) => {
        mod $family {
            use super::super::harness::check;

            $(
                #[test]
                fn $case() {
                    check(stringify!($family), stringify!($case));
                }
            )*

            #[test]
            fn every_fixture_has_a_test() {
                assert_eq!(super::cases(stringify!($family)), [$(stringify!($case)),*]);
            }
        }
    };
}

fixtures!(
    deepseek_v3: all_dense,
    all_sparse,
    attention_bias,
    attention_bias_no_q_lora,
    base,
    bf16,
    fp8,
    fp8_reference,
    half_split,
    linear_mscale,
    mtp,
    no_q_lora,
    norm_eps,
    not_renormalised,
    odd,
    packed,
    pad_holes,
    pad_left,
    sharded,
    tied,
    ungrouped,
    yarn,
    yarn_mscale,
    yarn_no_mscale,
);
fixtures!(deepseek_v2: base, bf16, bias, greedy, no_groups, odd, packed, pad_left, yarn);
fixtures!(glm4_moe_lite: base, bf16, layer_types);
fixtures!(glm4_moe: base, bf16, groups, odd, packed, pad_left, qk_norm, tied, whole_heads, yarn);

/// Kimi K2 is DeepSeek-V3 under another name.
#[test]
fn kimi_k2_computes_the_same() {
    let fixture = Fixture::open("deepseek_v3", "ungrouped");
    let run = fixture.run("fp32");
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(fixture.dir.join("model.safetensors"), dir.path().join("model.safetensors")).unwrap();
    let config = std::fs::read_to_string(fixture.dir.join("config.json")).unwrap();
    let renamed = config.replace("\"model_type\": \"deepseek_v3\"", "\"model_type\": \"kimi_k2\"");
    assert_ne!(config, renamed);
    std::fs::write(dir.path().join("config.json"), renamed).unwrap();
    let mut kimi = fixture.clone();
    kimi.dir = dir.path().to_path_buf();
    let model = open(&kimi, run, Some(FloatDType::F32)).model;
    assert!(matches!(&model, Model::DeepseekV3(_)) && model.config().model_type() == "kimi_k2");
    let expected = &fixture.tensor("fp32.logits").values;
    assert!(relative_error(&logits(&model, &fixture.batch()), expected) < 1e-5);
}

/// What the fixtures distinguish: with the factor on the scores, without it, and with the epsilon of the model in the norms
/// of the compressed vectors the logits are others.
#[test]
fn score_factor_and_fixed_epsilon_matter() {
    let changed = |case: &str, from: &str, to: &str| {
        let fixture = Fixture::open("deepseek_v3", case);
        let dir = tempfile::tempdir().unwrap();
        std::fs::copy(fixture.dir.join("model.safetensors"), dir.path().join("model.safetensors")).unwrap();
        let config = std::fs::read_to_string(fixture.dir.join("config.json")).unwrap();
        assert!(config.contains(from), "{case}");
        std::fs::write(dir.path().join("config.json"), config.replace(from, to)).unwrap();
        let mut other = fixture.clone();
        other.dir = dir.path().to_path_buf();
        let model = open(&other, fixture.run("fp32"), Some(FloatDType::F32)).model;
        relative_error(&logits(&model, &fixture.batch()), &fixture.tensor("fp32.logits").values)
    };
    assert!(changed("yarn_no_mscale", "\"mscale_all_dim\": 0.0", "\"mscale_all_dim\": 1.0") > 1e-3);
    assert!(changed("linear_mscale", "\"mscale_all_dim\": 0.8", "\"mscale_all_dim\": 0.0") > 1e-3);
    assert!(changed("norm_eps", "\"rms_norm_eps\": 0.01", "\"rms_norm_eps\": 1e-6") > 1e-3);
    assert!(changed("half_split", "\"rope_interleave\": false", "\"rope_interleave\": true") > 1e-3);
}

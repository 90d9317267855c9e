//! mobius#188, llm-compressor#3173: Nemotron-H experts are squared ReLU without a gate, at a latent width other than the
//! hidden width. No gate weight may be looked for. (The values are compared in the parity suite, fixture `latent`.)

use burn_moe::backend::{Device, Infer};
use burn_moe_models::{AutoConfig, AutoModelForCausalLm};
use burn_moe_tests::fixture;

#[test]
fn no_gate_is_looked_for_and_experts_have_the_latent_width() {
    let dir = fixture::root().join("nemotron_h/latent");
    let (config, report) = AutoModelForCausalLm::<Infer>::inspect(&dir, &Default::default(), &Device::default()).unwrap();
    let AutoConfig::NemotronH(config) = config else {
        panic!("a Nemotron-H fixture")
    };
    let latent = config.moe.latent_size.expect("the fixture has a latent width");
    assert_ne!(latent, config.hidden_size);
    assert!(report.is_exact(), "{report}");
    let experts: Vec<_> = report.loaded.iter().filter(|t| t.path.contains(".experts.")).collect();
    assert!(!experts.is_empty());
    for tensor in experts {
        assert!(!tensor.path.contains("gate"), "{}", tensor.path);
        let (e, f) = (config.moe.router.num_experts, config.moe.intermediate_size);
        let expected = if tensor.path.ends_with("up_proj") {
            [e, f, latent]
        } else {
            [e, latent, f]
        };
        assert_eq!(tensor.shape, expected, "{}", tensor.path);
    }
}

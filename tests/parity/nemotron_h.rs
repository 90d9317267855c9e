//! Every fixture of the family nemotron_h.

use burn::tensor::FloatDType;
use burn_moe_tests::fixture::{Fixture, cases, relative_error};
use burn_moe_tests::fixture_model::{logits, open};

use super::harness::check;

const FAMILY: &str = "nemotron_h";

/// One test per fixture, and one that fails when a folder has none.
macro_rules! fixtures {
    ($($case:ident),* $(,)?) => {
        $(
            #[test]
            fn $case() {
                check(FAMILY, stringify!($case));
            }
        )*

        #[test]
        fn every_fixture_has_a_test() {
            assert_eq!(cases(FAMILY), [$(stringify!($case)),*]);
        }
    };
}

fixtures!(
    base,
    bf16,
    bf16_latent,
    bias,
    dt_floor,
    groups,
    items,
    latent,
    mtp,
    no_conv_bias,
    odd,
    packed,
    packed_no_mamba,
    pad_holes,
    pad_left,
    pad_right,
    sharded,
);

/// The tensor path of transformers carries the Mamba state from one packed document into the next. We must not.
#[test]
fn packed_documents_do_not_leak() {
    let fixture = Fixture::open(FAMILY, "packed");
    let model = open(&fixture, fixture.run("fp32"), Some(FloatDType::F32)).model;
    let found = logits(&model, &fixture.batch());
    let leak = &fixture.tensor("leak.logits").values;
    assert!(relative_error(&found, leak) > 1e-2);
}

/// The floor of transformers changes this fixture, so the two runs of `dt_floor` test two behaviours.
#[test]
fn the_step_floor_matters() {
    let fixture = Fixture::open(FAMILY, "dt_floor");
    let (with, without) = (fixture.tensor("fp32.logits"), fixture.tensor("no_floor.logits"));
    assert!(relative_error(&with.values, &without.values) > 1e-3);
}

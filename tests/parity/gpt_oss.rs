//! Every fixture of the family gpt_oss.

use burn::tensor::FloatDType;
use burn_moe_tests::fixture::{Fixture, cases, relative_error};
use burn_moe_tests::fixture_model::{logits, open};

use super::harness::check;

const FAMILY: &str = "gpt_oss";

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
    aux,
    aux_mask,
    base,
    bf16,
    clamp,
    head_64,
    items,
    layer_types,
    mxfp4_square_down,
    mxfp4_square_gate_up,
    no_attention_bias,
    odd,
    packed,
    pad_holes,
    pad_left,
    plain_rope,
    sharded,
    tied,
);

/// transformers builds the masks of this family without position ids, so packed documents see each other. Ours must not.
#[test]
fn packed_documents_do_not_see_each_other() {
    let fixture = Fixture::open(FAMILY, "packed");
    let model = open(&fixture, fixture.run("fp32"), Some(FloatDType::F32)).model;
    let found = logits(&model, &fixture.batch());
    let leak = &fixture.tensor("leak.logits").values;
    assert!(relative_error(&found, leak) > 1e-2);
}

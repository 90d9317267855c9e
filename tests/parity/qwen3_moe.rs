//! Every fixture of the family qwen3_moe.

use burn_moe_tests::fixture::cases;

use super::harness::check;

const FAMILY: &str = "qwen3_moe";

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
    attention_bias,
    aux,
    aux_items,
    aux_mask,
    base,
    bf16,
    dense_layers,
    mask_ones,
    odd,
    packed,
    packed_window,
    pad_holes,
    pad_left,
    pad_token,
    rope_dynamic,
    rope_linear,
    rope_llama3,
    rope_longrope,
    rope_yarn,
    rope_yarn_mscale,
    sharded,
    tied,
    v4_config,
    window,
    window_off,
);

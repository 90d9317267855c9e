//! Every fixture of the dense decoders and of the relatives of Qwen3-MoE.

/// A module per family with one test per fixture, and one that fails when a folder has none.
macro_rules! families {
    ($($family:ident: $($case:ident),+ ;)+) => {
        $(
            mod $family {
                use burn_moe_tests::fixture::cases;

                use crate::parity::harness::check;

                $(
                    #[test]
                    fn $case() {
                        check(stringify!($family), stringify!($case));
                    }
                )+

                #[test]
                fn every_fixture_has_a_test() {
                    assert_eq!(cases(stringify!($family)), [$(stringify!($case)),+]);
                }
            }
        )+
    };
}

families! {
    llama: base, bf16, bias, defaults, items, odd, packed, pad_holes, pad_left, rope_dynamic, rope_linear, rope_llama3, rope_llama3_v4, sharded, tied;
    qwen2: base, bf16, layer_types, packed_window, pad_left, rope_yarn, tied, window_layers, window_off;
    qwen3: base, bf16, bias, odd, packed, rope_yarn, tied, window_layers;
    mistral: base, bf16, odd, packed_window, pad_right, window_default, window_null;
    qwen2_moe: aux_mask, base, bf16, dense_layers, odd, packed, pad_left, v4_config, window;
    mixtral: aux_mask, base, bf16, mlp_names, odd, packed_window, stacked, tied, window;
    olmoe: aux_mask, base, bf16, clip_qkv, odd, packed, tied;
}

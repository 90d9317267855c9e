//! The kernels of small windows, the split backward (which also is the deterministic one) and the backward of latent heads.

use burn::tensor::FloatDType;
use burn_ep_backend::kernels::attention::with_deterministic;

use crate::attention_case::{Case, Layout, Padding, case};
use crate::support::Gpu;

#[test]
fn attention_in_small_windows() {
    for dim in [64, 128] {
        for (seq, window) in [
            (300, 1),
            (300, 64),
            (517, 127),
            (517, 128),
            (451, 129),
            (600, 256),
            (600, 257),
            (700, 300),
        ] {
            Case {
                window: Some(window),
                sink: true,
                ..case(seq, dim)
            }
            .check();
        }
    }
}

#[test]
fn attention_in_small_windows_and_other_masks() {
    for dim in [64, 128] {
        let base = Case {
            window: Some(100),
            sink: true,
            ..case(300, dim)
        };
        for case in [
            Case {
                documents: Some(77),
                ..base
            },
            Case {
                documents: Some(1),
                ..base
            },
            Case {
                padding: Padding::Holes,
                ..base
            },
            Case {
                padding: Padding::Left(150),
                ..base
            },
            Case {
                padding: Padding::All,
                sink: false,
                ..base
            },
            Case { causal: false, ..base },
            Case { sq: 130, ..base },
            Case {
                batch: 1,
                heads: 7,
                kv_heads: 1,
                layout: Layout::Fused,
                ..base
            },
            Case {
                heads: 3,
                kv_heads: 3,
                layout: Layout::HeadsFirst,
                ..base
            },
        ] {
            case.check();
        }
    }
}

#[test]
fn attention_in_small_windows_of_other_head_sizes() {
    for (dk, dv) in [(16, 16), (80, 80), (96, 64), (192, 128)] {
        Case {
            dv,
            window: Some(64),
            ..case(200, dk)
        }
        .check();
    }
}

#[test]
fn attention_in_small_windows_in_half_precision() {
    for dim in [64, 128] {
        Case {
            window: Some(128),
            sink: true,
            ..case(300, dim)
        }
        .check_in(FloatDType::F16);
    }
}

// GPT-OSS: eight query heads a key head, as many tiles as processors and more.
#[test]
fn attention_in_a_small_window_of_many_tiles() {
    Case {
        batch: 1,
        heads: 16,
        kv_heads: 2,
        window: Some(128),
        sink: true,
        gain: 4.0,
        ..case(2048, 64)
    }
    .check();
}

// The gradients are right, and the same to the last bit in every run.
#[test]
fn deterministic_attention_repeats() {
    with_deterministic(true, || {
        for case in [
            Case {
                batch: 3,
                heads: 8,
                window: Some(130),
                sink: true,
                ..case(517, 64)
            },
            Case {
                batch: 3,
                heads: 8,
                window: Some(300),
                ..case(517, 128)
            },
            case(1, 128),
            Case {
                sink: true,
                ..case(300, 64)
            },
            case(451, 128),
            Case {
                documents: Some(130),
                padding: Padding::Right(45),
                ..case(517, 128)
            },
            Case {
                documents: Some(37),
                causal: false,
                ..case(300, 64)
            },
            Case { skv: 300, ..case(70, 80) },
            Case {
                batch: 1,
                heads: 16,
                kv_heads: 2,
                ..case(2048, 128)
            },
        ] {
            if case.sq > 1 {
                case.check();
            }
            let first = case.run::<Gpu>(FloatDType::BF16);
            for _ in 0..4 {
                assert_eq!(first, case.run::<Gpu>(FloatDType::BF16), "{case:?}");
            }
        }
    });
}

#[test]
fn attention_of_latent_heads() {
    let latent = |seq| Case { dv: 128, ..case(seq, 192) };
    for case in [
        latent(2),
        latent(64),
        latent(300),
        latent(517),
        Case {
            heads: 3,
            kv_heads: 3,
            layout: Layout::HeadsFirst,
            ..latent(300)
        },
        Case {
            sink: true,
            window: Some(300),
            ..latent(517)
        },
        Case {
            documents: Some(130),
            padding: Padding::Right(45),
            ..latent(517)
        },
        Case {
            padding: Padding::Holes,
            causal: false,
            ..latent(150)
        },
        Case {
            padding: Padding::All,
            ..latent(150)
        },
        Case { skv: 300, ..latent(70) },
        Case { gain: 30.0, ..latent(300) },
        Case { dv: 96, ..case(200, 136) },
        Case {
            batch: 1,
            heads: 8,
            kv_heads: 8,
            ..latent(2048)
        },
    ] {
        case.check();
    }
    Case { sink: true, ..latent(200) }.check_in(FloatDType::F16);
}

//! The portable attention kernels: fp32, head sizes that the Hopper kernels do not take, and what they cannot do.

use burn::tensor::FloatDType;
use burn_ep_backend::kernels::attention::with_deterministic;

use crate::attention_case::{Case, Layout, Padding, case};
use crate::support::Gpu;

/// Every mask, over one head size: the variants of the kernels are few, the cases many.
fn masks(dim: usize) -> Vec<Case> {
    let base = Case {
        sink: true,
        ..case(150, dim)
    };
    vec![
        case(1, dim),
        case(300, dim),
        Case { window: Some(16), ..base },
        Case {
            documents: Some(37),
            window: Some(50),
            padding: Padding::Right(20),
            ..base
        },
        Case {
            padding: Padding::Holes,
            ..base
        },
        Case {
            padding: Padding::All,
            sink: false,
            ..base
        },
        Case {
            padding: Padding::Left(60),
            sink: false,
            ..base
        },
        Case {
            causal: false,
            documents: Some(37),
            ..base
        },
        Case { sq: 70, skv: 300, ..base },
        Case {
            heads: 14,
            kv_heads: 2,
            layout: Layout::HeadsFirst,
            ..base
        },
    ]
}

#[test]
fn portable_attention_in_fp32() {
    for case in masks(64) {
        case.check_f32();
    }
}

#[test]
fn portable_attention_in_bf16() {
    // one token is tested in `attention_of_one_token`; 12 columns are no multiple of 16 bytes
    for case in masks(12).into_iter().skip(1) {
        case.check();
    }
}

#[test]
fn portable_attention_of_odd_and_large_heads() {
    for (dk, dv, dtype) in [
        (3, 5, FloatDType::F32),
        (192, 128, FloatDType::F32),
        (256, 256, FloatDType::F32),
        (256, 256, FloatDType::BF16),
        (192, 128, FloatDType::F16),
    ] {
        let case = Case {
            dv,
            documents: Some(90),
            ..case(140, dk)
        };
        match dtype {
            FloatDType::F32 => case.check_f32(),
            _ => case.check_in(dtype),
        }
    }
}

// With different head sizes of keys and values the deterministic backward is the portable one.
#[test]
fn deterministic_attention_of_latent_heads() {
    with_deterministic(true, || {
        let latent = Case { dv: 128, ..case(150, 192) };
        latent.check();
        let first = latent.run::<Gpu>(FloatDType::BF16);
        assert_eq!(first, latent.run::<Gpu>(FloatDType::BF16));
    });
}

//! Ops under Burn's fusion layer, which runs lazily: most are their reference there, whose chains it merges.

use burn::tensor::FloatDType::{BF16, F16, F32};
use burn_ep_backend::NormRounding;

use crate::attention_case::case;
use crate::mamba_conv::{PLAIN, conv};
use crate::mamba_scan::{SMALL, Scan, scan};
use crate::norms::{add_norm, gated};
use crate::support::{Cpu, FusedGpu, close, compare};

#[test]
fn norms_under_fusion() {
    let sizes = (37, 96, false);
    let exact = add_norm::<Cpu>(sizes, NormRounding::Llama, F32, F32);
    close(
        "fused norm fp32",
        add_norm::<FusedGpu>(sizes, NormRounding::Llama, F32, F32),
        exact.clone(),
        2e-5,
    );
    for dtype in [BF16, F16] {
        let [fused, plain] = [
            add_norm::<FusedGpu>(sizes, NormRounding::Llama, dtype, dtype),
            add_norm::<Cpu>(sizes, NormRounding::Llama, dtype, dtype),
        ];
        compare(&format!("fused norm {dtype:?}"), fused, exact.clone(), plain);
    }
    let sizes = (33, 3, 20, false);
    close(
        "fused gated norm",
        gated::<FusedGpu>(sizes, F32, F32),
        gated::<Cpu>(sizes, F32, F32),
        2e-5,
    );
}

#[test]
fn attention_under_fusion() {
    let mut case = case(70, 24);
    (case.sink, case.window, case.documents) = (true, Some(20), Some(31));
    let exact = case.run::<Cpu>(F32);
    close("fused attention fp32", case.run::<FusedGpu>(F32), exact.clone(), 2e-5);
    compare("fused attention", case.run::<FusedGpu>(BF16), exact, case.run::<Cpu>(BF16));
}

#[test]
fn mamba_under_fusion() {
    let exact = conv::<Cpu>(PLAIN, F32);
    close("fused convolution", conv::<FusedGpu>(PLAIN, F32), exact, 2e-5);
    let case = Scan {
        documents: Some(17),
        initial_state: true,
        ..SMALL
    };
    close("fused scan", scan::<FusedGpu>(case, F32), scan::<Cpu>(case, F32), 5e-5);
}

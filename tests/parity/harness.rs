//! One fixture against our model.
//!
//! fp32: logits, loss and auxiliary loss to 1e-5, every gradient to 1e-4 (norm of the difference over the norm), equal
//! experts, two optimizer steps. bf16: by the low-precision rule, see [`check_bf16`].
//!
//! On CUDA the fp32 tolerances are ten times wider: sums over thousands of terms run in another order and with fused
//! multiply-adds, exponentials are the device's, and products may be chosen by tuning, so that a repeated pass is equal only up to
//! that. It is still fp32 throughout (TF32 would be off by 1e-3); on an H200 logits were off by 6e-7 and gradients by 6e-6 at most.

use std::collections::BTreeMap;

use burn::module::AutodiffModule;
use burn::tensor::FloatDType;
use burn_moe::backend::{Device, Infer, Train};
use burn_moe::batch::HostBatch;
use burn_moe::model::CausalLm;
use burn_moe::optim::{AdamW, GradStore, ParamTable, clip_factor, global_norm};
use burn_moe::train::Recompute;
use burn_moe_tests::fixture::{Fixture, HostTensor, Run, relative_error};
use burn_moe_tests::fixture_model::{Model, adamw, gradients, logits, open, parameters, pass, path_of};

/// Widens the tolerances on CUDA, see above.
const DEVICE: f64 = if cfg!(feature = "cuda") { 10.0 } else { 1.0 };
/// Relative tolerance of logits and losses, and of gradients.
const VALUE: f64 = 1e-5 * DEVICE;
const GRADIENT: f64 = 1e-4 * DEVICE;
/// Of what two optimizer steps change: about one rounding of the parameters.
const CHANGE: f64 = 1e-3 * DEVICE;
/// Of a pass that is run again with recomputation: equal bits on the CPU.
const AGAIN: f64 = if cfg!(feature = "cuda") { VALUE } else { 0.0 };

/// Checks the fp32 runs of a fixture, and the bf16 run if it has one.
pub fn check(family: &str, case: &str) {
    let fixture = Fixture::open(family, case);
    for run in fixture.expected.runs.iter().filter(|run| run.dtype == "float32") {
        check_fp32(&fixture, run);
    }
    if fixture.has_run("bf16") {
        check_bf16(&fixture);
    }
}

fn check_fp32(fixture: &Fixture, run: &Run) {
    let label = format!("{}/{} {}", fixture.expected.family, fixture.expected.case, run.name);
    let batch = fixture.batch();
    let model = open(fixture, run, Some(FloatDType::F32)).model;

    let logits = logits(&model, &batch);
    let expected = &fixture.tensor(&format!("{}.logits", run.name)).values;
    close_logits(&label, &batch, &logits, expected);
    check_routing(fixture, run, &label, &model, &batch);

    let kept = pass(&model, fixture, Recompute::None);
    close(&format!("{label}: loss"), kept.loss, run.loss, VALUE);
    close(&format!("{label}: gradient norm"), kept.grad_norm, run.grad_norm, VALUE);
    match (kept.balance, run.aux_loss) {
        (Some(found), Some(expected)) => close(&format!("{label}: auxiliary loss"), found, expected, VALUE),
        (None, None) => {}
        (found, expected) => panic!("{label}: auxiliary loss {found:?}, expected {expected:?}"),
    }
    let expected = fixture.tensors_under(&format!("{}.grad.", run.name));
    let mut worst = 0.0f64;
    for (name, found, expected) in pairs(&label, &kept.grads, &expected) {
        assert_eq!(found.shape, expected.shape, "{label}: shape of the gradient of {name}");
        let error = relative_error(&found.values, &expected.values);
        worst = worst.max(error);
        assert!(error <= GRADIENT, "{label}: gradient of {name} is off by {error:.2e}");
    }
    println!("{label}: largest error of a gradient {worst:.2e}");

    for recompute in [Recompute::All, Recompute::KeepEvery(2)] {
        let again = pass(&model, fixture, recompute);
        close(&format!("{label}: loss with {recompute:?}"), again.loss, kept.loss, AGAIN);
        assert_eq!(
            again.grads.keys().collect::<Vec<_>>(),
            kept.grads.keys().collect::<Vec<_>>(),
            "{label}: {recompute:?}"
        );
        for (name, grad) in &again.grads {
            let error = relative_error(&grad.values, &kept.grads[name].values);
            assert!(
                error <= AGAIN,
                "{label}: gradient of {name} with {recompute:?} differs by {error:.2e}"
            );
        }
    }
    check_training(fixture, run, &label, model);
}

/// Our error against fp32 is at most twice that of the reference's bf16, plus a floor of about half a unit in the last place
/// of bf16. The fp32 values are the reference's with the same, widened weights.
///
/// A tensor of four values can come out right by luck, so the reference's error for one gradient is taken to be at least the
/// median over all gradients; in return our errors over all gradients together must be of the reference's size.
fn check_bf16(fixture: &Fixture) {
    const FLOOR: f64 = 2e-3;
    const OVERALL: f64 = 1.5;
    let label = format!("{}/{} bf16", fixture.expected.family, fixture.expected.case);
    let (exact, low) = (fixture.run("fp32"), fixture.run("bf16"));
    let batch = fixture.batch();
    let model = open(fixture, low, None).model;
    let within = |what: &str, found: f64, reference: f64| {
        assert!(
            found <= 2.0 * reference + FLOOR,
            "{label}: {what}: error {found:.2e} against fp32, the reference's bf16 has {reference:.2e}"
        );
    };

    let logits = logits(&model, &batch);
    let values = |name: &str| &fixture.tensor(name).values;
    within(
        "logits",
        relative_error(&logits, values("fp32.logits")),
        relative_error(values("bf16.logits"), values("fp32.logits")),
    );
    check_routing(fixture, low, &label, &model, &batch);

    let ours = pass(&model, fixture, Recompute::All);
    let error = |loss: f64| (loss - exact.loss).abs() / exact.loss;
    within("loss", error(ours.loss), error(low.loss));
    let (expected, reference) = (fixture.tensors_under("fp32.grad."), fixture.tensors_under("bf16.grad."));
    let errors: Vec<(&str, f64, f64)> = pairs(&label, &ours.grads, &expected)
        .into_iter()
        .map(|(name, found, expected)| {
            let found = relative_error(&found.values, &expected.values);
            (name, found, relative_error(&reference[name].values, &expected.values))
        })
        .collect();
    let mut sorted: Vec<f64> = errors.iter().map(|(_, _, reference)| *reference).collect();
    sorted.sort_by(f64::total_cmp);
    let median = sorted[sorted.len() / 2];
    for (name, found, reference) in &errors {
        within(&format!("gradient of {name}"), *found, reference.max(median));
    }
    let rms = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
    let (found, reference) = (rms(&mut errors.iter().map(|e| e.1)), rms(&mut errors.iter().map(|e| e.2)));
    assert!(
        found <= OVERALL * reference,
        "{label}: error over all gradients {found:.2e}, the reference's bf16 has {reference:.2e}"
    );
}

/// Two steps of AdamW with clipping on the same batch.
fn check_training(fixture: &Fixture, run: &Run, label: &str, mut model: Model) {
    let expected = run.train.as_ref().expect("fp32 runs record two steps");
    let before = parameters(&model);
    let table = ParamTable::new::<Train, _>(&model);
    let mut optimizer = AdamW::<Infer>::new(adamw(expected), table.clone()).expect("valid settings");
    let norms = expected.grad_norms.len();
    for step in 0..=norms {
        let mut grads = GradStore::new();
        let loss = gradients(&model, fixture, Recompute::All, &mut grads).0;
        close(&format!("{label}: loss after {step} steps"), loss, expected.losses[step], VALUE);
        if step == norms {
            break;
        }
        let norm = global_norm(&grads, &table, None).expect("a norm");
        close(
            &format!("{label}: gradient norm of step {step}"),
            norm,
            expected.grad_norms[step],
            GRADIENT,
        );
        let factor = clip_factor(norm, expected.max_grad_norm);
        model = optimizer.step::<Train, _>(model, &mut grads, expected.lr, factor).expect("a step");
    }

    // A step of Adam is about the sign of the gradient, so single values may differ where a gradient is nearly zero; norms do
    // not. Fixtures with `after` use an epsilon that makes the step smooth.
    let after = parameters(&model);
    let change = |name: &str, after: &[f32]| -> Vec<f32> {
        let before = &before[path_of(name)].values;
        after.iter().zip(before).map(|(a, b)| a - b).collect()
    };
    for (name, norm) in &expected.change_norms {
        let found = change(name, &after[path_of(name)].values);
        let zeros = vec![0.0; found.len()];
        close(&format!("{label}: change of {name}"), relative_error(&found, &zeros), *norm, CHANGE);
    }
    for (name, expected) in fixture.tensors_under(&format!("{}.after.", run.name)) {
        let found = change(name, &after[path_of(name)].values);
        let error = relative_error(&found, &change(name, &expected.values));
        assert!(error <= CHANGE, "{label}: change of {name} in two steps is off by {error:.2e}");
    }
}

/// Every router chooses the experts of the reference.
fn check_routing(fixture: &Fixture, run: &Run, label: &str, model: &Model, batch: &HostBatch) {
    let model = model.valid();
    let input = model.prepare(batch, 0, &Device::default()).expect("a batch");
    let mut x = model.embed(&input).expect("embeddings");
    let expected = fixture.tensors_under(&format!("{}.routing.model.layers.", run.name));
    let mut routers = 0;
    for index in 0..model.num_blocks() {
        let out = model.block(index, x, &input, None, None).expect("a block");
        x = out.x_bsd;
        let Some(router) = out.router else { continue };
        routers += 1;
        let (_, dense) = expected
            .iter()
            .find(|(name, _)| name.split('.').next() == Some(index.to_string().as_str()))
            .unwrap_or_else(|| panic!("{label}: the reference has no router in layer {index}"));
        let top_k = router.ids_tk.dims()[1];
        let ids: Vec<i64> = router.ids_tk.into_data().iter::<i64>().collect();
        for (token, (ids, weights)) in ids.chunks(top_k).zip(dense.values.chunks(dense.shape[1])).enumerate() {
            if !is_real(batch, token) {
                continue;
            }
            let mut found: Vec<usize> = ids.iter().map(|&id| id as usize).collect();
            found.sort_unstable();
            let chosen: Vec<usize> = (0..weights.len()).filter(|&e| weights[e] != 0.0).collect();
            assert_eq!(found, chosen, "{label}: experts of token {token} in layer {index}");
        }
    }
    assert_eq!(routers, expected.len(), "{label}: number of routers");
}

/// Found and expected tensors by name; panics unless the names are the same.
fn pairs<'a>(
    label: &str,
    found: &'a BTreeMap<String, HostTensor>,
    expected: &BTreeMap<&'a str, &'a HostTensor>,
) -> Vec<(&'a str, &'a HostTensor, &'a HostTensor)> {
    let by_name: BTreeMap<&str, (&'a str, &'a HostTensor)> =
        expected.iter().map(|(name, tensor)| (path_of(name), (*name, *tensor))).collect();
    let names = |it: Vec<&str>| it.join(" ");
    assert_eq!(
        names(found.keys().map(String::as_str).collect()),
        names(by_name.keys().copied().collect()),
        "{label}: names of the gradients"
    );
    found
        .iter()
        .map(|(name, tensor)| {
            let (full_name, expected) = by_name[name.as_str()];
            (full_name, tensor, expected)
        })
        .collect()
}

fn is_real(batch: &HostBatch, token: usize) -> bool {
    batch.attention_mask.as_ref().is_none_or(|mask| mask[token])
}

/// Logits of real tokens: by norm, and the largest difference against the largest logit.
fn close_logits(label: &str, batch: &HostBatch, found: &[f32], expected: &[f32]) {
    let vocab = expected.len() / batch.tokens();
    let real = |values: &[f32]| -> Vec<f32> {
        let rows = values.chunks(vocab).enumerate();
        rows.filter(|(token, _)| is_real(batch, *token))
            .flat_map(|(_, row)| row.to_vec())
            .collect()
    };
    let (found, expected) = (real(found), real(expected));
    let error = relative_error(&found, &expected);
    println!("{label}: error of the logits {error:.2e}");
    assert!(error <= VALUE, "{label}: logits are off by {error:.2e}");
    let largest = expected.iter().fold(0.0f32, |max, v| max.max(v.abs()));
    let difference = found.iter().zip(&expected).fold(0.0f32, |max, (a, b)| max.max((a - b).abs()));
    assert!(difference <= VALUE as f32 * largest, "{label}: a logit is off by {difference:.2e}");
}

pub fn close(what: &str, found: f64, expected: f64, tolerance: f64) {
    let error = (found - expected).abs() / expected.abs().max(f64::MIN_POSITIVE);
    assert!(
        error <= tolerance,
        "{what}: {found}, expected {expected} (relative difference {error:.2e})"
    );
}

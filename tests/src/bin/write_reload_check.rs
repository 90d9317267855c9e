//! Trains the model of a fixture for one step, saves it, and writes the logits it then computes next to it, for
//! `tests/fixtures/check_reload.py`.
//!
//! ```text
//! cargo run --release -p burn-moe-tests --bin write_reload_check -- nemotron_h base OUT
//! cargo run --release -p burn-moe-tests --bin write_reload_check -- gpt_oss mxfp4_square_down OUT quantised
//! ```

use std::path::Path;

use burn::tensor::FloatDType;
use burn_moe::backend::{Infer, Train};
use burn_moe::checkpoint::SaveOptions;
use burn_moe::optim::{AdamW, GradStore, ParamTable};
use burn_moe::train::Recompute;
use burn_moe_tests::fixture::Fixture;
use burn_moe_tests::fixture_model::{adamw, gradients, logits, open};
use safetensors::Dtype;
use safetensors::tensor::TensorView;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (family, case, out, quantised) = match arguments.as_slice() {
        [family, case, out] => (family, case, out, false),
        [family, case, out, word] if word == "quantised" => (family, case, out, true),
        _ => return Err("usage: write_reload_check FAMILY CASE OUT [quantised]".into()),
    };
    let out = Path::new(out);
    let fixture = Fixture::open(family, case);
    let run = fixture.run("fp32");
    let settings = run.train.as_ref().ok_or("the fixture has no optimizer steps")?;

    let loaded = open(&fixture, run, None);
    let mut grads = GradStore::new();
    let (loss, _) = gradients(&loaded.model, &fixture, Recompute::All, &mut grads);
    let mut optimizer = AdamW::<Infer>::new(adamw(settings), ParamTable::new::<Train, _>(&loaded.model))?;
    let model = optimizer.step::<Train, _>(loaded.model, &mut grads, settings.lr, 1.0)?;
    let like = Some(&loaded.source);
    model.save_pretrained(
        out,
        &SaveOptions {
            like,
            quantised,
            ..SaveOptions::default()
        },
    )?;

    // What was saved, read back and widened: what a bf16 model computes in fp32.
    let mut saved = fixture.clone();
    saved.dir = out.to_path_buf();
    let reloaded = open(&saved, run, Some(FloatDType::F32)).model;
    let logits = logits(&reloaded, &fixture.batch());
    write_values(&fixture, &logits, &out.join("reload_check.safetensors"))?;
    println!("{family}/{case}: loss before the step {loss:.5}, saved to {}", out.display());
    Ok(())
}

fn write_values(fixture: &Fixture, logits: &[f32], path: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let mut shape = fixture.tensor("input.input_ids").shape.clone();
    shape.push(logits.len() / fixture.batch().tokens());
    let mut tensors = vec![(
        "logits".to_string(),
        Dtype::F32,
        shape,
        logits.iter().flat_map(|v| v.to_le_bytes()).collect(),
    )];
    for (name, tensor) in fixture.tensors_under("input.") {
        if ["input_ids", "attention_mask", "position_ids"].contains(&name) {
            let bytes: Vec<u8> = tensor.values.iter().flat_map(|&v| (v as i32).to_le_bytes()).collect();
            tensors.push((name.to_string(), Dtype::I32, tensor.shape.clone(), bytes));
        }
    }
    let views = tensors
        .iter()
        .map(|(name, dtype, shape, bytes)| Ok((name, TensorView::new(*dtype, shape.clone(), bytes)?)))
        .collect::<Result<Vec<_>, safetensors::SafeTensorError>>()?;
    safetensors::serialize_to_file(views, None, path)?;
    Ok(())
}

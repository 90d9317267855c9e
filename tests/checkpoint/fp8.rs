//! FP8 in blocks: a folder of DeepSeek-V3 with edge blocks and a prediction layer, against a decoder of its own.

use std::collections::BTreeMap;
use std::path::Path;

use burn::tensor::FloatDType;
use burn_moe::backend::{Device, Train};
use burn_moe::checkpoint::{CheckpointSource, SaveOptions};
use burn_moe::optim::{AdamW, GradStore, ParamTable};
use burn_moe::train::Recompute;
use burn_moe_models::{AutoModelForCausalLm, FromPretrainedOptions, Pretrained};
use burn_moe_tests::fixture::{self, Fixture};
use burn_moe_tests::fixture_model::{adamw, gradients, open};
use half::bf16;
use safetensors::Dtype;

use super::toy::{self, Folder, Stored};

const BLOCK: usize = 128;
const SCALES: &str = "_scale_inv";

fn dir() -> std::path::PathBuf {
    fixture::root().join("deepseek_v3/fp8")
}

/// `(-1)^s * 1.m * 2^(e - 7)`, in f64 from the bits.
fn e4m3(code: u8) -> f64 {
    let (exponent, fraction) = (i32::from(code >> 3 & 15), f64::from(code & 7));
    let magnitude = match exponent {
        0 => fraction / 8.0 * 2f64.powi(-6),
        _ => (1.0 + fraction / 8.0) * 2f64.powi(exponent - 7),
    };
    if code >= 128 { -magnitude } else { magnitude }
}

fn floats(tensor: &Stored) -> Vec<f64> {
    match tensor.dtype {
        Dtype::F32 => tensor
            .bytes
            .as_chunks::<4>()
            .0
            .iter()
            .map(|b| f64::from(f32::from_le_bytes(*b)))
            .collect(),
        Dtype::BF16 => tensor
            .bytes
            .as_chunks::<2>()
            .0
            .iter()
            .map(|b| bf16::from_le_bytes(*b).to_f64())
            .collect(),
        other => panic!("{other}"),
    }
}

/// Every weight of a folder by name, scales applied.
fn decoded(folder: &Folder) -> BTreeMap<String, Vec<f64>> {
    let values = |(name, tensor): (&String, &Stored)| {
        let values = match folder.get(&format!("{name}{SCALES}")) {
            Some(scales) => {
                assert_eq!(tensor.dtype, Dtype::F8_E4M3, "{name}");
                let (columns, scale) = (tensor.shape[1], floats(scales));
                let wide = columns.div_ceil(BLOCK);
                assert_eq!(scales.shape, [tensor.shape[0].div_ceil(BLOCK), wide], "{name}");
                let at = |i: usize| scale[i / columns / BLOCK * wide + i % columns / BLOCK];
                // The product is rounded to fp32 by definition.
                let product = |(i, code): (usize, &u8)| f64::from((e4m3(*code) * at(i)) as f32);
                tensor.bytes.iter().enumerate().map(product).collect()
            }
            None => floats(tensor),
        };
        (name.clone(), values)
    };
    folder.iter().filter(|(name, _)| !name.ends_with(SCALES)).map(values).collect()
}

fn load(dir: &Path, dtype: Option<FloatDType>) -> Pretrained<Train> {
    let options = FromPretrainedOptions {
        dtype,
        ..FromPretrainedOptions::default()
    };
    AutoModelForCausalLm::<Train>::from_pretrained(dir, &options, &Device::default()).unwrap()
}

fn save(loaded: &Pretrained<Train>, to: &Path, quantised: bool) {
    let options = SaveOptions {
        like: Some(&loaded.source),
        quantised,
        ..SaveOptions::default()
    };
    loaded.model.save_pretrained(to, &options).unwrap();
}

/// candle#2875: matrices of 130 rows, whose second row of blocks has two.
#[test]
fn a_plain_save_holds_what_an_independent_decoder_reads() {
    let stored = toy::read(&dir());
    let edge = &stored["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"];
    assert_eq!((edge.dtype, &edge.shape[..]), (Dtype::F8_E4M3, &[130, 136][..]));
    let expected = decoded(&stored);
    for dtype in [None, Some(FloatDType::F32)] {
        let loaded = load(&dir(), dtype);
        assert!(loaded.report.is_exact(), "{}", loaded.report);
        let out = tempfile::tempdir().unwrap();
        save(&loaded, out.path(), false);
        let plain = toy::read(out.path());
        let names = |map: Vec<&String>| map.into_iter().cloned().collect::<Vec<_>>();
        assert_eq!(names(plain.keys().collect()), names(expected.keys().collect()));
        for (name, tensor) in &plain {
            let kept_fp32 = name.ends_with("e_score_correction_bias");
            assert_eq!(tensor.dtype, if kept_fp32 { Dtype::F32 } else { Dtype::BF16 }, "{name}");
            let rounded: Vec<f64> = match tensor.dtype {
                Dtype::F32 => expected[name].clone(),
                _ => expected[name].iter().map(|&v| bf16::from_f32(v as f32).to_f64()).collect(),
            };
            assert_eq!(floats(tensor), rounded, "{name}");
        }
        // The prediction layer as well.
        assert_eq!(plain["model.layers.2.self_attn.o_proj.weight"].dtype, Dtype::BF16);
        assert!(
            CheckpointSource::open(out.path())
                .unwrap()
                .config()
                .get("quantization_config")
                .is_none()
        );
        assert_eq!(toy::read(&save_again(out.path())), plain);
    }
}

fn save_again(dir: &Path) -> std::path::PathBuf {
    let out = dir.join("again");
    save(&load(dir, None), &out, false);
    out
}

/// Values in fp32 are the products, not what bf16 makes of them.
#[test]
fn values_in_fp32_are_not_rounded_to_bf16() {
    let loaded = load(&dir(), Some(FloatDType::F32));
    let model = match &loaded.model {
        AutoModelForCausalLm::DeepseekV3(model) => model,
        other => panic!("{other:?}"),
    };
    let weight = model.layers[0].self_attn.kv_a_proj_with_mqa.weight.val().into_data();
    let found: Vec<f64> = weight.iter::<f64>().collect();
    let expected = &decoded(&toy::read(&dir()))["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"];
    assert_eq!(&found, expected);
    assert!(expected.iter().any(|&v| bf16::from_f64(v).to_f64() != v));
}

/// After a step every trained block is quantised anew, by the published rule; what was not trained keeps its bytes.
#[test]
fn trained_blocks_are_quantised_again() {
    let fixture = Fixture::open("deepseek_v3", "fp8");
    let run = fixture.run("fp32");
    let mut loaded = open(&fixture, run, Some(FloatDType::F32));
    let mut grads = GradStore::new();
    gradients(&loaded.model, &fixture, Recompute::None, &mut grads);
    let settings = run.train.as_ref().unwrap();
    let mut optimizer = AdamW::new(adamw(settings), ParamTable::new::<Train, _>(&loaded.model)).unwrap();
    loaded.model = optimizer.step::<Train, _>(loaded.model, &mut grads, 1e-2, 1.0).unwrap();

    let out = tempfile::tempdir().unwrap();
    save(&loaded, &out.path().join("plain"), false);
    save(&loaded, &out.path().join("fp8"), true);
    let (before, after) = (toy::read(&dir()), toy::read(&out.path().join("fp8")));
    assert_eq!(before.keys().collect::<Vec<_>>(), after.keys().collect::<Vec<_>>());
    let trained = floats_of(&loaded);
    let read = decoded(&after);
    let mut changed = 0;
    for (name, tensor) in &after {
        if name.starts_with("model.layers.2.") {
            assert_eq!(tensor, &before[name], "{name}");
            continue;
        }
        let Some(scales) = after.get(&format!("{name}{SCALES}")) else {
            continue;
        };
        changed += usize::from(tensor.bytes != before[name].bytes);
        let (columns, wide) = (tensor.shape[1], scales.shape[1]);
        let scales = floats(scales);
        let mut largest = vec![0.0f64; scales.len()];
        let block = |i: usize| i / columns / BLOCK * wide + i % columns / BLOCK;
        let Some(values) = trained.get(name) else { continue };
        for (i, v) in values.iter().enumerate() {
            largest[block(i)] = largest[block(i)].max(v.abs());
        }
        for (scale, largest) in scales.iter().zip(&largest) {
            assert_eq!(*scale, f64::from(*largest as f32 / 448.0), "{name}");
        }
        for (i, (read, value)) in read[name].iter().zip(values).enumerate() {
            // Half a unit of the last of three fraction bits; the smallest step is 2^-9 scales.
            let bound = (value.abs() / 16.0).max(scales[block(i)] * 2f64.powi(-10)) * 1.0001;
            assert!((read - value).abs() <= bound, "{name}[{i}]: {read} for {value}");
        }
    }
    assert!(changed > 20, "{changed} matrices");
}

/// Trained values of the matrices that are stored one to one, by file name.
fn floats_of(loaded: &Pretrained<Train>) -> BTreeMap<String, Vec<f64>> {
    let parameters = burn_moe_tests::fixture_model::parameters(&loaded.model);
    let one = |(path, tensor): (String, fixture::HostTensor)| {
        let values = tensor.values.iter().map(|&v| f64::from(v)).collect();
        (format!("model.{path}"), values)
    };
    parameters
        .into_iter()
        .filter(|(path, _)| path.contains("_proj.weight"))
        .map(one)
        .collect()
}

/// A plain model can be written in FP8, and comes back within the precision of the format.
#[test]
fn a_plain_model_is_quantised_on_request() {
    let from = fixture::root().join("deepseek_v3/ungrouped");
    let out = tempfile::tempdir().unwrap();
    save(&load(&from, None), out.path(), true);
    let (plain, packed) = (decoded(&toy::read(&from)), toy::read(out.path()));
    let config = CheckpointSource::open(out.path()).unwrap();
    let quantisation = config.config().get("quantization_config").unwrap();
    assert_eq!(quantisation["weight_block_size"], serde_json::json!([128, 128]));
    let quantised = packed.values().filter(|t| t.dtype == Dtype::F8_E4M3).count();
    // Three layers: attention of four, dense of three, two with three shared and three for each of eight experts.
    assert_eq!(quantised, 3 * 4 + 3 + 2 * (3 + 3 * 8));
    for name in [
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.layers.1.mlp.gate.weight",
        "model.norm.weight",
    ] {
        assert_ne!(packed[name].dtype, Dtype::F8_E4M3, "{name}");
    }
    for (name, values) in decoded(&packed) {
        let largest = plain[&name].iter().fold(0.0f64, |m, v| m.max(v.abs()));
        for (found, expected) in values.iter().zip(&plain[&name]) {
            let bound = (expected.abs() / 16.0).max(largest / 448.0 * 2f64.powi(-10)) * 1.0001;
            assert!((found - expected).abs() <= bound, "{name}: {found} for {expected}");
        }
    }
    let again = tempfile::tempdir().unwrap();
    save(&load(out.path(), None), again.path(), true);
    assert_eq!(toy::read(again.path()), packed);
}

/// candle#2875: a type that is not decoded, and a quantised weight where the family has none.
#[test]
fn other_types_are_refused_by_tensor_and_dtype() {
    let attempt = |name: &str, dtype: Dtype, shape: Vec<usize>, bytes: usize| {
        let mut folder = toy::read(&dir());
        folder.insert(
            name.to_string(),
            Stored {
                dtype,
                shape,
                bytes: vec![0x38; bytes],
            },
        );
        let out = tempfile::tempdir().unwrap();
        std::fs::copy(dir().join("config.json"), out.path().join("config.json")).unwrap();
        toy::write_file(&out.path().join("model.safetensors"), folder.iter());
        let error = AutoModelForCausalLm::<Train>::from_pretrained(out.path(), &Default::default(), &Device::default());
        error.unwrap_err().to_string()
    };
    let name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight";
    let error = attempt(name, Dtype::F8_E5M2, vec![130, 136], 130 * 136);
    assert!(
        error.contains(name) && error.contains("F8_E5M2") && error.contains("F8_E4M3"),
        "{error}"
    );
    let scales = format!("{name}{SCALES}");
    let error = attempt(&scales, Dtype::F16, vec![2, 2], 8);
    assert!(error.contains(&scales) && error.contains("F16"), "{error}");
    let error = attempt(&scales, Dtype::F32, vec![1, 2], 8);
    assert!(error.contains("[1, 2]") && error.contains("[2, 2]"), "{error}");
    let gate = "model.layers.1.mlp.gate.weight";
    let error = attempt(gate, Dtype::F8_E4M3, vec![4, 136], 4 * 136);
    assert!(error.contains(gate) && error.contains("F8_E4M3"), "{error}");
}

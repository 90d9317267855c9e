//! Quantised weights: what does not fit is named, and only what was trained changes.

use std::path::Path;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Tensor, TensorData};
use burn_moe::backend::{Device, Train};
use burn_moe::checkpoint::SaveOptions;
use burn_moe::optim::PathStack;
use burn_moe_models::{AutoConfig, AutoModelForCausalLm, FromConfigOptions, FromPretrainedOptions, Pretrained};
use burn_moe_tests::fixture;
use safetensors::Dtype;

use super::toy::{self, Folder, Stored};

const EXPERTS: &str = "model.layers.1.mlp.experts";

fn original() -> std::path::PathBuf {
    fixture::root().join("gpt_oss/mxfp4_square_gate_up")
}

/// The fixture with some tensors changed.
fn changed(change: impl FnOnce(&mut Folder)) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(original().join("config.json"), dir.path().join("config.json")).unwrap();
    let mut folder = toy::read(&original());
    change(&mut folder);
    toy::write_file(&dir.path().join("model.safetensors"), folder.iter());
    dir
}

fn load(dir: &Path, options: &FromPretrainedOptions) -> burn_moe::Result<Pretrained<Train>> {
    AutoModelForCausalLm::from_pretrained(dir, options, &Device::default())
}

fn error_of(change: impl FnOnce(&mut Folder)) -> String {
    load(changed(change).path(), &Default::default()).unwrap_err().to_string()
}

#[test]
fn what_does_not_belong_together_is_named() {
    let (blocks, scales) = (format!("{EXPERTS}.down_proj_blocks"), format!("{EXPERTS}.down_proj_scales"));
    let missing = error_of(|f| drop(f.remove(&scales)));
    assert!(
        missing.contains("missing in the checkpoint (1)") && missing.contains(&scales),
        "{missing}"
    );
    let missing = error_of(|f| drop(f.remove(&blocks)));
    assert!(
        missing.contains("missing in the checkpoint (1)") && missing.contains(&blocks),
        "{missing}"
    );

    // One scale per two blocks.
    let shape = error_of(|f| {
        let stored = f.get_mut(&scales).unwrap();
        stored.shape = vec![4, 32, 2];
    });
    assert!(shape.contains("MXFP4 weights [64, 1, 16] with scales [32, 2]"), "{shape}");
    let dtype = error_of(|f| {
        let stored = f.get_mut(&scales).unwrap();
        stored.dtype = Dtype::I8;
    });
    assert!(
        dtype.contains(&scales) && dtype.contains("dtype I8") && dtype.contains("U8 (MXFP4)"),
        "{dtype}"
    );
    // Packed for another width.
    let width = error_of(|f| {
        let stored = f.get_mut(&blocks).unwrap();
        stored.shape = vec![4, 32, 2, 16];
        f.get_mut(&scales).unwrap().shape = vec![4, 32, 2];
    });
    assert!(width.contains("together [32, 64]") && width.contains("[64, 32]"), "{width}");
    // Both layouts of one matrix: the second is not used.
    let both = error_of(|f| {
        let stored = Stored {
            dtype: Dtype::BF16,
            shape: vec![4, 32, 64],
            bytes: vec![0; 4 * 32 * 64 * 2],
        };
        f.insert(format!("{EXPERTS}.down_proj"), stored);
    });
    assert!(
        both.contains("unused by the model (1)") && both.contains(&format!("{EXPERTS}.down_proj")),
        "{both}"
    );
}

/// Scale 255 is NaN. The message has the tensor, the expert and the element.
#[test]
fn scales_that_are_no_numbers_are_refused() {
    let dir = changed(|f| f.get_mut(&format!("{EXPERTS}.down_proj_scales")).unwrap().bytes[64 * 3 + 2] = 255);
    let error = load(dir.path(), &Default::default()).unwrap_err().to_string();
    assert!(
        error.contains("down_proj_blocks") && error.contains("NaN (BF16) at element 64 of expert 3"),
        "{error}"
    );
    let options = FromPretrainedOptions {
        allow_nonfinite: true,
        ..Default::default()
    };
    assert!(load(dir.path(), &options).is_ok());
}

/// Adds a constant to one value of one expert.
struct Nudge(PathStack);

impl ModuleMapper<Train> for Nudge {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.0.enter(name, container_type);
    }

    fn exit_module(&mut self, _name: &str, container_type: &str) {
        self.0.exit(container_type);
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<Train, D>>) -> Param<Tensor<Train, D>> {
        if self.0.path() != "layers.1.mlp.experts.down_proj" {
            return param;
        }
        param.map(|t| {
            let shape = t.dims();
            let (device, dtype) = (t.device(), t.dtype());
            let mut values = t.into_data().convert::<f32>().to_vec::<f32>().unwrap();
            // Expert 2, row 5, column 7.
            values[(2 * 64 + 5) * 32 + 7] += 1.0;
            Tensor::from_data(TensorData::new(values, shape).convert_dtype(dtype), (&device, dtype))
        })
    }
}

#[test]
fn only_blocks_that_changed_are_quantised_again() {
    let loaded = load(&original(), &Default::default()).unwrap();
    let model = loaded.model.map(&mut Nudge(PathStack::default()));
    let out = tempfile::tempdir().unwrap();
    let options = SaveOptions {
        like: Some(&loaded.source),
        quantised: true,
        ..SaveOptions::default()
    };
    model.save_pretrained(out.path(), &options).unwrap();
    let (before, after) = (toy::read(&original()), toy::read(out.path()));
    for (name, stored) in &before {
        let found = &after[name];
        let differing: Vec<usize> = (0..stored.bytes.len()).filter(|&i| stored.bytes[i] != found.bytes[i]).collect();
        if name == &format!("{EXPERTS}.down_proj_blocks") {
            let block = (2 * 64 + 5) * 16;
            assert!(
                !differing.is_empty() && differing.iter().all(|i| (block..block + 16).contains(i)),
                "{name}: {differing:?}"
            );
        } else if name == &format!("{EXPERTS}.down_proj_scales") {
            assert!(differing.iter().all(|i| *i == 2 * 64 + 5), "{name}: {differing:?}");
        } else {
            assert!(differing.is_empty(), "{name}: {differing:?}");
        }
    }
}

/// What cannot be packed is refused before anything is written.
#[test]
fn a_width_without_whole_blocks_and_families_without_a_format_are_refused() {
    let text = r#"{"model_type": "gpt_oss", "vocab_size": 20, "hidden_size": 24, "num_hidden_layers": 1, "head_dim": 4,
        "num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 2, "num_experts_per_tok": 1,
        "intermediate_size": 32}"#;
    let qwen = r#"{"model_type": "qwen3_moe", "vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "head_dim": 4,
        "num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": 2, "num_experts_per_tok": 1}"#;
    for (text, parts) in [
        (text, ["layers.0.mlp.experts.gate_up_proj", "24 columns", "multiple of 32"]),
        (qwen, ["quantised", "true", "no quantised layout"]),
    ] {
        let config = AutoConfig::from_text(text).unwrap();
        let model = AutoModelForCausalLm::<Train>::from_config(&config, &FromConfigOptions::default(), &Device::default()).unwrap();
        let out = tempfile::tempdir().unwrap();
        let options = SaveOptions {
            quantised: true,
            ..SaveOptions::default()
        };
        let error = model.save_pretrained(out.path(), &options).unwrap_err().to_string();
        assert!(parts.iter().all(|p| error.contains(p)), "{error}");
        assert_eq!(std::fs::read_dir(out.path()).unwrap().count(), 0);
    }
}

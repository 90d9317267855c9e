//! What does not fit is refused, with names, values and suggestions.

use burn::prelude::*;
use burn::tensor::DType;
use burn_flex::Flex;
use burn_moe::Error;
use burn_moe::checkpoint::{CheckpointSource, EpRank, LoadOptions, LoadReport, Rule, WeightMap, check_writable, inspect, load};
use half::bf16;
use safetensors::Dtype;

use super::toy::*;

type Loaded = burn_moe::Result<(Toy<Flex>, LoadReport)>;

fn load_with(folder: &Folder, map: &WeightMap, options: &LoadOptions) -> Loaded {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), folder);
    let source = CheckpointSource::open(dir.path()).unwrap();
    load(Toy::new(false, E / options.ep.size, &Default::default()), &source, map, options)
}

fn refused(folder: &Folder) -> String {
    let error = load_with(folder, &map(), &LoadOptions::default()).unwrap_err();
    assert!(matches!(error, Error::Mismatch(_)), "{error}");
    error.to_string()
}

fn rename(folder: &mut Folder, from: &str, to: &str) {
    let tensor = folder.remove(from).unwrap();
    folder.insert(to.into(), tensor);
}

/// An initialised model, for partial loads.
fn initialised() -> Toy<Flex> {
    use burn::module::{ModuleMapper, Param};
    struct Zeros;
    impl ModuleMapper<Flex> for Zeros {
        fn map_float<const R: usize>(&mut self, param: Param<Tensor<Flex, R>>) -> Param<Tensor<Flex, R>> {
            let zeros = Tensor::zeros(param.lazy_shape(), &param.lazy_device());
            let id = param.id;
            param.transform_for_load(zeros, id)
        }
    }
    Toy::<Flex>::new(false, E, &Default::default()).map(&mut Zeros)
}

// burn#5032.
#[test]
fn a_dropped_and_a_renamed_tensor_are_both_named() {
    let mut folder = folder("model.");
    folder.remove("model.norm.weight");
    rename(
        &mut folder,
        "model.layers.0.mixer.up_proj.weight",
        "model.layers.0.mixer.up_prok.weight",
    );
    let text = refused(&folder);
    for part in [
        "missing in the checkpoint (2)",
        "model.norm.weight",
        "model.layers.0.mixer.up_proj.weight (did you mean model.layers.0.mixer.up_prok.weight?)",
        "unused by the model (1)",
        "model.layers.0.mixer.up_prok.weight (did you mean model.layers.0.mixer.up_proj.weight?)",
    ] {
        assert!(text.contains(part), "{part}\n{text}");
    }
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), &folder);
    let source = CheckpointSource::open(dir.path()).unwrap();
    let partial = LoadOptions {
        strict: false,
        ..LoadOptions::default()
    };
    let (toy, report) = load(initialised(), &source, &map(), &partial).unwrap();
    let missing: Vec<&str> = report.missing.iter().map(|m| m.path.as_str()).collect();
    assert_eq!(missing, ["layers.0.mixer.up_proj.weight", "norm.weight"]);
    assert_eq!(report.unused[0].name, "model.layers.0.mixer.up_prok.weight");
    assert_eq!(floats(toy.norm.weight.val().into_data()), [0.0; D]);
    assert_eq!(
        floats(toy.layers[1].norm.weight.val().into_data()),
        values("model.layers.1.norm.weight", D)
    );
}

// VeOmni#67, Megatron#5844.
#[test]
fn unknown_expert_names_are_refused_with_both_lists() {
    let mut folder = folder("model.");
    for e in 0..E {
        for (ours, theirs) in [("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")] {
            let moe = "model.layers.1.mixer";
            rename(
                &mut folder,
                &format!("{moe}.experts.{e}.{ours}.weight"),
                &format!("{moe}.ffn.{e}.{theirs}"),
            );
        }
    }
    let text = refused(&folder);
    for part in [
        "missing in the checkpoint (36)",
        "model.layers.1.mixer.experts.0.gate_proj.weight and 11 more like it",
        "unused by the model (36)",
        "model.layers.1.mixer.ffn.0.w1 and 11 more like it",
    ] {
        assert!(text.contains(part), "{part}\n{text}");
    }
    let partial = LoadOptions {
        strict: false,
        ..LoadOptions::default()
    };
    let (_, report) = load_with(&folder, &map(), &partial).unwrap();
    assert_eq!((report.missing.len(), report.unused.len()), (2, 36));
}

#[test]
fn one_absent_expert_is_named() {
    let mut folder = folder("model.");
    folder.remove("model.layers.1.mixer.experts.11.up_proj.weight");
    let text = refused(&folder);
    assert!(
        text.contains("missing in the checkpoint (1):\n  model.layers.1.mixer.experts.11.up_proj.weight"),
        "{text}"
    );
}

#[test]
fn more_experts_than_the_model_has_are_refused() {
    let mut folder = folder("model.");
    for projection in ["gate_proj", "up_proj", "down_proj"] {
        let name = |e: usize| format!("model.layers.1.mixer.experts.{e}.{projection}.weight");
        let extra = folder[&name(0)].clone();
        folder.insert(name(E), extra);
    }
    assert!(refused(&folder).contains("unused by the model (3)"));
    let mut stacked = stacked_folder("model.");
    let down = stacked.get_mut("model.layers.1.mixer.experts.down_proj").unwrap();
    down.shape[0] += 1;
    down.bytes.extend([0; 2 * D * F]);
    assert!(refused(&stacked).contains("found shape [13, 3, 2], expected 12 experts on axis 0"));
}

#[test]
fn wrong_shapes_name_both_shapes() {
    let mut folder = folder("model.");
    folder.get_mut("model.layers.0.mixer.up_proj.weight").unwrap().shape = vec![D, F];
    folder.get_mut("model.layers.1.mixer.experts.3.up_proj.weight").unwrap().shape = vec![D, F];
    let text = refused(&folder);
    assert!(text.contains("mismatched (2)"), "{text}");
    assert!(
        text.contains("model.layers.0.mixer.up_proj.weight (for layers.0.mixer.up_proj.weight): found shape [3, 2], expected shape [2, 3]"),
        "{text}"
    );
    assert!(
        text.contains("model.layers.1.mixer.experts.3.up_proj.weight (for layers.1.mixer.experts.gate_up_proj)"),
        "{text}"
    );
    let partial = LoadOptions {
        strict: false,
        ..LoadOptions::default()
    };
    assert!(load_with(&folder, &map(), &partial).is_err());
}

#[test]
fn nan_weights_are_refused_by_name() {
    for (name, bytes, place) in [
        ("model.norm.weight", bf16::NAN.to_le_bytes(), "NaN (BF16) at element 1"),
        (
            "model.layers.1.mixer.experts.7.down_proj.weight",
            bf16::NEG_INFINITY.to_le_bytes(),
            "-inf (BF16) at element 1",
        ),
    ] {
        let mut folder = folder("model.");
        folder.get_mut(name).unwrap().bytes[2..4].copy_from_slice(&bytes);
        let error = load_with(&folder, &map(), &LoadOptions::default()).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, Error::Checkpoint { .. }), "{text}");
        assert!(
            text.contains(name) && text.contains(place) && text.contains("model.safetensors"),
            "{text}"
        );
        let allowed = LoadOptions {
            allow_nonfinite: true,
            ..LoadOptions::default()
        };
        load_with(&folder, &map(), &allowed).unwrap();
    }
}

#[test]
fn values_beyond_the_dtype_asked_for_are_refused() {
    let mut folder = folder("model.");
    folder.get_mut("model.norm.weight").unwrap().bytes[..2].copy_from_slice(&bf16::from_f32(1e6).to_le_bytes());
    let half = LoadOptions {
        dtype: Some(DType::F16),
        ..LoadOptions::default()
    };
    let text = load_with(&folder, &map(), &half).unwrap_err().to_string();
    assert!(text.contains("tensor `model.norm.weight`: found inf (F16)"), "{text}");
}

#[test]
fn types_that_do_not_fit_are_refused() {
    let mut folder = folder("model.");
    let norm = folder.get_mut("model.norm.weight").unwrap();
    (norm.dtype, norm.bytes) = (Dtype::F8_E4M3, vec![0; D]);
    assert!(refused(&folder).contains("found dtype F8_E4M3, expected a dtype for Float parameters"));
    let mut mixed = super::toy::folder("model.");
    let part = mixed.get_mut("model.layers.1.mixer.experts.5.down_proj.weight").unwrap();
    (part.dtype, part.bytes) = (Dtype::F32, vec![0; 4 * D * F]);
    let text = refused(&mixed);
    assert!(text.contains("found dtype F32, expected dtype BF16 like the other parts"), "{text}");
    let wide = LoadOptions {
        dtype: Some(DType::F32),
        ..LoadOptions::default()
    };
    load_with(&mixed, &map(), &wide).unwrap();
}

// transformers#45662 (the loading half).
#[test]
fn every_rank_reads_its_own_experts() {
    for folder in [folder("model."), stacked_folder("model.")] {
        for rank in 0..4 {
            let ep = EpRank { rank, size: 4 };
            let options = LoadOptions {
                ep,
                ..LoadOptions::default()
            };
            let (toy, report) = load_with(&folder, &map(), &options).unwrap();
            let experts = &toy.moe().experts;
            let mine = rank * 3..(rank + 1) * 3;
            assert_eq!(
                floats(experts.gate_up_proj.val().into_data()),
                expected_experts("model.", &["gate_proj", "up_proj"], mine.clone())
            );
            assert_eq!(
                floats(experts.down_proj.val().into_data()),
                expected_experts("model.", &["down_proj"], mine)
            );
            assert_eq!(report.num_expert_params(), (E * 3 * F * D) as u64);
        }
    }
    let ints = LoadOptions {
        dtype: Some(DType::I32),
        ..LoadOptions::default()
    };
    let text = load_with(&folder("model."), &map(), &ints).unwrap_err().to_string();
    assert!(text.contains("`dtype`: found I32"), "{text}");
    let bad = LoadOptions {
        ep: EpRank { rank: 2, size: 2 },
        ..LoadOptions::default()
    };
    let text = load_with(&folder("model."), &map(), &bad).unwrap_err().to_string();
    assert!(text.contains("`ep`") && text.contains("rank 2 of 2"), "{text}");
}

#[test]
fn a_table_without_rules_or_with_bad_ones_is_refused() {
    let bad = WeightMap::new(["model."]).rule(Rule::tensor("{path}"));
    let text = load_with(&folder("model."), &bad, &LoadOptions::default()).unwrap_err().to_string();
    assert!(text.contains("at least one layout"), "{text}");
    let narrow = WeightMap::new(["model."]).rule(Rule::tensor("norm.weight").stored_as(["{base}norm.weight"], []));
    let text = load_with(&folder("model."), &narrow, &LoadOptions::default())
        .unwrap_err()
        .to_string();
    assert!(text.contains("no rule for `embed_tokens.weight`"), "{text}");
}

#[test]
fn inspection_reads_no_weights() {
    let mut folder = folder("model.");
    folder.get_mut("model.norm.weight").unwrap().bytes[..2].copy_from_slice(&bf16::NAN.to_le_bytes());
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), &folder);
    let source = CheckpointSource::open(dir.path()).unwrap();
    // The parameters panic when initialised, and a load would fail on the NaN.
    let toy = Toy::<Flex>::new(false, E, &Default::default());
    let report = inspect(&toy, &source, &map(), &LoadOptions::default()).unwrap();
    assert!(report.is_exact());
    assert_eq!(
        report
            .loaded
            .iter()
            .find(|t| t.path == "layers.1.mixer.experts.gate_up_proj")
            .unwrap()
            .sources,
        2 * E
    );
}

// Automodel#1620.
#[test]
fn an_unwritable_output_is_an_error_before_training() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("taken");
    std::fs::write(&file, []).unwrap();
    let error = check_writable(&file).unwrap_err();
    assert!(matches!(error, Error::Io { .. }) && error.to_string().contains("taken"), "{error}");
}

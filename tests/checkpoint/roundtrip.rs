//! Load and save: exact values, and files that come back as they were.

use burn::module::{AutodiffModule, ModuleMapper, Param};
use burn::prelude::*;
use burn::tensor::DType;
use burn_ep_backend::MoeBackend;
use burn_flex::Flex;

use burn_moe::checkpoint::{CheckpointSource, ConfigJson, LoadOptions, SaveOptions, TieState, load, save};

use super::toy::*;

type Train = burn::backend::Autodiff<Flex>;

fn open(folder: &Folder) -> (tempfile::TempDir, CheckpointSource) {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), folder);
    let source = CheckpointSource::open(dir.path()).unwrap();
    (dir, source)
}

fn load_toy<B: MoeBackend>(source: &CheckpointSource, tied: bool, options: &LoadOptions) -> Toy<B> {
    load(Toy::new(tied, E, &Default::default()), source, &map(), options).unwrap().0
}

/// Saves in the style of `source` and reads the result with the safetensors crate.
fn saved<B: Backend>(toy: &Toy<B>, source: &CheckpointSource) -> Folder {
    let out = tempfile::tempdir().unwrap();
    let options = SaveOptions {
        like: Some(source),
        ..SaveOptions::default()
    };
    save(toy, &map(), out.path(), &options).unwrap();
    assert_eq!(std::fs::read_to_string(out.path().join("config.json")).unwrap(), CONFIG);
    read(out.path())
}

// Automodel#945, #2741, transformers#45591, mobius#188.
#[test]
fn untouched_files_come_back_identical() {
    for folder in [
        folder("backbone."),
        stacked_folder("backbone."),
        folder("model."),
        stacked_folder("model."),
    ] {
        let (_dir, source) = open(&folder);
        let toy: Toy<Train> = load_toy(&source, false, &LoadOptions::default());
        assert_eq!(saved(&toy, &source), folder);
        // Asked for another type in memory, the files still get theirs back.
        let wide = LoadOptions {
            dtype: Some(DType::F32),
            ..LoadOptions::default()
        };
        let toy: Toy<Flex> = load_toy(&source, false, &wide);
        assert_eq!(saved(&toy, &source), folder);
    }
}

// Automodel#1126, axolotl#3508.
#[test]
fn prefix_of_the_file_is_kept() {
    for base in ["backbone.", "model."] {
        let (_dir, source) = open(&folder(base));
        let toy: Toy<Flex> = load_toy(&source, false, &LoadOptions::default());
        assert!(saved(&toy, &source).contains_key(&format!("{base}embed_tokens.weight")));
    }
}

#[test]
fn values_types_and_gradient_flags_are_right() {
    for folder in [folder("model."), stacked_folder("model.")] {
        let (_dir, source) = open(&folder);
        let empty = Toy::<Train>::new(false, E, &Default::default());
        let id = empty.norm.weight.id;
        let (toy, report) = load(empty, &source, &map(), &LoadOptions::default()).unwrap();
        let experts = &toy.moe().experts;
        let gate_up = experts.gate_up_proj.val();
        assert_eq!((gate_up.dims(), gate_up.dtype()), ([E, 2 * F, D], DType::BF16));
        assert_eq!(
            floats(gate_up.into_data()),
            expected_experts("model.", &["gate_proj", "up_proj"], 0..E)
        );
        assert_eq!(
            floats(experts.down_proj.val().into_data()),
            expected_experts("model.", &["down_proj"], 0..E)
        );
        let bias = &toy.moe().gate.e_score_correction_bias;
        assert_eq!(
            floats(bias.val().into_data()),
            values("model.layers.1.mixer.gate.e_score_correction_bias", E)
        );
        assert_eq!(bias.dtype(), DType::F32);
        assert!(!bias.is_require_grad() && experts.down_proj.is_require_grad() && toy.norm.weight.is_require_grad());
        assert_eq!(toy.norm.weight.id, id);
        assert!(!toy.valid().norm.weight.is_require_grad());
        assert_eq!(report.carried, ["mtp.layers.0.weight"]);
        assert!(report.is_exact() && report.cast().count() == 0, "{report}");
        assert_eq!(report.num_expert_params(), (E * 3 * F * D) as u64);
        let all: usize = folder
            .values()
            .filter(|t| t.shape != [7])
            .map(|t| t.shape.iter().product::<usize>())
            .sum();
        assert_eq!(report.num_params(), all as u64);
    }
}

#[test]
fn dtype_is_applied_except_where_fp32_is_kept() {
    let mut narrow = folder("model.");
    let name = "model.layers.0.mixer.A_log".to_string();
    let bytes: Vec<u8> = values(&name, 4)
        .iter()
        .flat_map(|&v| half::bf16::from_f32(v).to_le_bytes())
        .collect();
    let dtype = safetensors::Dtype::BF16;
    narrow.insert(
        name.clone(),
        Stored {
            dtype,
            shape: vec![4],
            bytes,
        },
    );
    let (_dir, source) = open(&narrow);
    let options = LoadOptions {
        dtype: Some(DType::F16),
        ..LoadOptions::default()
    };
    let (toy, report) = load(Toy::<Flex>::new(false, E, &Default::default()), &source, &map(), &options).unwrap();
    assert_eq!(toy.norm.weight.dtype(), DType::F16);
    let Mixer::Scan(scan) = &toy.layers[0].mixer else {
        panic!("layer 0 is a scan")
    };
    assert_eq!(scan.A_log.dtype(), DType::F32);
    assert_eq!(floats(scan.A_log.val().into_data()), values(&name, 4));
    assert_eq!(report.cast().count(), 10);
    // Stored as bf16, written as bf16.
    assert_eq!(saved(&toy, &source)[&name], narrow[&name]);
}

struct Double;

impl<B: Backend> ModuleMapper<B> for Double {
    fn map_float<const R: usize>(&mut self, param: Param<Tensor<B, R>>) -> Param<Tensor<B, R>> {
        param.map(|t| t * 2.0)
    }
}

#[test]
fn changed_weights_are_written_under_the_same_names() {
    let before = folder("backbone.");
    let (_dir, source) = open(&before);
    let toy: Toy<Flex> = load_toy(&source, false, &LoadOptions::default());
    let after = saved(&toy.map(&mut Double), &source);
    for (name, tensor) in &before {
        assert_eq!((&after[name].dtype, &after[name].shape), (&tensor.dtype, &tensor.shape), "{name}");
        let exact: Vec<f32> = values(name, 2).iter().map(|v| 2.0 * v).collect();
        if name.starts_with("mtp.") {
            assert_eq!(&after[name], tensor);
        } else if tensor.dtype == safetensors::Dtype::BF16 {
            let first: Vec<f32> = after[name]
                .bytes
                .chunks(2)
                .take(2)
                .map(|b| half::bf16::from_le_bytes([b[0], b[1]]).to_f32())
                .collect();
            assert_eq!(first, exact, "{name}");
        }
    }
    assert_eq!(after.len(), before.len());
}

#[test]
fn a_model_without_source_gets_the_published_layout() {
    let (_dir, source) = open(&stacked_folder("model."));
    let toy: Toy<Flex> = load_toy(&source, false, &LoadOptions::default());
    let out = tempfile::tempdir().unwrap();
    let config = ConfigJson::parse("config.json", CONFIG.into()).unwrap();
    let options = SaveOptions {
        config: Some(&config),
        ..SaveOptions::default()
    };
    let report = save(&toy, &map(), out.path(), &options).unwrap();
    let mut expected: Folder = folder("backbone.")
        .into_keys()
        .map(|name| {
            let tensor = folder("model.")[&name.replace("backbone.", "model.")].clone();
            (name, tensor)
        })
        .collect();
    expected.remove("mtp.layers.0.weight");
    assert_eq!(read(out.path()), expected);
    assert_eq!((report.files.len(), report.tensors), (1, expected.len()));
    let nothing = save(&toy, &map(), out.path(), &SaveOptions::default()).unwrap_err().to_string();
    assert!(nothing.contains("`config`"), "{nothing}");
}

#[test]
fn tied_embeddings_load_from_either_name_and_come_back() {
    let both = || {
        let mut folder = folder("model.");
        let embedding = folder["model.embed_tokens.weight"].clone();
        folder.insert("lm_head.weight".into(), embedding);
        folder
    };
    let (mut only_embedding, mut only_head) = (both(), both());
    only_embedding.remove("lm_head.weight");
    only_head.remove("model.embed_tokens.weight");
    let expected = values("model.embed_tokens.weight", V * D);
    let cases = [
        (both(), TieState::Identical),
        (only_embedding, TieState::OneStored),
        (only_head, TieState::OneStored),
    ];
    for (folder, state) in cases {
        let (_dir, source) = open(&folder);
        assert_eq!(source.tie_state(&map()), state);
        let toy: Toy<Flex> = load_toy(&source, true, &LoadOptions::default());
        assert_eq!(floats(toy.embed_tokens.weight.val().into_data()), expected);
        assert_eq!(saved(&toy, &source), folder);
    }
    // Two different tensors must not be tied.
    let (_dir, source) = open(&folder("model."));
    assert_eq!(source.tie_state(&map()), TieState::Different);
    let error = load(
        Toy::<Flex>::new(true, E, &Default::default()),
        &source,
        &map(),
        &LoadOptions::default(),
    )
    .unwrap_err();
    assert!(error.to_string().contains("build it untied"), "{error}");
}

#[test]
fn side_files_travel_with_the_weights() {
    let (dir, source) = open(&folder("model."));
    let files = [
        ("tokenizer.json", "{\"t\": 1}"),
        ("generation_config.json", "{}"),
        ("chat_template.jinja", "{{ x }}"),
    ];
    for (name, text) in files {
        std::fs::write(dir.path().join(name), text).unwrap();
    }
    std::fs::create_dir(dir.path().join("chat_templates")).unwrap();
    std::fs::write(dir.path().join("chat_templates/tools.jinja"), "tools").unwrap();
    std::fs::write(dir.path().join("modeling_toy.py"), "print()").unwrap();
    let toy: Toy<Flex> = load_toy(&source, false, &LoadOptions::default());
    let out = tempfile::tempdir().unwrap();
    let options = SaveOptions {
        like: Some(&source),
        ..SaveOptions::default()
    };
    save(&toy, &map(), out.path(), &options).unwrap();
    for (name, text) in files {
        assert_eq!(std::fs::read_to_string(out.path().join(name)).unwrap(), text);
    }
    assert_eq!(
        std::fs::read_to_string(out.path().join("chat_templates/tools.jinja")).unwrap(),
        "tools"
    );
    assert!(!out.path().join("modeling_toy.py").exists());
    // Back into the folder it came from.
    save(&toy, &map(), dir.path(), &options).unwrap();
    assert_eq!(read(dir.path()), folder("model."));
}

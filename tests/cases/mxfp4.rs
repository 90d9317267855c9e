//! MXFP4: what the bytes mean, and which matrix they are.

use std::collections::BTreeMap;

use burn_moe::backend::{Device, Train};
use burn_moe::checkpoint::{HostTensor, QuantFormat, SaveOptions, Step, backward, forward};
use burn_moe_models::{AutoModelForCausalLm, Pretrained};
use burn_moe_tests::fixture::{self, Fixture};
use burn_moe_tests::fixture_model::parameters;
use safetensors::Dtype;

use crate::checkpoint::toy::{self, Stored};

/// Hidden = ffn makes down square, hidden = 2 ffn makes gate_up square: a shape does not tell `[in, out]` from `[out, in]`.
const FIXTURES: [&str; 2] = ["mxfp4_square_down", "mxfp4_square_gate_up"];

fn bytes(shape: &[usize], data: Vec<u8>) -> HostTensor<'static> {
    HostTensor {
        dtype: Dtype::U8,
        shape: shape.to_vec(),
        data: data.into(),
    }
}

fn bf16(data: &[u8]) -> Vec<f32> {
    let words = data.as_chunks::<2>().0.iter();
    words.map(|b| half::bf16::from_le_bytes(*b).to_f32()).collect()
}

/// jundot/omlx#2159, zhengyu-imp/imp#567: the low half of a byte comes first, the scale is `2^(s - 127)`.
#[test]
fn a_byte_holds_two_values_low_half_first() {
    for (scale, expected) in [(127, [0.5, 1.0]), (128, [1.0, 2.0])] {
        let sources = vec![bytes(&[1, 1, 16], vec![0x21; 16]), bytes(&[1, 1], vec![scale])];
        let matrix = forward(&[Step::Dequantise(QuantFormat::Mxfp4)], sources).unwrap();
        assert_eq!((matrix.dtype, &matrix.shape[..]), (Dtype::BF16, &[1, 32][..]));
        assert_eq!(bf16(&matrix.data), expected.repeat(16));
    }
}

/// The rule of the format as an independent script applies it to numbers from 1e-42 to 1e35, midpoints included.
#[test]
fn quantising_follows_the_published_rule() {
    for case in FIXTURES {
        let fixture = Fixture::open("gpt_oss", case);
        let values = fixture.tensor("quantise.values");
        let source = HostTensor {
            dtype: Dtype::F32,
            shape: values.shape.clone(),
            data: values.values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>().into(),
        };
        let parts = backward(&[Step::Dequantise(QuantFormat::Mxfp4)], source, 2).unwrap();
        for (part, name) in parts.iter().zip(["quantise.blocks", "quantise.scales"]) {
            let expected = fixture.tensor(name);
            assert_eq!(part.shape, expected.shape, "{name}");
            let expected: Vec<u8> = expected.values.iter().map(|&v| v as u8).collect();
            assert_eq!(part.data.to_vec(), expected, "{name}");
        }
    }
}

fn load(dir: &std::path::Path) -> Pretrained<Train> {
    AutoModelForCausalLm::<Train>::from_pretrained(dir, &Default::default(), &Device::default()).unwrap()
}

/// `[E, in, out]` to `[E, out, in]`.
fn transposed(values: &[f32], [e, rows, columns]: [usize; 3]) -> Vec<f32> {
    let at = |i: usize| {
        let (expert, column, row) = (i / (rows * columns), i / rows % columns, i % rows);
        values[(expert * rows + row) * columns + column]
    };
    (0..e * rows * columns).map(at).collect()
}

/// huggingface/transformers#41580: nothing is missing, nothing is left over, and the experts are the decoded values.
#[test]
fn blocks_and_scales_become_the_experts() {
    for case in FIXTURES {
        let fixture = Fixture::open("gpt_oss", case);
        let loaded = load(&fixture.dir);
        assert!(loaded.report.is_exact(), "{}", loaded.report);
        assert!(loaded.report.to_string().contains("MXFP4 -> BF16"), "{}", loaded.report);
        let found = parameters(&loaded.model);
        let expected = fixture.tensors_under("plain.model.");
        assert_eq!(expected.len(), 4, "two matrices in two layers");
        for (name, plain) in expected {
            let shape: [usize; 3] = plain.shape.clone().try_into().unwrap();
            assert_eq!(found[name].shape, [shape[0], shape[2], shape[1]], "{name}");
            assert_eq!(found[name].values, transposed(&plain.values, shape), "{name}");
        }
    }
}

/// ml-explore/mlx-lm#679: the two layouts of one model, whose square matrices only a name can tell apart.
#[test]
fn square_matrices_are_recognised_by_their_names() {
    for case in FIXTURES {
        let dir = fixture::root().join("gpt_oss").join(case);
        let packed = load(&dir);
        let save = |loaded: &Pretrained<Train>, quantised: bool| {
            let out = tempfile::tempdir().unwrap();
            let options = SaveOptions {
                like: Some(&loaded.source),
                quantised,
                ..SaveOptions::default()
            };
            loaded.model.save_pretrained(out.path(), &options).unwrap();
            out
        };
        let plain_dir = save(&packed, false);
        let plain = load(plain_dir.path());
        assert_eq!(parameters(&plain.model), parameters(&packed.model), "{case}");

        // The plain files hold what the reference decodes, and say nothing of a format.
        let files = toy::read(plain_dir.path());
        let fixture = Fixture::open("gpt_oss", case);
        let experts: BTreeMap<&String, &Stored> = files
            .iter()
            .filter(|(n, _)| n.ends_with("gate_up_proj") || n.ends_with("down_proj"))
            .collect();
        assert_eq!(experts.len(), 4);
        for (name, stored) in experts {
            let expected = fixture.tensor(&format!("plain.{name}"));
            assert_eq!((stored.dtype, &stored.shape), (Dtype::BF16, &expected.shape), "{name}");
            assert_eq!(bf16(&stored.bytes), expected.values, "{name}");
        }
        assert!(
            files.keys().all(|n| !n.ends_with("_blocks") && !n.ends_with("_scales")),
            "{:?}",
            files.keys()
        );
        assert!(plain.source.config().get("quantization_config").is_none());

        // Each comes back in its own layout, byte for byte.
        assert_eq!(toy::read(save(&plain, false).path()), files, "{case}");
        let again = save(&packed, true);
        assert_eq!(toy::read(again.path()), toy::read(&dir), "{case}");
        let config = |dir: &std::path::Path| std::fs::read_to_string(dir.join("config.json")).unwrap();
        assert_eq!(config(again.path()), config(&dir));

        // A plain model can be packed too; what is representable loads to the same values.
        let repacked = load(save(&plain, true).path());
        let method = repacked
            .source
            .config()
            .get("quantization_config")
            .and_then(|c| c.get("quant_method"));
        assert_eq!(method.and_then(|m| m.as_str()), Some("mxfp4"));
        assert_eq!(parameters(&repacked.model), parameters(&packed.model), "{case}");
    }
}

//! Damaged input: always a typed error, never a panic.

use std::path::Path;

use burn_flex::Flex;
use burn_moe::Error;
use burn_moe::backend::{Device, Infer};
use burn_moe::checkpoint::{CheckpointSource, ConfigJson, LoadOptions, load};
use burn_moe_models::{AutoModelForCausalLm, FromPretrainedOptions};
use burn_moe_tests::fixture;
use rand::prelude::*;
use rand::rngs::StdRng;

use super::toy::*;

/// Tokens that turn one kind of JSON into another.
const TOKENS: [&str; 18] = [
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    "\"",
    "\\",
    "-1",
    "0",
    "18446744073709551615",
    "1e999",
    "NaN",
    "null",
    "\"F32\"",
    "\"../x\"",
    "\u{0}",
    "é",
];

/// Flips, drops, repeats or replaces a few bytes.
fn damage(bytes: &[u8], rng: &mut StdRng) -> Vec<u8> {
    let mut out = bytes.to_vec();
    for _ in 0..rng.random_range(1..4) {
        if out.is_empty() {
            return out;
        }
        let at = rng.random_range(0..out.len());
        let end = rng.random_range(at..=out.len().min(at + 12));
        match rng.random_range(0..6) {
            0 => out[at] ^= 1 << rng.random_range(0..8),
            1 => out[at] = rng.random(),
            2 => out.truncate(at),
            3 => drop(out.drain(at..end)),
            4 => {
                let again = out[at..end].to_vec();
                out.splice(at..at, again);
            }
            _ => {
                let token = TOKENS.choose(rng).expect("tokens").bytes();
                out.splice(at..end, token);
            }
        }
    }
    out
}

/// Opens and loads; whatever happens must be a value.
fn try_load(dir: &Path) -> bool {
    let attempt = || -> burn_moe::Result<()> {
        let source = CheckpointSource::open(dir)?;
        load(
            Toy::<Flex>::new(false, E, &Default::default()),
            &source,
            &map(),
            &LoadOptions::default(),
        )?;
        Ok(())
    };
    match attempt() {
        Ok(()) => true,
        Err(Error::Checkpoint { .. } | Error::Io { .. } | Error::Mismatch(_)) => false,
        Err(other) => panic!("an error of the wrong kind: {other}"),
    }
}

#[test]
fn damaged_files_are_errors() {
    let dir = tempfile::tempdir().unwrap();
    write_shards(dir.path(), &folder("model."), 2, |i, _| i % 2);
    assert!(try_load(dir.path()));
    let mut rng = StdRng::seed_from_u64(20_260_101);
    let mut refused = 0;
    for (name, rounds) in [
        ("part-0.safetensors", 2500),
        ("model.safetensors.index.json", 1500),
        ("config.json", 1000),
    ] {
        let path = dir.path().join(name);
        let whole = std::fs::read(&path).unwrap();
        // Most damage goes to the header, where the decisions are.
        let header = if name.ends_with("tensors") {
            8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize
        } else {
            whole.len()
        };
        for round in 0..rounds {
            let cut = if round % 8 == 0 { whole.len() } else { header };
            let mut bytes = damage(&whole[..cut], &mut rng);
            bytes.extend_from_slice(&whole[cut..]);
            std::fs::write(&path, bytes).unwrap();
            refused += usize::from(!try_load(dir.path()));
        }
        std::fs::write(&path, whole).unwrap();
    }
    assert!(try_load(dir.path()));
    assert!(refused > 3000, "only {refused} of 5000 were refused");
}

/// Headers that are JSON of the right form, with wrong numbers.
#[test]
fn wrong_numbers_in_headers_are_errors() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), "{}").unwrap();
    let mut rng = StdRng::seed_from_u64(7);
    let numbers = [0u64, 1, 2, 3, 4, 8, 1 << 31, 1 << 32, 1 << 62, u64::MAX - 1, u64::MAX];
    for _ in 0..3000 {
        let mut number = || *numbers.choose(&mut rng).expect("numbers");
        let shape: Vec<u64> = (0..number() % 5).map(|_| number()).collect();
        let header = format!(
            "{{\"a\":{{\"dtype\":\"BF16\",\"shape\":{shape:?},\"data_offsets\":[{},{}]}},\"b\":{{\"dtype\":\"U8\",\"shape\":[{}],\"data_offsets\":[{},{}]}}}}",
            number(),
            number(),
            number(),
            number(),
            number(),
        );
        let length = if number() == 1 { number() } else { header.len() as u64 };
        let mut bytes = length.to_le_bytes().to_vec();
        bytes.extend_from_slice(header.as_bytes());
        bytes.extend_from_slice(&[0; 8]);
        std::fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
        match CheckpointSource::open(dir.path()) {
            Ok(source) => {
                let total: usize = source.names().iter().map(|n| source.info(n).unwrap().bytes).sum();
                assert_eq!(total, 8);
            }
            Err(error) => assert!(matches!(error, Error::Checkpoint { .. }), "{error}"),
        }
    }
}

#[test]
fn damaged_configs_are_errors() {
    let mut rng = StdRng::seed_from_u64(3);
    for _ in 0..3000 {
        let bytes = damage(CONFIG.as_bytes(), &mut rng);
        let Ok(text) = String::from_utf8(bytes) else { continue };
        match ConfigJson::parse("config.json", text.clone()) {
            Ok(mut config) => {
                assert_eq!(config.to_text(), text);
                // What was read can be written and read again.
                config.set("added", 1);
                let again = ConfigJson::parse("config.json", config.to_text()).unwrap();
                assert_eq!(again.to_value(), config.to_value());
            }
            Err(error) => assert!(matches!(error, Error::Checkpoint { .. })),
        }
    }
}

/// Configs of real families: with damaged bytes, and with numbers of every size in every field.
#[test]
fn damaged_family_configs_are_errors() {
    let mut rng = StdRng::seed_from_u64(11);
    let numbers = [
        "0",
        "1",
        "-1",
        "7",
        "0.5",
        "65537",
        "4294967296",
        "9007199254740993",
        "18446744073709551615",
        "1e300",
        "NaN",
    ];
    for case in [
        "nemotron_h/base",
        "nemotron_h/latent",
        "qwen3_moe/base",
        "qwen3_moe/rope_yarn",
        "deepseek_v3/yarn",
        "deepseek_v2/base",
        "glm4_moe/yarn",
        "gpt_oss/mxfp4_square_down",
    ] {
        let fixture = fixture::root().join(case);
        let text = std::fs::read_to_string(fixture.join("config.json")).unwrap();
        let dir = tempfile::tempdir().unwrap();
        std::fs::copy(fixture.join("model.safetensors"), dir.path().join("model.safetensors")).unwrap();
        let attempt = |damaged: &[u8]| {
            std::fs::write(dir.path().join("config.json"), damaged).unwrap();
            let options = FromPretrainedOptions::default();
            match AutoModelForCausalLm::<Infer>::inspect(dir.path(), &options, &Device::default()) {
                Ok((_, report)) => drop(report.to_string()),
                Err(error) => assert!(!error.to_string().is_empty()),
            }
        };
        let fields: Vec<String> = serde_json::from_str::<serde_json::Map<_, _>>(&text)
            .unwrap()
            .into_iter()
            .map(|(k, _)| k)
            .collect();
        for field in &fields {
            for number in numbers {
                let mut config = ConfigJson::parse("config.json", text.clone()).unwrap();
                config.set(field, "PLACE");
                attempt(config.to_text().replace("\"PLACE\"", number).as_bytes());
            }
        }
        for _ in 0..300 {
            attempt(&damage(text.as_bytes(), &mut rng));
        }
    }
}

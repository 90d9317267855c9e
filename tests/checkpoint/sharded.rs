//! Sharded files: any order in, limits and crash safety out.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use burn::module::{ModuleMapper, Param};
use burn::prelude::*;
use burn_flex::Flex;
use burn_moe::checkpoint::{CheckpointSource, LoadOptions, SaveOptions, load, save};

use super::toy::*;

fn load_toy(source: &CheckpointSource) -> Toy<Flex> {
    load(Toy::new(false, E, &Default::default()), source, &map(), &LoadOptions::default())
        .unwrap()
        .0
}

struct Scale(f32);

impl<B: Backend> ModuleMapper<B> for Scale {
    fn map_float<const R: usize>(&mut self, param: Param<Tensor<B, R>>) -> Param<Tensor<B, R>> {
        param.map(|t| t * self.0)
    }
}

fn like(source: &CheckpointSource, max_shard_bytes: u64) -> SaveOptions<'_> {
    SaveOptions {
        like: Some(source),
        max_shard_bytes,
        ..SaveOptions::default()
    }
}

fn files(dir: &Path) -> BTreeSet<String> {
    std::fs::read_dir(dir)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect()
}

// burn#3598, transformers#47514 (the order half).
#[test]
fn the_order_of_shards_is_irrelevant() {
    let folder = folder("model.");
    let spreads: [fn(usize, &str) -> usize; 3] = [
        |i, _| i % 8,
        |i, _| 7 - i % 8,
        |_, name| name.bytes().map(usize::from).sum::<usize>() * 31 % 8,
    ];
    let mut loaded = Vec::new();
    for spread in spreads {
        let dir = tempfile::tempdir().unwrap();
        write_shards(dir.path(), &folder, 8, spread);
        let source = CheckpointSource::open(dir.path()).unwrap();
        let toy = load_toy(&source);
        assert_eq!(
            floats(toy.moe().experts.down_proj.val().into_data()),
            expected_experts("model.", &["down_proj"], 0..E)
        );
        let out = tempfile::tempdir().unwrap();
        save(&toy, &map(), out.path(), &like(&source, 100)).unwrap();
        assert_eq!(read(out.path()), folder);
        loaded.push(std::fs::read(out.path().join("model.safetensors.index.json")).unwrap());
    }
    assert_eq!(loaded[0], loaded[1]);
    assert_eq!(loaded[0], loaded[2]);
}

#[test]
fn shards_respect_the_limit_and_the_index_counts() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), &folder("model."));
    let source = CheckpointSource::open(dir.path()).unwrap();
    let out = tempfile::tempdir().unwrap();
    let report = save(&load_toy(&source), &map(), out.path(), &like(&source, 100)).unwrap();
    assert!(report.files.len() > 4);
    assert_eq!(report.files[0], format!("model-00001-of-{:05}.safetensors", report.files.len()));
    let text = std::fs::read_to_string(out.path().join("model.safetensors.index.json")).unwrap();
    let index: serde_json::Value = serde_json::from_str(&text).unwrap();
    let total: usize = folder("model.").values().map(|t| t.bytes.len()).sum();
    assert_eq!(index["metadata"]["total_size"], total);
    assert_eq!(report.bytes, total as u64);
    assert_eq!(index["metadata"]["total_parameters"], report.num_params);
    let keys: Vec<&String> = index["weight_map"].as_object().unwrap().keys().collect();
    assert!(keys.is_sorted());
    for file in &report.files {
        let bytes = std::fs::read(out.path().join(file)).unwrap();
        let (_, metadata) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        assert_eq!(metadata.metadata().as_ref().unwrap()["format"], "pt");
        assert!(metadata.tensors().len() == 1 || metadata.data_len() <= 100);
    }
}

#[test]
fn saving_again_replaces_the_earlier_files() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), &folder("model."));
    let source = CheckpointSource::open(dir.path()).unwrap();
    let toy = load_toy(&source);
    let out = tempfile::tempdir().unwrap();
    std::fs::write(out.path().join("optimizer.bin"), "mine").unwrap();
    for limit in [100, 100, u64::MAX, 200, 100, u64::MAX] {
        let report = save(&toy, &map(), out.path(), &like(&source, limit)).unwrap();
        assert_eq!(read(out.path()), folder("model."));
        let mut expected: BTreeSet<String> = report.files.into_iter().collect();
        expected.extend(["config.json", "optimizer.bin"].map(String::from));
        if limit != u64::MAX {
            expected.insert("model.safetensors.index.json".into());
        }
        assert_eq!(files(out.path()), expected);
    }
}

/// A save that fails at any file leaves the earlier one whole.
#[test]
fn a_failed_save_leaves_the_last_good_one() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), &folder("model."));
    let source = CheckpointSource::open(dir.path()).unwrap();
    let toy = load_toy(&source);
    let other = load_toy(&source).map(&mut Scale(2.0));
    for (first, second) in [(100, 100), (u64::MAX, 100), (100, u64::MAX), (u64::MAX, u64::MAX)] {
        let out = tempfile::tempdir().unwrap();
        save(&toy, &map(), out.path(), &like(&source, first)).unwrap();
        let before = read(out.path());
        // Folders in the way of the new files: of a shard, of the single file, of the index.
        let obstacles = [
            "model-00002-of-00008.safetensors.part",
            "model-r1-00003-of-00008.safetensors.part",
            "model.safetensors.part",
            "model.safetensors.index.json.part",
            "config.json.part",
        ];
        let mut failures = 0;
        for obstacle in obstacles {
            let path = out.path().join(obstacle);
            std::fs::create_dir(&path).unwrap();
            let failed = save(&other, &map(), out.path(), &like(&source, second)).is_err();
            std::fs::remove_dir(&path).unwrap();
            if failed {
                failures += 1;
                assert!(read(out.path()) == before, "{obstacle}");
            } else {
                save(&toy, &map(), out.path(), &like(&source, first)).unwrap();
            }
        }
        assert!(failures >= 2, "{failures}");
        save(&other, &map(), out.path(), &like(&source, second)).unwrap();
        assert!(read(out.path()) != before);
        assert!(!files(out.path()).iter().any(|f| f.ends_with(".part")));
    }
}

#[test]
fn missing_and_truncated_shards_are_named() {
    let dir = tempfile::tempdir().unwrap();
    write_shards(dir.path(), &folder("model."), 3, |i, _| i % 3);
    let shard = dir.path().join("part-1.safetensors");
    let whole = std::fs::read(&shard).unwrap();
    let open = || CheckpointSource::open(dir.path()).unwrap_err().to_string();
    for length in [0, 4, 8, 20, whole.len() / 2, whole.len() - 1] {
        std::fs::write(&shard, &whole[..length]).unwrap();
        assert!(open().contains("part-1.safetensors"), "{}", open());
    }
    std::fs::remove_file(&shard).unwrap();
    assert!(open().contains("no file `part-1.safetensors`"), "{}", open());
}

const LOOP_DIR: &str = "BURN_MOE_TEST_SAVE_LOOP";

/// Saves one generation after the other until it is killed; generation n has every weight multiplied by n. Does nothing
/// unless [`a_killed_save_leaves_one_whole_generation`] starts it.
#[test]
fn save_loop() {
    let Ok(dir) = std::env::var(LOOP_DIR) else { return };
    let dir = Path::new(&dir);
    let source = CheckpointSource::open(dir.join("source")).unwrap();
    for generation in 1u8..=120 {
        // Weights stay exact in bf16 up to 2^8.
        let toy = load_toy(&source).map(&mut Scale(f32::from(generation)));
        let limit = [u64::MAX, 100, 100, 200][usize::from(generation) % 4];
        save(&toy, &map(), dir.join("out"), &like(&source, limit)).unwrap();
        std::fs::write(dir.join("saved"), [generation]).unwrap();
    }
}

#[test]
fn a_killed_save_leaves_one_whole_generation() {
    let dir = tempfile::tempdir().unwrap();
    // One value everywhere, so that a mix of two generations shows.
    let mut ones = folder("model.");
    ones.remove("mtp.layers.0.weight");
    for tensor in ones.values_mut() {
        match tensor.dtype {
            safetensors::Dtype::F32 => tensor.bytes = tensor.bytes.chunks(4).flat_map(|_| 1f32.to_le_bytes()).collect(),
            _ => tensor.bytes = tensor.bytes.chunks(2).flat_map(|_| half::bf16::ONE.to_le_bytes()).collect(),
        }
    }
    write(&dir.path().join("source"), &ones);
    let (out, saved) = (dir.path().join("out"), dir.path().join("saved"));
    for round in 0..12 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["checkpoint::sharded::save_loop", "--exact"])
            .env(LOOP_DIR, dir.path())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let started = Instant::now();
        while !saved.exists() {
            assert!(started.elapsed() < Duration::from_secs(60), "the first save never came");
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_micros(7_919 * round));
        child.kill().unwrap();
        child.wait().unwrap();
        std::fs::remove_file(&saved).unwrap();
        // Opens, loads, and holds one generation.
        let toy = load_toy(&CheckpointSource::open(&out).unwrap());
        let value = floats(toy.norm.weight.val().into_data())[0];
        for (name, tensor) in read(&out) {
            let size = tensor.bytes.len() / tensor.shape.iter().product::<usize>();
            for bytes in tensor.bytes.chunks(size) {
                // bf16 is the upper half of fp32.
                let mut wide = [0; 4];
                wide[4 - size..].copy_from_slice(bytes);
                assert_eq!(f32::from_le_bytes(wide), value, "{name}");
            }
        }
    }
}

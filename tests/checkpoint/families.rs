//! Files made by transformers, through the real models.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use burn::tensor::FloatDType;
use burn_ep_backend::comm::{CommHandle, EpGroup, LocalCommunicator};
use burn_moe::backend::{Device, Infer};
use burn_moe::checkpoint::SaveOptions;
use burn_moe_models::{AutoModelForCausalLm, FromPretrainedOptions};
use burn_moe_tests::fixture;

use super::toy;

fn folders() -> Vec<PathBuf> {
    let family = |family: String| {
        let cases = fixture::cases(&family).into_iter();
        cases.map(move |case| fixture::root().join(&family).join(case))
    };
    fixture::families().into_iter().flat_map(family).collect()
}

/// Loads and saves on this rank.
fn pass(from: &Path, to: &Path, options: &FromPretrainedOptions, max_shard_bytes: u64) {
    let loaded = AutoModelForCausalLm::<Infer>::from_pretrained(from, options, &Device::default())
        .unwrap_or_else(|e| panic!("{}: {e}", from.display()));
    let save = SaveOptions {
        like: Some(&loaded.source),
        quantised: loaded.source.config().get("quantization_config").is_some(),
        max_shard_bytes,
        ep: options.ep.as_ref(),
        ..SaveOptions::default()
    };
    loaded
        .model
        .save_pretrained(to, &save)
        .unwrap_or_else(|e| panic!("{}: {e}", from.display()));
}

/// Bytes of every file of a folder.
fn all_files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path());
    entries
        .map(|path| {
            (
                path.file_name().unwrap().to_string_lossy().into_owned(),
                std::fs::read(&path).unwrap(),
            )
        })
        .collect()
}

// transformers#45591, mobius#188, Automodel#945, #2741.
#[test]
fn every_fixture_comes_back_tensor_by_tensor() {
    for dir in folders() {
        let before = toy::read(&dir);
        // As the config says; in small files; and widened in memory.
        for (dtype, max_shard_bytes) in [(None, u64::MAX), (None, 4000), (Some(FloatDType::F32), u64::MAX)] {
            let options = FromPretrainedOptions {
                dtype,
                ..FromPretrainedOptions::default()
            };
            let out = tempfile::tempdir().unwrap();
            pass(&dir, out.path(), &options, max_shard_bytes);
            assert_eq!(toy::read(out.path()), before, "{}", dir.display());
            let config = |dir: &Path| std::fs::read(dir.join("config.json")).unwrap();
            assert_eq!(config(out.path()), config(&dir), "{}", dir.display());
        }
    }
}

/// The folder does not tell how many ranks wrote it.
#[test]
fn any_number_of_ranks_writes_the_same_folder() {
    // Six experts each, eight, or four.
    for (case, sizes) in [
        ("nemotron_h/latent", [1, 2, 3]),
        ("qwen3_moe/base", [1, 2, 3]),
        ("qwen2_moe/base", [1, 2, 3]),
        ("mixtral/base", [1, 2, 3]),
        ("olmoe/base", [1, 2, 3]),
        ("deepseek_v3/base", [1, 2, 4]),
        ("gpt_oss/mxfp4_square_down", [1, 2, 4]),
    ] {
        let dir = fixture::root().join(case);
        let mut written = Vec::new();
        for size in sizes {
            let out = tempfile::tempdir().unwrap();
            std::thread::scope(|scope| {
                for comm in LocalCommunicator::group(size) {
                    let (dir, out) = (&dir, out.path());
                    scope.spawn(move || {
                        let options = FromPretrainedOptions {
                            ep: Some(EpGroup::new(CommHandle::new(comm))),
                            ..FromPretrainedOptions::default()
                        };
                        pass(dir, out, &options, 20_000);
                    });
                }
            });
            assert_eq!(toy::read(out.path()), toy::read(&dir), "{case}, {size} ranks");
            written.push(all_files(out.path()));
        }
        assert!(written[0].len() > 3, "{case}: more than one shard");
        assert!(written[0] == written[1] && written[0] == written[2], "{case}");
    }
}

/// When one rank cannot save, every rank says so instead of waiting.
#[test]
fn a_failure_on_one_rank_ends_all() {
    let dir = fixture::root().join("qwen3_moe/base");
    let parent = tempfile::tempdir().unwrap();
    let taken = parent.path().join("file");
    std::fs::write(&taken, []).unwrap();
    let errors: Vec<String> = std::thread::scope(|scope| {
        let ranks: Vec<_> = LocalCommunicator::group(2)
            .into_iter()
            .map(|comm| {
                let (dir, taken) = (&dir, &taken);
                scope.spawn(move || {
                    let ep = EpGroup::new(CommHandle::new(comm));
                    let options = FromPretrainedOptions {
                        ep: Some(ep.clone()),
                        ..FromPretrainedOptions::default()
                    };
                    let loaded = AutoModelForCausalLm::<Infer>::from_pretrained(dir, &options, &Device::default()).unwrap();
                    let save = SaveOptions {
                        like: Some(&loaded.source),
                        ep: Some(&ep),
                        ..SaveOptions::default()
                    };
                    loaded.model.save_pretrained(taken, &save).unwrap_err().to_string()
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    assert!(errors[0].contains("create the output folder"), "{}", errors[0]);
    assert!(
        errors[1].contains("rank 0 failed") && errors[1].contains("rank 1 of 2"),
        "{}",
        errors[1]
    );
}

/// A folder written by two ranks loads on one, values included.
#[test]
fn layouts_do_not_depend_on_the_number_of_ranks() {
    let dir = fixture::root().join("nemotron_h/base");
    let out = tempfile::tempdir().unwrap();
    std::thread::scope(|scope| {
        for comm in LocalCommunicator::group(2) {
            let (dir, out) = (&dir, out.path());
            scope.spawn(move || {
                let options = FromPretrainedOptions {
                    ep: Some(EpGroup::new(CommHandle::new(comm))),
                    ..FromPretrainedOptions::default()
                };
                pass(dir, out, &options, u64::MAX);
            });
        }
    });
    let again = tempfile::tempdir().unwrap();
    pass(out.path(), again.path(), &FromPretrainedOptions::default(), u64::MAX);
    assert_eq!(toy::read(again.path()), toy::read(&dir));
}

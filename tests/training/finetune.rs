//! The main path as a library call, on the shipped assets: checkpoint in, training, checkpoint out.

use std::path::Path;

use burn_moe::backend::{Device, Infer};
use burn_moe::batch::HostBatch;
use burn_moe::data::Layout;
use burn_moe::model::CausalLm;
use burn_moe::train::{Interrupt, RunEnd, Schedule, TrainerConfig};
use burn_moe_models::finetune::{Event, Finetune, FinetuneConfig, FinetuneReport};
use burn_moe_models::{AutoModelForCausalLm, FromPretrainedOptions};
use burn_moe_tests::fixture::asset;

fn config(output: &Path) -> FinetuneConfig {
    FinetuneConfig {
        batch: 4,
        seq: 96,
        seed: 1,
        trainer: TrainerConfig {
            steps: 8,
            schedule: Schedule {
                lr: 2e-3,
                ..Schedule::default()
            },
            ..TrainerConfig::default()
        },
        ..FinetuneConfig::new(asset("tiny-nemotron-h"), asset("instructions.jsonl"), output)
    }
}

fn run(config: FinetuneConfig) -> FinetuneReport {
    Finetune::prepare(config).unwrap().run(&Interrupt::new(), |_| {}).unwrap()
}

fn logits(folder: &Path) -> Vec<f32> {
    let device = Device::default();
    let model = AutoModelForCausalLm::<Infer>::from_pretrained(folder, &FromPretrainedOptions::default(), &device)
        .unwrap()
        .model;
    let ids: Vec<i32> = (0..40).map(|i| (i * 37 + 5) % 1000).collect();
    let batch = HostBatch {
        batch: 2,
        seq: 20,
        labels: ids.clone(),
        input_ids: ids,
        ..HostBatch::default()
    };
    let input = model.prepare(&batch, 0, &device).unwrap();
    model.logits(&input).unwrap().into_data().to_vec().unwrap()
}

fn weights(folder: &Path) -> Vec<u8> {
    std::fs::read(folder.join("model.safetensors")).unwrap()
}

#[test]
fn loss_falls_and_the_saved_folder_is_a_checkpoint() {
    let root = tempfile::tempdir().unwrap();
    let output = root.path().join("out");
    let mut config = config(&output);
    config.question = Some("How many kilograms are in half a tonne?".into());
    config.trainer.steps = 12;
    let finetune = Finetune::prepare(config).unwrap();
    let (mut answers, mut steps) = (Vec::new(), Vec::new());
    let report = finetune
        .run(&Interrupt::new(), |event| match event {
            Event::Answer { trained, .. } => answers.push(trained),
            Event::Step(report) => steps.push((report.step, report.loss)),
            Event::Memory(plan) => assert!(plan.weights > 0 && plan.optimizer > 0, "{plan}"),
            Event::Loaded { step, .. } => assert_eq!(step, 0),
        })
        .unwrap();
    assert_eq!((report.end, report.step), (RunEnd::Finished, 12));
    assert_eq!(answers, [false, true]);
    assert_eq!(steps.iter().map(|(_, loss)| *loss).collect::<Vec<_>>(), report.losses);
    let (first, last) = report.first_and_last_loss().unwrap();
    assert!(last < 0.8 * first, "loss {first} -> {last}");

    // The output folder and the checkpoint in it are the same model, and not the one training began with.
    let trained = logits(&output);
    assert_eq!(trained, logits(&output.join("checkpoint-12")));
    assert_ne!(trained, logits(&asset("tiny-nemotron-h")));
    for file in [
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "chat_template.jinja",
    ] {
        let original = std::fs::read(asset("tiny-nemotron-h").join(file)).unwrap();
        assert_eq!(std::fs::read(output.join(file)).unwrap(), original, "{file}");
    }
}

#[test]
fn interrupted_and_resumed_equals_uninterrupted() {
    for layout in [Layout::PadToLongest, Layout::Packed] {
        let root = tempfile::tempdir().unwrap();
        let with = |name: &str| FinetuneConfig {
            layout,
            ..config(&root.path().join(name))
        };
        let whole = run(with("whole"));

        let interrupt = Interrupt::new();
        let stopped = Finetune::prepare(with("parts"))
            .unwrap()
            .run(&interrupt, |event| {
                if let Event::Step(report) = event
                    && report.step == 3
                {
                    interrupt.request();
                }
            })
            .unwrap();
        assert_eq!((stopped.end, stopped.step), (RunEnd::Interrupted, 3));
        let refused = Finetune::prepare(with("parts")).unwrap_err().to_string();
        assert!(refused.contains("checkpoint-3"), "{refused}");
        let deletes_its_model = FinetuneConfig {
            overwrite: true,
            model: root.path().join("parts/checkpoint-3"),
            ..with("parts")
        };
        assert!(
            Finetune::prepare(deletes_its_model)
                .unwrap_err()
                .to_string()
                .contains("another output folder")
        );
        let resumed = run(FinetuneConfig {
            resume: true,
            ..with("parts")
        });
        let losses: Vec<f64> = stopped.losses.iter().chain(&resumed.losses).copied().collect();
        assert_eq!(losses, whole.losses);
        assert!(
            weights(&root.path().join("parts")) == weights(&root.path().join("whole")),
            "weights differ"
        );
    }
}

#[test]
fn expert_parallel_ranks_train_the_same_model() {
    let root = tempfile::tempdir().unwrap();
    let with = |name: &str, ep| FinetuneConfig {
        ep,
        ..config(&root.path().join(name))
    };
    let one = run(with("one", 1));
    for (name, ep) in [("two", 2), ("four", 4)] {
        let many = run(with(name, ep));
        for (step, (a, b)) in one.losses.iter().zip(&many.losses).enumerate().take(2) {
            assert!((a - b).abs() <= 1e-5 * a.abs(), "ep {ep}, step {step}: {b} instead of {a}");
        }
        let files = std::fs::read_dir(root.path().join(name)).unwrap().count();
        assert!(files > 3);
        logits(&root.path().join(name));
    }
}

#[test]
fn what_cannot_work_is_refused_before_training() {
    let root = tempfile::tempdir().unwrap();
    let blocked = root.path().join("file");
    std::fs::write(&blocked, "").unwrap();
    let empty = root.path().join("empty.jsonl");
    std::fs::write(&empty, "\n").unwrap();
    let base = config(&root.path().join("out"));
    let copy = root.path().join("model");
    let inside = copy.join("checkpoint-1");
    for folder in [&copy, &inside] {
        std::fs::create_dir_all(folder).unwrap();
        for file in std::fs::read_dir(asset("tiny-nemotron-h")).unwrap() {
            let file = file.unwrap();
            std::fs::copy(file.path(), folder.join(file.file_name())).unwrap();
        }
    }
    let cases: [(&str, FinetuneConfig); 12] = [
        // The model would be replaced by its fine-tuned version, or deleted as a checkpoint of an earlier run.
        (
            "another output folder",
            FinetuneConfig {
                model: copy.clone(),
                output: copy.clone(),
                overwrite: true,
                ..base.clone()
            },
        ),
        (
            "another output folder",
            FinetuneConfig {
                model: inside,
                output: copy.clone(),
                overwrite: true,
                ..base.clone()
            },
        ),
        (
            "model.safetensors, expected no weights",
            FinetuneConfig {
                output: copy,
                ..base.clone()
            },
        ),
        ("`ep`", FinetuneConfig { ep: 0, ..base.clone() }),
        ("`seq`", FinetuneConfig { seq: 1, ..base.clone() }),
        (
            "output folder",
            FinetuneConfig {
                output: blocked.join("out"),
                ..base.clone()
            },
        ),
        (
            "data set is empty",
            FinetuneConfig {
                data: empty,
                ..base.clone()
            },
        ),
        (
            "n_routed_experts",
            FinetuneConfig {
                ep: 3,
                batch: 3,
                ..base.clone()
            },
        ),
        (
            "`batch`",
            FinetuneConfig {
                ep: 2,
                batch: 3,
                ..base.clone()
            },
        ),
        ("line 1", FinetuneConfig { seq: 4, ..base.clone() }),
        (
            "resume",
            FinetuneConfig {
                resume: true,
                ..base.clone()
            },
        ),
        (
            "config.json",
            FinetuneConfig {
                model: root.path().join("nowhere"),
                ..base.clone()
            },
        ),
    ];
    for (expected, config) in cases {
        let error = Finetune::prepare(config).unwrap_err().to_string();
        assert!(error.contains(expected), "{expected}: {error}");
    }
}

#[test]
fn a_model_that_diverged_in_the_last_step_is_an_error_and_leaves_the_earlier_run() {
    let root = tempfile::tempdir().unwrap();
    let output = root.path().join("out");
    let mut config = config(&output);
    config.trainer.steps = 1;
    run(config.clone());
    let before = weights(&output);
    config.overwrite = true;
    config.trainer.schedule.lr = 1e300;
    let error = Finetune::prepare(config).unwrap().run(&Interrupt::new(), |_| {}).unwrap_err();
    assert!(error.to_string().contains("expected finite weights"), "{error}");
    assert_eq!(weights(&output), before);
    assert!(!output.join("checkpoint-1.partial").exists());
}

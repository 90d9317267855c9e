//! Ranks as processes: the same job under a launcher's variables as in one process, and what is left when a rank is killed.
//!
//! The test program starts itself once more for every rank.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use burn_moe::backend::Transport;
use burn_moe::train::{Interrupt, Schedule, TrainerConfig};
use burn_moe_models::finetune::{Event, Finetune, FinetuneConfig};
use burn_moe_tests::fixture::asset;
use safetensors::SafeTensors;

/// Folder of the job that a rank takes part in.
const JOB: &str = "BURN_MOE_TEST_JOB";
const STEPS: u64 = 6;

/// A port nobody listens on now.
pub(super) fn free_port() -> u16 {
    TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port()
}

fn config(output: &Path) -> FinetuneConfig {
    FinetuneConfig {
        batch: 4,
        seq: 64,
        too_long: burn_moe::data::TooLong::Truncate,
        seed: 3,
        save_every: Some(2),
        // On a GPU build the processes share GPU 0, which NCCL refuses and shared memory does not.
        transport: if cfg!(feature = "cuda") { Transport::Peer } else { Transport::Host },
        trainer: TrainerConfig {
            steps: STEPS,
            schedule: Schedule {
                lr: 1e-3,
                ..Schedule::default()
            },
            ..TrainerConfig::default()
        },
        ..FinetuneConfig::new(asset("tiny-nemotron-h"), asset("instructions.jsonl"), output)
    }
}

/// Runs the job and writes a line for each step to `losses`.
fn run(output: &Path, resume: bool, pause: Duration) -> burn_moe::Result<Vec<f64>> {
    let config = FinetuneConfig { resume, ..config(output) };
    let mut losses = Vec::new();
    Finetune::prepare(config)?.run(&Interrupt::new(), |event| {
        if let Event::Step(report) = event {
            losses.push(report.loss);
            std::thread::sleep(pause);
        }
    })?;
    Ok(losses)
}

#[test]
#[ignore = "one rank of the jobs that the tests below start"]
fn rank() {
    let Ok(job) = std::env::var(JOB).map(PathBuf::from) else {
        panic!("this is no test of its own: {JOB} is not set");
    };
    // Slow enough to be killed between two steps.
    let losses = run(&job.join("out"), false, Duration::from_millis(40));
    let text = match losses {
        Ok(losses) => losses.iter().map(|loss| format!("{loss:?}\n")).collect(),
        Err(error) => format!("error: {error}\n"),
    };
    std::fs::write(job.join(format!("rank{}", std::env::var("RANK").unwrap())), text).unwrap();
}

struct Job {
    folder: tempfile::TempDir,
    ranks: Vec<Child>,
}

impl Job {
    fn start(world: usize) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let port = free_port();
        let ranks = (0..world)
            .map(|rank| {
                Command::new(std::env::current_exe().unwrap())
                    .args(["--exact", "ep::processes::rank", "--ignored"])
                    .env(JOB, folder.path())
                    .env("RANK", rank.to_string())
                    .env("WORLD_SIZE", world.to_string())
                    .env("LOCAL_RANK", rank.to_string())
                    .env("MASTER_ADDR", "127.0.0.1")
                    .env("MASTER_PORT", port.to_string())
                    .env("RAYON_NUM_THREADS", "1")
                    .stdout(Stdio::null())
                    .stderr(Stdio::null())
                    .spawn()
                    .unwrap()
            })
            .collect();
        Self { folder, ranks }
    }

    fn output(&self) -> PathBuf {
        self.folder.path().join("out")
    }

    /// What rank `rank` wrote, once it has ended.
    fn result(&mut self, rank: usize, limit: Duration) -> String {
        let started = Instant::now();
        while self.ranks[rank].try_wait().unwrap().is_none() {
            assert!(started.elapsed() < limit, "rank {rank} still runs after {limit:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
        std::fs::read_to_string(self.folder.path().join(format!("rank{rank}"))).unwrap_or_default()
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        for rank in &mut self.ranks {
            let _ = rank.kill();
            let _ = rank.wait();
        }
    }
}

fn numbers(text: &str) -> Vec<f64> {
    text.lines().map(|line| line.parse().unwrap_or_else(|_| panic!("{line}"))).collect()
}

fn assert_close(found: &[f64], expected: &[f64], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (f, e)) in found.iter().zip(expected).enumerate() {
        assert!((f - e).abs() <= 1e-5 * e.abs(), "{what}, step {i}: {f} against {e}");
    }
}

/// Largest difference between two checkpoints, relative to the largest value of each tensor.
fn difference(a: &Path, b: &Path) -> f32 {
    let [a, b] = [a, b].map(|dir| std::fs::read(dir.join("model.safetensors")).unwrap());
    let (a, b) = (SafeTensors::deserialize(&a).unwrap(), SafeTensors::deserialize(&b).unwrap());
    assert_eq!(a.len(), b.len());
    let floats = |t: safetensors::tensor::TensorView<'_>| -> Vec<f32> {
        t.data()
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
            .collect()
    };
    let mut worst = 0f32;
    for (name, tensor) in a.tensors() {
        let (x, y) = (floats(tensor), floats(b.tensor(&name).unwrap()));
        let scale = y.iter().fold(1e-6f32, |m, v| m.max(v.abs()));
        worst = x.iter().zip(&y).fold(worst, |m, (x, y)| m.max((x - y).abs() / scale));
    }
    worst
}

#[test]
fn processes_train_like_one_process() {
    let alone = tempfile::tempdir().unwrap();
    let expected = run(alone.path(), false, Duration::ZERO).unwrap();
    for world in [2, 4] {
        let mut job = Job::start(world);
        let results: Vec<String> = (0..world).map(|rank| job.result(rank, Duration::from_secs(120))).collect();
        assert_close(&numbers(&results[0]), &expected, &format!("{world} processes"));
        assert!(results[1..].iter().all(String::is_empty), "only rank 0 reports: {results:?}");
        // AdamW divides by the root of the second moment: a gradient near zero turns rounding into a step of the learning rate.
        let worst = difference(&job.output(), alone.path());
        assert!(worst < 2e-2, "{world} processes: weights differ by {worst}");
    }
}

#[test]
fn a_killed_rank_ends_the_others_and_the_last_checkpoint_continues() {
    let alone = tempfile::tempdir().unwrap();
    let expected = run(alone.path(), false, Duration::ZERO).unwrap();

    let mut job = Job::start(2);
    let checkpoint = job.output().join("checkpoint-2");
    let started = Instant::now();
    while !checkpoint.is_dir() {
        assert!(started.elapsed() < Duration::from_secs(120), "no checkpoint");
        std::thread::sleep(Duration::from_millis(5));
    }
    job.ranks[1].kill().unwrap();
    let killed = Instant::now();
    let error = job.result(0, Duration::from_secs(10));
    assert!(killed.elapsed() < Duration::from_secs(10));
    assert!(error.starts_with("error: rank 0 of 2") && error.contains("rank 1"), "{error}");

    // Whole enough to go on with, on another number of ranks.
    let done = burn_moe::train::latest_checkpoint(&job.output()).unwrap().unwrap();
    let step: usize = done.to_str().unwrap().rsplit('-').next().unwrap().parse().unwrap();
    assert!((2..STEPS as usize).contains(&step), "killed after the end");
    let rest = run(&job.output(), true, Duration::ZERO).unwrap();
    assert_close(&rest, &expected[step..], "resumed");
}

#[test]
fn a_job_with_different_settings_does_not_start() {
    let root = tempfile::tempdir().unwrap();
    let port = free_port();
    let errors: Vec<String> = std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..2)
            .map(|rank| {
                let mut config = config(&root.path().join("out"));
                config.seed += rank as u64;
                let launch = burn_ep_backend::comm::Launch {
                    rank,
                    world: 2,
                    local_rank: rank,
                    master_addr: "127.0.0.1".into(),
                    master_port: port,
                };
                scope.spawn(move || {
                    let job = Finetune::prepare_as(config, Some(launch)).unwrap();
                    job.run(&Interrupt::new(), |_| {}).unwrap_err().to_string()
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    for error in errors {
        assert!(error.contains("seed is 3 on rank 0, seed is 4 on rank 1"), "{error}");
    }
    assert_eq!(burn_moe::train::latest_checkpoint(&root.path().join("out")).unwrap(), None);
}

//! A rank is lost in every phase of a step and of a save: the other ends with an error, the newest checkpoint is whole, and a run
//! that continues from it gives the losses of one that nothing happened to.
//!
//! The ranks are processes. The one that is lost ends at a given operation between ranks, as if it were killed there.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use burn::tensor::Device;
use burn_ep_backend::comm::{Communicator, Launch, Ranks, rendezvous};
use burn_moe::checkpoint::SaveOptions;
use burn_moe::train::{BatchSource, Interrupt, RepeatSource, SavePlan, latest_checkpoint};
use burn_moe_models::FromPretrainedOptions;

use super::processes::free_port;
use super::*;

const JOB: &str = "BURN_MOE_TEST_FAULT_JOB";
/// Operation at which rank 1 ends.
const LAST: &str = "BURN_MOE_TEST_LAST_OPERATION";
const STEPS: u64 = 3;

/// Ends the process at operation `last`, whatever group it is in, and writes down what the operations were.
#[derive(Debug, Clone)]
struct Mortal {
    inner: Arc<dyn Communicator>,
    done: Arc<AtomicUsize>,
    last: Option<usize>,
    log: PathBuf,
}

impl Mortal {
    fn live(&self, op: &str) {
        use std::io::Write;
        let number = self.done.fetch_add(1, Ordering::Relaxed);
        let mut log = std::fs::OpenOptions::new().create(true).append(true).open(&self.log).unwrap();
        writeln!(log, "{op}").unwrap();
        if self.last == Some(number) {
            // No farewell: connections break as they do when a process is killed.
            std::process::exit(9);
        }
    }
}

impl Communicator for Mortal {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn world(&self) -> usize {
        self.inner.world()
    }

    fn all_to_all(&self, send: Vec<Vec<u8>>) -> burn_ep_backend::Result<Vec<Vec<u8>>> {
        self.live("all_to_all");
        self.inner.all_to_all(send)
    }

    fn all_gather(&self, bytes: Vec<u8>) -> burn_ep_backend::Result<Vec<Vec<u8>>> {
        self.live("all_gather");
        self.inner.all_gather(bytes)
    }

    fn all_reduce_sum(&self, values: &mut [f32]) -> burn_ep_backend::Result<()> {
        self.live("all_reduce_sum");
        self.inner.all_reduce_sum(values)
    }

    fn all_reduce_sum_f64(&self, values: &mut [f64]) -> burn_ep_backend::Result<()> {
        self.live("all_reduce_sum_f64");
        self.inner.all_reduce_sum_f64(values)
    }

    fn barrier(&self) -> burn_ep_backend::Result<()> {
        self.live("barrier");
        self.inner.barrier()
    }

    fn abort(&self, why: &str) {
        self.inner.abort(why);
    }

    fn failure(&self) -> Option<String> {
        self.inner.failure()
    }

    fn lost(&self) -> Option<String> {
        self.inner.lost()
    }

    fn in_process(&self) -> bool {
        self.inner.in_process()
    }

    fn subgroup(&self, ranks: Ranks) -> burn_ep_backend::Result<Arc<dyn Communicator>> {
        Ok(Arc::new(Self {
            inner: self.inner.subgroup(ranks)?,
            ..self.clone()
        }))
    }
}

/// Trains to the end with a checkpoint after every step; losses of the steps done here.
fn train(output: &Path, ep: &EpGroup) -> burn_moe::Result<Vec<f64>> {
    let device = Device::<Train>::default();
    let newest = latest_checkpoint(output)?;
    let start = match &newest {
        Some(dir) => {
            let options = FromPretrainedOptions {
                ep: Some(ep.clone()),
                ..FromPretrainedOptions::default()
            };
            Model::from_pretrained(dir, &options, &device)?.model
        }
        None => model(NEMOTRON, ep),
    };
    let config = TrainerConfig {
        steps: STEPS,
        ..trainer_config(LEARNING_RATE)
    };
    let mut trainer = Trainer::new(start, config, device, Some(ep.clone()))?;
    let mut source = RepeatSource::new((0..STEPS as usize).map(|step| batch(step, share(ep), &[])).collect());
    let source: &mut dyn BatchSource = &mut source;
    if let Some(dir) = &newest {
        trainer.resume(dir, source)?;
    }
    let plan = SavePlan {
        every: Some(1),
        ..SavePlan::new(output)
    };
    let save = |model: &Model, dir: &Path| {
        let options = SaveOptions {
            ep: Some(ep),
            ..SaveOptions::default()
        };
        model.save_pretrained(dir, &options).map(drop)
    };
    let mut losses = Vec::new();
    trainer.run(source, &Interrupt::new(), Some((&plan, &save)), &mut |report| {
        losses.push(report.loss)
    })?;
    Ok(losses)
}

#[test]
#[ignore = "one rank of the jobs that the test below starts"]
fn rank() {
    let job = PathBuf::from(std::env::var(JOB).expect("this is no test of its own"));
    let launch = Launch::from_env().unwrap().unwrap();
    let last = std::env::var(LAST).ok().map(|n| n.parse().unwrap());
    let comm = Mortal {
        inner: Arc::new(rendezvous(&launch, &Vec::new(), Duration::from_secs(60)).unwrap()),
        done: Arc::default(),
        last: last.filter(|_| launch.rank == 1),
        log: job.join(format!("operations{}", launch.rank)),
    };
    let ep = EpGroup::new(CommHandle::new(comm));
    let text = match train(&job.join("out"), &ep) {
        Ok(losses) => losses.iter().map(|loss| format!("{loss:?}\n")).collect(),
        Err(error) => {
            ep.world().get().abort(&error.to_string());
            format!("error: {error}\n")
        }
    };
    std::fs::write(job.join(format!("rank{}", launch.rank)), text).unwrap();
}

struct Job {
    folder: tempfile::TempDir,
    ranks: Vec<Child>,
}

impl Job {
    fn start(last: Option<usize>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let port = free_port();
        let start = |rank: usize| {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command
                .args(["--exact", "ep::faults::rank", "--ignored"])
                .env(JOB, folder.path())
                .env("RANK", rank.to_string())
                .env("WORLD_SIZE", "2")
                .env("LOCAL_RANK", rank.to_string())
                .env("MASTER_ADDR", "127.0.0.1")
                .env("MASTER_PORT", port.to_string())
                .env("RAYON_NUM_THREADS", "1")
                .stdout(Stdio::null())
                .stderr(Stdio::null());
            if let Some(last) = last {
                command.env(LAST, last.to_string());
            }
            command.spawn().unwrap()
        };
        let ranks = [0, 1].map(start).into();
        Self { folder, ranks }
    }

    fn wait(&mut self, rank: usize, limit: Duration) {
        let started = Instant::now();
        while self.ranks[rank].try_wait().unwrap().is_none() {
            assert!(started.elapsed() < limit, "rank {rank} still runs after {limit:?}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn text(&self, name: &str) -> String {
        std::fs::read_to_string(self.folder.path().join(name)).unwrap_or_default()
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

#[test]
fn a_rank_lost_in_any_phase_costs_no_checkpoint() {
    let alone = tempfile::tempdir().unwrap();
    let expected = on_ranks(1, |ep| train(alone.path(), &ep).unwrap()).remove(0);

    let mut whole = Job::start(None);
    (0..2).for_each(|rank| whole.wait(rank, Duration::from_secs(120)));
    let operations = whole.text("operations1");
    let operations: Vec<&str> = operations.lines().collect();
    assert_eq!(
        operations,
        whole.text("operations0").lines().collect::<Vec<_>>(),
        "ranks call different operations"
    );
    let saves: Vec<usize> = (0..operations.len()).filter(|i| operations[*i] == "barrier").collect();
    assert!(saves.len() >= 6 && operations.len() > 60, "{operations:?}");

    // The second step: ids, rows there, rows back, backward, gradients, weights; then the barriers of its save and, between them,
    // what the ranks agree on.
    let (from, to) = (saves[saves.len() / 3 - 1] + 1, saves[saves.len() / 3]);
    let mut phases: Vec<usize> = (0..6).map(|i| from + i * (to - from) / 6).collect();
    phases.extend(&saves[saves.len() / 3..2 * saves.len() / 3]);
    phases.push(saves[saves.len() / 3] + 1);
    for last in phases {
        let what = format!("operation {last}, {}", operations[last]);
        let mut job = Job::start(Some(last));
        job.wait(1, Duration::from_secs(120));
        let lost = Instant::now();
        job.wait(0, Duration::from_secs(10));
        let error = job.text("rank0");
        assert!(
            error.starts_with("error: rank 0 of 2") && error.contains("rank 1"),
            "{what}: {error} after {:?}",
            lost.elapsed()
        );

        let output = job.folder.path().join("out");
        let newest = latest_checkpoint(&output)
            .unwrap()
            .unwrap_or_else(|| panic!("{what}: no checkpoint"));
        let step: usize = newest.to_str().unwrap().rsplit('-').next().unwrap().parse().unwrap();
        assert!((1..STEPS as usize).contains(&step), "{what}: {step}");
        let rest = on_ranks(1, |ep| train(&output, &ep).unwrap()).remove(0);
        assert_eq!(rest.len(), STEPS as usize - step, "{what}");
        for (found, expected) in rest.iter().zip(&expected[step..]) {
            assert!((found / expected - 1.0).abs() < 1e-5, "{what}: {found} for {expected}");
        }
    }
}

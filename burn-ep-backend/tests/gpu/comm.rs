//! Tensors between ranks on the device: every operation against what the host computes, then what happens when a rank is lost.
//!
//! One suite for any number of ranks and both transports. Shared memory runs with two and four processes, which share a GPU when
//! there are fewer; NCCL refuses two ranks on a device, so with one GPU it runs alone. The test program starts itself once for each
//! rank.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use burn::tensor::{FloatDType, Tensor, TensorData};
#[cfg(feature = "nccl")]
use burn_ep_backend::comm::LocalCommunicator;
#[cfg(feature = "nccl")]
use burn_ep_backend::comm::cuda::nccl::{NcclCommunicator, available};
use burn_ep_backend::comm::cuda::peer::{PeerCommunicator, PeerOptions};
use burn_ep_backend::comm::{CommHandle, ExchangePlan, Launch, Ranks, rendezvous};
use burn_ep_backend::{Cuda, ops, visible_gpus};
use cubecl::cuda::CudaDevice;

use crate::support::{host, random};

/// Folder of the job that a rank takes part in.
const JOB: &str = "BURN_MOE_TEST_JOB";
/// Its transport.
const TRANSPORT: &str = "BURN_MOE_TEST_TRANSPORT";
/// What its ranks do.
const TASK: &str = "BURN_MOE_TEST_TASK";

fn flat(values: &[f32], device: &CudaDevice) -> Tensor<Cuda, 1> {
    Tensor::from_data(TensorData::new(values.to_vec(), [values.len()]), device)
}

/// Values of rank `rank`, exact in fp32 under any order of summation.
fn values(rank: usize, len: usize, seed: u64) -> Vec<f32> {
    let values: Vec<f32> = random(&[len], seed * 100 + rank as u64).into_vec().unwrap();
    values.iter().map(|v| (v * 64.0).round()).collect()
}

fn sums(world: usize, len: usize, seed: u64) -> Vec<f32> {
    let mut sum = vec![0.0; len];
    for rank in 0..world {
        for (total, value) in sum.iter_mut().zip(values(rank, len, seed)) {
            *total += value;
        }
    }
    sum
}

/// Rows that `from` sends to `to` in round `round`: skewed, with ranks that get nothing.
fn rows(from: usize, to: usize, world: usize, round: usize) -> usize {
    match round {
        // everything to one rank
        0 => {
            if to == world - 1 {
                40 + from
            } else {
                0
            }
        }
        // one rank sends nothing
        1 => {
            if from == 0 && world > 1 {
                0
            } else {
                3 * to + 1
            }
        }
        _ => (from * 7 + to * 3) % 11,
    }
}

/// Every operation of the transport, on rank `comm.rank()` of any number of them.
fn suite(comm: &CommHandle, device: &CudaDevice) {
    let (rank, world) = (comm.get().rank(), comm.get().world());
    for (round, share) in [(0u64, 1usize), (1, 5000), (2, 1 << 20)] {
        let len = share * world;
        let all = ops::all_reduce(flat(&values(rank, len, round), device), comm).unwrap();
        assert_eq!(host(all), sums(world, len, round), "all_reduce of {len}");
        let part = ops::reduce_scatter(flat(&values(rank, len, round), device), comm).unwrap();
        assert_eq!(
            host(part),
            sums(world, len, round)[rank * share..(rank + 1) * share],
            "reduce_scatter of {len}"
        );
        for dtype in [FloatDType::F32, FloatDType::BF16] {
            // Multiples of 1/64 up to 6 are exact in bf16 only when small: scaled down to integers below 256.
            let own: Vec<f32> = values(rank, share, round).iter().map(|v| v % 128.0).collect();
            let gathered = ops::all_gather(flat(&own, device).cast(dtype), comm).unwrap();
            let expected: Vec<f32> = (0..world).flat_map(|r| values(r, share, round)).map(|v| v % 128.0).collect();
            assert_eq!(host(gathered), expected, "all_gather of {share} {dtype:?}");
        }
    }
    let double = flat(&[0.1, rank as f32], device).cast(FloatDType::F64);
    let double = ops::all_reduce(double, comm).unwrap().into_data().to_vec::<f64>().unwrap();
    let expected = (world * (world - 1) / 2) as f64;
    assert!(
        (double[0] - f64::from(0.1f32) * world as f64).abs() < 1e-15 && double[1] == expected,
        "{double:?}"
    );

    for round in 0..4 {
        for width in [8, 2880] {
            let plan = ExchangePlan {
                send: (0..world).map(|to| rows(rank, to, world, round)).collect(),
                recv: (0..world).map(|from| rows(from, rank, world, round)).collect(),
            };
            let block = |from: usize, to: usize| values(from * world + to, rows(from, to, world, round) * width, 9);
            let sent: Vec<f32> = (0..world).flat_map(|to| block(rank, to)).collect();
            let count = plan.send.iter().sum();
            // Uploads have padded rows at this width: the transport must not send the padding.
            let tensor = Tensor::<Cuda, 2>::from_data(TensorData::new(sent.clone(), [count, width]), device);
            let received = ops::exchange_rows(tensor, &plan, comm).unwrap();
            let expected: Vec<f32> = (0..world).flat_map(|from| block(from, rank)).collect();
            assert_eq!(received.dims(), [plan.recv.iter().sum(), width]);
            assert_eq!(host(received.clone()), expected, "round {round}, width {width}");
            let back = ops::exchange_rows(received, &plan.reversed(), comm).unwrap();
            assert_eq!(host(back), sent, "the way back, round {round}, width {width}");
        }
    }
    // Groups: this rank alone, and all of them once more.
    let alone = comm
        .subgroup(Ranks {
            first: rank,
            step: 1,
            len: 1,
        })
        .unwrap();
    assert_eq!(host(ops::all_reduce(flat(&[3.0], device), &alone).unwrap()), [3.0]);
    let again = comm.subgroup(Ranks::all(world)).unwrap();
    assert_eq!(host(ops::all_reduce(flat(&[1.0], device), &again).unwrap()), [world as f32]);
    comm.check().unwrap();
}

/// Bytes a second of the exchange when every rank sends 128 MiB, to all ranks alike.
fn speed(comm: &CommHandle, device: &CudaDevice) -> f64 {
    let (world, width) = (comm.get().world(), 2048);
    let rows = (128 << 20) / (2 * width) / world;
    let plan = ExchangePlan {
        send: vec![rows; world],
        recv: vec![rows; world],
    };
    let tensor = Tensor::<Cuda, 2>::ones([rows * world, width], device).cast(FloatDType::BF16);
    let mut seconds = f64::INFINITY;
    for _ in 0..6 {
        comm.get().barrier().unwrap();
        let start = Instant::now();
        let mut out = tensor.clone();
        for _ in 0..10 {
            out = ops::exchange_rows(out, &plan, comm).unwrap();
        }
        // One element is read: the host waits for all of it.
        assert_eq!(host(out.slice([0..1, 0..1])), [1.0]);
        seconds = seconds.min(start.elapsed().as_secs_f64() / 10.0);
    }
    (rows * world * width * 2) as f64 / seconds
}

#[cfg(feature = "nccl")]
#[test]
fn nccl_alone() {
    if let Err(why) = available() {
        // Not a pass: the machine lacks what the test is about.
        println!("SKIPPED: {why}");
        return;
    }
    let device = CudaDevice::new(0);
    let comm = NcclCommunicator::new(LocalCommunicator::single(), device.clone()).unwrap();
    comm.device_barrier().unwrap();
    let comm = CommHandle::new(comm);
    suite(&comm, &device);
    println!("exchange with itself: {:.0} GB/s", speed(&comm, &device) / 1e9);
}

/// An operation after the end of the job is an error, not a hang, and says why.
#[cfg(feature = "nccl")]
#[test]
fn nccl_after_an_abort() {
    if let Err(why) = available() {
        println!("SKIPPED: {why}");
        return;
    }
    let device = CudaDevice::new(0);
    let comm = CommHandle::new(NcclCommunicator::new(LocalCommunicator::single(), device.clone()).unwrap());
    assert_eq!(host(ops::all_reduce(flat(&[2.0], &device), &comm).unwrap()), [2.0]);
    comm.get().abort("the loss is not a number");
    let error = ops::all_reduce(flat(&[1.0], &device), &comm).unwrap_err().to_string();
    assert!(error.contains("the loss is not a number"), "{error}");
}

struct Job {
    folder: tempfile::TempDir,
    ranks: Vec<Child>,
}

impl Job {
    fn start(transport: &str, world: usize, task: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let port = TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port();
        let ranks = (0..world).map(|rank| {
            Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "comm::rank", "--ignored", "--nocapture"])
                .env(JOB, folder.path())
                .env(TASK, task)
                .env(TRANSPORT, transport)
                .env("RANK", rank.to_string())
                .env("WORLD_SIZE", world.to_string())
                .env("LOCAL_RANK", rank.to_string())
                .env("MASTER_ADDR", "127.0.0.1")
                .env("MASTER_PORT", port.to_string())
                .stdout(Stdio::null())
                .spawn()
                .unwrap()
        });
        let ranks = ranks.collect();
        Self { folder, ranks }
    }

    fn file(&self, rank: usize) -> PathBuf {
        self.folder.path().join(format!("rank{rank}"))
    }

    /// What rank `rank` wrote, once it has ended.
    fn result(&mut self, rank: usize, limit: Duration) -> String {
        let started = Instant::now();
        while self.ranks[rank].try_wait().unwrap().is_none() {
            assert!(started.elapsed() < limit, "rank {rank} still runs after {limit:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
        std::fs::read_to_string(self.file(rank)).unwrap_or_else(|e| format!("nothing written: {e}"))
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
#[ignore = "one rank of the jobs that the tests here start"]
fn rank() {
    let job = PathBuf::from(std::env::var(JOB).expect("this is no test of its own"));
    let launch = Launch::from_env().unwrap().expect("a launcher's variables");
    let device = CudaDevice::new(launch.local_rank % visible_gpus().unwrap());
    let tcp = rendezvous(&launch, &Vec::new(), Duration::from_secs(60)).unwrap();
    let options = |megabytes: usize, seconds: u64| PeerOptions {
        capacity: megabytes << 20,
        timeout: Duration::from_secs(seconds),
    };
    let task = std::env::var(TASK).unwrap();
    let comm = match (std::env::var(TRANSPORT).unwrap().as_str(), task.as_str()) {
        #[cfg(feature = "nccl")]
        ("nccl", _) => CommHandle::new(NcclCommunicator::new(tcp, device.clone()).unwrap()),
        // Smaller than the largest collective of the suite, so that it goes in pieces.
        ("peer", "suite") => CommHandle::new(PeerCommunicator::new(tcp, device.clone(), options(3, 60)).unwrap()),
        ("peer", "full") => CommHandle::new(PeerCommunicator::new(tcp, device.clone(), options(1, 60)).unwrap()),
        ("peer", "late") => CommHandle::new(PeerCommunicator::new(tcp, device.clone(), options(1, 3)).unwrap()),
        ("peer", _) => CommHandle::new(PeerCommunicator::new(tcp, device.clone(), options(256, 60)).unwrap()),
        (other, _) => panic!("unknown transport {other}"),
    };
    let text = match task.as_str() {
        "suite" => {
            suite(&comm, &device);
            comm.get().barrier().unwrap();
            "ok".into()
        }
        "speed" => {
            let speed = speed(&comm, &device) / 1e9;
            comm.get().barrier().unwrap();
            format!("ok {speed:.0} GB/s")
        }
        "full" => {
            // 2 MiB to a rank that can receive 1 MiB.
            let world = comm.get().world();
            let plan = ExchangePlan {
                send: (0..world).map(|to| if to == 0 { 1024 } else { 0 }).collect(),
                recv: vec![if comm.get().rank() == 0 { 1024 } else { 0 }; world],
            };
            let rows = Tensor::<Cuda, 2>::ones([1024, 512], &device);
            ended(|| ops::exchange_rows(rows.clone(), &plan, &comm).map(|out| host(out.sum())), &comm)
        }
        "late" => {
            // Rank 1 is there, but does not come.
            ops::all_reduce(flat(&[1.0], &device), &comm).unwrap();
            if comm.get().rank() == 1 {
                std::thread::sleep(Duration::from_secs(8));
            }
            ended(|| ops::all_reduce(flat(&[1.0], &device), &comm).map(host), &comm)
        }
        "lost" => lost(&comm, &device, &job),
        other => panic!("unknown task {other}"),
    };
    std::fs::write(job.join(format!("rank{}", launch.rank)), text).unwrap();
}

/// The error with which the job ends; `work` reads its result, so it waits for the device.
fn ended<T>(work: impl Fn() -> burn_ep_backend::Result<T>, comm: &CommHandle) -> String {
    let started = Instant::now();
    loop {
        if let Err(error) = work().and_then(|_| comm.check()) {
            return error.to_string();
        }
        if started.elapsed() > Duration::from_secs(20) {
            return "no error".into();
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Exchanges until that fails; says so in a file once it is under way.
fn lost(comm: &CommHandle, device: &CudaDevice, job: &Path) -> String {
    let rank = comm.get().rank();
    for round in 0.. {
        let sum = ops::all_reduce(flat(&values(rank, 1 << 16, round), device), comm);
        // Reading waits for the device: a kernel that waits for a dead rank would hold it for ever.
        match sum.map(|sum| host(sum.narrow(0, 0, 1))).and_then(|_| comm.check()) {
            Ok(()) if round == 5 => std::fs::write(job.join(format!("started{rank}")), "").unwrap(),
            Ok(()) => {}
            Err(error) => return error.to_string(),
        }
    }
    unreachable!("the loop ends with an error")
}

#[cfg(feature = "nccl")]
fn gpus() -> usize {
    match available() {
        Ok(()) => visible_gpus().unwrap(),
        Err(why) => {
            println!("SKIPPED: {why}");
            0
        }
    }
}

#[cfg(feature = "nccl")]
#[test]
fn nccl_on_several_gpus() {
    let world = gpus().min(8);
    if world < 2 {
        println!("SKIPPED: {world} GPU here, NCCL wants one for each rank");
        return;
    }
    let mut job = Job::start("nccl", world, "suite");
    let results: Vec<String> = (0..world).map(|rank| job.result(rank, Duration::from_secs(180))).collect();
    println!("{results:?}");
    assert!(results.iter().all(|r| r == "ok"), "{results:?}");
    let mut job = Job::start("nccl", world, "speed");
    println!("{}", job.result(0, Duration::from_secs(120)));
}

#[cfg(feature = "nccl")]
#[test]
fn nccl_with_a_rank_that_is_killed() {
    let world = gpus().min(4);
    if world < 2 {
        println!("SKIPPED: {world} GPU here, NCCL wants one for each rank");
        return;
    }
    killed("nccl", world);
}

fn killed(transport: &str, world: usize) {
    let mut job = Job::start(transport, world, "lost");
    let started = Instant::now();
    while !(0..world).all(|rank| job.folder.path().join(format!("started{rank}")).exists()) {
        assert!(started.elapsed() < Duration::from_secs(120), "the ranks did not begin");
        std::thread::sleep(Duration::from_millis(5));
    }
    job.ranks[1].kill().unwrap();
    for rank in (0..world).filter(|rank| *rank != 1) {
        let error = job.result(rank, Duration::from_secs(10));
        assert!(error.contains("rank 1") && error.contains("operation"), "rank {rank}: {error}");
    }
}

#[test]
fn peers_of_one_host() {
    for world in [2, 4] {
        let mut job = Job::start("peer", world, "suite");
        let results: Vec<String> = (0..world).map(|rank| job.result(rank, Duration::from_secs(180))).collect();
        assert!(results.iter().all(|r| r == "ok"), "{world} ranks: {results:?}");
    }
    let mut job = Job::start("peer", 2, "speed");
    println!(
        "two processes, {} GPUs: {}",
        visible_gpus().unwrap(),
        job.result(0, Duration::from_secs(120))
    );
}

#[test]
fn peers_with_a_rank_that_is_killed() {
    killed("peer", 2);
}

/// Every rank ends with the reason, though only one of them cannot take what it would be sent.
#[test]
fn peers_with_too_small_a_buffer() {
    let mut job = Job::start("peer", 2, "full");
    for rank in 0..2 {
        let error = job.result(rank, Duration::from_secs(60));
        assert!(error.contains("rank 0") && error.contains("capacity"), "rank {rank}: {error}");
    }
}

#[test]
fn peers_that_do_not_come_are_not_waited_for_for_ever() {
    let mut job = Job::start("peer", 2, "late");
    for rank in 0..2 {
        let error = job.result(rank, Duration::from_secs(60));
        assert!(
            error.contains("no sign of rank 1") || error.contains("has not ended"),
            "rank {rank}: {error}"
        );
    }
}

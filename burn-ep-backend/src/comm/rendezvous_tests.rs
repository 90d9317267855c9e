//! Ranks as threads that only share TCP connections.

use super::*;
use crate::comm::Communicator;

const LIMIT: Duration = Duration::from_secs(20);

/// A port nobody listens on now.
fn free_port() -> u16 {
    TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port()
}

fn launch(rank: usize, world: usize, port: u16) -> Launch {
    Launch {
        rank,
        world,
        local_rank: rank,
        master_addr: "127.0.0.1".into(),
        master_port: port,
    }
}

/// Meets on a free port and runs `f` on every rank; results in rank order.
fn on_ranks<T: Send>(world: usize, f: impl Fn(TcpCommunicator) -> T + Sync) -> Vec<T> {
    let port = free_port();
    thread::scope(|scope| {
        let threads: Vec<_> = (0..world)
            .map(|rank| {
                let f = &f;
                scope.spawn(move || {
                    // the last ranks come first, and one comes late
                    thread::sleep(Duration::from_millis(if rank == 1 { 150 } else { 10 * (world - rank) as u64 }));
                    f(rendezvous(&launch(rank, world, port), &Agreement::new(), LIMIT).unwrap())
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

#[test]
fn every_operation_gives_what_threads_get() {
    let results = on_ranks(4, |comm| {
        let rank = comm.rank();
        // rank r sends r bytes 10 r + i to rank i; the large one does not fit socket buffers
        let send = (0..4u8)
            .map(|i| vec![10 * rank as u8 + i; if rank == 3 { 3 << 20 } else { rank }])
            .collect();
        let received = comm.all_to_all(send).unwrap();
        let gathered = comm.all_gather(vec![rank as u8; rank]).unwrap();
        let mut single = [[1e8f32, 1.0, -1e8, 0.25][rank], rank as f32];
        comm.all_reduce_sum(&mut single).unwrap();
        let mut double = [[1e17f64, 1.0, -1e17, 0.25][rank]];
        comm.all_reduce_sum_f64(&mut double).unwrap();
        comm.barrier().unwrap();
        (received, gathered, single, double)
    });
    for (i, (received, gathered, single, double)) in results.into_iter().enumerate() {
        let i = i as u8;
        assert_eq!(received[..3], [vec![], vec![10 + i], vec![20 + i; 2]]);
        assert!(received[3].len() == 3 << 20 && received[3].iter().all(|b| *b == 30 + i));
        assert_eq!(gathered, [vec![], vec![1], vec![2; 2], vec![3; 3]]);
        // in rank order: another order would keep or lose other digits
        assert_eq!(single, [((1e8f32 + 1.0) - 1e8) + 0.25, 6.0]);
        assert_eq!(double, [((1e17f64 + 1.0) - 1e17) + 0.25]);
    }
}

#[test]
fn a_fast_rank_may_run_ahead() {
    let sums = on_ranks(3, |comm| {
        (0..100u32)
            .map(|step| {
                if comm.rank() == 1 && step % 25 == 0 {
                    thread::sleep(Duration::from_millis(5));
                }
                let gathered = comm.all_gather(step.to_le_bytes().to_vec()).unwrap();
                gathered.iter().map(|b| u32::from_le_bytes(b[..].try_into().unwrap())).sum::<u32>()
            })
            .collect::<Vec<_>>()
    });
    let expected: Vec<u32> = (0..100).map(|step| 3 * step).collect();
    assert!(sums.iter().all(|s| *s == expected));
}

#[test]
fn a_rank_that_leaves_or_aborts_is_reported_at_once() {
    let started = Instant::now();
    let left = on_ranks(3, |comm| {
        comm.barrier().unwrap();
        if comm.rank() == 1 {
            String::new()
        } else {
            comm.barrier().unwrap_err().to_string()
        }
    });
    for rank in [0, 2] {
        assert!(
            left[rank].contains("rank 1") && left[rank].contains("left the group"),
            "{}",
            left[rank]
        );
    }
    let aborted = on_ranks(3, |comm| {
        if comm.rank() == 2 {
            comm.abort("loss is not a number");
        }
        let first = comm.barrier().unwrap_err().to_string();
        first + &comm.all_gather(vec![]).unwrap_err().to_string()
    });
    for error in aborted {
        assert_eq!(
            error.matches("rank 2 aborted the group: loss is not a number").count(),
            2,
            "{error}"
        );
    }
    // far below the 10 minutes that a wait may last, far above what a busy machine needs
    assert!(started.elapsed() < Duration::from_secs(90));
}

#[test]
fn different_operations_and_lengths_are_errors_everywhere() {
    let errors = on_ranks(2, |comm| match comm.rank() {
        0 => comm.barrier().unwrap_err().to_string(),
        _ => comm.all_gather(vec![]).unwrap_err().to_string(),
    });
    assert!(
        errors.iter().all(|e| e.contains("barrier") && e.contains("all_gather")),
        "{errors:?}"
    );
    let errors = on_ranks(2, |comm| {
        comm.all_reduce_sum(&mut vec![0.0; 2 + comm.rank()]).unwrap_err().to_string()
    });
    assert!(
        errors.iter().all(|e| e.contains("of 2 values") && e.contains("of 3 values")),
        "{errors:?}"
    );
}

#[test]
fn a_wait_ends_after_its_limit_and_names_who_is_missing() {
    let errors = on_ranks(2, |comm| {
        if comm.rank() == 1 {
            thread::sleep(Duration::from_millis(400));
            return comm.barrier().unwrap_err().to_string();
        }
        let comm = comm.with_timeout(Duration::from_millis(100)).unwrap();
        comm.barrier().unwrap_err().to_string()
    });
    assert!(
        errors[0].contains("waited 100ms for rank 1 (it has not called any operation)"),
        "{}",
        errors[0]
    );
    assert!(errors[1].contains("the group has ended: rank 0"), "{}", errors[1]);
}

fn errors(launches: Vec<(Launch, Agreement)>, limit: Duration) -> Vec<String> {
    thread::scope(|scope| {
        let threads: Vec<_> = launches
            .iter()
            .map(|(launch, agreement)| scope.spawn(move || rendezvous(launch, agreement, limit).unwrap_err().to_string()))
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

#[test]
fn ranks_that_do_not_come_are_named_on_every_rank() {
    let port = free_port();
    let here = [0, 2].map(|rank| (launch(rank, 4, port), Agreement::new())).to_vec();
    for error in errors(here, Duration::from_millis(400)) {
        assert!(error.contains("rendezvous") && error.contains("for ranks [1, 3]"), "{error}");
    }
    let alone = vec![(launch(1, 2, free_port()), Agreement::new())];
    let error = errors(alone, Duration::from_millis(300)).remove(0);
    assert!(error.contains("rank 0 at 127.0.0.1") && error.contains("MASTER_ADDR"), "{error}");
}

#[test]
fn ranks_that_differ_are_told_in_what() {
    let setting = |value: &str| vec![("ep".to_string(), value.to_string())];
    let port = free_port();
    let pair = vec![(launch(0, 2, port), setting("2")), (launch(1, 2, port), setting("4"))];
    for error in errors(pair, LIMIT) {
        assert!(error.contains("ep is 2 on rank 0, ep is 4 on rank 1"), "{error}");
    }
    let port = free_port();
    let pair = vec![(launch(0, 2, port), Agreement::new()), (launch(1, 3, port), Agreement::new())];
    for error in errors(pair, LIMIT) {
        assert!(error.contains("rank 1 counts 3 ranks, rank 0 counts 2"), "{error}");
    }
}

#[test]
fn strangers_do_not_disturb_the_meeting() {
    let port = free_port();
    let sums = thread::scope(|scope| {
        let ranks: Vec<_> = (0..2)
            .map(|rank| {
                scope.spawn(move || {
                    thread::sleep(Duration::from_millis(300 * rank as u64));
                    let comm = rendezvous(&launch(rank, 2, port), &Agreement::new(), LIMIT).unwrap();
                    let mut sum = [1.0];
                    comm.all_reduce_sum(&mut sum).unwrap();
                    sum[0]
                })
            })
            .collect();
        thread::sleep(Duration::from_millis(100));
        for greeting in ["GET / HTTP/1.1\r\n\r\n", "", "\u{2}\0\0\0{}"] {
            let mut stranger = TcpStream::connect(("127.0.0.1", port)).unwrap();
            stranger.write_all(greeting.as_bytes()).unwrap();
        }
        ranks.into_iter().map(|t| t.join().unwrap()).collect::<Vec<f32>>()
    });
    assert_eq!(sums, [2.0, 2.0]);
}

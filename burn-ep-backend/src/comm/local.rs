//! Threads of one process as ranks: the transport of CPU tests and of ep = 1.

use std::time::Duration;

use super::Ranks;
use super::hub::{DEFAULT_TIMEOUT, Hub, Member, communicate_as_member};

/// One rank of an in-process group.
///
/// A wait ends with an error that names the missing ranks when its timeout is over, when a rank calls
/// [`abort`](super::Communicator::abort), when ranks call different operations, and when a rank that is waited for has dropped
/// its communicator (its thread ended). Any such error ends the whole group.
#[derive(Debug)]
pub struct LocalCommunicator {
    member: Member,
}

impl LocalCommunicator {
    /// A group of `world` ranks; give one communicator to each thread.
    pub fn group(world: usize) -> Vec<Self> {
        let hub = Hub::new(world, true);
        let member = |index| Member {
            group: Ranks::all(world),
            index,
            timeout: DEFAULT_TIMEOUT,
            hub: hub.clone(),
            wire: None,
        };
        (0..world).map(|rank| Self { member: member(rank) }).collect()
    }

    /// A group of one.
    pub fn single() -> Self {
        Self::group(1).remove(0)
    }

    /// The same rank with another limit for each wait (10 minutes by default).
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.member.timeout = timeout;
        self
    }
}

impl Drop for LocalCommunicator {
    fn drop(&mut self) {
        self.member.hub.leave(self.member.rank(), "left the group");
    }
}

communicate_as_member!(LocalCommunicator);

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Instant;

    use super::*;
    use crate::comm::Communicator;

    /// Runs `f` on every rank at once and returns the results in rank order.
    fn on_ranks<T: Send>(group: Vec<LocalCommunicator>, f: impl Fn(LocalCommunicator) -> T + Sync) -> Vec<T> {
        thread::scope(|scope| {
            let threads: Vec<_> = group.into_iter().map(|comm| scope.spawn(|| f(comm))).collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        })
    }

    #[test]
    fn all_to_all_delivers_in_rank_order_also_without_payload() {
        let received = on_ranks(LocalCommunicator::group(3), |comm| {
            // Rank r sends r copies of 10 r + i to rank i: rank 0 sends nothing.
            let send = (0..3u8).map(|i| vec![10 * comm.rank() as u8 + i; comm.rank()]).collect();
            comm.all_to_all(send).unwrap()
        });
        for (i, from) in received.iter().enumerate() {
            let i = i as u8;
            assert_eq!(*from, [vec![], vec![10 + i], vec![20 + i; 2]]);
        }
    }

    #[test]
    fn sums_have_the_same_bits_on_every_rank() {
        // 1e8 + 1 - 1e8 depends on the order in fp32.
        let parts = [1e8f32, 1.0, -1e8, 0.25];
        let expected = ((parts[0] + parts[1]) + parts[2]) + parts[3];
        let sums = on_ranks(LocalCommunicator::group(4), |comm| {
            let mut single = [parts[comm.rank()]];
            let mut double = [f64::from(parts[comm.rank()])];
            comm.all_reduce_sum(&mut single).unwrap();
            comm.all_reduce_sum_f64(&mut double).unwrap();
            (single[0].to_bits(), double[0])
        });
        assert!(sums.iter().all(|s| *s == (expected.to_bits(), 1.25)), "{sums:?}");
    }

    #[test]
    fn a_fast_rank_may_run_ahead_without_mixing_rounds() {
        let sums = on_ranks(LocalCommunicator::group(2), |comm| {
            (0..200u32)
                .map(|step| {
                    if comm.rank() == 1 && step % 50 == 0 {
                        thread::sleep(Duration::from_millis(2));
                    }
                    let gathered = comm.all_gather(step.to_le_bytes().to_vec()).unwrap();
                    comm.barrier().unwrap();
                    gathered.iter().map(|b| u32::from_le_bytes(b[..].try_into().unwrap())).sum::<u32>()
                })
                .collect::<Vec<_>>()
        });
        let expected: Vec<u32> = (0..200).map(|step| 2 * step).collect();
        assert_eq!(sums, [expected.clone(), expected]);
    }

    #[test]
    fn a_timeout_names_rank_operation_and_who_is_missing() {
        let mut group = LocalCommunicator::group(3);
        let _late = group.remove(2);
        let errors = on_ranks(group, |comm| {
            let limit = Duration::from_millis(50 + 2000 * comm.rank() as u64);
            let comm = comm.with_timeout(limit);
            comm.barrier().unwrap_err().to_string()
        });
        assert!(
            errors[0].starts_with("rank 0 of 3: barrier: operation 0: waited 50ms for rank 2"),
            "{}",
            errors[0]
        );
        assert!(
            errors[1].contains("the group has ended: rank 0"),
            "rank 1 must not wait out its own limit: {}",
            errors[1]
        );
    }

    #[test]
    fn different_operations_are_an_error_on_both_ranks() {
        let errors = on_ranks(LocalCommunicator::group(2), |comm| match comm.rank() {
            0 => comm.all_to_all(vec![vec![], vec![]]).unwrap_err().to_string(),
            _ => {
                thread::sleep(Duration::from_millis(20));
                comm.all_reduce_sum(&mut [0.0; 3]).unwrap_err().to_string()
            }
        });
        for error in errors {
            assert!(
                error.contains("rank 1 called all_reduce_sum of 3 values while rank 0 called all_to_all"),
                "{error}"
            );
        }
    }

    #[test]
    fn reductions_of_different_length_are_an_error() {
        let errors = on_ranks(LocalCommunicator::group(2), |comm| {
            comm.all_reduce_sum(&mut vec![1.0; 2 + comm.rank()]).unwrap_err().to_string()
        });
        assert!(
            errors.iter().all(|e| e.contains("of 2 values") && e.contains("of 3 values")),
            "{errors:?}"
        );
    }

    #[test]
    fn an_abort_wakes_waiting_ranks_and_lasts() {
        let started = Instant::now();
        let errors = on_ranks(LocalCommunicator::group(2), |comm| {
            if comm.rank() == 1 {
                thread::sleep(Duration::from_millis(20));
                comm.abort("loss is not a number");
            }
            let first = comm.barrier().unwrap_err().to_string();
            let later = comm.all_gather(vec![]).unwrap_err().to_string();
            [first, later]
        });
        for error in errors.iter().flatten() {
            assert!(error.contains("rank 1 aborted the group: loss is not a number"), "{error}");
        }
        assert!(started.elapsed() < Duration::from_secs(5));
    }

    #[test]
    fn a_rank_that_ends_early_is_reported_at_once() {
        let started = Instant::now();
        let results = on_ranks(LocalCommunicator::group(2), |comm| {
            comm.barrier().unwrap();
            if comm.rank() == 0 { Ok(()) } else { comm.barrier() }
        });
        let error = results[1].as_ref().unwrap_err().to_string();
        assert!(error.contains("rank 0 (its last operation: 0, barrier) left the group"), "{error}");
        assert!(started.elapsed() < Duration::from_secs(5));
    }

    #[test]
    fn a_wrong_number_of_payloads_ends_the_group() {
        let errors = on_ranks(LocalCommunicator::group(2), |comm| {
            comm.all_to_all(vec![vec![]; 1 + comm.rank()]).unwrap_err().to_string()
        });
        assert!(errors.iter().all(|e| e.contains("rank 0 has 1 payloads for 2 ranks")), "{errors:?}");
    }

    /// Rows and columns of a mesh of 2 x 3 work at the same time, and a failure in one ends all.
    #[test]
    fn groups_of_a_mesh_do_not_mix() {
        let results = on_ranks(LocalCommunicator::group(6), |comm| {
            let (row, column) = (comm.rank() / 3, comm.rank() % 3);
            let rows = comm
                .subgroup(Ranks {
                    first: 3 * row,
                    step: 1,
                    len: 3,
                })
                .unwrap();
            let columns = comm
                .subgroup(Ranks {
                    first: column,
                    step: 3,
                    len: 2,
                })
                .unwrap();
            assert_eq!((rows.rank(), rows.world(), columns.rank(), columns.world()), (column, 3, row, 2));
            let mut sums = Vec::new();
            for round in 0..50 {
                let mut along = [(comm.rank() * round) as f64];
                // Unequal numbers of operations in the two groups.
                rows.all_reduce_sum_f64(&mut along).unwrap();
                let mut across = [10f64.powi(comm.rank() as i32)];
                columns.all_reduce_sum_f64(&mut across).unwrap();
                rows.barrier().unwrap();
                sums.push((along[0], across[0]));
            }
            for (round, (along, across)) in sums.into_iter().enumerate() {
                assert_eq!(along, (round * (9 * row + 3)) as f64);
                assert_eq!(across, 10f64.powi(column as i32) + 10f64.powi(column as i32 + 3));
            }
            // May fail already: rank 4 does not wait for the others to leave.
            let _ = comm.barrier();
            if comm.rank() == 4 {
                columns.abort("out of memory");
            }
            rows.all_gather(vec![]).and_then(|_| comm.barrier()).unwrap_err().to_string()
        });
        assert!(
            results.iter().all(|e| e.contains("rank 4 aborted the group: out of memory")),
            "{results:?}"
        );
    }

    #[test]
    fn a_group_without_this_rank_is_refused() {
        let comm = LocalCommunicator::group(4).remove(1);
        let error = comm.subgroup(Ranks { first: 0, step: 2, len: 2 }).unwrap_err().to_string();
        assert!(
            error.contains("ranks 0 to 2 in steps of 2") && error.contains("this one (1)"),
            "{error}"
        );
    }

    #[test]
    fn a_group_of_one_needs_no_other() {
        let comm = LocalCommunicator::single();
        assert_eq!((comm.rank(), comm.world()), (0, 1));
        assert_eq!(comm.all_to_all(vec![vec![7]]).unwrap(), [[7]]);
        let mut values = [2.5];
        comm.all_reduce_sum(&mut values).unwrap();
        assert_eq!(values, [2.5]);
        comm.barrier().unwrap();
    }
}

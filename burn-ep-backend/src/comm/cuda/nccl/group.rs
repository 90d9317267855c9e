//! The library's communicator of one group of ranks: made at the first operation, ended with the last handle.

use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use cubecl::cuda::CudaDevice;

use super::api::{Api, Comm, IN_PROGRESS, Queue, SUCCESS, UniqueId, api};
use crate::comm::Communicator;
use crate::comm::cuda::runner;
use crate::comm::cuda::watch::{GRACE, Watch, place};
use crate::error::{OpError, Result};
use crate::kernels::raw::CudaTensor;
use crate::kernels::vendor::side_stream::{SideStream, driver_refuses};

/// Time between two questions for the outcome of a call.
const POLL: Duration = Duration::from_micros(50);
/// How long the farewell to the other ranks may take before it is left out.
const FAREWELL: Duration = Duration::from_secs(10);

pub(super) struct Group {
    api: &'static Api,
    host: Arc<dyn Communicator>,
    device: CudaDevice,
    job_rank: usize,
    timeout: Duration,
    id: Mutex<Option<UniqueId>>,
    state: Arc<Mutex<State>>,
    watch: Arc<Watch>,
}

#[derive(Default)]
struct State {
    ready: Option<Ready>,
    /// Nothing is called any more.
    ended: bool,
}

struct Ready {
    comm: Comm,
    side: SideStream,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl Group {
    pub(super) fn new(host: Arc<dyn Communicator>, device: CudaDevice, job_rank: usize, timeout: Duration) -> Result<Self, String> {
        let api = api()?;
        if let Some(reason) = driver_refuses() {
            return Err(reason);
        }
        let state = Arc::new(Mutex::new(State::default()));
        let (ended, asked) = (state.clone(), state.clone());
        let give_up = move || {
            let mut state = lock(&ended);
            state.ended = true;
            if let Some(ready) = state.ready.take() {
                api.abort(ready.comm);
            }
        };
        // A call under way holds the lock and asks for itself.
        let trouble = move || {
            let state = asked.try_lock().ok()?;
            let comm = state.ready.as_ref()?.comm;
            match api.state(comm) {
                SUCCESS | IN_PROGRESS => None,
                code => Some(api.describe(code, Some(comm))),
            }
        };
        let watch = Watch::new(
            host.clone(),
            place(job_rank, device.index),
            timeout,
            Box::new(give_up),
            Box::new(trouble),
        );
        Ok(Self {
            api,
            host,
            device,
            job_rank,
            timeout,
            id: Mutex::new(None),
            state,
            watch: Arc::new(watch.map_err(|e| format!("starting a thread: {e}"))?),
        })
    }

    fn error(&self, why: String) -> OpError {
        OpError::Comm {
            rank: self.job_rank,
            world: self.host.world(),
            op: "nccl",
            why,
        }
    }

    /// The id that the first rank of the group has drawn; all ranks come here at their first operation.
    fn id(&self) -> Result<UniqueId> {
        let mut known = lock(&self.id);
        if let Some(id) = *known {
            return Ok(id);
        }
        let own = match self.host.rank() {
            0 => self.api.unique_id().map_err(|why| self.error(why))?.0.to_vec(),
            _ => Vec::new(),
        };
        let all = self.host.all_gather(own)?;
        let id = all[0].as_slice().try_into().map(UniqueId);
        let id = id.map_err(|_| self.error(format!("rank 0 of the group sent an id of {} bytes, expected 128", all[0].len())))?;
        *known = Some(id);
        Ok(id)
    }

    /// Queues an operation behind all earlier work of the device and before all later work. `call` gets the addresses of
    /// `tensors` and returns the library's answer. What goes wrong later ends the job.
    pub(super) fn enqueue(
        &self,
        what: String,
        tensors: Vec<CudaTensor>,
        call: impl FnOnce(&Queue<'_>, &[u64]) -> i32 + Send + 'static,
    ) -> Result<()> {
        let id = self.id()?;
        let (api, host, state, watch) = (self.api, self.host.clone(), self.state.clone(), self.watch.clone());
        let timeout = self.timeout;
        runner::submit(&self.device, tensors, move |addresses| {
            let run = || -> Result<(), String> {
                let addresses = addresses?;
                let mut state = lock(&state);
                if state.ended {
                    return Ok(());
                }
                if state.ready.is_none() {
                    state.ready = Some(meet(api, &*host, id, timeout)?);
                }
                let Some(Ready { comm, side }) = &state.ready else {
                    return Ok(());
                };
                let done = side.ordered(|stream| {
                    let queue = Queue {
                        api,
                        comm: *comm,
                        stream: stream.cast(),
                    };
                    settle(api, *comm, call(&queue, &addresses), &*host, timeout)?;
                    watch.add(stream, what.clone())
                });
                done.map_err(|error| format!("ordering with CubeCL's streams: {error:?}"))?
            };
            if let Err(why) = run() {
                watch.fail(&format!("{what}: {why}"));
            }
        });
        Ok(())
    }
}

/// All ranks of the group make the communicator. On the runner thread.
fn meet(api: &'static Api, host: &dyn Communicator, id: UniqueId, timeout: Duration) -> Result<Ready, String> {
    let side = SideStream::new().map_err(|error| format!("stream: {error:?}"))?;
    let comm = api.start(host.world(), id, host.rank())?;
    if let Err(why) = settle(api, comm, IN_PROGRESS, host, timeout) {
        api.abort(comm);
        return Err(format!("making the communicator of {} ranks: {why}", host.world()));
    }
    Ok(Ready { comm, side })
}

/// Asks for the outcome of a call until there is one, a rank is lost, or the time is over.
fn settle(api: &Api, comm: Comm, first: i32, host: &dyn Communicator, timeout: Duration) -> Result<(), String> {
    let start = Instant::now();
    let mut lost_since = None;
    let mut code = first;
    loop {
        match code {
            SUCCESS => return Ok(()),
            IN_PROGRESS => {}
            code => return Err(api.describe(code, Some(comm))),
        }
        if let Some(lost) = host.lost()
            && lost_since.get_or_insert_with(Instant::now).elapsed() >= GRACE
        {
            return Err(lost);
        }
        if start.elapsed() >= timeout {
            return Err(format!("waited {timeout:?} for the other ranks"));
        }
        thread::sleep(POLL);
        code = api.state(comm);
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // What was queued must be enqueued before the look-out can tell when it has ended.
        let _ = runner::call(&self.device, || Ok(()));
        self.watch.drain();
        let (api, host, state) = (self.api, self.host.clone(), self.state.clone());
        let ended = runner::call(&self.device, move || {
            let mut state = lock(&state);
            state.ended = true;
            let Some(Ready { comm, .. }) = state.ready.take() else {
                return Ok(());
            };
            if let Err(why) = settle(api, comm, api.finalize(comm), &*host, FAREWELL) {
                api.abort(comm);
                return Err(why);
            }
            api.destroy(comm);
            Ok(())
        });
        if let Err(why) = ended {
            tracing::debug!(why, "NCCL's communicator was left without a farewell");
        }
    }
}

//! A look-out for device operations that other ranks have to take part in.
//!
//! A kernel that waits for a rank that is gone never ends, and everything queued behind it waits as well. A thread looks at the
//! events of the operations under way; when one is overdue, or a rank is lost while one waits, the transport is told to give up
//! (which frees the device) and the job ends with an error on every rank.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::thread;
use std::time::{Duration, Instant};

use cubecl::cuda::CudaDevice;
use cudarc::driver::sys as cu;

use super::runner;
use crate::comm::Communicator;

/// Time between two looks.
const PERIOD: Duration = Duration::from_millis(20);
/// How long an operation may go on after a rank has left: what it sent before may still be under way.
pub(super) const GRACE: Duration = Duration::from_secs(3);

/// Gives up: ends the operations under way, whatever they wait for.
pub(super) type GiveUp = dyn Fn() + Send + Sync;

/// Operations of one communicator that are under way.
pub(super) struct Watch {
    inner: Arc<Inner>,
}

struct Inner {
    host: Arc<dyn Communicator>,
    /// This rank in words.
    place: String,
    timeout: Duration,
    give_up: Box<GiveUp>,
    /// What the transport itself reports, if anything is wrong.
    trouble: Box<dyn Fn() -> Option<String> + Send + Sync>,
    pending: Mutex<Under>,
    count: AtomicU64,
}

/// What is under watch.
#[derive(Default)]
struct Under {
    operations: VecDeque<Pending>,
    /// The transport has given up: nobody looks any more.
    ended: bool,
}

struct Pending {
    event: cu::CUevent,
    context: cu::CUcontext,
    what: String,
    since: Instant,
}

// SAFETY: driver handles may be used from any thread.
unsafe impl Send for Pending {}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl Watch {
    /// Watches until it is dropped. `trouble` is asked while something is under way.
    pub(super) fn new(
        host: Arc<dyn Communicator>,
        place: String,
        timeout: Duration,
        give_up: Box<GiveUp>,
        trouble: Box<dyn Fn() -> Option<String> + Send + Sync>,
    ) -> std::io::Result<Self> {
        let inner = Arc::new(Inner {
            host,
            place,
            timeout,
            give_up,
            trouble,
            pending: Mutex::default(),
            count: AtomicU64::new(0),
        });
        let watched = Arc::downgrade(&inner);
        thread::Builder::new()
            .name("device exchange".into())
            .spawn(move || look(&watched))?;
        Ok(Self { inner })
    }

    /// Puts what was enqueued on `stream` under watch. On a thread whose context is that of the stream.
    #[cfg(feature = "nccl")]
    pub(super) fn add(&self, stream: cu::CUstream, what: String) -> Result<(), String> {
        // SAFETY: an event that was just made, and a live stream.
        self.inner.add(|event, _| unsafe { cu::cuEventRecord(event, stream) }, what)
    }

    /// Puts everything that this thread has queued on CubeCL's stream under watch.
    pub(super) fn add_queued(&self, device: &CudaDevice, what: String) {
        let inner = self.inner.clone();
        runner::submit(device, Vec::new(), move |_| {
            let record = |event, context| {
                // SAFETY: an event that was just made, and the current context.
                unsafe { cu::cuCtxRecordEvent(context, event) }
            };
            if let Err(why) = inner.add(record, what) {
                inner.fail(&why);
            }
        });
    }

    /// Ends the job because of something that went wrong here.
    #[cfg(feature = "nccl")]
    pub(super) fn fail(&self, why: &str) {
        self.inner.fail(why);
    }

    /// Waits until nothing is under way; the look-out sees to it that this ends.
    pub(super) fn drain(&self) {
        while !lock(&self.inner.pending).operations.is_empty() {
            thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Inner {
    /// `record` records an event of the current context.
    fn add(&self, record: impl FnOnce(cu::CUevent, cu::CUcontext) -> cu::CUresult, what: String) -> Result<(), String> {
        const NO_TIMING: u32 = 2;
        let mut pending = Pending {
            event: std::ptr::null_mut(),
            context: std::ptr::null_mut(),
            what: format!("{what} (operation {})", self.count.fetch_add(1, Ordering::Relaxed)),
            since: Instant::now(),
        };
        // SAFETY: every call writes a handle of its type.
        let made = unsafe {
            let context = cu::cuCtxGetCurrent(&mut pending.context).result();
            context.and_then(|()| cu::cuEventCreate(&mut pending.event, NO_TIMING).result())
        };
        made.and_then(|()| record(pending.event, pending.context).result())
            .map_err(|error| format!("event: {error:?}"))?;
        let mut under = lock(&self.pending);
        match under.ended {
            true => pending.destroy(),
            false => under.operations.push_back(pending),
        }
        Ok(())
    }

    fn fail(&self, why: &str) {
        tracing::error!(place = self.place, why, "exchange between devices failed");
        (self.give_up)();
        self.host.abort(&format!("{}: {why}", self.place));
        let mut under = lock(&self.pending);
        under.ended = true;
        under.operations.drain(..).for_each(Pending::destroy);
    }
}

impl Pending {
    /// Whether it has ended; an event that cannot be asked counts as an error.
    fn done(&self) -> Result<bool, String> {
        // SAFETY: the event was made in this context and is destroyed only after it was taken out of the queue.
        let state = unsafe {
            cu::cuCtxSetCurrent(self.context)
                .result()
                .map_err(|error| format!("context: {error:?}"))?;
            cu::cuEventQuery(self.event)
        };
        match state {
            cu::CUresult::CUDA_SUCCESS => Ok(true),
            cu::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            error => Err(format!("the device reports {error:?}")),
        }
    }

    fn destroy(self) {
        // SAFETY: the event is not used again.
        let _ = unsafe { cu::cuEventDestroy_v2(self.event) };
    }
}

fn look(watched: &Weak<Inner>) {
    let mut lost_since: Option<Instant> = None;
    loop {
        thread::sleep(PERIOD);
        let Some(inner) = watched.upgrade() else { return };
        let why = {
            let mut under = lock(&inner.pending);
            if under.ended {
                return;
            }
            let pending = &mut under.operations;
            let mut failed = None;
            while let Some(front) = pending.front() {
                match front.done() {
                    Ok(false) => break,
                    Ok(true) => pending.pop_front().into_iter().for_each(Pending::destroy),
                    Err(why) => {
                        failed = Some(format!("{}: {why}", front.what));
                        break;
                    }
                }
            }
            match (failed, pending.front()) {
                (Some(why), _) => Some(why),
                (None, None) => {
                    lost_since = None;
                    None
                }
                (None, Some(front)) => {
                    let lost = inner.host.lost();
                    let since = match lost {
                        Some(_) => *lost_since.get_or_insert_with(Instant::now),
                        None => Instant::now(),
                    };
                    let waited = front.since.elapsed();
                    if let Some(trouble) = (inner.trouble)() {
                        Some(format!("{}: {trouble}", front.what))
                    } else if let Some(lost) = lost.filter(|_| since.elapsed() >= GRACE) {
                        Some(format!("{} cannot end: {lost}", front.what))
                    } else if waited >= inner.timeout {
                        Some(format!(
                            "{} has not ended after {waited:.0?}; all ranks must call the same operations",
                            front.what
                        ))
                    } else {
                        None
                    }
                }
            }
        };
        if let Some(why) = why {
            inner.fail(&why);
            return;
        }
    }
}

/// This rank for error messages.
pub(super) fn place(rank: usize, device: usize) -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host = host.trim();
    let host = if host.is_empty() { "an unknown host" } else { host };
    format!("rank {rank} (GPU {device} of {host})")
}

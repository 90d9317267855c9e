//! The functions of libnccl that are used here, found at run time.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

use libloading::Library;

/// Names under which the library is looked for on the library path.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];
/// Variable that names the file instead.
const PATH: &str = "BURN_MOE_NCCL";
/// First version with everything used here (grouped send and receive, communicators that do not block).
const MIN_VERSION: i32 = 21_400;

pub(super) const SUCCESS: i32 = 0;
pub(super) const IN_PROGRESS: i32 = 7;

/// `ncclComm_t`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Comm(pub *mut c_void);

// SAFETY: a handle; the library's functions are called under the lock of the group that owns it.
unsafe impl Send for Comm {}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct UniqueId(pub [u8; 128]);

/// `ncclConfig_t` of version 2.17; later ones read as many bytes as `size` says and fill in the rest.
#[repr(C)]
pub(super) struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

impl Config {
    /// Calls return at once and are asked for their outcome, so that a missing rank cannot hold them for ever.
    pub fn non_blocking() -> Self {
        const UNDEFINED: c_int = c_int::MIN;
        Self {
            size: size_of::<Self>(),
            magic: 0xcafe_beef,
            version: 21_700,
            blocking: 0,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: std::ptr::null(),
            split_share: UNDEFINED,
        }
    }
}

/// Element types by the library's numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub(super) enum Elem {
    U8 = 1,
    F32 = 7,
    F64 = 8,
}

const SUM: c_int = 0;

type Stream = *mut c_void;

/// The loaded library.
pub(super) struct Api {
    get_unique_id: unsafe extern "C" fn(*mut UniqueId) -> c_int,
    init_rank_config: unsafe extern "C" fn(*mut *mut c_void, c_int, UniqueId, c_int, *mut Config) -> c_int,
    finalize: unsafe extern "C" fn(*mut c_void) -> c_int,
    destroy: unsafe extern "C" fn(*mut c_void) -> c_int,
    abort: unsafe extern "C" fn(*mut c_void) -> c_int,
    async_error: unsafe extern "C" fn(*mut c_void, *mut c_int) -> c_int,
    error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    last_error: unsafe extern "C" fn(*mut c_void) -> *const c_char,
    all_reduce: unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, *mut c_void, Stream) -> c_int,
    reduce_scatter: unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, *mut c_void, Stream) -> c_int,
    all_gather: unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, *mut c_void, Stream) -> c_int,
    broadcast: unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, *mut c_void, Stream) -> c_int,
    send: unsafe extern "C" fn(*const c_void, usize, c_int, c_int, *mut c_void, Stream) -> c_int,
    recv: unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, *mut c_void, Stream) -> c_int,
    group_start: unsafe extern "C" fn() -> c_int,
    group_end: unsafe extern "C" fn() -> c_int,
    /// Keeps the functions where they are.
    _library: Library,
}

/// The library, or why it cannot be used, with where it was looked for.
pub(super) fn api() -> Result<&'static Api, &'static str> {
    static API: OnceLock<Result<Api, String>> = OnceLock::new();
    API.get_or_init(load).as_ref().map_err(String::as_str)
}

fn load() -> Result<Api, String> {
    let named = std::env::var(PATH).ok().filter(|path| !path.is_empty());
    let names: Vec<&str> = named.as_deref().map_or_else(|| NAMES.to_vec(), |path| vec![path]);
    let mut failures = Vec::new();
    for name in &names {
        // SAFETY: libnccl's initialisers touch nothing of ours.
        match unsafe { Library::new(*name) } {
            Ok(library) => return resolve(library, name),
            Err(error) => failures.push(format!("{name}: {error}")),
        }
    }
    Err(format!(
        "libnccl cannot be loaded ({}); put the folder of libnccl.so.2 (package libnccl2, or nvidia-nccl-cu13 of pip) on LD_LIBRARY_PATH, or name the file in {PATH}",
        failures.join("; ")
    ))
}

fn resolve(library: Library, name: &str) -> Result<Api, String> {
    macro_rules! symbol {
        ($symbol:literal) => {
            // SAFETY: the type is that of the function in nccl.h.
            *unsafe { library.get(concat!($symbol, "\0").as_bytes()) }.map_err(|e| format!("{name} has no {}: {e}", $symbol))?
        };
    }
    let get_version: unsafe extern "C" fn(*mut c_int) -> c_int = symbol!("ncclGetVersion");
    let mut version = 0;
    // SAFETY: writes one integer.
    let code = unsafe { get_version(&mut version) };
    if code != SUCCESS || version < MIN_VERSION {
        return Err(format!("{name} is version {version}, expected {MIN_VERSION} (2.14) or newer"));
    }
    tracing::info!(version, name, "NCCL");
    Ok(Api {
        get_unique_id: symbol!("ncclGetUniqueId"),
        init_rank_config: symbol!("ncclCommInitRankConfig"),
        finalize: symbol!("ncclCommFinalize"),
        destroy: symbol!("ncclCommDestroy"),
        abort: symbol!("ncclCommAbort"),
        async_error: symbol!("ncclCommGetAsyncError"),
        error_string: symbol!("ncclGetErrorString"),
        last_error: symbol!("ncclGetLastError"),
        all_reduce: symbol!("ncclAllReduce"),
        reduce_scatter: symbol!("ncclReduceScatter"),
        all_gather: symbol!("ncclAllGather"),
        broadcast: symbol!("ncclBroadcast"),
        send: symbol!("ncclSend"),
        recv: symbol!("ncclRecv"),
        group_start: symbol!("ncclGroupStart"),
        group_end: symbol!("ncclGroupEnd"),
        _library: library,
    })
}

impl Api {
    pub fn unique_id(&self) -> Result<UniqueId, String> {
        let mut id = UniqueId([0; 128]);
        // SAFETY: writes the 128 bytes of an id.
        let code = unsafe { (self.get_unique_id)(&mut id) };
        if code == SUCCESS {
            Ok(id)
        } else {
            Err(format!("ncclGetUniqueId: {}", self.describe(code, None)))
        }
    }

    /// Starts the meeting of all ranks; ask [`Api::state`] until it is over.
    pub fn start(&self, ranks: usize, id: UniqueId, rank: usize) -> Result<Comm, String> {
        let mut comm = std::ptr::null_mut();
        let mut config = Config::non_blocking();
        // SAFETY: the arguments are of the types of nccl.h; the config is read during the call.
        let code = unsafe { (self.init_rank_config)(&mut comm, ranks as c_int, id, rank as c_int, &mut config) };
        match code {
            SUCCESS | IN_PROGRESS if !comm.is_null() => Ok(Comm(comm)),
            code => Err(format!("ncclCommInitRankConfig: {}", self.describe(code, None))),
        }
    }

    /// Outcome of what was last called: [`SUCCESS`], [`IN_PROGRESS`] or an error.
    pub fn state(&self, comm: Comm) -> i32 {
        let mut state = SUCCESS;
        // SAFETY: `comm` is live; writes one integer.
        let code = unsafe { (self.async_error)(comm.0, &mut state) };
        if code == SUCCESS { state } else { code }
    }

    pub fn describe(&self, code: i32, comm: Option<Comm>) -> String {
        // SAFETY: the library returns static strings, or null.
        let text = |pointer: *const c_char| (!pointer.is_null()).then(|| unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned());
        // SAFETY: takes an integer, and a live communicator or null.
        let (what, last) = unsafe {
            let last = (self.last_error)(comm.map_or(std::ptr::null_mut(), |comm| comm.0));
            (text((self.error_string)(code)), text(last))
        };
        let what = what.unwrap_or_else(|| format!("error {code}"));
        match last.filter(|last| !last.is_empty()) {
            Some(last) => format!("{what}: {last}"),
            None => what,
        }
    }

    pub fn finalize(&self, comm: Comm) -> i32 {
        // SAFETY: `comm` is live.
        unsafe { (self.finalize)(comm.0) }
    }

    pub fn destroy(&self, comm: Comm) -> i32 {
        // SAFETY: `comm` is live and not used again.
        unsafe { (self.destroy)(comm.0) }
    }

    /// Ends every operation of the communicator, also those on the device, and frees it.
    pub fn abort(&self, comm: Comm) -> i32 {
        // SAFETY: `comm` is live and not used again.
        unsafe { (self.abort)(comm.0) }
    }
}

/// A communicator and the stream that its operations are enqueued on.
pub(super) struct Queue<'a> {
    pub api: &'a Api,
    pub comm: Comm,
    pub stream: Stream,
}

/// Counts are in elements; every address is on the communicator's device and has that many.
impl Queue<'_> {
    pub fn all_reduce(&self, from: u64, to: u64, count: usize, elem: Elem) -> i32 {
        let (from, to) = (from as *const c_void, to as *mut c_void);
        // SAFETY: the contract of this block.
        unsafe { (self.api.all_reduce)(from, to, count, elem as c_int, SUM, self.comm.0, self.stream) }
    }

    /// `count` elements of the result on each rank.
    pub fn reduce_scatter(&self, from: u64, to: u64, count: usize, elem: Elem) -> i32 {
        let (from, to) = (from as *const c_void, to as *mut c_void);
        // SAFETY: the contract of this block.
        unsafe { (self.api.reduce_scatter)(from, to, count, elem as c_int, SUM, self.comm.0, self.stream) }
    }

    /// `count` elements from each rank.
    pub fn all_gather(&self, from: u64, to: u64, count: usize, elem: Elem) -> i32 {
        let (from, to) = (from as *const c_void, to as *mut c_void);
        // SAFETY: the contract of this block.
        unsafe { (self.api.all_gather)(from, to, count, elem as c_int, self.comm.0, self.stream) }
    }

    pub fn broadcast(&self, from: u64, to: u64, count: usize, elem: Elem, root: usize) -> i32 {
        let (from, to) = (from as *const c_void, to as *mut c_void);
        // SAFETY: the contract of this block.
        unsafe { (self.api.broadcast)(from, to, count, elem as c_int, root as c_int, self.comm.0, self.stream) }
    }

    /// Blocks of bytes, `(address, bytes)` for each rank; all at once.
    pub fn all_to_all(&self, send: &[(u64, usize)], recv: &[(u64, usize)]) -> i32 {
        let elem = Elem::U8 as c_int;
        // SAFETY: the contract of this block; start and end of the group are paired.
        unsafe {
            let mut worst = (self.api.group_start)();
            for (peer, (&(from, sent), &(to, received))) in send.iter().zip(recv).enumerate() {
                let peer = peer as c_int;
                if sent > 0 {
                    worst = first_error(
                        worst,
                        (self.api.send)(from as *const c_void, sent, elem, peer, self.comm.0, self.stream),
                    );
                }
                if received > 0 {
                    worst = first_error(
                        worst,
                        (self.api.recv)(to as *mut c_void, received, elem, peer, self.comm.0, self.stream),
                    );
                }
            }
            first_error(worst, (self.api.group_end)())
        }
    }
}

/// An error stays; [`IN_PROGRESS`] outlives success.
fn first_error(before: i32, now: i32) -> i32 {
    match before {
        SUCCESS | IN_PROGRESS if now != SUCCESS => now,
        before => before,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_named_with_where_it_was_looked_for() {
        // Whether it is installed or not, the answer must be of use.
        match api() {
            Ok(api) => assert!(api.unique_id().is_ok() || !api.describe(1, None).is_empty()),
            Err(why) => assert!(
                why.contains("libnccl.so.2") && why.contains("LD_LIBRARY_PATH") && why.contains(PATH),
                "{why}"
            ),
        }
    }

    #[test]
    fn errors_outlive_what_comes_after() {
        assert_eq!(
            [(0, 0), (0, 7), (7, 0), (7, 2), (3, 0), (3, 7)].map(|(a, b)| first_error(a, b)),
            [0, 7, 7, 2, 3, 3]
        );
        assert_eq!(size_of::<Config>(), 48);
    }
}

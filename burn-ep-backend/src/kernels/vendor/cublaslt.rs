//! Dense products by cuBLASLt: every layout without copies, one algorithm per problem chosen by the library's heuristic and
//! kept, one workspace for each device.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::c_void;
use std::sync::{Mutex, MutexGuard, OnceLock};

use burn_backend::DType;
use cubecl::Runtime;
use cubecl::cuda::{CudaDevice, CudaRuntime};
use cubecl::server::{Binding, ComputeServer};
use cubecl_common::device::Device;
use cubecl_common::device_handle::DeviceHandle;
use cubecl_common::stream_id::StreamId;
use cudarc::cublaslt::{result as lt, sys};
use cudarc::driver::sys as cu;

use super::super::profile;
use super::side_stream::{SideStream, driver_refuses};
use super::{Call, MatrixLayout, Place, Product};

type Server = <CudaRuntime as Runtime>::Server;

/// What NVIDIA recommends for Hopper; split-K keeps partial sums here.
const WORKSPACE: usize = 32 << 20;
/// Proposals asked of the heuristic; the first one that runs is taken.
const PROPOSALS: usize = 8;
/// Partial sums of a split K are added in fp32, never in the output's dtype (the library's `COMPUTE_TYPE` scheme).
const REDUCTION_IN_FP32: u32 = 2;

/// Whether the library can be used at all; the reason if not, also logged once.
pub fn available() -> Result<(), &'static str> {
    static AVAILABLE: OnceLock<Result<(), String>> = OnceLock::new();
    let found = AVAILABLE.get_or_init(|| {
        // SAFETY: opens and closes the library; its initialisers touch nothing of ours.
        let present = unsafe { sys::is_culib_present() };
        let found = match driver_refuses() {
            _ if !present => Err("libcublasLt is not on the library path".to_string()),
            Some(reason) => Err(reason),
            None => Ok(()),
        };
        if let Err(reason) = &found {
            tracing::warn!(reason, "cuBLASLt cannot be used, dense products run on Burn's own kernels");
        }
        found
    });
    found.as_ref().map(|_| ()).map_err(String::as_str)
}

/// Whether the library has an algorithm for the product. The first call for a product asks the library on CubeCL's runner
/// thread, later ones read a table.
pub fn supports(device: &CudaDevice, product: &Product) -> bool {
    type Known = Mutex<HashMap<(usize, Product), bool>>;
    static KNOWN: OnceLock<Known> = OnceLock::new();
    if available().is_err() {
        return false;
    }
    let known = KNOWN.get_or_init(Default::default);
    let key = (device.index, product.clone());
    if let Some(found) = lock(known).get(&key) {
        return *found;
    }
    let index = device.index;
    let asked = product.clone();
    let answer =
        DeviceHandle::<Server>::new(device.to_id()).submit_blocking(move |_| on_library(index, |library| library.plan(&asked).map(|_| ())));
    let found = match answer {
        Ok(Ok(())) => true,
        Ok(Err(reason)) => {
            tracing::warn!(?product, reason, "no cuBLASLt algorithm, the product runs on Burn's own kernel");
            false
        }
        Err(error) => {
            tracing::warn!(
                ?product,
                ?error,
                "CubeCL's runner thread did not answer, the product runs on Burn's own kernel"
            );
            false
        }
    };
    lock(known).insert(key, found);
    found
}

/// Enqueues the calls one after another, behind all earlier work of the device and before all later work. Every product must
/// be one that [`supports`] accepted. A product that fails all the same is logged and leaves NaN.
pub fn launch(device: &CudaDevice, buffers: Vec<Binding>, calls: Vec<Call>) {
    let index = device.index;
    let stream_id = StreamId::current();
    let name = profile::file().map(|_| calls.iter().map(|call| call.product.to_string()).collect::<Vec<_>>().join(", "));
    let run = move |server: &mut Server| {
        // Holding the resources keeps the memory until the work is enqueued.
        let resources = buffers.into_iter().map(|buffer| server.get_resource(buffer, stream_id));
        let resources = match resources.collect::<Result<Vec<_>, _>>() {
            Ok(resources) => resources,
            Err(error) => return tracing::error!(?error, "a buffer of a dense product is gone"),
        };
        let pointers: Vec<u64> = resources.iter().map(|resource| resource.resource().ptr).collect();
        let done = on_library(index, |library| library.run(&pointers, &calls));
        if let Err(error) = done {
            tracing::error!(error, "cuBLASLt failed");
        }
    };
    let handle = DeviceHandle::<Server>::new(device.to_id());
    match name {
        None => handle.submit(run),
        Some(name) => profile::timed(device, &name, move || {
            if let Err(error) = handle.submit_blocking(run) {
                tracing::error!(?error, "CubeCL's runner thread did not answer");
            }
        }),
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Runs `f` on the library of a device, on that device's runner thread, where its context is current.
fn on_library<R>(index: usize, f: impl FnOnce(&mut Library) -> Result<R, String>) -> Result<R, String> {
    static LIBRARIES: OnceLock<Mutex<HashMap<usize, Library>>> = OnceLock::new();
    let mut libraries = lock(LIBRARIES.get_or_init(Default::default));
    let library = match libraries.entry(index) {
        Entry::Occupied(entry) => entry.into_mut(),
        Entry::Vacant(entry) => entry.insert(Library::new()?),
    };
    f(library)
}

/// Handle, stream, workspace and algorithms of one device.
struct Library {
    handle: sys::cublasLtHandle_t,
    side: SideStream,
    workspace: cu::CUdeviceptr,
    plans: HashMap<Product, Plan>,
}

// SAFETY: the handles are only used under the lock of `on_library`, by one thread at a time.
unsafe impl Send for Library {}

/// Descriptors of a product and the algorithm for it. The library computes column-major, so a row-major `C = A · B` is its
/// `C^T = B^T · A^T`: `first` describes B, `second` A. Lives as long as the process.
#[derive(Clone, Copy)]
struct Plan {
    desc: sys::cublasLtMatmulDesc_t,
    first: sys::cublasLtMatrixLayout_t,
    second: sys::cublasLtMatrixLayout_t,
    out: sys::cublasLtMatrixLayout_t,
    algo: sys::cublasLtMatmulAlgo_t,
}

fn failed(what: &str) -> impl Fn(lt::CublasError) -> String + '_ {
    move |error| format!("{what}: {error}")
}

impl Library {
    fn new() -> Result<Self, String> {
        let handle = lt::create_handle().map_err(failed("cublasLtCreate"))?;
        let side = SideStream::new().map_err(|error| format!("stream: {error:?}"))?;
        let mut workspace = 0;
        // SAFETY: the call writes one address.
        let allocated = unsafe { cu::cuMemAlloc_v2(&mut workspace, WORKSPACE) }.result();
        allocated.map_err(|error| format!("workspace of {WORKSPACE} bytes: {error:?}"))?;
        // SAFETY: takes no argument.
        let version = unsafe { sys::cublasLtGetVersion() };
        tracing::info!(version, "cuBLASLt for dense products");
        Ok(Self {
            handle,
            side,
            workspace,
            plans: HashMap::new(),
        })
    }

    fn plan(&mut self, product: &Product) -> Result<Plan, String> {
        if let Some(plan) = self.plans.get(product) {
            return Ok(*plan);
        }
        let plan = new_plan(self.handle, product)?;
        self.plans.insert(product.clone(), plan);
        Ok(plan)
    }

    fn run(&mut self, pointers: &[u64], calls: &[Call]) -> Result<(), String> {
        let mut plans = Vec::with_capacity(calls.len());
        for call in calls {
            plans.push(self.plan(&call.product)?);
        }
        let (handle, workspace) = (self.handle, self.workspace);
        let results = self.side.ordered(|stream| {
            let run = |(call, plan): (&Call, &Plan)| multiply(handle, plan, call, pointers, workspace, stream);
            calls.iter().zip(&plans).map(run).collect::<Result<Vec<()>, String>>()
        });
        results
            .map_err(|error| format!("ordering with CubeCL's streams: {error:?}"))?
            .map(|_| ())
    }
}

fn multiply(
    handle: sys::cublasLtHandle_t,
    plan: &Plan,
    call: &Call,
    pointers: &[u64],
    workspace: cu::CUdeviceptr,
    stream: cu::CUstream,
) -> Result<(), String> {
    let address = |place: Place| pointers[place.buffer] + place.offset as u64;
    let (a, b, c) = (address(call.a), address(call.b), address(call.c));
    let f64s = call.product.dtype == DType::F64;
    // alpha and beta are fp32, for f64 products f64: the library reads as many bytes as it needs
    let bits = |value: f32| if f64s { f64::from(value).to_ne_bytes() } else { f32_bytes(value) };
    let (alpha, beta) = (bits(1.0), bits(if call.product.accumulate { 1.0 } else { 0.0 }));
    let scalar = |value: &[u8; 8]| std::ptr::from_ref(value).cast::<c_void>();
    // SAFETY: the descriptors live as long as the process; the buffers are those the caller's product describes and stay
    // allocated until the work is enqueued; alpha and beta are read during the call.
    let status = unsafe {
        if let Some(bias) = call.bias {
            set(plan.desc, Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &address(bias))?;
        }
        sys::cublasLtMatmul(
            handle,
            plan.desc,
            scalar(&alpha),
            b as *const c_void,
            plan.first,
            a as *const c_void,
            plan.second,
            scalar(&beta),
            c as *const c_void,
            plan.out,
            c as *mut c_void,
            plan.out,
            &plan.algo,
            workspace as *mut c_void,
            WORKSPACE,
            stream.cast(),
        )
    };
    status.result().map_err(|error| {
        // All bits set is NaN in every float type: a wrong result must not look like a right one.
        // SAFETY: C has at least this many bytes by the contract of `Product`.
        unsafe { cu::cuMemsetD8Async(c, 0xff, call.product.bytes_of_c(), stream) };
        format!("cublasLtMatmul: {error} for {:?}", call.product)
    })
}

fn f32_bytes(value: f32) -> [u8; 8] {
    let mut bytes = [0; 8];
    bytes[..4].copy_from_slice(&value.to_ne_bytes());
    bytes
}

use sys::cublasLtMatmulDescAttributes_t as Attribute;

/// # Safety
/// `desc` must be a live descriptor and `T` the type of the attribute.
unsafe fn set<T>(desc: sys::cublasLtMatmulDesc_t, attribute: Attribute, value: &T) -> Result<(), String> {
    let (pointer, size) = (std::ptr::from_ref(value).cast::<c_void>(), size_of::<T>());
    // SAFETY: the caller's promise; the value is copied during the call.
    unsafe { lt::set_matmul_desc_attribute(desc, attribute, pointer, size) }.map_err(failed("descriptor"))
}

fn new_plan(handle: sys::cublasLtHandle_t, product: &Product) -> Result<Plan, String> {
    use sys::cublasComputeType_t::{CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_32F_FAST_TF32, CUBLAS_COMPUTE_64F};
    use sys::cublasLtMatmulPreferenceAttributes_t as Preference;

    let data = match product.dtype {
        DType::BF16 => sys::cudaDataType::CUDA_R_16BF,
        DType::F16 => sys::cudaDataType::CUDA_R_16F,
        DType::F32 => sys::cudaDataType::CUDA_R_32F,
        DType::F64 => sys::cudaDataType::CUDA_R_64F,
        other => return Err(format!("dtype {other:?}, expected bf16, fp16, fp32 or f64")),
    };
    let (compute, scale) = match product.dtype {
        DType::F64 => (CUBLAS_COMPUTE_64F, sys::cudaDataType::CUDA_R_64F),
        DType::F32 if product.tf32 => (CUBLAS_COMPUTE_32F_FAST_TF32, sys::cudaDataType::CUDA_R_32F),
        _ => (CUBLAS_COMPUTE_32F, sys::cudaDataType::CUDA_R_32F),
    };
    let layout = |rows: usize, cols: usize, stored: MatrixLayout| {
        // Row-major [rows, cols] is column-major [cols, rows].
        let (rows, cols) = if stored.transposed { (cols, rows) } else { (rows, cols) };
        new_layout(data, [cols, rows], stored, product.batch)
    };
    let first = layout(product.k, product.n, product.b)?;
    let second = layout(product.m, product.k, product.a)?;
    let out = layout(product.m, product.n, product.c)?;
    let desc = lt::create_matmul_desc(compute, scale).map_err(failed("descriptor"))?;
    let preference = lt::create_matmul_pref().map_err(failed("preference"))?;
    // cublasOperation_t: 0 takes the matrix as it is, 1 its transpose.
    let operation = |stored: MatrixLayout| i32::from(stored.transposed);
    // SAFETY: descriptors made above, attribute types as in the library's header; the proposals are plain data that the
    // library fills up to `count`.
    unsafe {
        set(desc, Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &operation(product.b))?;
        set(desc, Attribute::CUBLASLT_MATMUL_DESC_TRANSB, &operation(product.a))?;
        if product.bias {
            set(
                desc,
                Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE,
                &sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS,
            )?;
        }
        let prefer = |attribute, pointer: *const c_void, size| {
            lt::set_matmul_pref_attribute(preference, attribute, pointer, size).map_err(failed("preference"))
        };
        let word = |value: &u32| std::ptr::from_ref(value).cast::<c_void>();
        let workspace = WORKSPACE;
        prefer(
            Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
            std::ptr::from_ref(&workspace).cast(),
            size_of::<usize>(),
        )?;
        prefer(
            Preference::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
            word(&REDUCTION_IN_FP32),
            size_of::<u32>(),
        )?;
        for (attribute, stored) in [
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, product.b),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, product.a),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, product.c),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, product.c),
        ] {
            prefer(attribute, word(&(stored.alignment as u32)), size_of::<u32>())?;
        }
        let mut proposals: [sys::cublasLtMatmulHeuristicResult_t; PROPOSALS] = std::mem::zeroed();
        let mut count = 0;
        let asked = sys::cublasLtMatmulAlgoGetHeuristic(
            handle,
            desc,
            first,
            second,
            out,
            out,
            preference,
            PROPOSALS as i32,
            proposals.as_mut_ptr(),
            &mut count,
        );
        asked.result().map_err(failed("heuristic"))?;
        lt::destroy_matmul_pref(preference).map_err(failed("preference"))?;
        let usable = |proposal: &&sys::cublasLtMatmulHeuristicResult_t| {
            proposal.state == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS && proposal.workspaceSize <= WORKSPACE
        };
        let best = proposals[..count as usize]
            .iter()
            .find(usable)
            .ok_or("the heuristic proposes nothing")?;
        Ok(Plan {
            desc,
            first,
            second,
            out,
            algo: best.algo,
        })
    }
}

/// Column-major `[rows, cols]`.
fn new_layout(
    data: sys::cudaDataType,
    [rows, cols]: [usize; 2],
    stored: MatrixLayout,
    batch: usize,
) -> Result<sys::cublasLtMatrixLayout_t, String> {
    use sys::cublasLtMatrixLayoutAttribute_t as Layout;
    let layout = lt::create_matrix_layout(data, rows as u64, cols as u64, stored.ld as i64).map_err(failed("layout"))?;
    if batch > 1 {
        let (count, stride) = (batch as i32, stored.batch_stride as i64);
        // SAFETY: the layout was made above; the attributes are a 32 and a 64-bit integer.
        unsafe {
            let pointer = std::ptr::from_ref(&count).cast();
            lt::set_matrix_layout_attribute(layout, Layout::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, pointer, size_of::<i32>())
                .map_err(failed("layout"))?;
            let pointer = std::ptr::from_ref(&stride).cast();
            lt::set_matrix_layout_attribute(
                layout,
                Layout::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                pointer,
                size_of::<i64>(),
            )
            .map_err(failed("layout"))?;
        }
    }
    Ok(layout)
}

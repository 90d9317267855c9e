//! Selective scan of Mamba-2 in chunks of 64 tokens (Dao and Gu 2024, "Transformers are SSMs"), forward and backward.
//!
//! Tables of step sizes and decays, what each chunk adds to the state, a walk over the chunks, then all chunks at once; the
//! backward walks the adjoint of the state the other way. With x, B, C and the gradient in bf16 the products run on the tensor
//! cores and computed factors are split in two bf16 parts, so that sums and factors are as good as fp32; other types are
//! computed in fp32. Sums have a fixed order. Workspace: fp32 `[B, S / 64, H, P, N]` in the forward, twice that in the backward.

use burn_backend::{Backend, DType, TensorMetadata, tensor::FloatTensor};
use burn_cubecl::kernel::cast;
use cubecl::server::Handle;

use super::super::cube::{column_sums::column_sums, fits, launch::dense_f32};
use super::super::raw::{CudaTensor, RawKernel, dense, empty, multiprocessors};
use super::{Tokens, int_type, kernel, lacks_bf16};
use crate::backend::{SsdGrads, SsdOutPrim, SsdPrim};
use crate::desc::SsdDesc;

const SCAN: &str = include_str!("../../../kernels/mamba/scan.cuh");
const STEPS: &str = include_str!("../../../kernels/mamba/scan_steps.cu");
const STATES: &str = include_str!("../../../kernels/mamba/scan_states.cu");
const PASS: &str = include_str!("../../../kernels/mamba/scan_pass.cu");
const OUTPUT: &str = include_str!("../../../kernels/mamba/scan_output.cu");
const BACKWARD: &str = include_str!("../../../kernels/mamba/scan_backward.cu");
const SUMS: &str = include_str!("../../../kernels/mamba/scan_sums.cu");
/// Tokens of a chunk.
const Q: usize = 64;
/// Tables of a chunk and head, see `scan.cuh`.
const TABLES: usize = 5;
/// Warps of a block of the backward kernel.
const BACKWARD_WARPS: usize = 16;

/// What the sources are specialised for.
#[derive(Clone, Copy, Debug)]
struct Config {
    /// x, B, C and dy in bf16, else fp32.
    bf16: bool,
    dt_bf16: bool,
    head_size: usize,
    state_size: usize,
    heads: usize,
    groups: usize,
    /// Type of the document starts.
    documents: Option<&'static str>,
}

impl Config {
    fn kernel(&self, extra: &str, source: &str, entry: &'static str, threads: usize, smem: usize) -> RawKernel {
        let Self { head_size, state_size, .. } = self;
        let defines = format!(
            "#define T_BF16 {}\n#define DT_T {}\n#define P {head_size}\n#define N {state_size}\n#define HEADS {}\n#define GROUPS {}\n\
             #define PACKED {}\n#define DOC_T {}\n{extra}",
            u32::from(self.bf16),
            if self.dt_bf16 { "bf16" } else { "float" },
            self.heads,
            self.groups,
            u32::from(self.documents.is_some()),
            self.documents.unwrap_or("int"),
        );
        kernel(entry, defines, &[SCAN, source], threads, smem)
    }

    /// Rows in shared memory of width P and N, in elements.
    fn strides(&self) -> [usize; 2] {
        [self.head_size, self.state_size].map(|width| width.next_multiple_of(16) + 8)
    }

    fn element(&self) -> usize {
        if self.bf16 { 2 } else { 4 }
    }

    fn dtype(&self) -> DType {
        if self.bf16 { DType::BF16 } else { DType::F32 }
    }

    fn state_bytes(&self) -> usize {
        self.head_size.next_multiple_of(16) * self.strides()[1] * 4
    }

    fn steps(&self) -> RawKernel {
        self.kernel("", STEPS, "ssd_steps", 256, 0)
    }

    fn states(&self, adjoint: bool) -> RawKernel {
        let [p, n] = self.strides();
        let extra = format!("#define ADJOINT {}\n", u32::from(adjoint));
        self.kernel(&extra, STATES, "ssd_states", 256, Q * (p * 4 + n * self.element()))
    }

    fn pass(&self, adjoint: bool, initial: bool) -> RawKernel {
        let extra = format!("#define ADJOINT {}\n#define INITIAL {}\n", u32::from(adjoint), u32::from(initial));
        self.kernel(&extra, PASS, "ssd_pass", 256, 0)
    }

    fn output(&self) -> RawKernel {
        let [p, n] = self.strides();
        let smem = self.state_bytes() + Q * (Q + 8) * 4 + Q * (2 * n + p) * self.element() + 4 * Q * 4;
        self.kernel("", OUTPUT, "ssd_output", 256, smem)
    }

    fn backward_smem(&self) -> usize {
        let [p, n] = self.strides();
        let across = BACKWARD_WARPS / 4;
        let numbers = Q * (Q + 8) + Q * (Q + 1) + (TABLES + 1 + 3 * across + 1) * Q + 2 * BACKWARD_WARPS;
        self.state_bytes() + 4 * numbers + Q * (2 * n + 2 * p) * self.element()
    }

    fn backward(&self, heads_per_block: usize) -> RawKernel {
        let extra = format!("#define HEADS_PER_BLOCK {heads_per_block}\n");
        self.kernel(&extra, BACKWARD, "ssd_backward", 32 * BACKWARD_WARPS, self.backward_smem())
    }

    fn sums(&self) -> RawKernel {
        self.kernel("", SUMS, "ssd_sums", 128, 0)
    }
}

/// Why the reference runs instead of these kernels, forward and backward alike.
pub fn refusal<B>(input: &SsdPrim<B>) -> Option<&'static str>
where
    B: Backend<FloatTensorPrimitive = CudaTensor, IntTensorPrimitive = CudaTensor>,
{
    let SsdPrim {
        x,
        dt,
        a_log,
        b,
        c,
        d,
        dt_bias,
        initial_state,
        doc_start_bs,
    } = input;
    let [batch, seq, heads, head_size] = x.shape().dims::<4>();
    let [_, _, groups, state_size] = b.shape().dims::<4>();
    if !fits([x, dt, a_log, b, c, d, dt_bias].into_iter().chain(initial_state)) {
        return Some("a tensor is neither fp32, fp16 nor bf16");
    }
    if lacks_bf16([x, dt, b, c]) {
        return Some("bf16 on a device before compute capability 8.0");
    }
    if doc_start_bs.as_ref().is_some_and(|doc| int_type(doc.dtype).is_none()) {
        return Some("document starts are neither 32 nor 64-bit integers");
    }
    if batch * seq * heads * head_size * state_size == 0 {
        return Some("an empty tensor");
    }
    let config = Config {
        bf16: [x, b, c].into_iter().all(|t| t.dtype == DType::BF16),
        dt_bf16: false,
        head_size,
        state_size,
        heads,
        groups,
        documents: None,
    };
    if config.backward_smem() > x.client.properties().hardware.max_shared_memory_size {
        return Some("a chunk with its state does not fit into shared memory");
    }
    let blocks = batch * seq.div_ceil(Q) * heads;
    if i32::try_from(blocks.max(batch * heads * head_size * state_size / 256)).is_err() {
        return Some("more chunks than a grid has blocks");
    }
    None
}

/// The inputs as the kernels take them, and the tables.
struct Scan {
    config: Config,
    batch: usize,
    seq: usize,
    x: Tokens,
    dt: Tokens,
    b: Tokens,
    c: Tokens,
    a_log: CudaTensor,
    d: CudaTensor,
    initial_state: Option<CudaTensor>,
    dt_limits: [f32; 2],
    /// fp32 `[B, S / 64, H, TABLES, 64]`.
    tables: CudaTensor,
    /// int32 `[B, S / 64, 64]`.
    first: CudaTensor,
}

impl Scan {
    /// `bf16`: x, B, C and, in the backward, the gradient.
    fn new<B>(input: SsdPrim<B>, desc: &SsdDesc, bf16: bool) -> Self
    where
        B: Backend<FloatTensorPrimitive = CudaTensor, IntTensorPrimitive = CudaTensor>,
    {
        let [batch, seq, heads, head_size] = input.x.shape().dims::<4>();
        let [_, _, groups, state_size] = input.b.shape().dims::<4>();
        let dt = if input.dt.dtype == DType::BF16 {
            input.dt
        } else {
            cast(input.dt, DType::F32)
        };
        let documents = input.doc_start_bs.map(dense);
        let config = Config {
            bf16,
            dt_bf16: dt.dtype == DType::BF16,
            head_size,
            state_size,
            heads,
            groups,
            documents: documents.as_ref().and_then(|doc| int_type(doc.dtype)),
        };
        let chunks = seq.div_ceil(Q);
        let wide = |tensor: CudaTensor| Tokens::new(cast(tensor, config.dtype()), 16 / config.element());
        let scan = Self {
            config,
            batch,
            seq,
            x: wide(input.x),
            b: wide(input.b),
            c: wide(input.c),
            a_log: dense_f32(input.a_log),
            d: dense_f32(input.d),
            initial_state: input.initial_state.map(dense_f32),
            dt_limits: [desc.dt_min, desc.dt_max],
            tables: empty(&dt, &[batch, chunks, heads, TABLES, Q], DType::F32),
            first: empty(&dt, &[batch, chunks, Q], DType::I32),
            dt: Tokens::new(dt, 1),
        };
        let dt_bias = dense_f32(input.dt_bias);
        let mut buffers = vec![&scan.dt.tensor, &scan.a_log, &dt_bias];
        buffers.extend(&documents);
        buffers.extend([&scan.tables, &scan.first]);
        scan.launch(config.steps(), batch * chunks * heads.div_ceil(4), &buffers, None);
        scan
    }

    fn chunks(&self) -> usize {
        self.seq.div_ceil(Q)
    }

    /// Blocks of a kernel that works on one chunk and head.
    fn blocks(&self) -> usize {
        self.batch * self.chunks() * self.config.heads
    }

    fn launch(&self, kernel: RawKernel, grid: usize, buffers: &[&CudaTensor], grad: Option<&Tokens>) {
        let handles: Vec<&Handle> = buffers.iter().map(|tensor| &tensor.handle).collect();
        let mut scalars = vec![self.batch as u64, self.seq as u64, self.chunks() as u64];
        for tokens in [&self.x, &self.dt, &self.b, &self.c, grad.unwrap_or(&self.x)] {
            scalars.extend([tokens.batch, tokens.token]);
        }
        scalars.extend(self.dt_limits.map(|limit| u64::from(limit.to_bits())));
        kernel.launch(&self.tables.client, grid as u32, vec![], &handles, scalars);
    }

    fn pass(&self, adjoint: bool, buffers: &[&CudaTensor]) {
        let Config {
            head_size,
            state_size,
            heads,
            ..
        } = self.config;
        let lanes = if state_size.is_multiple_of(4) { 4 } else { 1 };
        let threads = self.batch * heads * head_size * state_size / lanes;
        let initial = self.initial_state.is_some() && !adjoint;
        self.launch(self.config.pass(adjoint, initial), threads.div_ceil(256), buffers, None);
    }

    fn states_dims(&self) -> [usize; 5] {
        let Config {
            head_size,
            state_size,
            heads,
            ..
        } = self.config;
        [self.batch, self.chunks(), heads, head_size, state_size]
    }

    /// State before every chunk `[B, S / 64, H, P, N]` and after the last one `[B, H, P, N]`.
    fn states(&self) -> (CudaTensor, CudaTensor) {
        let dims = self.states_dims();
        let states = empty(&self.tables, &dims, DType::F32);
        let final_state = empty(&self.tables, &[dims[0], dims[2], dims[3], dims[4]], DType::F32);
        let buffers = [&self.x.tensor, &self.b.tensor, &self.tables, &states];
        self.launch(self.config.states(false), self.blocks(), &buffers, None);
        let mut buffers = vec![&self.tables, &states];
        buffers.extend(&self.initial_state);
        buffers.push(&final_state);
        self.pass(false, &buffers);
        (states, final_state)
    }

    /// Adjoint of the state after every chunk, `[B, S / 64, H, P, N]`.
    fn adjoints(&self, grad: &Tokens) -> CudaTensor {
        let adjoints = empty(&self.tables, &self.states_dims(), DType::F32);
        let buffers = [&grad.tensor, &self.c.tensor, &self.tables, &adjoints];
        self.launch(self.config.states(true), self.blocks(), &buffers, Some(grad));
        self.pass(true, &[&self.tables, &adjoints]);
        adjoints
    }

    /// Heads of a group that one block of the backward walks over: all of them, unless that leaves multiprocessors idle.
    fn heads_per_block(&self) -> usize {
        let repeat = self.config.heads / self.config.groups;
        let wanted = 2 * multiprocessors(&self.tables.client) as usize;
        let groups = self.batch * self.chunks() * self.config.groups;
        let splits = (1..=repeat).find(|splits| repeat.is_multiple_of(*splits) && groups * splits >= wanted);
        repeat / splits.unwrap_or(repeat)
    }
}

/// See [`crate::MoeBackend::ssd_scan`].
pub fn ssd_scan<B>(input: SsdPrim<B>, desc: &SsdDesc) -> SsdOutPrim<B>
where
    B: Backend<FloatTensorPrimitive = CudaTensor, IntTensorPrimitive = CudaTensor>,
{
    let dtype = input.x.dtype;
    let bf16 = [&input.x, &input.b, &input.c].into_iter().all(|t| t.dtype == DType::BF16);
    let scan = Scan::new(input, desc, bf16);
    let (states, final_state) = scan.states();
    let y = empty(
        &scan.tables,
        &[scan.batch, scan.seq, scan.config.heads, scan.config.head_size],
        scan.config.dtype(),
    );
    let buffers = [
        &scan.x.tensor,
        &scan.b.tensor,
        &scan.c.tensor,
        &scan.d,
        &scan.tables,
        &scan.first,
        &states,
        &y,
    ];
    scan.launch(scan.config.output(), scan.blocks(), &buffers, None);
    SsdOutPrim {
        y: cast(y, dtype),
        final_state,
    }
}

/// See [`crate::MoeBackend::ssd_scan_backward`].
pub fn ssd_scan_backward<B>(grad_y: FloatTensor<B>, input: SsdPrim<B>, desc: &SsdDesc) -> SsdGrads<B>
where
    B: Backend<FloatTensorPrimitive = CudaTensor, IntTensorPrimitive = CudaTensor>,
{
    let dtypes = [
        input.x.dtype,
        input.dt.dtype,
        input.a_log.dtype,
        input.b.dtype,
        input.c.dtype,
        input.d.dtype,
        input.dt_bias.dtype,
    ];
    let bf16 = [&grad_y, &input.x, &input.b, &input.c].into_iter().all(|t| t.dtype == DType::BF16);
    let scan = Scan::new(input, desc, bf16);
    let config = scan.config;
    let grad = Tokens::new(cast(grad_y, config.dtype()), 16 / config.element());
    let (states, _) = scan.states();
    let adjoints = scan.adjoints(&grad);

    let (batch, seq, heads) = (scan.batch, scan.seq, config.heads);
    let heads_per_block = scan.heads_per_block();
    let splits = heads / config.groups / heads_per_block;
    let like = &scan.tables;
    let dx = empty(like, &[batch, seq, heads, config.head_size], config.dtype());
    let ddt = empty(like, &[batch, seq, heads], scan.dt.tensor.dtype);
    let group_dims = [batch, seq, config.groups, config.state_size];
    let group_rows = group_dims.iter().product::<usize>();
    let group_dtype = if splits == 1 { config.dtype() } else { DType::F32 };
    let [db, dc] = [(); 2].map(|()| empty(like, &[splits, group_rows], group_dtype));
    let parts = empty(like, &[batch * scan.chunks(), 3, heads], DType::F32);
    let buffers = [
        &grad.tensor,
        &scan.x.tensor,
        &scan.b.tensor,
        &scan.c.tensor,
        &scan.a_log,
        &scan.d,
        &scan.tables,
        &scan.first,
        &states,
        &adjoints,
        &dx,
        &ddt,
        &db,
        &dc,
        &parts,
    ];
    let blocks = batch * scan.chunks() * config.groups * splits;
    scan.launch(config.backward(heads_per_block), blocks, &buffers, Some(&grad));
    let [a_log, d, dt_bias] = [(); 3].map(|()| empty(like, &[heads], DType::F32));
    scan.launch(config.sums(), (3 * heads).div_ceil(128), &[&parts, &a_log, &d, &dt_bias], None);

    let of_group = |parts: CudaTensor, dtype: DType| {
        if splits == 1 {
            cast(B::float_reshape(parts, group_dims.into()), dtype)
        } else {
            column_sums(parts, &group_dims, dtype)
        }
    };
    SsdGrads {
        x: cast(dx, dtypes[0]),
        dt: cast(ddt, dtypes[1]),
        a_log: cast(a_log, dtypes[2]),
        b: of_group(db, dtypes[3]),
        c: of_group(dc, dtypes[4]),
        d: cast(d, dtypes[5]),
        dt_bias: cast(dt_bias, dtypes[6]),
    }
}

/// Every kernel, in both types, with and without documents and initial state, for compile checks without a GPU.
#[cfg(test)]
pub fn variants() -> Vec<RawKernel> {
    let mut all = Vec::new();
    for (bf16, head_size, state_size, documents) in [
        (true, 64, 128, None),
        (true, 5, 7, Some("int")),
        (false, 64, 128, Some("long long")),
    ] {
        let config = Config {
            bf16,
            dt_bf16: bf16,
            head_size,
            state_size,
            heads: 16,
            groups: 4,
            documents,
        };
        all.extend([
            config.steps(),
            config.output(),
            config.backward(4),
            config.backward(1),
            config.sums(),
        ]);
        for adjoint in [false, true] {
            all.extend([config.states(adjoint), config.pass(adjoint, !adjoint && bf16)]);
        }
    }
    all
}

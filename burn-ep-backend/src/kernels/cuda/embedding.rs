//! Embedding: rows by index, and the gradient of the table as a sum over sorted indices, the same in every run.

use burn_backend::{DType, TensorMetadata};

use super::super::raw::{CudaTensor, RawKernel, dense, empty, multiprocessors};
use super::{is_float, is_index, kernel};

const SOURCE: &str = include_str!("../../../kernels/cuda/embedding.cu");
/// Sorting counts, for every token, the smaller ones: quadratic, 5 ms at this many.
const MAX_TOKENS: usize = 1 << 18;
/// Threads of a block that sums a slice of columns.
const SUM_THREADS: usize = 128;

#[derive(Clone, Copy)]
enum Kind {
    Gather,
    Rank,
    Sum,
    Zero,
}

fn of_kind(kind: Kind, float: DType, index: DType) -> RawKernel {
    let (number, threads) = match kind {
        Kind::Gather => (0, 256),
        Kind::Rank => (1, 256),
        Kind::Sum => (2, SUM_THREADS as u32),
        Kind::Zero => (3, 512),
    };
    kernel(SOURCE, "embedding", float, index, &format!("#define KIND {number}\n"), threads)
}

/// Whether the lookup runs here.
pub fn supports(float: DType, ids: &CudaTensor) -> bool {
    is_float(float) && is_index(ids.dtype)
}

/// `table [V, D]` and `ids [B, S]` to `[B, S, D]`; an id outside the table gives zeros.
pub fn gather(table: CudaTensor, ids: CudaTensor) -> CudaTensor {
    let (table, ids) = (dense(table), dense(ids));
    let ([vocab, width], [b, s]) = (table.shape().dims::<2>(), ids.shape().dims::<2>());
    let out = empty(&table, &[b, s, width], table.dtype);
    let tokens = b * s;
    if tokens * width > 0 {
        let grid = tokens.div_ceil(8).min(multiprocessors(&table.client) as usize * 32) as u32;
        let scalars = [tokens, vocab, width].map(|n| n as u64).to_vec();
        let buffers = [&table.handle, &ids.handle, &out.handle];
        of_kind(Kind::Gather, table.dtype, ids.dtype).launch(&table.client, grid, vec![], &buffers, scalars);
    }
    out
}

/// Whether the gradient of a table of this many rows runs here.
pub fn supports_grad(grad: &CudaTensor, ids: &CudaTensor, vocab: usize) -> bool {
    let elements = grad.shape().num_elements();
    let tokens = ids.shape().num_elements();
    elements > 0 && vocab > 0 && tokens <= MAX_TOKENS && supports(grad.dtype, ids)
}

/// Gradient `[V, D]` of the table from `grad [B, S, D]`: for every row the sum over its tokens in fp32, in their order.
pub fn table_grad(grad: CudaTensor, ids: CudaTensor, vocab: usize) -> CudaTensor {
    let (grad, ids) = (dense(grad), dense(ids));
    let [_, _, width] = grad.shape().dims::<3>();
    let tokens = ids.shape().num_elements();
    let client = &grad.client;
    let scalars = || [tokens, vocab, width].map(|n| n as u64).to_vec();
    let order = empty(&grad, &[tokens], DType::I32);
    let table = empty(&grad, &[vocab, width], grad.dtype);
    let launch = |kind, grid: usize, buffers: &[&cubecl::server::Handle]| {
        of_kind(kind, grad.dtype, ids.dtype).launch(client, grid as u32, vec![], buffers, scalars());
    };
    let columns = SUM_THREADS * 16 / grad.dtype.size();
    launch(Kind::Rank, tokens.div_ceil(256), &[&ids.handle, &order.handle]);
    launch(Kind::Zero, multiprocessors(client) as usize * 4, &[&table.handle]);
    launch(
        Kind::Sum,
        tokens * width.div_ceil(columns),
        &[&grad.handle, &ids.handle, &order.handle, &table.handle],
    );
    table
}

/// Every kernel of this file for these dtypes.
pub fn variants(float: DType, index: DType) -> Vec<RawKernel> {
    [Kind::Gather, Kind::Rank, Kind::Sum, Kind::Zero]
        .map(|kind| of_kind(kind, float, index))
        .to_vec()
}

//! Matmul with rows grouped by expert: forward, input gradient and weight gradient in bf16 with fp32 accumulation.
//!
//! One kernel, chosen by defines (`kernels/hopper/gemm*.{cu,cuh}`). Counts stay on the device; the grid is one block per
//! multiprocessor. Widths must be multiples of 8 (16-byte rows).

use burn_backend::DType;
use burn_backend::TensorMetadata;

use super::super::raw::{self, CudaTensor, MapElem, RawKernel, dense, dense_map, tensor_map};
use super::queue_counter;

const SOURCE: [&str; 5] = [
    include_str!("../../../kernels/hopper/gemm.cuh"),
    include_str!("../../../kernels/hopper/gemm_ptx.cuh"),
    include_str!("../../../kernels/hopper/gemm_schedule.cuh"),
    include_str!("../../../kernels/hopper/gemm_store.cuh"),
    include_str!("../../../kernels/hopper/gemm.cu"),
];
const ENTRY: &str = "hopper_gemm";
/// Largest dynamic shared memory of a block.
const MAX_SMEM: usize = 232_448;

/// Which product the kernel computes; rows of group e are `offsets[e]..offsets[e + 1]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Product {
    /// `D[r, N] = A[r, K] · B[e, N, K]^T`.
    Forward,
    /// `D[r, N] = A[r, K] · B[e, K, N]`.
    GradRows,
    /// `D[e, M, N] = sum_r A[r, M]^T · B[r, N]`.
    GradWeight,
}

/// Compile-time settings, the best of those tried on an H200.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    product: Product,
    /// Columns of a block tile: 128, 192 or 256.
    bn: usize,
    stages: usize,
    cluster: u32,
}

impl Config {
    /// 192 columns pad less than 256 when N is 2880; otherwise 256 wins.
    pub fn new(product: Product, n: usize) -> Self {
        let padded = |bn: usize| n.div_ceil(bn) * bn;
        let bn = if padded(192) * 100 < padded(256) * 97 { 192 } else { 256 };
        Self {
            product,
            bn,
            stages: 4,
            cluster: 2,
        }
    }

    fn smem(self, groups: usize) -> usize {
        self.stages * (128 + self.bn) * 128 + 2 * 8 * 2048 + 256 + 4 * (groups + 1)
    }

    /// The kernel with its defines.
    pub fn kernel(self, groups: usize) -> RawKernel {
        let (wgrad, b_mn) = match self.product {
            Product::Forward => (0, 0),
            Product::GradRows => (0, 1),
            Product::GradWeight => (1, 0),
        };
        let defines = format!(
            "#define WGRAD {wgrad}\n#define B_MN {b_mn}\n#define GATHER 0\n#define BN {}\n#define STAGES {}\n#define CLUSTER {}\n\
             #define OUT_BUFS 2\n#define F32 0\n#define ACC 0\n#define EPI 0\n#define DYN 1\n#define SPREAD 4\n#define PROFILE 0\n\
             #define ENTRY {ENTRY}\n",
            self.bn, self.stages, self.cluster
        );
        RawKernel::new(defines + &SOURCE.concat(), ENTRY, 384, self.smem(groups))
    }
}

/// Whether the kernel can run a problem of these widths and this many groups.
pub fn supports(widths: [usize; 2], groups: usize) -> bool {
    widths.iter().all(|w| *w > 0 && w.is_multiple_of(8)) && Config::new(Product::Forward, 256).smem(groups) <= MAX_SMEM
}

/// Rows of a matrix up to a limit that the kernel chooses per group; see `load_rows` in the source.
fn ragged_map(tensor: &CudaTensor, rows: usize, cols: usize, box_rows: usize) -> cubecl::server::TensorMapBinding {
    tensor_map(
        &tensor.handle,
        vec![(1 << 31) - 1, rows + 1, 1 << 30, cols],
        vec![(1 << 33) - cols, cols, cols, 1],
        &[1, 1, box_rows, 64],
        MapElem::Bf16,
    )
}

/// `[R, K] x [E, N, K]` (forward) or `[R, K] x [E, K, N]` (row gradient) to `[R, N]`.
pub fn grouped(product: Product, rows: CudaTensor, weight: CudaTensor, offsets: CudaTensor) -> CudaTensor {
    debug_assert_ne!(product, Product::GradWeight);
    let (rows, weight, offsets) = (dense(rows), dense(weight), dense(offsets));
    let [r, k] = rows.shape().dims::<2>();
    let [groups, d1, d2] = weight.shape().dims::<3>();
    let n = if product == Product::Forward { d1 } else { d2 };
    let out = raw::empty(&rows, &[r, n], DType::BF16);
    if r == 0 {
        return out;
    }
    let config = Config::new(product, n);
    let box_k = if config.bn.is_multiple_of(128) { 64 } else { 32 };
    let map_b = match product {
        Product::Forward => dense_map(&weight.handle, &[groups, n, k], &[1, config.bn / 2, 64], MapElem::Bf16),
        _ => dense_map(&weight.handle, &[groups, k, n], &[1, box_k, 64], MapElem::Bf16),
    };
    let maps = vec![
        dense_map(&rows.handle, &[r, k], &[64, 64], MapElem::Bf16),
        map_b,
        dense_map(&out.handle, &[r, n], &[16, 64], MapElem::Bf16),
    ];
    let counter = queue_counter(&rows);
    launch(config, &rows, maps, &[&offsets.handle, &counter], [groups, 0, n, k], k);
    out
}

/// `sum over the rows of each group of grad[r, M]^T · rows[r, N]`: `[E, M, N]`, zeros for empty groups.
pub fn grouped_grad_weight(grad: CudaTensor, rows: CudaTensor, offsets: CudaTensor) -> CudaTensor {
    let (grad, rows, offsets) = (dense(grad), dense(rows), dense(offsets));
    let [r, m] = grad.shape().dims::<2>();
    let [_, n] = rows.shape().dims::<2>();
    let [e1] = offsets.shape().dims::<1>();
    let groups = e1 - 1;
    let out = raw::empty(&grad, &[groups, m, n], DType::BF16);
    let config = Config::new(Product::GradWeight, n);
    let box_k = if config.bn.is_multiple_of(128) { 64 } else { 32 };
    let maps = vec![
        ragged_map(&grad, r, m, 64),
        ragged_map(&rows, r, n, box_k),
        dense_map(&out.handle, &[groups * m, n], &[16, 64], MapElem::Bf16),
    ];
    let counter = queue_counter(&grad);
    launch(config, &grad, maps, &[&offsets.handle, &counter], [groups, m, n, 0], n);
    out
}

fn launch(
    config: Config,
    like: &CudaTensor,
    maps: Vec<cubecl::server::TensorMapBinding>,
    buffers: &[&cubecl::server::Handle],
    [groups, m, n, k]: [usize; 4],
    stride: usize,
) {
    /// Row tiles of a band in which blocks share operands through L2.
    const RASTER: u64 = 8;
    let grid = raw::multiprocessors(&like.client) / config.cluster * config.cluster;
    let scalars = vec![groups as u64, m as u64, n as u64, k as u64, RASTER, stride as u64];
    config.kernel(groups).launch(&like.client, grid, maps, buffers, scalars);
}

/// Every kernel variant this file can launch, for compile checks without a GPU.
pub fn variants() -> Vec<RawKernel> {
    let products = [Product::Forward, Product::GradRows, Product::GradWeight];
    products
        .into_iter()
        .flat_map(|product| [2048, 2880].map(|n| Config::new(product, n).kernel(8)))
        .collect()
}

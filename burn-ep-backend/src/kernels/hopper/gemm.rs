//! Matmul with rows grouped by expert: forward, input gradient and weight gradient in bf16 with fp32 accumulation.
//!
//! One kernel, chosen by defines (`kernels/hopper/gemm*.{cu,cuh}`). Counts stay on the device; the grid is one block per
//! multiprocessor. Widths must be multiples of 8 (16-byte rows).

use burn_backend::DType;
use burn_backend::TensorMetadata;
use cubecl::server::{Handle, TensorMapBinding};

use super::super::raw::{self, CudaTensor, MapElem, RawKernel, dense, dense_map, mappable, strided_map, tensor_map};
use super::queue_counter;

const SOURCE: [&str; 6] = [
    include_str!("../../../kernels/hopper/gemm.cuh"),
    include_str!("../../../kernels/hopper/gemm_ptx.cuh"),
    include_str!("../../../kernels/hopper/gemm_schedule.cuh"),
    include_str!("../../../kernels/hopper/gemm_store.cuh"),
    include_str!("../../../kernels/hopper/gemm_experts.cuh"),
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
    pub(super) product: Product,
    /// Columns of a block tile: 128, 192 or 256.
    pub(super) bn: usize,
    pub(super) stages: usize,
    pub(super) cluster: u32,
    /// Row r of the left operand is row `slots[r] / top_k` of the given matrix. Not for weight gradients: there a gather
    /// took 1.8 times as long as the plain product on an H200, more than the product of a permuted copy and the copy.
    pub(super) gather: bool,
    /// `EPI` of `gemm_experts.cuh`, 0 for none.
    pub(super) epilogue: u32,
    /// Add an fp32 bias before the activation.
    pub(super) bias: bool,
    /// Scale by the routing weight in a backward epilogue.
    pub(super) weighted: bool,
}

/// Run-time numbers of a launch: groups, rows of a weight gradient, columns, reduction length, row stride of the gathered
/// operand, choices per token, and the numbers of the clamped SwiGLU.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sizes {
    pub groups: usize,
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub stride: usize,
    pub top_k: usize,
    pub alpha: f32,
    pub limit: f32,
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
            gather: false,
            epilogue: 0,
            bias: false,
            weighted: false,
        }
    }

    /// Rows of one box of a right operand whose columns are contiguous.
    pub(super) fn box_k(self) -> usize {
        if self.bn.is_multiple_of(128) { 64 } else { 32 }
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
        let gather = u32::from(self.gather);
        // A fused epilogue has many phases already, so that one k block between two is enough.
        let spread = if self.epilogue == 0 { 4 } else { 1 };
        let (bias, weighted) = (u32::from(self.bias), u32::from(self.weighted));
        let defines = format!(
            "#define WGRAD {wgrad}\n#define B_MN {b_mn}\n#define GATHER {gather}\n#define BN {}\n#define STAGES {}\n#define CLUSTER {}\n\
             #define OUT_BUFS 2\n#define F32 0\n#define ACC 0\n#define EPI {}\n#define BIAS {bias}\n#define WEIGHTED {weighted}\n\
             #define DYN 1\n#define SPREAD {spread}\n#define PROFILE 0\n#define ENTRY {ENTRY}\n",
            self.bn, self.stages, self.cluster, self.epilogue
        );
        RawKernel::new(defines + &SOURCE.concat(), ENTRY, 384, self.smem(groups))
    }
}

/// Whether the kernel can run a problem of these widths and this many groups.
pub fn supports(widths: [usize; 2], groups: usize) -> bool {
    widths.iter().all(|w| *w > 0 && w.is_multiple_of(8)) && Config::new(Product::Forward, 256).smem(groups) <= MAX_SMEM
}

/// Rows of a matrix up to a limit that the kernel chooses per group; see `load_rows` in the source.
fn ragged_map(tensor: &CudaTensor, box_rows: usize) -> TensorMapBinding {
    let [rows, cols] = tensor.shape().dims::<2>();
    // the stride of a single row says nothing
    let pitch = if rows > 1 { tensor.meta.strides()[0] } else { cols };
    tensor_map(
        &tensor.handle,
        vec![(1 << 31) - 1, rows + 1, 1 << 30, cols],
        vec![(1 << 33) - pitch, pitch, pitch, 1],
        &[1, 1, box_rows, 64],
        MapElem::Bf16,
    )
}

/// `[R, K] x [E, N, K]` (forward) or `[R, K] x [E, K, N]` (row gradient) to `[R, N]`.
pub fn grouped(product: Product, rows: CudaTensor, weight: CudaTensor, offsets: CudaTensor) -> CudaTensor {
    debug_assert_ne!(product, Product::GradWeight);
    let (rows, weight, offsets) = (mappable(rows), mappable(weight), dense(offsets));
    let [r, k] = rows.shape().dims::<2>();
    let [groups, d1, d2] = weight.shape().dims::<3>();
    let n = if product == Product::Forward { d1 } else { d2 };
    let out = raw::empty(&rows, &[r, n], DType::BF16);
    if r == 0 {
        return out;
    }
    let config = Config::new(product, n);
    let maps = vec![
        strided_map(&rows, &[64, 64], MapElem::Bf16),
        weight_map(config, &weight),
        dense_map(&out.handle, &[r, n], &[16, 64], MapElem::Bf16),
    ];
    let counter = queue_counter(&rows);
    let sizes = Sizes {
        groups,
        n,
        k,
        stride: k,
        ..Sizes::default()
    };
    launch(config, &rows, maps, &[&offsets.handle, &counter], sizes);
    out
}

/// Stacked weights ([`mappable`]) as the right operand.
pub(super) fn weight_map(config: Config, weight: &CudaTensor) -> TensorMapBinding {
    let rows = match config.product {
        Product::Forward => config.bn / 2,
        Product::GradRows | Product::GradWeight => config.box_k(),
    };
    strided_map(weight, &[1, rows, 64], MapElem::Bf16)
}

/// `sum over the rows of each group of grad[r, M]^T · rows[r, N]`: `[E, M, N]`, zeros for empty groups. There must be rows.
pub fn grouped_grad_weight(grad: CudaTensor, rows: CudaTensor, offsets: CudaTensor) -> CudaTensor {
    let (grad, rows, offsets) = (mappable(grad), mappable(rows), dense(offsets));
    let ([_, m], [_, n]) = (grad.shape().dims::<2>(), rows.shape().dims::<2>());
    let [e1] = offsets.shape().dims::<1>();
    let groups = e1 - 1;
    let out = raw::empty(&grad, &[groups, m, n], DType::BF16);
    let config = Config::new(Product::GradWeight, n);
    let maps = vec![
        ragged_map(&grad, 64),
        ragged_map(&rows, config.box_k()),
        dense_map(&out.handle, &[groups * m, n], &[16, 64], MapElem::Bf16),
    ];
    let counter = queue_counter(&grad);
    let sizes = Sizes {
        groups,
        m,
        n,
        stride: n,
        ..Sizes::default()
    };
    launch(config, &grad, maps, &[&offsets.handle, &counter], sizes);
    out
}

pub(super) fn launch(config: Config, like: &CudaTensor, maps: Vec<TensorMapBinding>, buffers: &[&Handle], sizes: Sizes) {
    /// Row tiles of a band in which blocks share operands through L2.
    const RASTER: u64 = 8;
    let grid = raw::multiprocessors(&like.client) / config.cluster * config.cluster;
    let Sizes {
        groups,
        m,
        n,
        k,
        stride,
        top_k,
        alpha,
        limit,
    } = sizes;
    let [groups_, m, n, k, stride, top_k] = [groups, m, n, k, stride, top_k].map(|size| size as u64);
    let [alpha, limit] = [alpha, limit].map(|number| u64::from(number.to_bits()));
    let scalars = vec![groups_, m, n, k, RASTER, stride, top_k, alpha, limit];
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

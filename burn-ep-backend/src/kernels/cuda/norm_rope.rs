//! RMSNorm of every head and rotary embedding in one pass, forward and backward: what query and key go through before attention.

use burn_backend::{DType, TensorMetadata};

use super::super::cube::column_sums::column_sums;
use super::super::raw::{CudaTensor, RawKernel, dense, empty, multiprocessors};
use super::is_float;
use crate::desc::{NormDesc, NormRounding, RopeLayout};

const SOURCE: &str = include_str!("../../../kernels/cuda/norm_rope.cu");
/// Threads of a block.
const THREADS: usize = 256;

/// What the kernels are compiled for.
#[derive(Clone, Copy)]
struct Config {
    x: DType,
    weight: DType,
    table: DType,
    width: usize,
    llama: bool,
}

impl Config {
    fn of(x: &CudaTensor, weight: &CudaTensor, cos: &CudaTensor, desc: &NormDesc) -> Self {
        let [.., width] = x.shape().dims::<4>();
        Self {
            x: x.dtype,
            weight: weight.dtype,
            table: cos.dtype,
            width,
            llama: desc.rounding == NormRounding::Llama,
        }
    }

    /// Lanes that share a row: eight channels of either half each.
    fn lanes(self) -> usize {
        (self.width / 16).next_power_of_two()
    }

    /// `rows`: rows of a lane in flight.
    fn kernel(self, entry: &'static str, rows: usize) -> RawKernel {
        let element = |dtype| match dtype {
            DType::BF16 => 0,
            DType::F16 => 1,
            _ => 2,
        };
        let [x, weight, table] = [self.x, self.weight, self.table].map(element);
        let defines = format!(
            "#define X {x}\n#define W {weight}\n#define A {table}\n#define WIDTH {}\n#define LANES {}\n#define ROWS {rows}\n#define LLAMA {}\n",
            self.width,
            self.lanes(),
            u32::from(self.llama)
        );
        RawKernel::new(defines + SOURCE, entry, THREADS as u32, 0)
    }

    fn forward(self) -> RawKernel {
        self.kernel("norm_rope", 4)
    }

    fn backward(self) -> RawKernel {
        self.kernel("norm_rope_backward", 2)
    }
}

/// Whether the kernels cover a call: all channels turn, in two halves, and head sizes are multiples of 16 up to 512.
pub fn supports(x_bshd: &CudaTensor, weight_d: &CudaTensor, cos: &CudaTensor, sin: &CudaTensor, layout: RopeLayout) -> bool {
    let [b, s, h, d] = x_bshd.shape().dims::<4>();
    let [.., half] = cos.shape().dims::<3>();
    let typed = [x_bshd, weight_d, cos].iter().all(|tensor| is_float(tensor.dtype)) && sin.dtype == cos.dtype;
    let rows = b * s * h;
    typed && layout == RopeLayout::HalfSplit && 2 * half == d && d.is_multiple_of(16) && d <= 512 && (1..1 << 31).contains(&rows)
}

/// The by-value struct `Scalars` of the kernels.
fn scalars(x: &CudaTensor, cos: &CudaTensor, desc: &NormDesc) -> Vec<u64> {
    let ([b, s, h, _], [tables, ..]) = (x.shape().dims::<4>(), cos.shape().dims::<3>());
    vec![(b * s * h) as u64, h as u64, (tables * s) as u64, u64::from(desc.eps.to_bits())]
}

/// Blocks that fill the device `times` over, fewer if there are not as many rows.
fn blocks(x: &CudaTensor, config: Config, rows: usize, times: usize) -> usize {
    let [b, s, h, _] = x.shape().dims::<4>();
    let per_block = THREADS / config.lanes() * rows;
    (b * s * h).div_ceil(per_block).min(multiprocessors(&x.client) as usize * times)
}

/// See [`crate::MoeBackend::rms_norm_rope`].
pub fn forward(x_bshd: CudaTensor, weight_d: CudaTensor, cos: CudaTensor, sin: CudaTensor, desc: &NormDesc) -> CudaTensor {
    let (x, weight, cos, sin) = (dense(x_bshd), dense(weight_d), dense(cos), dense(sin));
    let config = Config::of(&x, &weight, &cos, desc);
    let out = empty(&x, &x.shape().dims::<4>(), x.dtype);
    let buffers = [&x.handle, &weight.handle, &cos.handle, &sin.handle, &out.handle];
    let grid = blocks(&x, config, 4, 3);
    config
        .forward()
        .launch(&x.client, grid as u32, vec![], &buffers, scalars(&x, &cos, desc));
    out
}

/// Gradients of x and the weight; `grad` has the dtype of x.
pub fn backward(
    grad: CudaTensor,
    x_bshd: CudaTensor,
    weight_d: CudaTensor,
    cos: CudaTensor,
    sin: CudaTensor,
    desc: &NormDesc,
) -> (CudaTensor, CudaTensor) {
    let (grad, x, weight, cos, sin) = (dense(grad), dense(x_bshd), dense(weight_d), dense(cos), dense(sin));
    let config = Config::of(&x, &weight, &cos, desc);
    let grad_x = empty(&x, &x.shape().dims::<4>(), x.dtype);
    let grid = blocks(&x, config, 2, 2);
    let parts = empty(&x, &[grid, config.width], DType::F32);
    let buffers = [
        &grad.handle,
        &x.handle,
        &weight.handle,
        &cos.handle,
        &sin.handle,
        &grad_x.handle,
        &parts.handle,
    ];
    config
        .backward()
        .launch(&x.client, grid as u32, vec![], &buffers, scalars(&x, &cos, desc));
    (grad_x, column_sums(parts, &[config.width], weight.dtype))
}

/// Some kernels of this file for x of this dtype.
#[cfg(test)]
pub fn variants(x: DType) -> Vec<RawKernel> {
    let configs = [(x, x, 128, true), (DType::F32, DType::F32, 80, false), (x, DType::F32, 256, true)];
    let config = configs.map(|(weight, table, width, llama)| Config {
        x,
        weight,
        table,
        width,
        llama,
    });
    config.iter().flat_map(|config| [config.forward(), config.backward()]).collect()
}

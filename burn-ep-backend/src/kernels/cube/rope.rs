//! Rotary embedding: a team of units a token, a unit a channel pair.

use burn_backend::TensorMetadata;
use cubecl::prelude::*;

use super::super::raw::{CudaTensor, dense, empty, multiprocessors};
use super::{THREADS_PER_PROCESSOR, vector_size};
use crate::desc::RopeLayout;

/// Widths count vectors; the interleaved layout uses vectors of one element.
#[cube(launch_unchecked, address_type = "u64")]
fn kernel<T: Float, A: Float, N: Size>(
    x: &Tensor<Vector<T, N>>,
    cos: &Tensor<Vector<A, N>>,
    sin: &Tensor<Vector<A, N>>,
    out: &mut Tensor<Vector<T, N>>,
    tokens: usize,
    angle_rows: usize,
    heads: u32,
    #[comptime] half: u32,
    #[comptime] width: u32,
    #[comptime] interleaved: bool,
    #[define(T, A)] _dtypes: [StorageType; 2],
) {
    let pairs = heads * half;
    let rest = comptime!(width - 2 * half);
    let mut token = CUBE_POS * CUBE_DIM_Y as usize + UNIT_POS_Y as usize;
    while token < tokens {
        let base = token * (heads * width) as usize;
        // one table for all batch rows, or one a row
        let angles = token % angle_rows * half as usize;
        let mut i = UNIT_POS_X;
        while i < pairs {
            let pair = i % half;
            let head = base + (i / half * width) as usize;
            let mut at_first = head + pair as usize;
            let mut at_second = at_first + half as usize;
            if comptime!(interleaved) {
                at_first = head + (2 * pair) as usize;
                at_second = at_first + 1;
            }
            let first = Vector::<f32, N>::cast_from(x[at_first]);
            let second = Vector::<f32, N>::cast_from(x[at_second]);
            let c = Vector::<f32, N>::cast_from(cos[angles + pair as usize]);
            let s = Vector::<f32, N>::cast_from(sin[angles + pair as usize]);
            out[at_first] = Vector::cast_from(first * c - second * s);
            out[at_second] = Vector::cast_from(second * c + first * s);
            i += CUBE_DIM_X;
        }
        if comptime!(rest > 0) {
            let mut i = UNIT_POS_X;
            while i < heads * rest {
                let at = base + (i / rest * width + 2 * half + i % rest) as usize;
                out[at] = x[at];
                i += CUBE_DIM_X;
            }
        }
        token += CUBE_COUNT * CUBE_DIM_Y as usize;
    }
}

/// Whether the sizes stay within the kernel's 32-bit count of one token's channels.
pub fn supports(x_bshd: &CudaTensor, cos: &CudaTensor, sin: &CudaTensor) -> bool {
    let shape = x_bshd.shape();
    shape.num_elements() > 0 && u32::try_from(shape[2] * shape[3]).is_ok() && cos.dtype == sin.dtype
}

/// See [`crate::MoeBackend::rope`].
pub fn rope(x_bshd: CudaTensor, cos: CudaTensor, sin: CudaTensor, layout: RopeLayout) -> CudaTensor {
    let (x_bshd, cos, sin) = (dense(x_bshd), dense(cos), dense(sin));
    let ([b, s, heads, width], [table_rows, _, half]) = (x_bshd.shape().dims::<4>(), cos.shape().dims::<3>());
    let client = x_bshd.client.clone();
    let out = empty(&x_bshd, &[b, s, heads, width], x_bshd.dtype);
    let dtypes = [x_bshd.dtype.into(), cos.dtype.into()];
    let vector = match layout {
        RopeLayout::HalfSplit => vector_size(&[half, width]),
        RopeLayout::Interleaved => 1,
    };
    let (half, width) = ((half / vector) as u32, (width / vector) as u32);
    let units = (heads as u32 * half).next_power_of_two().clamp(32, 256);
    let teams = 256 / units;
    let resident = multiprocessors(&client) * (2 * THREADS_PER_PROCESSOR / 256);
    let cubes = (b * s).div_ceil(teams as usize).min(resident as usize) as u32;
    // SAFETY: x and out hold `b * s * heads` rows of `width` vectors, the tables `table_rows * s` rows of `half` vectors with
    // `2 * half <= width`; all are dense and aligned.
    unsafe {
        kernel::launch_unchecked(
            &client,
            CubeCount::Static(cubes, 1, 1),
            CubeDim::new_2d(units, teams),
            vector,
            x_bshd.into_tensor_arg(),
            cos.into_tensor_arg(),
            sin.into_tensor_arg(),
            out.clone().into_tensor_arg(),
            b * s,
            table_rows * s,
            heads as u32,
            half,
            width,
            layout == RopeLayout::Interleaved,
            dtypes,
        );
    }
    out
}

#[cfg(test)]
pub(super) fn variants() -> Vec<String> {
    use super::source::Parameters;
    use half::bf16;

    fn variant<N: Size>(vector: usize, interleaved: bool, half: u32, width: u32) -> String {
        let mut p = Parameters::new();
        let x = p.input::<Vector<bf16, N>>();
        let [cos, sin] = [0; 2].map(|_| p.input::<Vector<f32, N>>());
        let out = p.output::<Vector<bf16, N>>();
        let [tokens, angle_rows] = [0; 2].map(|_| p.scalar::<usize>());
        let heads = p.scalar::<u32>();
        kernel::expand::<bf16, f32, N>(
            &mut p.0.scope,
            vector,
            x,
            cos,
            sin,
            out,
            tokens,
            angle_rows,
            heads,
            half,
            width,
            interleaved,
            [
                bf16::as_type_native_unchecked().storage_type(),
                f32::as_type_native_unchecked().storage_type(),
            ],
        );
        p.source("rope", CubeDim::new_2d(64, 4))
    }
    vec![
        variant::<Const<4>>(4, false, 16, 32),
        variant::<Const<1>>(1, true, 16, 33),
        variant::<Const<2>>(2, false, 5, 12),
    ]
}

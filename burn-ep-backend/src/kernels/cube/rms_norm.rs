//! RMSNorm: one team of units a row.

use burn_backend::{Backend, TensorMetadata};
use cubecl::prelude::*;

use super::super::raw::{CudaTensor, dense, empty};
use super::reduce::{team_sum, vector_sum};
use super::rows::Rows;
use crate::desc::{NormDesc, NormRounding};

#[cube(launch_unchecked, address_type = "u64")]
fn forward_kernel<T: Float, W: Float, N: Size>(
    x: &Tensor<Vector<T, N>>,
    weight: &Tensor<Vector<W, N>>,
    out: &mut Tensor<Vector<T, N>>,
    rows: usize,
    vectors: usize,
    width: f32,
    eps: f32,
    #[comptime] items: usize,
    #[comptime] planes: usize,
    #[comptime] round_before_weight: bool,
    #[define(T, W)] _dtypes: [StorageType; 2],
) {
    let unit = UNIT_POS_X as usize;
    let step = CUBE_DIM_X as usize;
    let mut row = CUBE_POS * CUBE_DIM_Y as usize + UNIT_POS_Y as usize;
    while row < rows {
        let base = row * vectors;
        let mut values = Array::<Vector<f32, N>>::new(items);
        let mut squares = Vector::<f32, N>::new(0.0);
        #[unroll]
        for item in 0..items {
            let column = unit + item * step;
            if column < vectors {
                let value = Vector::<f32, N>::cast_from(x[base + column]);
                squares += value * value;
                values[item] = value;
            }
        }
        let mean = team_sum(vector_sum(squares), planes) / width;
        let scale = Vector::<f32, N>::new(f32::inverse_sqrt(mean + eps));
        #[unroll]
        for item in 0..items {
            let column = unit + item * step;
            if column < vectors {
                let y = values[item] * scale;
                let w = Vector::<f32, N>::cast_from(weight[column]);
                if comptime!(round_before_weight) {
                    let rounded = Vector::<f32, N>::cast_from(Vector::<T, N>::cast_from(y));
                    out[base + column] = Vector::cast_from(w * rounded);
                } else {
                    out[base + column] = Vector::cast_from(w * y);
                }
            }
        }
        row += CUBE_COUNT * CUBE_DIM_Y as usize;
    }
}

/// Each team keeps its own fp32 sum of the weight gradient in registers and stores it at the end.
#[cube(launch_unchecked, address_type = "u64")]
fn backward_kernel<T: Float, W: Float, N: Size>(
    grad: &Tensor<Vector<T, N>>,
    x: &Tensor<Vector<T, N>>,
    weight: &Tensor<Vector<W, N>>,
    grad_x: &mut Tensor<Vector<T, N>>,
    grad_weight_parts: &mut Tensor<Vector<f32, N>>,
    rows: usize,
    vectors: usize,
    width: f32,
    eps: f32,
    #[comptime] items: usize,
    #[comptime] planes: usize,
    #[define(T, W)] _dtypes: [StorageType; 2],
) {
    let unit = UNIT_POS_X as usize;
    let step = CUBE_DIM_X as usize;
    let team = CUBE_POS * CUBE_DIM_Y as usize + UNIT_POS_Y as usize;
    let mut weights = Array::<Vector<f32, N>>::new(items);
    let mut sums = Array::<Vector<f32, N>>::new(items);
    #[unroll]
    for item in 0..items {
        let column = unit + item * step;
        sums[item] = Vector::new(0.0);
        if column < vectors {
            weights[item] = Vector::cast_from(weight[column]);
        }
    }
    let mut row = team;
    while row < rows {
        let base = row * vectors;
        let mut squares = Vector::<f32, N>::new(0.0);
        let mut products = Vector::<f32, N>::new(0.0);
        #[unroll]
        for item in 0..items {
            let column = unit + item * step;
            if column < vectors {
                let value = Vector::<f32, N>::cast_from(x[base + column]);
                let g = Vector::<f32, N>::cast_from(grad[base + column]);
                squares += value * value;
                products += g * weights[item] * value;
            }
        }
        let scale = f32::inverse_sqrt(team_sum(vector_sum(squares), planes) / width + eps);
        let pull = team_sum(vector_sum(products), planes) / width * scale * scale;
        let scale = Vector::<f32, N>::new(scale);
        let pull = Vector::<f32, N>::new(pull);
        #[unroll]
        for item in 0..items {
            let column = unit + item * step;
            if column < vectors {
                let value = Vector::<f32, N>::cast_from(x[base + column]);
                let g = Vector::<f32, N>::cast_from(grad[base + column]);
                grad_x[base + column] = Vector::cast_from(scale * (g * weights[item] - value * pull));
                sums[item] += g * value * scale;
            }
        }
        row += CUBE_COUNT * CUBE_DIM_Y as usize;
    }
    #[unroll]
    for item in 0..items {
        let column = unit + item * step;
        if column < vectors {
            grad_weight_parts[team * vectors + column] = sums[item];
        }
    }
}

/// See [`crate::MoeBackend::rms_norm`]; `rows` are those of `x`.
pub fn rms_norm(x: CudaTensor, weight: CudaTensor, desc: &NormDesc, rows: Rows) -> CudaTensor {
    let (x, weight) = (dense(x), dense(weight));
    let client = x.client.clone();
    let out = empty(&x, &x.shape().iter().copied().collect::<Vec<_>>(), x.dtype);
    let dtypes = [x.dtype.into(), weight.dtype.into()];
    // SAFETY: x and out hold `rows.count` rows of `rows.width` elements and the weight one; all are dense and aligned.
    unsafe {
        forward_kernel::launch_unchecked(
            &client,
            CubeCount::Static(rows.cubes, 1, 1),
            rows.cube_dim,
            rows.vector,
            x.into_tensor_arg(),
            weight.into_tensor_arg(),
            out.clone().into_tensor_arg(),
            rows.count,
            rows.vectors(),
            rows.width as f32,
            desc.eps,
            rows.items,
            rows.planes,
            desc.rounding == NormRounding::Llama,
            dtypes,
        );
    }
    out
}

/// See [`crate::MoeBackend::rms_norm_backward`]; `grad` has the dtype of `x`.
pub fn rms_norm_backward<B>(grad: CudaTensor, x: CudaTensor, weight: CudaTensor, desc: &NormDesc, rows: Rows) -> (CudaTensor, CudaTensor)
where
    B: Backend<FloatTensorPrimitive = CudaTensor>,
{
    let (grad, x, weight) = (dense(grad), dense(x), dense(weight));
    let client = x.client.clone();
    let grad_x = empty(&x, &x.shape().iter().copied().collect::<Vec<_>>(), x.dtype);
    let parts = empty(&x, &[rows.teams(), rows.width], burn_backend::DType::F32);
    let weight_dtype = weight.dtype;
    let dtypes = [x.dtype.into(), weight.dtype.into()];
    // SAFETY: grad, x and grad_x hold `rows.count` rows of `rows.width` elements, the weight one and the parts one for each
    // team; all are dense and aligned.
    unsafe {
        backward_kernel::launch_unchecked(
            &client,
            CubeCount::Static(rows.cubes, 1, 1),
            rows.cube_dim,
            rows.vector,
            grad.into_tensor_arg(),
            x.into_tensor_arg(),
            weight.into_tensor_arg(),
            grad_x.clone().into_tensor_arg(),
            parts.clone().into_tensor_arg(),
            rows.count,
            rows.vectors(),
            rows.width as f32,
            desc.eps,
            rows.items,
            rows.planes,
            dtypes,
        );
    }
    let sum = B::float_reshape(B::float_sum_dim(parts, 0), [rows.width].into());
    (grad_x, B::float_cast(sum, weight_dtype.into()))
}

#[cfg(test)]
pub(super) fn variants() -> Vec<String> {
    use super::source::Parameters;
    use half::bf16;
    type N = Const<4>;

    let dtypes = [
        bf16::as_type_native_unchecked().storage_type(),
        f32::as_type_native_unchecked().storage_type(),
    ];
    let (items, planes) = (3, 8);
    let mut sources = Vec::new();
    for round_before_weight in [false, true] {
        let mut p = Parameters::new();
        let tensors = (
            p.input::<Vector<bf16, N>>(),
            p.input::<Vector<f32, N>>(),
            p.output::<Vector<bf16, N>>(),
        );
        let scalars = (p.scalar::<usize>(), p.scalar::<usize>(), p.scalar::<f32>(), p.scalar::<f32>());
        let scope = &mut p.0.scope;
        forward_kernel::expand::<bf16, f32, N>(
            scope,
            4,
            tensors.0,
            tensors.1,
            tensors.2,
            scalars.0,
            scalars.1,
            scalars.2,
            scalars.3,
            items,
            planes,
            round_before_weight,
            dtypes,
        );
        sources.push(p.source("rms_norm", CubeDim::new_2d(256, 1)));
    }
    let mut p = Parameters::new();
    let inputs = (
        p.input::<Vector<bf16, N>>(),
        p.input::<Vector<bf16, N>>(),
        p.input::<Vector<f32, N>>(),
    );
    let outputs = (p.output::<Vector<bf16, N>>(), p.output::<Vector<f32, N>>());
    let scalars = (p.scalar::<usize>(), p.scalar::<usize>(), p.scalar::<f32>(), p.scalar::<f32>());
    backward_kernel::expand::<bf16, f32, N>(
        &mut p.0.scope,
        4,
        inputs.0,
        inputs.1,
        inputs.2,
        outputs.0,
        outputs.1,
        scalars.0,
        scalars.1,
        scalars.2,
        scalars.3,
        items,
        planes,
        dtypes,
    );
    sources.push(p.source("rms_norm_backward", CubeDim::new_2d(256, 1)));
    sources
}

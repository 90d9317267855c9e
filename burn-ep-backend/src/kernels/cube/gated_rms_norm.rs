//! Gated group RMSNorm of Mamba-2: one team of units a group of a row.

use burn_backend::{Backend, TensorMetadata};
use cubecl::prelude::*;

use super::super::raw::{CudaTensor, dense, empty};
use super::reduce::{sigmoid, team_sum, vector_sum};
use super::rows::Rows;

#[cube(launch_unchecked, address_type = "u64")]
fn forward_kernel<T: Float, Z: Float, W: Float, N: Size>(
    y: &Tensor<Vector<T, N>>,
    z: &Tensor<Vector<Z, N>>,
    weight: &Tensor<Vector<W, N>>,
    out: &mut Tensor<Vector<T, N>>,
    rows: usize,
    vectors: usize,
    groups: usize,
    width: f32,
    eps: f32,
    #[comptime] items: usize,
    #[comptime] planes: usize,
    #[define(T, Z, W)] _dtypes: [StorageType; 3],
) {
    let unit = UNIT_POS_X as usize;
    let step = CUBE_DIM_X as usize;
    let team = CUBE_POS * CUBE_DIM_Y as usize + UNIT_POS_Y as usize;
    let group = team % groups * vectors;
    let mut row = team;
    while row < rows {
        let base = row * vectors;
        let mut values = Array::<Vector<f32, N>>::new(items);
        let mut squares = Vector::<f32, N>::new(0.0);
        #[unroll]
        for item in 0..items {
            let column = unit + item * step;
            if column < vectors {
                let gate = Vector::<f32, N>::cast_from(z[base + column]);
                let value = Vector::<f32, N>::cast_from(y[base + column]) * (gate * sigmoid(gate));
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
                let rounded = Vector::<f32, N>::cast_from(Vector::<T, N>::cast_from(values[item] * scale));
                let w = Vector::<f32, N>::cast_from(weight[group + column]);
                out[base + column] = Vector::cast_from(w * rounded);
            }
        }
        row += CUBE_COUNT * CUBE_DIM_Y as usize;
    }
}

/// Each team keeps the fp32 sum of its group's weight gradient in registers and stores it at the end.
#[cube(launch_unchecked, address_type = "u64")]
fn backward_kernel<T: Float, Z: Float, W: Float, N: Size>(
    grad: &Tensor<Vector<T, N>>,
    y: &Tensor<Vector<T, N>>,
    z: &Tensor<Vector<Z, N>>,
    weight: &Tensor<Vector<W, N>>,
    grad_y: &mut Tensor<Vector<T, N>>,
    grad_z: &mut Tensor<Vector<Z, N>>,
    grad_weight_parts: &mut Tensor<Vector<f32, N>>,
    rows: usize,
    vectors: usize,
    groups: usize,
    width: f32,
    eps: f32,
    #[comptime] items: usize,
    #[comptime] planes: usize,
    #[define(T, Z, W)] _dtypes: [StorageType; 3],
) {
    let unit = UNIT_POS_X as usize;
    let step = CUBE_DIM_X as usize;
    let team = CUBE_POS * CUBE_DIM_Y as usize + UNIT_POS_Y as usize;
    let group = team % groups * vectors;
    let one = Vector::<f32, N>::new(1.0);
    let mut sums = Array::<Vector<f32, N>>::new(items);
    #[unroll]
    for item in 0..items {
        sums[item] = Vector::new(0.0);
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
                let gate = Vector::<f32, N>::cast_from(z[base + column]);
                let value = Vector::<f32, N>::cast_from(y[base + column]) * (gate * sigmoid(gate));
                let g = Vector::<f32, N>::cast_from(grad[base + column]);
                squares += value * value;
                products += g * Vector::cast_from(weight[group + column]) * value;
            }
        }
        let scale = f32::inverse_sqrt(team_sum(vector_sum(squares), planes) / width + eps);
        let pull = team_sum(vector_sum(products), planes) / width * scale * scale;
        let scale = Vector::<f32, N>::new(scale);
        let pull = Vector::<f32, N>::new(pull);
        // the second pass reads the row again, from the cache, instead of holding three tensors in registers
        #[unroll]
        for item in 0..items {
            let column = unit + item * step;
            if column < vectors {
                let gate = Vector::<f32, N>::cast_from(z[base + column]);
                let sigma = sigmoid(gate);
                let before_gate = Vector::<f32, N>::cast_from(y[base + column]);
                let value = before_gate * (gate * sigma);
                let g = Vector::<f32, N>::cast_from(grad[base + column]);
                let w = Vector::<f32, N>::cast_from(weight[group + column]);
                let grad_value = scale * (g * w - value * pull);
                grad_y[base + column] = Vector::cast_from(grad_value * (gate * sigma));
                let slope = sigma * (one + gate * (one - sigma));
                grad_z[base + column] = Vector::cast_from(grad_value * before_gate * slope);
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

/// See [`crate::MoeBackend::gated_rms_norm`]; `rows` are those of `y` cut into `groups`.
pub fn gated_rms_norm(y: CudaTensor, z: CudaTensor, weight: CudaTensor, groups: usize, eps: f32, rows: Rows) -> CudaTensor {
    let (y, z, weight) = (dense(y), dense(z), dense(weight));
    let client = y.client.clone();
    let out = empty(&y, &y.shape().iter().copied().collect::<Vec<_>>(), y.dtype);
    let dtypes = [y.dtype.into(), z.dtype.into(), weight.dtype.into()];
    // SAFETY: y, z and out hold `rows.count` rows of `rows.width` elements and the weight `groups` of them; all are dense
    // and aligned, and the number of teams is a multiple of the groups.
    unsafe {
        forward_kernel::launch_unchecked(
            &client,
            CubeCount::Static(rows.cubes, 1, 1),
            rows.cube_dim,
            rows.vector,
            y.into_tensor_arg(),
            z.into_tensor_arg(),
            weight.into_tensor_arg(),
            out.clone().into_tensor_arg(),
            rows.count,
            rows.vectors(),
            groups,
            rows.width as f32,
            eps,
            rows.items,
            rows.planes,
            dtypes,
        );
    }
    out
}

/// See [`crate::MoeBackend::gated_rms_norm_backward`]; `grad` has the dtype of `y`.
pub fn gated_rms_norm_backward<B>(
    grad: CudaTensor,
    y: CudaTensor,
    z: CudaTensor,
    weight: CudaTensor,
    groups: usize,
    eps: f32,
    rows: Rows,
) -> (CudaTensor, CudaTensor, CudaTensor)
where
    B: Backend<FloatTensorPrimitive = CudaTensor>,
{
    let (grad, y, z, weight) = (dense(grad), dense(y), dense(z), dense(weight));
    let client = y.client.clone();
    let shape = y.shape().iter().copied().collect::<Vec<_>>();
    let (grad_y, grad_z) = (empty(&y, &shape, y.dtype), empty(&y, &shape, z.dtype));
    let parts = empty(&y, &[rows.teams() / groups, groups * rows.width], burn_backend::DType::F32);
    let weight_dtype = weight.dtype;
    let dtypes = [y.dtype.into(), z.dtype.into(), weight.dtype.into()];
    // SAFETY: as in `gated_rms_norm`; the parts hold one row of `rows.width` elements for each team.
    unsafe {
        backward_kernel::launch_unchecked(
            &client,
            CubeCount::Static(rows.cubes, 1, 1),
            rows.cube_dim,
            rows.vector,
            grad.into_tensor_arg(),
            y.into_tensor_arg(),
            z.into_tensor_arg(),
            weight.into_tensor_arg(),
            grad_y.clone().into_tensor_arg(),
            grad_z.clone().into_tensor_arg(),
            parts.clone().into_tensor_arg(),
            rows.count,
            rows.vectors(),
            groups,
            rows.width as f32,
            eps,
            rows.items,
            rows.planes,
            dtypes,
        );
    }
    let sum = B::float_reshape(B::float_sum_dim(parts, 0), [groups * rows.width].into());
    (grad_y, grad_z, B::float_cast(sum, weight_dtype.into()))
}

#[cfg(test)]
pub(super) fn variants() -> Vec<String> {
    use super::source::Parameters;
    use half::bf16;
    type N = Const<2>;

    let dtypes = [bf16::as_type_native_unchecked().storage_type(); 3];
    let (items, planes) = (4, 1);
    let mut p = Parameters::new();
    let [y, z, w] = [0; 3].map(|_| p.input::<Vector<bf16, N>>());
    let out = p.output::<Vector<bf16, N>>();
    let [rows, vectors, groups] = [0; 3].map(|_| p.scalar::<usize>());
    let [width, eps] = [0; 2].map(|_| p.scalar::<f32>());
    forward_kernel::expand::<bf16, bf16, bf16, N>(
        &mut p.0.scope,
        2,
        y,
        z,
        w,
        out,
        rows,
        vectors,
        groups,
        width,
        eps,
        items,
        planes,
        dtypes,
    );
    let forward = p.source("gated_rms_norm", CubeDim::new_2d(32, 8));

    let mut p = Parameters::new();
    let [grad, y, z, w] = [0; 4].map(|_| p.input::<Vector<bf16, N>>());
    let [grad_y, grad_z] = [0; 2].map(|_| p.output::<Vector<bf16, N>>());
    let parts = p.output::<Vector<f32, N>>();
    let [rows, vectors, groups] = [0; 3].map(|_| p.scalar::<usize>());
    let [width, eps] = [0; 2].map(|_| p.scalar::<f32>());
    backward_kernel::expand::<bf16, bf16, bf16, N>(
        &mut p.0.scope,
        2,
        grad,
        y,
        z,
        w,
        grad_y,
        grad_z,
        parts,
        rows,
        vectors,
        groups,
        width,
        eps,
        items,
        planes,
        dtypes,
    );
    vec![forward, p.source("gated_rms_norm_backward", CubeDim::new_2d(32, 8))]
}

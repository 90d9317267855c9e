//! RMSNorm, with a residual added before it, and the gated group RMSNorm of Mamba-2: one team of units a row, or a group of a row.

use burn_backend::TensorMetadata;
use cubecl::prelude::*;

use super::super::raw::{CudaTensor, dense, empty};
use super::column_sums::column_sums;
use super::reduce::{sigmoid, team_sum, vector_sum};
use super::rows::Rows;

/// What is normalised: `x`, or `x * silu(z)`.
#[cube]
fn gated_value<T: Float, Z: Float, N: Size>(x: Vector<T, N>, z: Vector<Z, N>, #[comptime] gated: bool) -> Vector<f32, N> {
    let value = Vector::<f32, N>::cast_from(x);
    if comptime!(gated) {
        let gate = Vector::<f32, N>::cast_from(z);
        value * (gate * sigmoid(gate))
    } else {
        value
    }
}

/// With `added`, z is a residual in the dtype of x, and `sum` takes x + z. A tensor that a variant does not use is neither read nor
/// written. A team reads `together` rows before it needs the first: narrow rows would otherwise leave the memory idle. What lies
/// beyond the end is read from the last place instead, without a branch between the loads, and not used.
#[cube(launch_unchecked, address_type = "u64")]
fn forward_kernel<T: Float, Z: Float, W: Float, N: Size>(
    x: &Tensor<Vector<T, N>>,
    z: &Tensor<Vector<Z, N>>,
    weight: &Tensor<Vector<W, N>>,
    out: &mut Tensor<Vector<T, N>>,
    sum: &mut Tensor<Vector<T, N>>,
    rows: usize,
    vectors: usize,
    groups: usize,
    width: f32,
    eps: f32,
    #[comptime] items: usize,
    #[comptime] planes: usize,
    #[comptime] together: usize,
    #[comptime] gated: bool,
    #[comptime] added: bool,
    #[comptime] round_before_weight: bool,
    #[define(T, Z, W)] _dtypes: [StorageType; 3],
) {
    let unit = UNIT_POS_X as usize;
    let step = CUBE_DIM_X as usize;
    let team = CUBE_POS * CUBE_DIM_Y as usize + UNIT_POS_Y as usize;
    let group = team % groups * vectors;
    let teams = CUBE_COUNT * CUBE_DIM_Y as usize;
    let mut first = team;
    while first < rows {
        let mut xs = Array::<Vector<T, N>>::new(items * together);
        let mut zs = Array::<Vector<Z, N>>::new(items * together);
        #[unroll]
        for r in 0..together {
            let base = min(first + r * teams, rows - 1) * vectors;
            #[unroll]
            for item in 0..items {
                let at = base + min(unit + item * step, vectors - 1);
                xs[r * items + item] = x[at];
                if comptime!(gated || added) {
                    zs[r * items + item] = z[at];
                }
            }
        }
        #[unroll]
        for r in 0..together {
            let row = first + r * teams;
            if row < rows {
                let base = row * vectors;
                let mut values = Array::<Vector<f32, N>>::new(items);
                let mut squares = Vector::<f32, N>::new(0.0);
                #[unroll]
                for item in 0..items {
                    let column = unit + item * step;
                    if column < vectors {
                        let mut value = gated_value::<T, Z, N>(xs[r * items + item], zs[r * items + item], gated);
                        if comptime!(added) {
                            let rounded = Vector::<T, N>::cast_from(value + Vector::<f32, N>::cast_from(zs[r * items + item]));
                            sum[base + column] = rounded;
                            value = Vector::<f32, N>::cast_from(rounded);
                        }
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
                        let w = Vector::<f32, N>::cast_from(weight[group + column]);
                        if comptime!(round_before_weight) {
                            let rounded = Vector::<f32, N>::cast_from(Vector::<T, N>::cast_from(y));
                            out[base + column] = Vector::cast_from(w * rounded);
                        } else {
                            out[base + column] = Vector::cast_from(w * y);
                        }
                    }
                }
            }
        }
        first += together * teams;
    }
}

/// Each team keeps its own fp32 sum of the weight gradient in registers and stores it at the end. With `added`, `grad_so_far` is added to
/// the gradient of x.
#[cube(launch_unchecked, address_type = "u64")]
fn backward_kernel<T: Float, Z: Float, W: Float, N: Size>(
    grad: &Tensor<Vector<T, N>>,
    x: &Tensor<Vector<T, N>>,
    z: &Tensor<Vector<Z, N>>,
    weight: &Tensor<Vector<W, N>>,
    grad_so_far: &Tensor<Vector<T, N>>,
    grad_x: &mut Tensor<Vector<T, N>>,
    grad_z: &mut Tensor<Vector<Z, N>>,
    grad_weight_parts: &mut Tensor<Vector<f32, N>>,
    rows: usize,
    vectors: usize,
    groups: usize,
    width: f32,
    eps: f32,
    #[comptime] items: usize,
    #[comptime] planes: usize,
    #[comptime] together: usize,
    #[comptime] gated: bool,
    #[comptime] added: bool,
    #[define(T, Z, W)] _dtypes: [StorageType; 3],
) {
    let unit = UNIT_POS_X as usize;
    let step = CUBE_DIM_X as usize;
    let team = CUBE_POS * CUBE_DIM_Y as usize + UNIT_POS_Y as usize;
    let group = team % groups * vectors;
    let one = Vector::<f32, N>::new(1.0);
    let mut weights = Array::<Vector<f32, N>>::new(items);
    let mut sums = Array::<Vector<f32, N>>::new(items);
    #[unroll]
    for item in 0..items {
        let column = unit + item * step;
        sums[item] = Vector::new(0.0);
        if column < vectors {
            weights[item] = Vector::cast_from(weight[group + column]);
        }
    }
    let teams = CUBE_COUNT * CUBE_DIM_Y as usize;
    let mut first = team;
    while first < rows {
        let mut xs = Array::<Vector<T, N>>::new(items * together);
        let mut gs = Array::<Vector<T, N>>::new(items * together);
        let mut zs = Array::<Vector<Z, N>>::new(items * together);
        let mut before = Array::<Vector<T, N>>::new(items * together);
        #[unroll]
        for r in 0..together {
            let base = min(first + r * teams, rows - 1) * vectors;
            #[unroll]
            for item in 0..items {
                let at = base + min(unit + item * step, vectors - 1);
                xs[r * items + item] = x[at];
                gs[r * items + item] = grad[at];
                if comptime!(gated) {
                    zs[r * items + item] = z[at];
                }
                if comptime!(added) {
                    before[r * items + item] = grad_so_far[at];
                }
            }
        }
        #[unroll]
        for r in 0..together {
            let row = first + r * teams;
            if row < rows {
                let base = row * vectors;
                let mut squares = Vector::<f32, N>::new(0.0);
                let mut products = Vector::<f32, N>::new(0.0);
                #[unroll]
                for item in 0..items {
                    if unit + item * step < vectors {
                        let value = gated_value::<T, Z, N>(xs[r * items + item], zs[r * items + item], gated);
                        let g = Vector::<f32, N>::cast_from(gs[r * items + item]);
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
                        let at = base + column;
                        let value = gated_value::<T, Z, N>(xs[r * items + item], zs[r * items + item], gated);
                        let g = Vector::<f32, N>::cast_from(gs[r * items + item]);
                        let grad_value = scale * (g * weights[item] - value * pull);
                        sums[item] += g * value * scale;
                        if comptime!(gated) {
                            let gate = Vector::<f32, N>::cast_from(zs[r * items + item]);
                            let sigma = sigmoid(gate);
                            grad_x[at] = Vector::cast_from(grad_value * (gate * sigma));
                            let slope = sigma * (one + gate * (one - sigma));
                            let ungated = Vector::<f32, N>::cast_from(xs[r * items + item]);
                            grad_z[at] = Vector::cast_from(grad_value * ungated * slope);
                        } else if comptime!(added) {
                            let so_far = Vector::<f32, N>::cast_from(before[r * items + item]);
                            grad_x[at] = Vector::cast_from(grad_value + so_far);
                        } else {
                            grad_x[at] = Vector::cast_from(grad_value);
                        }
                    }
                }
            }
        }
        first += together * teams;
    }
    #[unroll]
    for item in 0..items {
        let column = unit + item * step;
        if column < vectors {
            grad_weight_parts[team * vectors + column] = sums[item];
        }
    }
}

/// What else goes into a norm.
pub enum Other {
    Nothing,
    /// The gate of Mamba-2.
    Gate(CudaTensor),
    /// Added to x first; of its dtype.
    Residual(CudaTensor),
}

/// See [`crate::MoeBackend::rms_norm`], with a gate [`crate::MoeBackend::gated_rms_norm`] and with a residual
/// [`crate::MoeBackend::add_rms_norm`]; `rows` are those of `x` cut into `groups`. The norm, and the sum if there is a residual.
pub fn forward(
    x: CudaTensor,
    other: Other,
    weight: CudaTensor,
    groups: usize,
    eps: f32,
    round_before_weight: bool,
    rows: Rows,
) -> (CudaTensor, Option<CudaTensor>) {
    let (x, weight) = (dense(x), dense(weight));
    let (gated, added) = (matches!(other, Other::Gate(_)), matches!(other, Other::Residual(_)));
    // what is absent is bound to something else and never touched
    let z = match other {
        Other::Nothing => x.clone(),
        Other::Gate(z) | Other::Residual(z) => dense(z),
    };
    let client = x.client.clone();
    let shape = x.shape().iter().copied().collect::<Vec<_>>();
    let out = empty(&x, &shape, x.dtype);
    let sum = added.then(|| empty(&x, &shape, x.dtype));
    let dtypes = [x.dtype.into(), z.dtype.into(), weight.dtype.into()];
    // SAFETY: x, z, out and sum hold `rows.count` rows of `rows.width` elements and the weight `groups` of them; all are dense
    // and aligned, and the number of teams is a multiple of the groups.
    unsafe {
        forward_kernel::launch_unchecked(
            &client,
            CubeCount::Static(rows.cubes, 1, 1),
            rows.cube_dim,
            rows.vector,
            x.into_tensor_arg(),
            z.into_tensor_arg(),
            weight.into_tensor_arg(),
            out.clone().into_tensor_arg(),
            sum.as_ref().unwrap_or(&out).clone().into_tensor_arg(),
            rows.count,
            rows.vectors(),
            groups,
            rows.width as f32,
            eps,
            rows.items,
            rows.planes,
            rows.together(8),
            gated,
            added,
            round_before_weight,
            dtypes,
        );
    }
    (out, sum)
}

/// Gradients of x, the gate and the weight; `grad` and `so_far`, which is added to the gradient of x of a norm without gate, have
/// the dtype of `x`.
pub fn backward(
    grad: CudaTensor,
    x: CudaTensor,
    gate: Option<CudaTensor>,
    so_far: Option<CudaTensor>,
    weight: CudaTensor,
    groups: usize,
    eps: f32,
    rows: Rows,
) -> (CudaTensor, Option<CudaTensor>, CudaTensor) {
    let (grad, x, weight) = (dense(grad), dense(x), dense(weight));
    let client = x.client.clone();
    let shape = x.shape().iter().copied().collect::<Vec<_>>();
    let grad_x = empty(&x, &shape, x.dtype);
    let grad_gate = gate.as_ref().map(|gate| empty(&x, &shape, gate.dtype));
    let gate = gate.map_or_else(|| x.clone(), dense);
    let added = so_far.is_some();
    let so_far = so_far.map_or_else(|| grad.clone(), dense);
    let parts = empty(&x, &[rows.teams() / groups, groups * rows.width], burn_backend::DType::F32);
    let weight_dtype = weight.dtype;
    let dtypes = [x.dtype.into(), gate.dtype.into(), weight.dtype.into()];
    // SAFETY: as in `forward`; the parts hold one row of `rows.width` elements for each team.
    unsafe {
        backward_kernel::launch_unchecked(
            &client,
            CubeCount::Static(rows.cubes, 1, 1),
            rows.cube_dim,
            rows.vector,
            grad.into_tensor_arg(),
            x.into_tensor_arg(),
            gate.into_tensor_arg(),
            weight.into_tensor_arg(),
            so_far.into_tensor_arg(),
            grad_x.clone().into_tensor_arg(),
            grad_gate.as_ref().unwrap_or(&grad_x).clone().into_tensor_arg(),
            parts.clone().into_tensor_arg(),
            rows.count,
            rows.vectors(),
            groups,
            rows.width as f32,
            eps,
            rows.items,
            rows.planes,
            rows.together(4),
            grad_gate.is_some(),
            added,
            dtypes,
        );
    }
    (grad_x, grad_gate, column_sums(parts, &[groups * rows.width], weight_dtype))
}

#[cfg(test)]
pub(super) fn variants() -> Vec<String> {
    use super::source::Parameters;
    use half::bf16;
    type N = Const<4>;

    let narrow = bf16::as_type_native_unchecked().storage_type();
    let dtypes = [narrow, narrow, f32::as_type_native_unchecked().storage_type()];
    let mut sources = Vec::new();
    // wide rows of several planes, and the narrow groups of Mamba-2
    let (wide, narrow_rows) = (CubeDim::new_2d(256, 1), CubeDim::new_2d(32, 8));
    for (gated, added, items, planes, cube_dim) in [
        (false, false, 3, 8, wide),
        (false, true, 3, 8, wide),
        (true, false, 4, 1, narrow_rows),
    ] {
        for round_before_weight in [false, true] {
            let mut p = Parameters::new();
            let [x, z] = [(); 2].map(|()| p.input::<Vector<bf16, N>>());
            let w = p.input::<Vector<f32, N>>();
            let [out, sum] = [(); 2].map(|()| p.output::<Vector<bf16, N>>());
            let [rows, vectors, groups] = [(); 3].map(|()| p.scalar::<usize>());
            let [width, eps] = [(); 2].map(|()| p.scalar::<f32>());
            forward_kernel::expand::<bf16, bf16, f32, N>(
                &mut p.0.scope,
                4,
                x,
                z,
                w,
                out,
                sum,
                rows,
                vectors,
                groups,
                width,
                eps,
                items,
                planes,
                2,
                gated,
                added,
                round_before_weight,
                dtypes,
            );
            sources.push(p.source("rms_norm", cube_dim));
        }
        let mut p = Parameters::new();
        let [grad, x, z] = [(); 3].map(|()| p.input::<Vector<bf16, N>>());
        let w = p.input::<Vector<f32, N>>();
        let so_far = p.input::<Vector<bf16, N>>();
        let [grad_x, grad_z] = [(); 2].map(|()| p.output::<Vector<bf16, N>>());
        let parts = p.output::<Vector<f32, N>>();
        let [rows, vectors, groups] = [(); 3].map(|()| p.scalar::<usize>());
        let [width, eps] = [(); 2].map(|()| p.scalar::<f32>());
        backward_kernel::expand::<bf16, bf16, f32, N>(
            &mut p.0.scope,
            4,
            grad,
            x,
            z,
            w,
            so_far,
            grad_x,
            grad_z,
            parts,
            rows,
            vectors,
            groups,
            width,
            eps,
            items,
            planes,
            2,
            gated,
            added,
            dtypes,
        );
        sources.push(p.source("rms_norm_backward", cube_dim));
    }
    sources
}

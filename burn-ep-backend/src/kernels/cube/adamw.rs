//! AdamW: one pass over a parameter and its state, arithmetic in fp32, in place where nobody else holds the buffers.

use burn_backend::{DType, TensorMetadata};
use cubecl::prelude::*;

use super::super::raw::{CudaTensor, dense, empty};
use super::fits;
use super::launch::{ROW_UNITS, addresses, dense_f32, vector_size};
use crate::MoeBackend;
use crate::backend::AdamWPrim;
use crate::desc::AdamWDesc;

/// Vectors per unit.
const PER_UNIT: usize = 4;

/// `value` for a tensor of bf16, rounded at random like [`crate::ops`]'s own: see `stochastic_bf16` there. `index` counts vectors.
#[cube]
fn stochastic<N: Size>(value: Vector<f32, N>, seed: u32, index: usize, #[comptime] tensor: u32) -> Vector<f32, N> {
    let bits = Vector::<u32, N>::reinterpret(value);
    let mut rounded = Vector::<u32, N>::empty();
    #[unroll]
    for lane in 0..N::value() {
        let element = u32::cast_from(index * N::value() + lane);
        let mut x = (element * 0x9e37_79b1u32) ^ seed ^ comptime!(tensor.wrapping_mul(0x85eb_ca77));
        x = (x ^ (x >> 16u32)) * 0x7feb_352du32;
        x = (x ^ (x >> 15u32)) * 0x846c_a68bu32;
        x = x ^ (x >> 16u32);
        let exponent = bits[lane] & 0x7f80_0000u32;
        // Infinities and NaN stay.
        let noise = select(exponent == 0x7f80_0000u32, 0u32, x & 0xffffu32);
        rounded[lane] = (bits[lane] + noise) & 0xffff_0000u32;
    }
    Vector::<f32, N>::reinterpret(rounded)
}

/// `m += (g - m) * take_m`, `v = v * keep_v + g² * take_v`, `p = p * decay - step_size * m / (sqrt(v) / v_root + eps)`.
///
/// A scale that is not finite leaves everything as it is. Each output may be the buffer of its own input: an element is read
/// and written by the same unit only.
#[cube(launch_unchecked, address_type = "dynamic")]
fn step_kernel<P: Float, G: Float, M: Float, V: Float, N: Size>(
    param: &Tensor<Vector<P, N>>,
    grad: &Tensor<Vector<G, N>>,
    m: &Tensor<Vector<M, N>>,
    v: &Tensor<Vector<V, N>>,
    master: &Tensor<Vector<f32, N>>,
    grad_scale: &Tensor<f32>,
    param_out: &mut Tensor<Vector<P, N>>,
    m_out: &mut Tensor<Vector<M, N>>,
    v_out: &mut Tensor<Vector<V, N>>,
    master_out: &mut Tensor<Vector<f32, N>>,
    n: usize,
    decay: f32,
    take_m: f32,
    keep_v: f32,
    take_v: f32,
    v_root: f32,
    eps: f32,
    step_size: f32,
    seed: u32,
    #[comptime] has_master: bool,
    #[comptime] scaled: bool,
    #[comptime] random: [bool; 3],
    #[define(P, G, M, V)] _dtypes: [StorageType; 4],
) {
    let mut scale = f32::new(1.0);
    if comptime!(scaled) {
        scale = grad_scale[0];
    }
    // False for NaN, too.
    let finite = scale.abs() <= 3.0e38;
    let stride = CUBE_DIM as usize;
    let first = CUBE_POS * stride * PER_UNIT + UNIT_POS as usize;
    #[unroll]
    for step in 0..PER_UNIT {
        let i = first + step * stride;
        if i < n {
            if finite {
                let g = Vector::<f32, N>::cast_from(grad[i]) * Vector::new(scale);
                let old_m = Vector::<f32, N>::cast_from(m[i]);
                let new_m = old_m + (g - old_m) * Vector::new(take_m);
                let new_v = Vector::<f32, N>::cast_from(v[i]) * Vector::new(keep_v) + g * Vector::new(take_v) * g;
                let mut p = Vector::<f32, N>::cast_from(param[i]);
                if comptime!(has_master) {
                    p = master[i];
                }
                let root = new_v.sqrt() / Vector::new(v_root) + Vector::new(eps);
                let new_p = p * Vector::new(decay) - new_m / root * Vector::new(step_size);
                if comptime!(has_master) {
                    master_out[i] = new_p;
                }
                let mut stored_p = new_p;
                let mut stored_m = new_m;
                let mut stored_v = new_v;
                if comptime!(random[0]) {
                    stored_p = stochastic(new_p, seed, i, 1u32);
                }
                if comptime!(random[1]) {
                    stored_m = stochastic(new_m, seed, i, 2u32);
                }
                if comptime!(random[2]) {
                    stored_v = stochastic(new_v, seed, i, 3u32);
                }
                param_out[i] = Vector::cast_from(stored_p);
                m_out[i] = Vector::cast_from(stored_m);
                v_out[i] = Vector::cast_from(stored_v);
            } else {
                param_out[i] = param[i];
                m_out[i] = m[i];
                v_out[i] = v[i];
                if comptime!(has_master) {
                    master_out[i] = master[i];
                }
            }
        }
    }
}

/// Whether the kernel takes these dtypes.
pub fn supports<B>(state: &AdamWPrim<B>, grad: &CudaTensor) -> bool
where
    B: MoeBackend<FloatTensorPrimitive = CudaTensor>,
{
    let floats = fits([&state.param, &state.m, &state.v, grad]);
    let master = state.master.as_ref().is_none_or(|master| master.dtype == DType::F32);
    floats && master && state.param.shape().num_elements() > 0
}

/// A tensor that will be overwritten by its own update: where to read, where to write, and the result.
struct Update {
    read: TensorArg<cubecl::cuda::CudaRuntime>,
    write: TensorArg<cubecl::cuda::CudaRuntime>,
    out: CudaTensor,
}

impl Update {
    /// `at` is the position of the tensor among the kernel's arguments.
    fn new(tensor: CudaTensor, at: usize) -> Self {
        let tensor = dense(tensor);
        if tensor.can_mut() {
            return Self {
                write: tensor.as_tensor_alias(at),
                read: tensor.clone().into_tensor_arg(),
                out: tensor,
            };
        }
        let shape: Vec<usize> = tensor.shape().iter().copied().collect();
        let out = empty(&tensor, &shape, tensor.dtype);
        Self {
            read: tensor.into_tensor_arg(),
            write: out.clone().into_tensor_arg(),
            out,
        }
    }
}

/// See [`MoeBackend::adamw_step`].
pub fn adamw_step<B>(state: AdamWPrim<B>, grad: CudaTensor, grad_scale: Option<CudaTensor>, desc: &AdamWDesc) -> AdamWPrim<B>
where
    B: MoeBackend<FloatTensorPrimitive = CudaTensor>,
{
    let grad = dense(grad);
    let n = grad.shape().num_elements();
    let client = grad.client.clone();
    let address = addresses(&[&grad, &state.param]);
    let dtypes = [&state.param, &grad, &state.m, &state.v].map(|tensor| tensor.dtype.into());
    let (has_master, scaled) = (state.master.is_some(), grad_scale.is_some());
    let param = Update::new(state.param, 0);
    let (m, v) = (Update::new(state.m, 2), Update::new(state.v, 3));
    // Absent tensors are neither read nor written; one element stands in for them.
    let unread = empty(&grad, &[1], DType::F32);
    let master = Update::new(state.master.unwrap_or_else(|| unread.clone()), 4);
    let grad_scale = grad_scale.map_or(unread, dense_f32);
    let factors = desc.factors();
    let widest = [&param.out, &m.out, &v.out, &grad]
        .map(|tensor| tensor.dtype.size())
        .into_iter()
        .max();
    let vector = match (has_master, widest) {
        (false, Some(2)) => vector_size(DType::BF16, n),
        _ => vector_size(DType::F32, n),
    };
    let n = n / vector;
    let on = |tensor: &CudaTensor| desc.stochastic_rounding.is_some() && tensor.dtype == DType::BF16;
    let random = [on(&param.out) && !has_master, on(&m.out), on(&v.out)];
    // SAFETY: the cubes cover `n` vectors and each unit checks that bound; all tensors are dense with `n` vectors.
    unsafe {
        step_kernel::launch_unchecked(
            &client,
            CubeCount::Static(n.div_ceil(ROW_UNITS as usize * PER_UNIT) as u32, 1, 1),
            CubeDim::new_1d(ROW_UNITS),
            address,
            vector,
            param.read,
            grad.into_tensor_arg(),
            m.read,
            v.read,
            master.read,
            grad_scale.into_tensor_arg(),
            param.write,
            m.write,
            v.write,
            master.write,
            n,
            factors.decay as f32,
            factors.take_m as f32,
            factors.keep_v as f32,
            factors.take_v as f32,
            factors.v_root as f32,
            factors.eps as f32,
            factors.step_size as f32,
            desc.stochastic_rounding.unwrap_or(0),
            has_master,
            scaled,
            random,
            dtypes,
        );
    }
    AdamWPrim {
        param: param.out,
        m: m.out,
        v: v.out,
        master: has_master.then_some(master.out),
    }
}

#[cfg(test)]
mod tests {
    use super::super::compile_check::*;
    use super::*;

    #[test]
    fn step_kernel_compiles_for_sm_90a() {
        let mixed = [DType::BF16, DType::BF16, DType::F32, DType::BF16];
        for (dtypes, flag) in [([DType::F32; 4], false), ([DType::BF16; 4], true), (mixed, true)] {
            for in_place in [false, true] {
                compile(ROW_UNITS, |b| {
                    use step_kernel::{G, M, N, P, V};
                    let [p, g, m, v] = dtypes.map(StorageType::from);
                    b.scope.register_type::<P>(p);
                    b.scope.register_type::<G>(g);
                    b.scope.register_type::<M>(m);
                    b.scope.register_type::<V>(v);
                    b.scope.register_size::<N>(4);
                    let (param, grad, m, v, master, scale) = (input(b), input(b), input(b), input(b), input(b), input(b));
                    let at = |position| in_place.then_some(position);
                    let outs = (output_at(b, at(0)), output_at(b, at(2)), output_at(b, at(3)), output_at(b, at(4)));
                    let n = scalar::<usize>(b);
                    let f: [_; 7] = std::array::from_fn(|_| scalar::<f32>(b));
                    let seed = scalar::<u32>(b);
                    let [decay, take_m, keep_v, take_v, v_root, eps, step_size] = f;
                    let scope = &mut b.scope;
                    step_kernel::expand::<P, G, M, V, N>(
                        scope,
                        4,
                        param,
                        grad,
                        m,
                        v,
                        master,
                        scale,
                        outs.0,
                        outs.1,
                        outs.2,
                        outs.3,
                        n,
                        decay,
                        take_m,
                        keep_v,
                        take_v,
                        v_root,
                        eps,
                        step_size,
                        seed,
                        flag,
                        flag,
                        [in_place; 3],
                        dtypes.map(StorageType::from),
                    );
                });
            }
        }
    }
}

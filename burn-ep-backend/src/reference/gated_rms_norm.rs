//! Gated group RMSNorm of Mamba-2 (Dao and Gu 2024) on plain tensors: gate first, then norm.

use burn_backend::{Backend, TensorMetadata, tensor::FloatTensor};
use burn_tensor::{Tensor, activation::sigmoid};

use super::prim::{cast, primitive, wide};

/// `weight * cast(RMSNorm_groups(y * silu(z)))`, dtype of y.
pub fn gated_rms_norm<B: Backend>(
    y: FloatTensor<B>,
    z: FloatTensor<B>,
    weight_d: FloatTensor<B>,
    groups: usize,
    eps: f32,
) -> FloatTensor<B> {
    let (shape, dtype) = (y.shape(), y.dtype());
    let (y_rgd, z_rgd) = (grouped::<B>(y, groups), grouped::<B>(z, groups));
    let wide_dtype = y_rgd.dtype();
    let v_rgd = y_rgd * silu(z_rgd.cast(wide_dtype));
    let inverse_rg1 = inverse_rms(v_rgd.clone(), eps);
    let rounded_rgd = (v_rgd * inverse_rg1).cast(dtype).cast(wide_dtype);
    let out_rgd = rounded_rgd * weight_grouped::<B>(weight_d, groups, wide_dtype);
    B::float_reshape(primitive(out_rgd.cast(dtype)), shape)
}

/// Gradients (y, z, weight): RMSNorm backward per group for `v = y * silu(z)`, then the product rule.
pub fn gated_rms_norm_backward<B: Backend>(
    grad: FloatTensor<B>,
    y: FloatTensor<B>,
    z: FloatTensor<B>,
    weight_d: FloatTensor<B>,
    groups: usize,
    eps: f32,
) -> (FloatTensor<B>, FloatTensor<B>, FloatTensor<B>) {
    let (shape, dtypes) = (y.shape(), [y.dtype(), z.dtype(), weight_d.dtype()]);
    let width = weight_d.shape()[0];
    let y_rgd = grouped::<B>(y, groups);
    let wide_dtype = y_rgd.dtype();
    let z_rgd = grouped::<B>(z, groups).cast(wide_dtype);
    let grad_rgd = grouped::<B>(grad, groups).cast(wide_dtype);
    let weight_1gd = weight_grouped::<B>(weight_d, groups, wide_dtype);

    let gate_rgd = silu(z_rgd.clone());
    let v_rgd = y_rgd.clone() * gate_rgd.clone();
    let inverse_rg1 = inverse_rms(v_rgd.clone(), eps);
    let normed_rgd = v_rgd * inverse_rg1.clone();
    let scaled_rgd = grad_rgd.clone() * weight_1gd;
    let mean_rg1 = (scaled_rgd.clone() * normed_rgd.clone()).mean_dim(2);
    let dv_rgd = (scaled_rgd - normed_rgd.clone() * mean_rg1) * inverse_rg1;

    let sigma_rgd = sigmoid(z_rgd.clone());
    // silu'(z) = sigma * (1 + z * (1 - sigma))
    let slope_rgd = (z_rgd * (sigma_rgd.clone().neg() + 1.0) + 1.0) * sigma_rgd;
    let dy_rgd = dv_rgd.clone() * gate_rgd;
    let dz_rgd = dv_rgd * y_rgd * slope_rgd;
    let dweight_gd = (grad_rgd * normed_rgd).sum_dim(0);
    (
        B::float_reshape(primitive(dy_rgd.cast(dtypes[0])), shape.clone()),
        B::float_reshape(primitive(dz_rgd.cast(dtypes[1])), shape),
        B::float_reshape(primitive(dweight_gd.cast(dtypes[2])), [width].into()),
    )
}

fn silu<B: Backend>(z: Tensor<B, 3>) -> Tensor<B, 3> {
    z.clone() * sigmoid(z)
}

/// `x` as wide `[R, G, D / G]`.
fn grouped<B: Backend>(x: FloatTensor<B>, groups: usize) -> Tensor<B, 3> {
    let shape = x.shape();
    let width = shape[shape.num_dims() - 1];
    let rows = shape.num_elements() / width.max(1);
    wide::<B, 3>(B::float_reshape(x, [rows, groups, width / groups].into()))
}

fn weight_grouped<B: Backend>(weight_d: FloatTensor<B>, groups: usize, dtype: burn_backend::DType) -> Tensor<B, 3> {
    let width = weight_d.shape()[0];
    cast::<B, 1>(weight_d, dtype).reshape([1, groups, width / groups])
}

fn inverse_rms<B: Backend>(v_rgd: Tensor<B, 3>, eps: f32) -> Tensor<B, 3> {
    (v_rgd.clone() * v_rgd).mean_dim(2).add_scalar(eps).sqrt().recip()
}

#[cfg(test)]
mod tests {
    use burn_std::DType;

    use crate::ops;
    use crate::reference::prim;
    use crate::testing::{Ad, assert_close, assert_low_precision, dot, f64s, numeric_gradient, tensor, values};

    const EPS: f32 = 1e-5;

    fn naive(y: &[f64], z: &[f64], w: &[f64], groups: usize) -> Vec<f64> {
        let d = w.len();
        let part = d / groups;
        let v: Vec<f64> = y.iter().zip(z).map(|(y, z)| y * z / (1.0 + (-z).exp())).collect();
        let mut out = Vec::new();
        for (row, group) in v.chunks(part).enumerate() {
            let mean = group.iter().map(|v| v * v).sum::<f64>() / part as f64;
            let first = row % groups * part;
            out.extend((0..part).map(|i| group[i] / (mean + f64::from(EPS)).sqrt() * w[first + i]));
        }
        out
    }

    #[test]
    fn forward_and_gradients_match_loops() {
        for (rows, d, groups) in [(1, 1, 1), (3, 10, 1), (5, 12, 3), (130, 8, 2)] {
            let (y, z, w, up) = (values(1, rows * d), values(2, rows * d), values(3, d), values(4, rows * d));
            for (dtype, tolerance) in [(DType::F64, 1e-8), (DType::F32, 3e-5)] {
                let yt = tensor::<Ad, 2>(&y, [rows, d], dtype).require_grad();
                let zt = tensor::<Ad, 2>(&z, [rows, d], dtype).require_grad();
                let wt = tensor::<Ad, 1>(&w, [d], dtype).require_grad();
                let out = ops::gated_rms_norm(yt.clone(), zt.clone(), wt.clone(), groups, EPS).expect("valid shapes");
                assert_close("out", &f64s(out.clone()), &naive(&y, &z, &w, groups), tolerance);
                let grads = (out * tensor(&up, [rows, d], dtype)).sum().backward();
                let dy = numeric_gradient(&y, |y| dot(&naive(y, &z, &w, groups), &up));
                let dz = numeric_gradient(&z, |z| dot(&naive(&y, z, &w, groups), &up));
                let dw = numeric_gradient(&w, |w| dot(&naive(&y, &z, w, groups), &up));
                assert_close("dy", &f64s(yt.grad(&grads).expect("dy")), &dy, tolerance);
                assert_close("dz", &f64s(zt.grad(&grads).expect("dz")), &dz, tolerance);
                assert_close("dw", &f64s(wt.grad(&grads).expect("dw")), &dw, tolerance);
            }
        }
    }

    #[test]
    fn large_gates_stay_finite() {
        let z = [-200.0, -90.0, 0.0, 200.0];
        let yt = tensor::<Ad, 2>(&[1.0; 4], [1, 4], DType::F32).require_grad();
        let zt = tensor::<Ad, 2>(&z, [1, 4], DType::F32).require_grad();
        let wt = tensor::<Ad, 1>(&[1.0; 4], [4], DType::F32);
        let out = ops::gated_rms_norm(yt.clone(), zt.clone(), wt, 1, EPS).expect("valid shapes");
        assert_close("out", &f64s(out.clone()), &naive(&[1.0; 4], &z, &[1.0; 4], 1), 1e-6);
        let grads = out.sum().backward();
        for grad in [yt.grad(&grads), zt.grad(&grads)] {
            assert!(f64s(grad.expect("gradient")).iter().all(|v| v.is_finite()));
        }
    }

    #[test]
    fn low_precision_and_views() {
        let (rows, d, groups) = (9, 40, 2);
        let (y, z, w, up) = (values(5, rows * d), values(6, rows * d), values(7, d), values(8, rows * d));
        let run = |dtype: DType, kernel: bool| {
            let yt = tensor::<Ad, 2>(&y, [d, rows], dtype).require_grad();
            let zt = tensor::<Ad, 2>(&z, [rows, d], dtype).require_grad();
            let wt = tensor::<Ad, 1>(&w, [d], dtype).require_grad();
            let y_rd = yt.clone().transpose();
            let out = if kernel {
                ops::gated_rms_norm(y_rd, zt.clone(), wt.clone(), groups, EPS).expect("valid shapes")
            } else {
                let v = (y_rd * burn_tensor::activation::silu(zt.clone())).reshape([rows, groups, d / groups]);
                let rms = (v.clone() * v.clone()).mean_dim(2).add_scalar(EPS).sqrt();
                (v / rms).reshape([rows, d]) * wt.clone().unsqueeze::<2>()
            };
            let grads = (out.clone() * tensor(&up, [rows, d], dtype)).sum().backward();
            [
                f64s(out),
                f64s(yt.grad(&grads).expect("dy")),
                f64s(zt.grad(&grads).expect("dz")),
                f64s(wt.grad(&grads).expect("dw")),
            ]
        };
        let exact = run(DType::F64, true);
        for (found, exact) in run(DType::F32, true).iter().zip(&exact) {
            assert_close("f32 view", found, exact, 2e-5);
        }
        let (kernel, plain) = (run(DType::BF16, true), run(DType::BF16, false));
        for (i, name) in ["out", "dy", "dz", "dw"].into_iter().enumerate() {
            assert_low_precision(name, &kernel[i], &plain[i], &exact[i]);
        }
    }

    // bf16 y with fp32 z and weight: every gradient has the dtype of its input, the output that of y.
    #[test]
    fn mixed_dtypes_keep_their_own() {
        use burn_flex::Flex;
        let prim = |dtype| prim::primitive(tensor::<Flex, 2>(&values(1, 8), [2, 4], dtype));
        let weight = prim::primitive(tensor::<Flex, 1>(&values(2, 4), [4], DType::F32));
        let (y, z, grad) = (prim(DType::BF16), prim(DType::F32), prim(DType::BF16));
        let out = <Flex as crate::MoeBackend>::gated_rms_norm(y.clone(), z.clone(), weight.clone(), 2, EPS);
        let plain = super::gated_rms_norm::<Flex>(y.clone(), z.clone(), weight.clone(), 2, EPS);
        assert_eq!((out.dtype(), plain.dtype()), (DType::BF16, DType::BF16));
        let expected = [DType::BF16, DType::F32, DType::F32];
        let (dy, dz, dw) = super::gated_rms_norm_backward::<Flex>(grad.clone(), y.clone(), z.clone(), weight.clone(), 2, EPS);
        assert_eq!([dy.dtype(), dz.dtype(), dw.dtype()], expected);
        let (dy, dz, dw) = <Flex as crate::MoeBackend>::gated_rms_norm_backward(grad, y, z, weight, 2, EPS);
        assert_eq!([dy.dtype(), dz.dtype(), dw.dtype()], expected);
    }
}

//! RMSNorm (Zhang and Sennrich 2019) on plain tensors.

use burn_backend::{Backend, TensorMetadata, tensor::FloatTensor};
use burn_tensor::Tensor;

use super::prim::{cast, primitive, wide};
use crate::desc::{NormDesc, NormRounding};

/// `weight * x * rsqrt(mean(x^2) + eps)` over the last axis, rounded where `desc.rounding` says.
pub fn rms_norm<B: Backend>(x: FloatTensor<B>, weight_d: FloatTensor<B>, desc: &NormDesc) -> FloatTensor<B> {
    let (shape, dtype) = (x.shape(), x.dtype());
    let x_rd = rows::<B>(x);
    let wide_dtype = x_rd.dtype();
    let inverse_rms_r1 = inverse_rms(x_rd.clone(), desc.eps);
    let y_rd = match desc.rounding {
        NormRounding::Llama => (x_rd * inverse_rms_r1).cast(dtype).cast(wide_dtype),
        NormRounding::Fp32Product => x_rd * inverse_rms_r1,
    };
    let weight_1d = cast::<B, 1>(weight_d, wide_dtype).unsqueeze::<2>();
    B::float_reshape(primitive((y_rd * weight_1d).cast(dtype)), shape)
}

/// Gradients (x, weight); with `g = grad * weight`: `dx = rs * (g - x * rs^2 * mean(g * x))`.
pub fn rms_norm_backward<B: Backend>(
    grad: FloatTensor<B>,
    x: FloatTensor<B>,
    weight_d: FloatTensor<B>,
    desc: &NormDesc,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let (shape, dtype, weight_dtype) = (x.shape(), x.dtype(), weight_d.dtype());
    let (grad_rd, x_rd) = (rows::<B>(grad), rows::<B>(x));
    let weight_1d = cast::<B, 1>(weight_d, x_rd.dtype()).unsqueeze::<2>();
    let inverse_rms_r1 = inverse_rms(x_rd.clone(), desc.eps);
    let y_rd = x_rd * inverse_rms_r1.clone();
    let scaled_rd = grad_rd.clone() * weight_1d;
    let mean_r1 = (scaled_rd.clone() * y_rd.clone()).mean_dim(1);
    let dx_rd = (scaled_rd - y_rd.clone() * mean_r1) * inverse_rms_r1;
    let dweight_d = (grad_rd * y_rd).sum_dim(0).squeeze_dim::<1>(0);
    (
        B::float_reshape(primitive(dx_rd.cast(dtype)), shape),
        primitive(dweight_d.cast(weight_dtype)),
    )
}

/// `x` as wide `[R, D]`.
fn rows<B: Backend>(x: FloatTensor<B>) -> Tensor<B, 2> {
    let shape = x.shape();
    let width = shape[shape.num_dims() - 1];
    let rows = shape.num_elements() / width.max(1);
    wide::<B, 2>(B::float_reshape(x, [rows, width].into()))
}

fn inverse_rms<B: Backend>(x_rd: Tensor<B, 2>, eps: f32) -> Tensor<B, 2> {
    (x_rd.clone() * x_rd).mean_dim(1).add_scalar(eps).sqrt().recip()
}

#[cfg(test)]
mod tests {
    use burn_flex::Flex;
    use burn_std::DType;
    use burn_tensor::Tensor;

    use crate::desc::{NormDesc, NormRounding};
    use crate::ops;
    use crate::reference::prim;
    use crate::testing::{Ad, assert_close, assert_low_precision, dot, f64s, numeric_gradient, tensor, values};

    const EPS: f32 = 1e-5;
    const LLAMA: NormDesc = NormDesc {
        eps: EPS,
        rounding: NormRounding::Llama,
    };

    fn naive(x: &[f64], w: &[f64]) -> Vec<f64> {
        let d = w.len();
        let mut out = Vec::new();
        for row in x.chunks(d) {
            let mean = row.iter().map(|v| v * v).sum::<f64>() / d as f64;
            out.extend((0..d).map(|i| row[i] / (mean + f64::from(EPS)).sqrt() * w[i]));
        }
        out
    }

    #[test]
    fn forward_and_gradients_match_loops() {
        for (rows, d) in [(1, 1), (3, 7), (130, 20)] {
            let (x, w, up) = (values(1, rows * d), values(2, d), values(3, rows * d));
            for (dtype, tolerance) in [(DType::F64, 1e-8), (DType::F32, 2e-5)] {
                let xt = tensor::<Ad, 3>(&x, [1, rows, d], dtype).require_grad();
                let wt = tensor::<Ad, 1>(&w, [d], dtype).require_grad();
                let out = ops::rms_norm(xt.clone(), wt.clone(), &LLAMA).expect("valid shapes");
                assert_close("out", &f64s(out.clone()), &naive(&x, &w), tolerance);
                let grads = (out * tensor(&up, [1, rows, d], dtype)).sum().backward();
                let dx = numeric_gradient(&x, |x| dot(&naive(x, &w), &up));
                let dw = numeric_gradient(&w, |w| dot(&naive(&x, w), &up));
                assert_close("dx", &f64s(xt.grad(&grads).expect("dx")), &dx, tolerance);
                assert_close("dw", &f64s(wt.grad(&grads).expect("dw")), &dw, tolerance);
            }
        }
    }

    #[test]
    fn frozen_weight_gets_no_gradient() {
        let x = tensor::<Ad, 2>(&values(1, 6), [2, 3], DType::F32).require_grad();
        let w = tensor::<Ad, 1>(&values(2, 3), [3], DType::F32);
        let grads = ops::rms_norm(x.clone(), w.clone(), &LLAMA).expect("valid shapes").sum().backward();
        assert!(x.grad(&grads).is_some());
        assert!(w.grad(&grads).is_none());
    }

    // Recomputing strategies drop outputs of cheap ops; what the op keeps must not depend on them.
    #[test]
    fn gradients_survive_checkpointing() {
        use burn_autodiff::{Autodiff, checkpoint::strategy::BalancedCheckpointing};
        use burn_tensor::backend::AutodiffBackend;
        fn gradients<B: AutodiffBackend + crate::MoeBackend>() -> [Vec<f64>; 2] {
            let x = tensor::<B, 2>(&values(1, 12), [3, 4], DType::F32).require_grad();
            let w = tensor::<B, 1>(&values(2, 4), [4], DType::F32).require_grad();
            let out = ops::rms_norm(x.clone() * 2.0 + 1.0, w.clone().exp(), &LLAMA).expect("valid shapes");
            let grads = (out.clone() * out).sum().backward();
            [f64s(x.grad(&grads).expect("dx")), f64s(w.grad(&grads).expect("dw"))]
        }
        assert_eq!(gradients::<Autodiff<Flex, BalancedCheckpointing>>(), gradients::<Ad>());
    }

    // The Llama form rounds y and the product, the GPT-OSS form only the product; kernel and reference agree bit for bit.
    #[test]
    fn rounds_where_the_family_rounds() {
        let bf16 = |v: f64| half::bf16::from_f64(v).to_f64();
        let (rows, d) = (4, 33);
        let (x, w) = (values(5, rows * d), values(6, d));
        let ones = vec![1.0; d];
        let y = naive(&x, &ones);
        for rounding in [NormRounding::Llama, NormRounding::Fp32Product] {
            let desc = NormDesc { eps: EPS, rounding };
            let expected: Vec<f64> = (0..rows * d)
                .map(|i| match rounding {
                    NormRounding::Llama => bf16(bf16(y[i]) * w[i % d]),
                    NormRounding::Fp32Product => bf16(y[i] * w[i % d]),
                })
                .collect();
            let xt = tensor::<Flex, 2>(&x, [rows, d], DType::BF16);
            let wt = tensor::<Flex, 1>(&w, [d], DType::BF16);
            let kernel = f64s(ops::rms_norm(xt.clone(), wt.clone(), &desc).expect("valid shapes"));
            let plain = super::rms_norm::<Flex>(prim::primitive(xt), prim::primitive(wt), &desc);
            assert_eq!(kernel, expected, "{rounding:?}");
            assert_eq!(f64s(prim::tensor::<Flex, 2>(plain)), expected, "{rounding:?}");
        }
    }

    #[test]
    fn low_precision_and_views() {
        let (rows, d) = (9, 40);
        let (x, w, up) = (values(5, rows * d), values(6, d), values(7, rows * d));
        let run = |dtype: DType| {
            // A transposed view: the kernel must honour strides.
            let xt = tensor::<Ad, 2>(&x, [d, rows], dtype).require_grad();
            let wt = tensor::<Ad, 1>(&w, [d], dtype).require_grad();
            let out = ops::rms_norm(xt.clone().transpose(), wt.clone(), &LLAMA).expect("valid shapes");
            let grads = (out.clone() * tensor(&up, [rows, d], dtype)).sum().backward();
            [f64s(out), f64s(xt.grad(&grads).expect("dx")), f64s(wt.grad(&grads).expect("dw"))]
        };
        let plain = |dtype: DType| {
            let xt = tensor::<Ad, 2>(&x, [d, rows], dtype).require_grad();
            let wt = tensor::<Ad, 1>(&w, [d], dtype).require_grad();
            let x_rd: Tensor<Ad, 2> = xt.clone().transpose();
            let rms = (x_rd.clone() * x_rd.clone()).mean_dim(1).add_scalar(EPS).sqrt();
            let out = x_rd / rms * wt.clone().unsqueeze::<2>();
            let grads = (out.clone() * tensor(&up, [rows, d], dtype)).sum().backward();
            [f64s(out), f64s(xt.grad(&grads).expect("dx")), f64s(wt.grad(&grads).expect("dw"))]
        };
        let exact = run(DType::F64);
        for (found, exact) in run(DType::F32).iter().zip(&exact) {
            assert_close("f32 view", found, exact, 2e-5);
        }
        for dtype in [DType::BF16, DType::F16] {
            let (kernel, plain) = (run(dtype), plain(dtype));
            for (i, name) in ["out", "dx", "dw"].into_iter().enumerate() {
                assert_low_precision(name, &kernel[i], &plain[i], &exact[i]);
            }
        }
    }
}

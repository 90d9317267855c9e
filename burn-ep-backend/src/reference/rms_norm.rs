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

/// `x + residual` and its [`rms_norm`].
pub fn add_rms_norm<B: Backend>(
    x: FloatTensor<B>,
    residual: FloatTensor<B>,
    weight_d: FloatTensor<B>,
    desc: &NormDesc,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let sum = B::float_add(x, residual);
    (sum.clone(), rms_norm::<B>(sum, weight_d, desc))
}

/// [`rms_norm_backward`], and `grad_x` added to the gradient of x.
pub fn add_rms_norm_backward<B: Backend>(
    grad: FloatTensor<B>,
    grad_x: FloatTensor<B>,
    x: FloatTensor<B>,
    weight_d: FloatTensor<B>,
    desc: &NormDesc,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let (dx, dweight_d) = rms_norm_backward::<B>(grad, x, weight_d, desc);
    (B::float_add(dx, grad_x), dweight_d)
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

    /// `sum(up * norm(x + r)) + sum(up_sum * (x + r))`; without `up_sum` the sum is only normalised, without `up` only summed.
    #[test]
    fn add_norm_matches_loops_whichever_output_is_used() {
        let (rows, d) = (5, 12);
        let n = rows * d;
        let (x, r, w) = (values(1, n), values(2, n), values(3, d));
        let (up, up_sum) = (values(4, n), values(5, n));
        let added = |x: &[f64], r: &[f64]| -> Vec<f64> { x.iter().zip(r).map(|(x, r)| x + r).collect() };
        for (with_norm, with_sum) in [(true, true), (true, false), (false, true)] {
            for (dtype, tolerance) in [(DType::F64, 1e-8), (DType::F32, 2e-5)] {
                let leaf = |v: &[f64]| tensor::<Ad, 2>(v, [rows, d], dtype).require_grad();
                let (xt, rt) = (leaf(&x), leaf(&r));
                let wt = tensor::<Ad, 1>(&w, [d], dtype).require_grad();
                let (sum, out) = ops::add_rms_norm(xt.clone(), rt.clone(), wt.clone(), &LLAMA).expect("valid shapes");
                assert_close("sum", &f64s(sum.clone()), &added(&x, &r), tolerance);
                assert_close("out", &f64s(out.clone()), &naive(&added(&x, &r), &w), tolerance);
                let up_t = |up: &[f64], on: bool| tensor::<Ad, 2>(up, [rows, d], dtype) * f64::from(u8::from(on));
                let loss = match (with_norm, with_sum) {
                    (true, false) => (out * up_t(&up, true)).sum(),
                    (false, true) => (sum * up_t(&up_sum, true)).sum(),
                    _ => (out * up_t(&up, true)).sum() + (sum * up_t(&up_sum, true)).sum(),
                };
                let grads = loss.backward();
                let loss = |x: &[f64], w: &[f64]| {
                    let h = added(x, &r);
                    let norm = if with_norm { dot(&naive(&h, w), &up) } else { 0.0 };
                    norm + if with_sum { dot(&h, &up_sum) } else { 0.0 }
                };
                let dx = numeric_gradient(&x, |x| loss(x, &w));
                for leaf in [&xt, &rt] {
                    assert_close("dx", &f64s(leaf.grad(&grads).expect("dx")), &dx, tolerance);
                }
                match wt.grad(&grads) {
                    Some(dw) => assert_close("dw", &f64s(dw), &numeric_gradient(&w, |w| loss(&x, w)), tolerance),
                    None => assert!(!with_norm),
                }
            }
        }
    }

    // A block as decoders have it: the residual stream passes both norms, and every gradient on the way is added in a norm.
    #[test]
    fn gradients_that_were_there_first_are_added() {
        let (rows, d) = (4, 6);
        let (x, w, up) = (values(6, rows * d), values(7, d), values(8, rows * d));
        let rounding = LLAMA;
        let xt = tensor::<Ad, 2>(&x, [rows, d], DType::F64).require_grad();
        let wt = tensor::<Ad, 1>(&w, [d], DType::F64);
        let h = ops::rms_norm(xt.clone(), wt.clone(), &rounding).expect("valid shapes");
        let (sum, h) = ops::add_rms_norm(xt.clone(), h * 0.5, wt.clone(), &rounding).expect("valid shapes");
        let grads = ((sum + h * 2.0) * tensor(&up, [rows, d], DType::F64)).sum().backward();
        let expected = numeric_gradient(&x, |x| {
            let sum: Vec<f64> = x.iter().zip(naive(x, &w)).map(|(x, h)| x + 0.5 * h).collect();
            let out: Vec<f64> = sum.iter().zip(naive(&sum, &w)).map(|(s, h)| s + 2.0 * h).collect();
            dot(&out, &up)
        });
        assert_close("dx", &f64s(xt.grad(&grads).expect("dx")), &expected, 1e-7);
    }

    // Kernel and reference agree bit for bit forward, and the sum is that of the plain addition.
    #[test]
    fn add_norm_in_low_precision() {
        let (rows, d) = (7, 40);
        let n = rows * d;
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let x = || tensor::<Flex, 2>(&values(1, n), [rows, d], dtype);
            let r = || tensor::<Flex, 2>(&values(2, n), [d, rows], dtype).transpose();
            let w = || tensor::<Flex, 1>(&values(3, d), [d], dtype);
            let (sum, out) = ops::add_rms_norm(x(), r(), w(), &LLAMA).expect("valid shapes");
            assert_eq!(f64s(sum.clone()), f64s(x() + r()), "{dtype:?}");
            let separate = ops::rms_norm(sum.clone(), w(), &LLAMA).expect("valid shapes");
            assert_eq!(f64s(out), f64s(separate), "{dtype:?}");

            let (grad, so_far) = (
                tensor::<Flex, 2>(&values(4, n), [rows, d], dtype),
                tensor::<Flex, 2>(&values(5, n), [rows, d], dtype),
            );
            let arguments = || {
                let [grad, so_far, sum] = [&grad, &so_far, &sum].map(|t| prim::primitive(t.clone()));
                (grad, so_far, sum, prim::primitive(w()))
            };
            let (g, s, x, w1) = arguments();
            let (dx, dw) = <Flex as crate::MoeBackend>::add_rms_norm_backward(g, s, x, w1, &LLAMA);
            let (g, s, x, w1) = arguments();
            let (dx_plain, dw_plain) = super::add_rms_norm_backward::<Flex>(g, s, x, w1, &LLAMA);
            let tolerance = if dtype == DType::F32 { 1e-6 } else { 2e-2 };
            let read = |t| f64s(prim::tensor::<Flex, 2>(t));
            assert_close("dx", &read(dx), &read(dx_plain), tolerance);
            let read = |t| f64s(prim::tensor::<Flex, 1>(t));
            assert_close("dw", &read(dw), &read(dw_plain), tolerance);
        }
    }
}

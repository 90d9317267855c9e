//! Rotary position embedding (Su et al. 2021) on plain tensors.

use burn_backend::{Backend, TensorMetadata, tensor::FloatTensor};
use burn_tensor::Tensor;

use super::prim::{cast, primitive, wide};
use crate::desc::RopeLayout;

/// Turn channel pairs (a, b) by the angle: `a * cos - b * sin`, `b * cos + a * sin`, in fp32 with one rounding.
/// cos and sin are `[B or 1, S, D_rot / 2]`; channels past `D_rot` pass through.
pub fn rope<B: Backend>(x_bshd: FloatTensor<B>, cos: FloatTensor<B>, sin: FloatTensor<B>, layout: RopeLayout) -> FloatTensor<B> {
    let dtype = x_bshd.dtype();
    let x_bshd = wide::<B, 4>(x_bshd);
    let [b, s, h, d] = x_bshd.dims();
    let cos_bs1r = cast::<B, 3>(cos, x_bshd.dtype()).unsqueeze_dim::<4>(2);
    let sin_bs1r = cast::<B, 3>(sin, x_bshd.dtype()).unsqueeze_dim::<4>(2);
    let [.., half] = cos_bs1r.dims();
    let turn = |first: Tensor<B, 4>, second: Tensor<B, 4>| {
        (
            first.clone() * cos_bs1r.clone() - second.clone() * sin_bs1r.clone(),
            second * cos_bs1r.clone() + first * sin_bs1r.clone(),
        )
    };
    let turned = x_bshd.clone().narrow(3, 0, 2 * half);
    let turned = match layout {
        RopeLayout::HalfSplit => {
            let (first, second) = turn(turned.clone().narrow(3, 0, half), turned.narrow(3, half, half));
            Tensor::cat(vec![first, second], 3)
        }
        RopeLayout::Interleaved => {
            let pairs = turned.reshape([b, s, h, half, 2]);
            let of_pair = |i| pairs.clone().narrow(4, i, 1).squeeze_dim::<4>(4);
            let (first, second) = turn(of_pair(0), of_pair(1));
            Tensor::stack::<5>(vec![first, second], 4).reshape([b, s, h, 2 * half])
        }
    };
    let out = if 2 * half < d {
        Tensor::cat(vec![turned, x_bshd.narrow(3, 2 * half, d - 2 * half)], 3)
    } else {
        turned
    };
    primitive(out.cast(dtype))
}

#[cfg(test)]
mod tests {
    use burn_flex::Flex;
    use burn_std::DType;
    use burn_tensor::Tensor;

    use crate::desc::RopeLayout;
    use crate::ops;
    use crate::reference::prim;
    use crate::testing::{Ad, assert_close, assert_low_precision, dot, f64s, numeric_gradient, tensor, values};

    struct Sizes {
        b: usize,
        s: usize,
        h: usize,
        d: usize,
        half: usize,
        angle_rows: usize,
    }

    fn naive(x: &[f64], cos: &[f64], sin: &[f64], n: &Sizes, layout: RopeLayout) -> Vec<f64> {
        let mut out = x.to_vec();
        for row in 0..n.b * n.s * n.h {
            let token = row / n.h;
            let angle = if n.angle_rows == 1 { token % n.s } else { token };
            for j in 0..n.half {
                let (p, q) = match layout {
                    RopeLayout::HalfSplit => (row * n.d + j, row * n.d + j + n.half),
                    RopeLayout::Interleaved => (row * n.d + 2 * j, row * n.d + 2 * j + 1),
                };
                let (c, s) = (cos[angle * n.half + j], sin[angle * n.half + j]);
                out[p] = x[p] * c - x[q] * s;
                out[q] = x[q] * c + x[p] * s;
            }
        }
        out
    }

    #[test]
    fn forward_and_gradient_match_loops() {
        for (b, s, h, d, half, angle_rows) in [(1, 1, 1, 2, 1, 1), (2, 5, 3, 8, 4, 1), (2, 3, 2, 10, 3, 2)] {
            let n = Sizes {
                b,
                s,
                h,
                d,
                half,
                angle_rows,
            };
            let x = values(1, b * s * h * d);
            let (cos, sin) = (values(2, angle_rows * s * half), values(3, angle_rows * s * half));
            let up = values(4, x.len());
            for layout in [RopeLayout::HalfSplit, RopeLayout::Interleaved] {
                for (dtype, tolerance) in [(DType::F64, 1e-9), (DType::F32, 1e-6)] {
                    let xt = tensor::<Ad, 4>(&x, [b, s, h, d], dtype).require_grad();
                    let angles = |v: &[f64]| tensor::<Ad, 3>(v, [angle_rows, s, half], dtype);
                    let out = ops::rope(xt.clone(), angles(&cos), angles(&sin), layout).expect("valid shapes");
                    assert_close("out", &f64s(out.clone()), &naive(&x, &cos, &sin, &n, layout), tolerance);
                    let grads = (out * tensor(&up, [b, s, h, d], dtype)).sum().backward();
                    let dx = numeric_gradient(&x, |x| dot(&naive(x, &cos, &sin, &n, layout), &up));
                    assert_close("dx", &f64s(xt.grad(&grads).expect("dx")), &dx, tolerance.max(1e-8));
                }
            }
        }
    }

    #[test]
    fn low_precision_and_views() {
        let (b, s, h, d) = (2, 3, 4, 8);
        let (x, cos, sin) = (values(1, b * s * h * d), values(2, s * d / 2), values(3, s * d / 2));
        for layout in [RopeLayout::HalfSplit, RopeLayout::Interleaved] {
            let run = |dtype| {
                // Stored [B, H, S, D], viewed as [B, S, H, D].
                let view = tensor::<Flex, 4>(&x, [b, h, s, d], dtype).swap_dims(1, 2);
                let angles = |v: &[f64]| tensor::<Flex, 3>(v, [1, s, d / 2], dtype);
                f64s(ops::rope(view, angles(&cos), angles(&sin), layout).expect("valid shapes"))
            };
            let exact = run(DType::F64);
            assert_close("f32 view", &run(DType::F32), &exact, 1e-6);
            // The exact result rounded once is the best a bf16 output can be.
            let rounded: Vec<f64> = exact.iter().map(|&v| half::bf16::from_f64(v).to_f64()).collect();
            assert_low_precision("bf16", &run(DType::BF16), &rounded, &exact);
        }
    }

    // A rotation by -angle undoes a rotation by angle, which is what the backward relies on.
    #[test]
    fn negated_sine_is_the_inverse() {
        let x = values(1, 2 * 3 * 6);
        let angle: Vec<f64> = (0..9).map(|i| f64::from(i) * 0.9).collect();
        let table = |f: fn(f64) -> f64| tensor::<Flex, 3>(&angle.iter().map(|&a| f(a)).collect::<Vec<_>>(), [1, 3, 3], DType::F64);
        for layout in [RopeLayout::HalfSplit, RopeLayout::Interleaved] {
            let xt = tensor::<Flex, 4>(&x, [1, 3, 2, 6], DType::F64);
            let turned: Tensor<Flex, 4> = ops::rope(xt, table(f64::cos), table(f64::sin), layout).expect("valid shapes");
            let back = ops::rope(turned, table(f64::cos), table(f64::sin).neg(), layout).expect("valid shapes");
            assert_close("back", &f64s(back), &x, 1e-12);
        }
        // The reference itself in f32, too: Flex runs a kernel there.
        let xt = prim::primitive(tensor::<Flex, 4>(&x, [1, 3, 2, 6], DType::F32));
        let cos = prim::primitive(table(f64::cos));
        let sin = prim::primitive(table(f64::sin));
        let out = super::rope::<Flex>(xt, cos, sin, RopeLayout::HalfSplit);
        let n = Sizes {
            b: 1,
            s: 3,
            h: 2,
            d: 6,
            half: 3,
            angle_rows: 1,
        };
        let (cos, sin): (Vec<f64>, Vec<f64>) = angle.iter().map(|a| (a.cos(), a.sin())).unzip();
        let expected = naive(&x, &cos, &sin, &n, RopeLayout::HalfSplit);
        assert_close("f32 reference", &f64s(prim::tensor::<Flex, 4>(out)), &expected, 1e-6);
    }
}

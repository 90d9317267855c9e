//! Rotary position embedding, alone and behind the norm of every head.

use burn_tensor::Tensor;

use super::check;
use crate::{MoeBackend, NormDesc, Result, RopeLayout};

/// Rotate the first `2 * cos.dims()[2]` channels of `[B, S, H, D]`; cos and sin are `[B or 1, S, D_rot / 2]` and get no gradient.
///
/// # Errors
/// A shape or setting that does not fit, by name.
pub fn rope<B: MoeBackend>(x_bshd: Tensor<B, 4>, cos: Tensor<B, 3>, sin: Tensor<B, 3>, layout: RopeLayout) -> Result<Tensor<B, 4>> {
    check_angles("rope", &x_bshd, &cos, &sin)?;
    Ok(check::tensor(B::rope(
        check::float(x_bshd),
        check::float(cos),
        check::float(sin),
        layout,
    )))
}

/// [`rope`] of the [`rms_norm`](super::rms_norm()) of every head: x `[B, S, H, D]`, weight `[D]`. One pass where the backend has one.
///
/// # Errors
/// A shape or setting that does not fit, by name.
pub fn rms_norm_rope<B: MoeBackend>(
    x_bshd: Tensor<B, 4>,
    weight_d: Tensor<B, 1>,
    cos: Tensor<B, 3>,
    sin: Tensor<B, 3>,
    layout: RopeLayout,
    desc: &NormDesc,
) -> Result<Tensor<B, 4>> {
    let op = "rms_norm_rope";
    check::shape(op, "weight", weight_d.dims(), [x_bshd.dims()[3]], "[D]")?;
    check_angles(op, &x_bshd, &cos, &sin)?;
    Ok(check::tensor(B::rms_norm_rope(
        check::float(x_bshd),
        check::float(weight_d),
        check::float(cos),
        check::float(sin),
        layout,
        desc,
    )))
}

fn check_angles<B: MoeBackend>(op: &'static str, x_bshd: &Tensor<B, 4>, cos: &Tensor<B, 3>, sin: &Tensor<B, 3>) -> Result<()> {
    let [b, s, _, d] = x_bshd.dims();
    let [cb, cs, half] = cos.dims();
    check::shape(
        op,
        "cos",
        [cb, cs, half],
        [if cb == 1 { 1 } else { b }, s, half],
        "[B or 1, S, D_rot / 2]",
    )?;
    check::shape(op, "sin", sin.dims(), [cb, cs, half], "[B or 1, S, D_rot / 2]")?;
    check::setting(
        op,
        "rotary width",
        half > 0 && 2 * half <= d,
        2 * half,
        format!("2 to the head size {d}"),
    )?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use burn_autodiff::Autodiff;
    use burn_flex::Flex;
    use burn_std::DType;

    use super::*;
    use crate::NormRounding;
    use crate::ops::rms_norm;
    use crate::testing::tensor;

    type B = Autodiff<Flex>;

    fn numbers(n: usize, seed: usize) -> Vec<f64> {
        (0..n).map(|i| ((i * 37 + seed * 101) as f64 * 0.618).sin() * 1.5).collect()
    }

    // Values and gradients are those of the two ops after each other, whatever the layout and the rounding.
    #[test]
    fn norm_and_rotation_in_one_op() {
        for dtype in [DType::F32, DType::BF16] {
            for layout in [RopeLayout::HalfSplit, RopeLayout::Interleaved] {
                for rounding in [NormRounding::Llama, NormRounding::Fp32Product] {
                    let desc = NormDesc { eps: 1e-5, rounding };
                    let run = |fused: bool| {
                        let x = tensor::<B, 4>(&numbers(2 * 3 * 2 * 10, 1), [2, 3, 2, 10], dtype).require_grad();
                        let w = tensor::<B, 1>(&numbers(10, 2), [10], dtype).require_grad();
                        let [cos, sin] = [f64::cos, f64::sin]
                            .map(|f| tensor::<B, 3>(&numbers(3 * 4, 3).into_iter().map(f).collect::<Vec<_>>(), [1, 3, 4], dtype));
                        let up = tensor::<B, 4>(&numbers(2 * 3 * 2 * 10, 4), [2, 3, 2, 10], dtype);
                        let out = if fused {
                            rms_norm_rope(x.clone(), w.clone(), cos, sin, layout, &desc)
                        } else {
                            rms_norm(x.clone(), w.clone(), &desc).and_then(|y| rope(y, cos, sin, layout))
                        }
                        .expect("valid shapes");
                        let grads = (out.clone() * up).sum().backward();
                        [
                            out.into_data(),
                            x.grad(&grads).expect("x").into_data(),
                            w.grad(&grads).expect("weight").into_data(),
                        ]
                    };
                    assert_eq!(run(true), run(false), "{dtype:?} {layout:?} {rounding:?}");
                }
            }
        }
    }

    #[test]
    fn misfits_are_named() {
        let x = || tensor::<B, 4>(&numbers(24, 1), [1, 3, 2, 4], DType::F32);
        let table = |s: usize, half: usize| tensor::<B, 3>(&numbers(s * half, 2), [1, s, half], DType::F32);
        let w = |d: usize| tensor::<B, 1>(&numbers(d, 3), [d], DType::F32);
        let desc = NormDesc {
            eps: 1e-5,
            rounding: NormRounding::Llama,
        };
        for (weight, cos, sin, name) in [
            (w(3), table(3, 2), table(3, 2), "`weight`"),
            (w(4), table(2, 2), table(2, 2), "`cos`"),
            (w(4), table(3, 2), table(3, 1), "`sin`"),
            (w(4), table(3, 3), table(3, 3), "`rotary width`"),
        ] {
            let found = rms_norm_rope(x(), weight, cos, sin, RopeLayout::HalfSplit, &desc);
            let found = found.expect_err("refused").to_string();
            assert!(found.contains(name), "{found}");
        }
    }
}

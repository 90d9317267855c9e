//! RMSNorm and the gated group norm of Mamba-2.

use burn_tensor::Tensor;

use super::check;
use crate::{MoeBackend, NormDesc, Result};

/// RMSNorm over the last axis with weight `[D]`; statistics in fp32 (Zhang and Sennrich 2019).
///
/// # Errors
/// A shape or setting that does not fit, by name.
pub fn rms_norm<B: MoeBackend, const R: usize>(x: Tensor<B, R>, weight_d: Tensor<B, 1>, desc: &NormDesc) -> Result<Tensor<B, R>> {
    let d = x.dims()[R - 1];
    check::shape("rms_norm", "weight", weight_d.dims(), [d], "[D]")?;
    Ok(check::tensor(B::rms_norm(check::float(x), check::float(weight_d), desc)))
}

/// `x + residual` and its [`rms_norm`], in one pass: the step from one sublayer of a decoder to the norm of the next. The sum is
/// rounded to the dtype of x before it is normalised, as two separate ops would.
///
/// # Errors
/// A shape, dtype or setting that does not fit, by name.
pub fn add_rms_norm<B: MoeBackend, const R: usize>(
    x: Tensor<B, R>,
    residual: Tensor<B, R>,
    weight_d: Tensor<B, 1>,
    desc: &NormDesc,
) -> Result<(Tensor<B, R>, Tensor<B, R>)> {
    let op = "add_rms_norm";
    let d = x.dims()[R - 1];
    check::shape(op, "residual", residual.dims(), x.dims(), "[.., D]")?;
    check::shape(op, "weight", weight_d.dims(), [d], "[D]")?;
    let dtypes = (residual.dtype(), x.dtype());
    let found = format!("{:?}", dtypes.0);
    check::setting(
        op,
        "dtype of residual",
        dtypes.0 == dtypes.1,
        found,
        format!("that of x, {:?}", dtypes.1),
    )?;
    let (sum, out) = B::add_rms_norm(check::float(x), check::float(residual), check::float(weight_d), desc);
    Ok((check::tensor(sum), check::tensor(out)))
}

/// `RMSNorm_groups(y * silu(z)) * weight`, statistics over each of `groups` equal parts of the last axis.
///
/// # Errors
/// A shape or setting that does not fit, by name.
pub fn gated_rms_norm<B: MoeBackend, const R: usize>(
    y: Tensor<B, R>,
    z: Tensor<B, R>,
    weight_d: Tensor<B, 1>,
    groups: usize,
    eps: f32,
) -> Result<Tensor<B, R>> {
    let op = "gated_rms_norm";
    let d = y.dims()[R - 1];
    check::shape(op, "z", z.dims(), y.dims(), "[.., D]")?;
    check::shape(op, "weight", weight_d.dims(), [d], "[D]")?;
    check::setting(
        op,
        "groups",
        groups > 0 && d.is_multiple_of(groups),
        groups,
        format!("a divisor of D = {d}"),
    )?;
    Ok(check::tensor(B::gated_rms_norm(
        check::float(y),
        check::float(z),
        check::float(weight_d),
        groups,
        eps,
    )))
}

#[cfg(test)]
mod tests {
    use burn_flex::Flex;
    use burn_std::DType;

    use super::*;
    use crate::NormRounding;
    use crate::testing::tensor;

    #[test]
    fn misfits_are_named() {
        let x = || tensor::<Flex, 2>(&[0.0; 12], [2, 6], DType::F32);
        let weight = |d: usize| tensor::<Flex, 1>(&vec![0.0; d], [d], DType::F32);
        let desc = NormDesc {
            eps: 1e-5,
            rounding: NormRounding::Llama,
        };
        let refusals = [
            (rms_norm(x(), weight(5), &desc), "`weight`"),
            (
                add_rms_norm(x(), x().narrow(0, 0, 1), weight(6), &desc).map(|(sum, _)| sum),
                "`residual`",
            ),
            (add_rms_norm(x(), x(), weight(5), &desc).map(|(sum, _)| sum), "`weight`"),
            (
                add_rms_norm(x(), x().cast(DType::F64), weight(6), &desc).map(|(sum, _)| sum),
                "`dtype of residual`",
            ),
            (gated_rms_norm(x(), x(), weight(6), 4, 1e-5), "`groups`"),
            (gated_rms_norm(x(), x(), weight(6), 0, 1e-5), "`groups`"),
            (gated_rms_norm(x(), x().transpose().reshape([3, 4]), weight(6), 2, 1e-5), "`z`"),
            (gated_rms_norm(x(), x(), weight(3), 2, 1e-5), "`weight`"),
        ];
        for (result, name) in refusals {
            let found = result.expect_err("refused").to_string();
            assert!(found.contains(name), "{found}");
        }
    }
}

//! The Mamba-2 selective scan.

use burn_tensor::{Int, Tensor};

use super::check;
use crate::{MoeBackend, Result, SsdDesc, SsdPrim};

/// Inputs of [`ssd_scan`]; see [`SsdPrim`] for the meaning of each.
#[derive(Debug, Clone)]
pub struct SsdInput<B: MoeBackend> {
    pub x_bshp: Tensor<B, 4>,
    pub dt_bsh: Tensor<B, 3>,
    pub a_log_h: Tensor<B, 1>,
    pub b_bsgn: Tensor<B, 4>,
    pub c_bsgn: Tensor<B, 4>,
    pub d_h: Tensor<B, 1>,
    pub dt_bias_h: Tensor<B, 1>,
    pub initial_state_bhpn: Option<Tensor<B, 4>>,
    pub doc_start_bs: Option<Tensor<B, 2, Int>>,
}

/// Output of [`ssd_scan`].
#[derive(Debug, Clone)]
pub struct SsdOutput<B: MoeBackend> {
    /// `[B, S, H, P]`.
    pub y_bshp: Tensor<B, 4>,
    /// `[B, H, P, N]` fp32. Not differentiable.
    pub final_state_bhpn: Tensor<B, 4>,
}

/// `S_t = exp(A d_t) S_{t-1} + d_t x_t B_t^T`, `y_t = S_t C_t + D x_t` with `d = clamp(softplus(dt + dt_bias))`.
///
/// # Errors
/// A shape or setting that does not fit, by name.
pub fn ssd_scan<B: MoeBackend>(input: SsdInput<B>, desc: &SsdDesc) -> Result<SsdOutput<B>> {
    let op = "ssd_scan";
    let [b, s, h, p] = input.x_bshp.dims();
    let [_, _, g, n] = input.b_bsgn.dims();
    check::setting(op, "groups", g > 0 && h.is_multiple_of(g), g, format!("a divisor of the {h} heads"))?;
    check::setting(op, "chunk", desc.chunk > 0, desc.chunk, "at least 1")?;
    check::setting(
        op,
        "dt_min",
        desc.dt_min <= desc.dt_max,
        desc.dt_min,
        format!("at most dt_max = {}", desc.dt_max),
    )?;
    check::shape(op, "dt", input.dt_bsh.dims(), [b, s, h], "[B, S, H]")?;
    check::shape(op, "b", input.b_bsgn.dims(), [b, s, g, n], "[B, S, G, N]")?;
    check::shape(op, "c", input.c_bsgn.dims(), [b, s, g, n], "[B, S, G, N]")?;
    for (name, v) in [("a_log", &input.a_log_h), ("d", &input.d_h), ("dt_bias", &input.dt_bias_h)] {
        check::shape(op, name, v.dims(), [h], "[H]")?;
    }
    if let Some(state) = &input.initial_state_bhpn {
        check::shape(op, "initial_state", state.dims(), [b, h, p, n], "[B, H, P, N]")?;
    }
    if let Some(doc) = &input.doc_start_bs {
        check::shape(op, "doc_start", doc.dims(), [b, s], "[B, S]")?;
    }
    let prim = SsdPrim {
        x: check::float(input.x_bshp),
        dt: check::float(input.dt_bsh),
        a_log: check::float(input.a_log_h),
        b: check::float(input.b_bsgn),
        c: check::float(input.c_bsgn),
        d: check::float(input.d_h),
        dt_bias: check::float(input.dt_bias_h),
        initial_state: input.initial_state_bhpn.map(check::float),
        doc_start_bs: input.doc_start_bs.map(check::int),
    };
    let out = B::ssd_scan(prim, desc);
    Ok(SsdOutput {
        y_bshp: check::tensor(out.y),
        final_state_bhpn: check::tensor(out.final_state),
    })
}

#[cfg(test)]
mod tests {
    use burn_flex::Flex;
    use burn_std::DType;

    use super::*;
    use crate::testing::{f64s, ints, tensor, values};

    fn input(s: usize) -> SsdInput<Flex> {
        let four = |shape: [usize; 4]| tensor(&values(1, shape.iter().product()), shape, DType::F32);
        let one = || tensor(&values(2, 4), [4], DType::F32);
        SsdInput {
            x_bshp: four([1, s, 4, 3]),
            dt_bsh: tensor(&values(3, s * 4), [1, s, 4], DType::F32),
            a_log_h: one(),
            b_bsgn: four([1, s, 2, 5]),
            c_bsgn: four([1, s, 2, 5]),
            d_h: one(),
            dt_bias_h: one(),
            initial_state_bhpn: None,
            doc_start_bs: None,
        }
    }

    const DESC: SsdDesc = SsdDesc {
        chunk: 2,
        dt_min: 0.0,
        dt_max: 1.0,
    };

    #[test]
    fn misfits_are_named() {
        let message = |change: &dyn Fn(&mut SsdInput<Flex>, &mut SsdDesc)| {
            let (mut input, mut desc) = (input(3), DESC);
            change(&mut input, &mut desc);
            ssd_scan(input, &desc).map_or_else(|error| error.to_string(), |_| "accepted".into())
        };
        assert_eq!(message(&|_, _| ()), "accepted");
        for (found, name) in [
            (message(&|_, desc| desc.chunk = 0), "`chunk`"),
            (message(&|_, desc| desc.dt_min = 2.0), "`dt_min`"),
            (message(&|_, desc| desc.dt_min = f32::NAN), "`dt_min`"),
            (
                message(&|input, _| input.b_bsgn = tensor(&[0.0; 45], [1, 3, 3, 5], DType::F32)),
                "`groups`",
            ),
            (
                message(&|input, _| input.c_bsgn = tensor(&[0.0; 24], [1, 3, 2, 4], DType::F32)),
                "`c`",
            ),
            (message(&|input, _| input.dt_bsh = tensor(&[0.0; 9], [1, 3, 3], DType::F32)), "`dt`"),
            (message(&|input, _| input.d_h = tensor(&[0.0; 3], [3], DType::F32)), "`d`"),
            (message(&|input, _| input.doc_start_bs = Some(ints(&[0; 2], [1, 2]))), "`doc_start`"),
        ] {
            assert!(found.contains(name), "{found}");
        }
    }

    // Values of `doc_start` are not read back by the check; a start behind its token must not break a kernel.
    #[test]
    fn document_starts_behind_their_token_do_not_panic() {
        let run = |docs: &[usize]| {
            let packed = SsdInput {
                doc_start_bs: Some(ints(docs, [1, 5])),
                ..input(5)
            };
            f64s(ssd_scan(packed, &DESC).expect("valid shapes").y_bshp)
        };
        assert_eq!(run(&[0, 9, 3, 3, 4]), run(&[0, 1, 2, 3, 4]));
    }
}

//! The routed experts as one op.

use burn_tensor::Tensor;

use super::{ExpertOrder, check};
use crate::{ExpertActivation, ExpertWeightsPrim, MoeBackend, Result};

/// Stacked expert weights.
#[derive(Debug, Clone)]
pub struct ExpertWeights<B: MoeBackend> {
    /// `[E, F * up_factor, D]`.
    pub up: Tensor<B, 3>,
    /// `[E, F * up_factor]`.
    pub up_bias: Option<Tensor<B, 2>>,
    /// `[E, D, F]`.
    pub down: Tensor<B, 3>,
    /// `[E, D]`.
    pub down_bias: Option<Tensor<B, 2>>,
}

/// Gather, up, activation, down, weighted combine: `[T, D]` to `[T, D]`.
///
/// Keeps only the input and the up product for its backward. `weights_tk` absent means weight 1.
pub fn expert_mlp<B: MoeBackend>(
    x_td: Tensor<B, 2>,
    order: &ExpertOrder<B>,
    weights_tk: Option<Tensor<B, 2>>,
    experts: ExpertWeights<B>,
    activation: ExpertActivation,
) -> Result<Tensor<B, 2>> {
    let op = "expert_mlp";
    let [t, d] = x_td.dims();
    let [e, up_rows, up_d] = experts.up.dims();
    let f = up_rows / activation.up_factor();
    check::shape(op, "x", [t, d], [t, up_d], "[T, D]")?;
    check::shape(
        op,
        "up",
        [e, up_rows, up_d],
        [e, f * activation.up_factor(), d],
        "[E, F * up_factor, D]",
    )?;
    check::shape(op, "down", experts.down.dims(), [e, d, f], "[E, D, F]")?;
    check::shape(op, "offsets", order.offsets_e1.dims(), [e + 1], "[E + 1]")?;
    check::shape(op, "slots", order.slots_r.dims(), [t * order.top_k], "[T * K]")?;
    if let Some(b) = &experts.up_bias {
        check::shape(op, "up_bias", b.dims(), [e, up_rows], "[E, F * up_factor]")?;
    }
    if let Some(b) = &experts.down_bias {
        check::shape(op, "down_bias", b.dims(), [e, d], "[E, D]")?;
    }
    if let Some(w) = &weights_tk {
        check::shape(op, "weights", w.dims(), [t, order.top_k], "[T, K]")?;
    }
    let weights = ExpertWeightsPrim {
        up: check::float(experts.up),
        up_bias: experts.up_bias.map(check::float),
        down: check::float(experts.down),
        down_bias: experts.down_bias.map(check::float),
    };
    let out = B::expert_mlp(
        check::float(x_td),
        &order.prim(),
        weights_tk.map(check::float),
        &weights,
        order.top_k,
        activation,
    );
    Ok(check::tensor(out.out_td))
}

#[cfg(test)]
mod tests {
    use burn_backend::DType;
    use burn_flex::Flex;

    use super::super::permute::sort_by_expert;
    use super::*;
    use crate::testing::*;
    use crate::{ExpertMlpGrads, reference};

    const CLAMPED: ExpertActivation = ExpertActivation::ClampedSwiGlu { alpha: 1.702, limit: 0.5 };
    const ACTIVATIONS: [ExpertActivation; 3] = [ExpertActivation::SwiGlu, ExpertActivation::Relu2, CLAMPED];

    #[derive(Debug, Clone)]
    struct Case {
        ids: Vec<usize>,
        k: usize,
        e: usize,
        d: usize,
        f: usize,
        activation: ExpertActivation,
        bias: bool,
        weighted: bool,
    }

    impl Case {
        fn t(&self) -> usize {
            self.ids.len() / self.k
        }

        fn f_up(&self) -> usize {
            self.f * self.activation.up_factor()
        }

        /// x, routing weights, up, down, up bias, down bias, upstream gradient.
        fn inputs(&self) -> [Vec<f64>; 7] {
            let (e, d) = (self.e, self.d);
            let sizes = [
                self.t() * d,
                self.ids.len(),
                e * self.f_up() * d,
                e * d * self.f,
                e * self.f_up(),
                e * d,
                self.t() * d,
            ];
            std::array::from_fn(|i| values(i as u64 + 1, sizes[i]))
        }

        /// Output and gradients of the first six inputs in f64, one row at a time.
        fn naive(&self, inputs: &[Vec<f64>; 7]) -> [Vec<f64>; 7] {
            let [x, w, up, down, up_bias, down_bias, g] = inputs;
            let (k, d, f, f_up) = (self.k, self.d, self.f, self.f_up());
            let mut out = vec![0.0; x.len()];
            let mut grads: [Vec<f64>; 6] = std::array::from_fn(|i| vec![0.0; inputs[i].len()]);
            let sigmoid = |z: f64| 1.0 / (1.0 + (-z).exp());
            for (slot, &e) in self.ids.iter().enumerate() {
                let t = slot / k;
                let weight = if self.weighted { w[slot] } else { 1.0 };
                let (xt, gt) = (&x[t * d..][..d], &g[t * d..][..d]);
                let h: Vec<f64> = (0..f_up)
                    .map(|i| {
                        let bias = if self.bias { up_bias[e * f_up + i] } else { 0.0 };
                        bias + (0..d).map(|c| xt[c] * up[(e * f_up + i) * d + c]).sum::<f64>()
                    })
                    .collect();
                let act = |h: &[f64], i: usize| match self.activation {
                    ExpertActivation::SwiGlu => h[i] * sigmoid(h[i]) * h[f + i],
                    ExpertActivation::Relu2 => h[i].max(0.0).powi(2),
                    ExpertActivation::ClampedSwiGlu { alpha, limit } => {
                        let (alpha, limit) = (f64::from(alpha), f64::from(limit));
                        let (gate, linear) = (h[2 * i].min(limit), h[2 * i + 1].clamp(-limit, limit));
                        (linear + 1.0) * gate * sigmoid(alpha * gate)
                    }
                };
                for c in 0..d {
                    let y = (0..f).map(|i| act(&h, i) * down[(e * d + c) * f + i]).sum::<f64>();
                    let y = y + if self.bias { down_bias[e * d + c] } else { 0.0 };
                    out[t * d + c] += weight * y;
                    grads[1][slot] += gt[c] * y;
                    grads[5][e * d + c] += weight * gt[c];
                    (0..f).for_each(|i| grads[3][(e * d + c) * f + i] += weight * gt[c] * act(&h, i));
                }
                // Numerical derivative of the activation: independent of the kernels' formulas.
                let grad_act: Vec<f64> = (0..f)
                    .map(|i| weight * (0..d).map(|c| gt[c] * down[(e * d + c) * f + i]).sum::<f64>())
                    .collect();
                for j in 0..f_up {
                    let (mut low, mut high) = (h.clone(), h.clone());
                    low[j] -= 1e-6;
                    high[j] += 1e-6;
                    let grad_h: f64 = (0..f).map(|i| grad_act[i] * (act(&high, i) - act(&low, i)) / 2e-6).sum();
                    grads[4][e * f_up + j] += grad_h;
                    for c in 0..d {
                        grads[2][(e * f_up + j) * d + c] += grad_h * xt[c];
                        grads[0][t * d + c] += grad_h * up[(e * f_up + j) * d + c];
                    }
                }
            }
            let [x, w, up, down, up_bias, down_bias] = grads;
            [out, x, w, up, down, up_bias, down_bias]
        }

        /// Output and the gradients that exist, by name, from the kernels or the reference.
        fn run(&self, inputs: &[Vec<f64>; 7], dtype: DType, kernel: bool) -> Vec<(&'static str, usize, Vec<f64>)> {
            let (t, k, e, d, f, f_up) = (self.t(), self.k, self.e, self.d, self.f, self.f_up());
            let order = sort_by_expert(ints::<Flex, 2>(&self.ids, [t, k]), e).unwrap().prim();
            let statistics = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
            let two = |i: usize, shape, dtype| check::float(tensor::<Flex, 2>(&inputs[i], shape, dtype));
            let three = |i: usize, shape| check::float(tensor::<Flex, 3>(&inputs[i], shape, dtype));
            let (x, grad) = (two(0, [t, d], dtype), two(6, [t, d], dtype));
            let weights = self.weighted.then(|| two(1, [t, k], statistics));
            let experts = ExpertWeightsPrim::<Flex> {
                up: three(2, [e, f_up, d]),
                down: three(3, [e, d, f]),
                up_bias: self.bias.then(|| two(4, [e, f_up], dtype)),
                down_bias: self.bias.then(|| two(5, [e, d], dtype)),
            };
            let (forward, backward) = if kernel {
                let out = Flex::expert_mlp(x.clone(), &order, weights.clone(), &experts, k, self.activation);
                let up = out.up_rf.clone();
                let grads = Flex::expert_mlp_backward(grad, x, up, &order, weights, &experts, k, self.activation);
                (out, grads)
            } else {
                use reference::expert_mlp as plain;
                let out = plain::expert_mlp::<Flex>(x.clone(), &order, weights.clone(), &experts, k, self.activation);
                let up = out.up_rf.clone();
                let grads = plain::expert_mlp_backward::<Flex>(grad, x, up, &order, weights, &experts, k, self.activation);
                (out, grads)
            };
            let flat2 = |prim| f64s(check::tensor::<Flex, 2>(prim));
            let flat3 = |prim| f64s(check::tensor::<Flex, 3>(prim));
            let ExpertMlpGrads {
                x_td,
                weights_tk,
                up,
                up_bias,
                down,
                down_bias,
            } = backward;
            assert_eq!(weights_tk.is_some(), self.weighted);
            assert_eq!((up_bias.is_some(), down_bias.is_some()), (self.bias, self.bias));
            let mut found = vec![
                ("out", 0, flat2(forward.out_td)),
                ("grad x", 1, flat2(x_td)),
                ("grad up", 3, flat3(up)),
                ("grad down", 4, flat3(down)),
            ];
            found.extend(weights_tk.map(|g| ("grad weights", 2, flat2(g))));
            found.extend(up_bias.map(|g| ("grad up_bias", 5, flat2(g))));
            found.extend(down_bias.map(|g| ("grad down_bias", 6, flat2(g))));
            found
        }
    }

    fn cases() -> Vec<Case> {
        let random = |n: usize, e: usize| values(21, n).into_iter().map(|v| ((v + 1.0) / 2.0 * e as f64) as usize).collect();
        let mut cases = Vec::new();
        for (i, activation) in ACTIVATIONS.into_iter().enumerate() {
            // transformers#42697: sizes that are not multiples of 16.
            let base = Case {
                ids: random(18, 5),
                k: 2,
                e: 5,
                d: 24,
                f: 20,
                activation,
                bias: i == 2,
                weighted: true,
            };
            let with = |change: &dyn Fn(&mut Case)| {
                let mut case = base.clone();
                change(&mut case);
                case
            };
            cases.push(base.clone());
            cases.push(with(&|c| c.bias = !c.bias));
            cases.push(with(&|c| c.weighted = false));
            cases.push(with(&|c| c.ids = vec![3; 12]));
            cases.push(with(&|c| (c.ids, c.e, c.k) = (vec![0; 3], 1, 1)));
            cases.push(with(&|c| (c.ids, c.e, c.k) = ((0..12).map(|s| s % 4).collect(), 4, 4)));
            cases.push(with(&|c| c.ids = vec![]));
            cases.push(with(&|c| c.ids = vec![4, 1]));
            cases.push(with(&|c| (c.ids, c.d, c.f) = (random(600, 5), 3, 2)));
        }
        cases
    }

    #[test]
    fn forward_and_gradients_match_loops() {
        for case in cases() {
            let inputs = case.inputs();
            let naive = case.naive(&inputs);
            for (dtype, tolerance) in [(DType::F64, 1e-7), (DType::F32, 3e-4)] {
                for kernel in [true, false] {
                    for (name, i, found) in case.run(&inputs, dtype, kernel) {
                        let scale = naive[i].iter().fold(1.0, |max: f64, v| max.max(v.abs()));
                        let name = format!("{name} of {case:?} {dtype:?} kernel={kernel}");
                        assert_close(&name, &found, &naive[i], tolerance * scale);
                    }
                }
            }
        }
    }

    #[test]
    fn low_precision_follows_the_rule() {
        for dtype in [DType::BF16, DType::F16] {
            for case in cases() {
                // The clamp has kinks: a value rounded across one has another gradient, which no error bound covers.
                if case.activation == CLAMPED {
                    continue;
                }
                let mut inputs = case.inputs();
                for (i, input) in inputs.iter_mut().enumerate() {
                    if i != 1 {
                        let n = input.len();
                        *input = f64s(tensor::<Flex, 1>(input, [n], dtype));
                    }
                }
                let naive = case.naive(&inputs);
                let (kernel, plain) = (case.run(&inputs, dtype, true), case.run(&inputs, dtype, false));
                for ((name, i, kernel), (_, _, plain)) in kernel.iter().zip(&plain) {
                    assert_low_precision(&format!("{name} of {case:?}"), kernel, plain, &naive[*i]);
                }
            }
        }
    }

    #[test]
    fn op_on_autodiff_matches_finite_differences() {
        for activation in ACTIVATIONS {
            for (bias, weighted) in [(true, true), (false, true), (true, false)] {
                let case = Case {
                    ids: vec![0, 2, 2, 0, 0, 2],
                    k: 2,
                    e: 3,
                    d: 3,
                    f: 2,
                    activation,
                    bias,
                    weighted,
                };
                let (t, k, e, d, f, f_up) = (case.t(), case.k, case.e, case.d, case.f, case.f_up());
                let [x, w, up, down, up_bias, down_bias, upstream] = case.inputs();
                let mut inputs = vec![x, up, down];
                inputs.extend(weighted.then_some(w));
                inputs.extend(bias.then_some([up_bias, down_bias]).into_iter().flatten());
                check_gradients(&format!("{case:?}"), &inputs, |inputs| {
                    let order = sort_by_expert(ints::<Ad, 2>(&case.ids, [t, k]), e).unwrap();
                    let mut rest = inputs[3..].iter().cloned();
                    let weights = weighted.then(|| rest.next().unwrap().reshape([t, k]));
                    let experts = ExpertWeights {
                        up: inputs[1].clone().reshape([e, f_up, d]),
                        down: inputs[2].clone().reshape([e, d, f]),
                        up_bias: bias.then(|| rest.next().unwrap().reshape([e, f_up])),
                        down_bias: bias.then(|| rest.next().unwrap().reshape([e, d])),
                    };
                    let out = expert_mlp(inputs[0].clone().reshape([t, d]), &order, weights, experts, activation).unwrap();
                    (out * tensor(&upstream, [t, d], DType::F64)).sum()
                });
            }
        }
    }

    #[test]
    fn experts_without_rows_get_exact_zero_gradients() {
        let mut case = cases().remove(0);
        (case.ids, case.bias) = (vec![1, 3, 3, 1], true);
        let inputs = case.inputs();
        for (name, i, grad) in case.run(&inputs, DType::F32, true) {
            if i < 3 {
                continue;
            }
            for (e, grad) in grad.chunks(grad.len() / case.e).enumerate() {
                let used = case.ids.contains(&e);
                assert_eq!(grad.iter().any(|&g| g != 0.0), used, "{name} of expert {e}");
            }
        }
    }

    #[test]
    fn mixed_dtypes_keep_their_own() {
        let mut case = cases().remove(0);
        case.bias = true;
        let (t, k, e, d, f, f_up) = (case.t(), case.k, case.e, case.d, case.f, case.f_up());
        let inputs = case.inputs();
        let order = sort_by_expert(ints::<Flex, 2>(&case.ids, [t, k]), e).unwrap().prim();
        let two = |i: usize, shape, dtype| check::float(tensor::<Flex, 2>(&inputs[i], shape, dtype));
        let three = |i: usize, shape| check::float(tensor::<Flex, 3>(&inputs[i], shape, DType::F32));
        let (x, grad) = (two(0, [t, d], DType::BF16), two(6, [t, d], DType::BF16));
        let weights = Some(two(1, [t, k], DType::BF16));
        let experts = ExpertWeightsPrim::<Flex> {
            up: three(2, [e, f_up, d]),
            up_bias: Some(two(4, [e, f_up], DType::F16)),
            down: three(3, [e, d, f]),
            down_bias: Some(two(5, [e, d], DType::F32)),
        };
        let expected = case.run(&inputs, DType::F32, true);
        for kernel in [true, false] {
            let (out, grads) = if kernel {
                let out = Flex::expert_mlp(x.clone(), &order, weights.clone(), &experts, k, case.activation);
                let (x, grad, up) = (x.clone(), grad.clone(), out.up_rf.clone());
                let grads = Flex::expert_mlp_backward(grad, x, up, &order, weights.clone(), &experts, k, case.activation);
                (out.out_td, grads)
            } else {
                use reference::expert_mlp as plain;
                let out = plain::expert_mlp::<Flex>(x.clone(), &order, weights.clone(), &experts, k, case.activation);
                let (x, grad, up) = (x.clone(), grad.clone(), out.up_rf.clone());
                let grads = plain::expert_mlp_backward::<Flex>(grad, x, up, &order, weights.clone(), &experts, k, case.activation);
                (out.out_td, grads)
            };
            let found = [&out, &grads.x_td, grads.weights_tk.as_ref().unwrap(), &grads.up, &grads.down];
            assert_eq!(
                found.map(|t| t.dtype()),
                [DType::BF16, DType::BF16, DType::BF16, DType::F32, DType::F32]
            );
            let biases = [grads.up_bias.as_ref().unwrap().dtype(), grads.down_bias.as_ref().unwrap().dtype()];
            assert_eq!(biases, [DType::F16, DType::F32]);
            let (name, _, expected) = &expected[0];
            assert_close(name, &f64s(check::tensor::<Flex, 2>(out)), expected, 2e-2);
        }
    }

    #[test]
    fn sizes_are_checked_by_name() {
        let order = sort_by_expert(ints::<Flex, 2>(&[0, 1], [2, 1]), 2).unwrap();
        let run = |up: [usize; 3], down: [usize; 3], bias: Option<[usize; 2]>| {
            let zeros = |shape: [usize; 3]| Tensor::<Flex, 3>::zeros(shape, &Default::default());
            let experts = ExpertWeights {
                up: zeros(up),
                up_bias: bias.map(|shape| Tensor::zeros(shape, &Default::default())),
                down: zeros(down),
                down_bias: None,
            };
            let x = Tensor::<Flex, 2>::zeros([2, 3], &Default::default());
            expert_mlp(x, &order, None, experts, ExpertActivation::SwiGlu)
                .unwrap_err()
                .to_string()
        };
        assert!(run([2, 8, 4], [2, 4, 4], None).contains("tensor `x` has shape [2, 3]"));
        assert!(run([2, 7, 3], [2, 3, 3], None).contains("tensor `up` has shape [2, 7, 3]"));
        assert!(run([2, 8, 3], [2, 3, 8], None).contains("tensor `down` has shape [2, 3, 8]"));
        assert!(run([3, 8, 3], [3, 3, 4], None).contains("tensor `offsets` has shape [3]"));
        assert!(run([2, 8, 3], [2, 3, 4], Some([2, 4])).contains("tensor `up_bias` has shape [2, 4]"));
    }
}

//! Router logits to expert ids and weights.

use burn_tensor::{Int, Tensor};

use super::check;
use crate::{MoeBackend, Result, RoutePrim, RouterDesc};

/// Chosen experts of every token.
#[derive(Debug, Clone)]
pub struct Route<B: MoeBackend> {
    /// `[T, K]` fp32, differentiable with respect to the logits.
    pub weights_tk: Tensor<B, 2>,
    /// `[T, K]`, best expert first.
    pub ids_tk: Tensor<B, 2, Int>,
}

/// Choose `K` experts per token from logits `[T, E]` (any float dtype; scores are fp32).
///
/// `selection_bias_e [E]` shifts the choice but not the weights (DeepSeek-V3, Nemotron-H) and gets no gradient.
/// `replay_tk` fixes the choice, e.g. when a block is recomputed; its ids must come from an earlier call.
pub fn route<B: MoeBackend>(
    logits_te: Tensor<B, 2>,
    selection_bias_e: Option<Tensor<B, 1>>,
    replay_tk: Option<Tensor<B, 2, Int>>,
    desc: &RouterDesc,
) -> Result<Route<B>> {
    let op = "route";
    let [t, e] = logits_te.dims();
    desc.validate()?;
    check::shape(op, "logits", [t, e], [t, desc.num_experts], "[T, E]")?;
    if let Some(bias) = &selection_bias_e {
        check::shape(op, "selection_bias", bias.dims(), [e], "[E]")?;
    }
    if let Some(replay) = &replay_tk {
        check::shape(op, "replay", replay.dims(), [t, desc.top_k], "[T, K]")?;
    }
    let RoutePrim { weights_tk, ids_tk } = B::moe_route(
        check::float(logits_te),
        selection_bias_e.map(check::float),
        replay_tk.map(check::int),
        desc,
    );
    Ok(Route {
        weights_tk: check::tensor(weights_tk),
        ids_tk: check::int_tensor(ids_tk),
    })
}

impl RouterDesc {
    /// Checks counts and groups against each other.
    pub fn validate(&self) -> Result<()> {
        let op = "route";
        check::setting(op, "num_experts", self.num_experts > 0, self.num_experts, "at least 1")?;
        check::setting(
            op,
            "top_k",
            (1..=self.num_experts).contains(&self.top_k),
            self.top_k,
            format!("1 to num_experts = {}", self.num_experts),
        )?;
        check::setting(
            op,
            "groups",
            self.groups > 0 && self.num_experts.is_multiple_of(self.groups),
            self.groups,
            format!("a divisor of num_experts = {}", self.num_experts),
        )?;
        check::setting(
            op,
            "top_groups",
            (1..=self.groups).contains(&self.top_groups),
            self.top_groups,
            format!("1 to groups = {}", self.groups),
        )?;
        let reachable = self.top_groups * (self.num_experts / self.groups);
        check::setting(
            op,
            "top_k",
            self.top_k <= reachable,
            self.top_k,
            format!("at most the {reachable} experts of {} groups", self.top_groups),
        )
    }
}

#[cfg(test)]
mod tests {
    use burn_backend::DType;
    use burn_flex::Flex;

    use super::*;
    use crate::testing::*;
    use crate::{GroupScore, RouterScore, reference};

    fn all_descs(num_experts: usize, top_k: usize) -> Vec<RouterDesc> {
        let mut descs = Vec::new();
        for score in [RouterScore::Softmax, RouterScore::TopKSoftmax, RouterScore::Sigmoid] {
            for renormalize in [false, true] {
                descs.push(RouterDesc {
                    score,
                    renormalize,
                    scale: 2.5,
                    ..RouterDesc::softmax(num_experts, top_k, renormalize)
                });
            }
        }
        descs
    }

    /// Scores, choice and weights straight from the definition, one token at a time, in f64.
    fn naive(logits: &[f64], bias: Option<&[f64]>, desc: &RouterDesc) -> (Vec<f64>, Vec<i64>) {
        let sum: f64 = logits.iter().map(|z| z.exp()).sum();
        let score = |e: usize| match desc.score {
            RouterScore::Softmax => logits[e].exp() / sum,
            RouterScore::TopKSoftmax => logits[e],
            RouterScore::Sigmoid => 1.0 / (1.0 + (-logits[e]).exp()),
        };
        let choice: Vec<f64> = (0..logits.len()).map(|e| score(e) + bias.map_or(0.0, |b| b[e])).collect();
        let size = logits.len() / desc.groups;
        let mut groups: Vec<usize> = (0..desc.groups).collect();
        let of_group = |g: usize| {
            let mut members = choice[g * size..(g + 1) * size].to_vec();
            members.sort_by(|a, b| b.total_cmp(a));
            let counted = match desc.group_score {
                GroupScore::Best => 1,
                GroupScore::TwoBest => 2,
            };
            members.iter().take(counted).sum::<f64>()
        };
        groups.sort_by(|&a, &b| of_group(b).total_cmp(&of_group(a)));
        let mut experts: Vec<usize> = (0..logits.len())
            .filter(|e| groups[..desc.top_groups].contains(&(e / size)))
            .collect();
        experts.sort_by(|&a, &b| choice[b].total_cmp(&choice[a]));
        experts.truncate(desc.top_k);

        let mut weights: Vec<f64> = experts.iter().map(|&e| score(e)).collect();
        if desc.score == RouterScore::TopKSoftmax {
            weights.iter_mut().for_each(|w| *w = w.exp());
        }
        if desc.renormalize || desc.score == RouterScore::TopKSoftmax {
            let total: f64 = weights.iter().sum();
            weights.iter_mut().for_each(|w| *w /= total);
        }
        weights.iter_mut().for_each(|w| *w *= f64::from(desc.scale));
        (weights, experts.iter().map(|&e| e as i64).collect())
    }

    fn check_against_naive(t: usize, desc: &RouterDesc, bias: Option<Vec<f64>>) {
        let e = desc.num_experts;
        let logits: Vec<f64> = values(3, t * e).into_iter().map(|z| 3.0 * z).collect();
        let (mut weights, mut ids) = (Vec::new(), Vec::new());
        for token in logits.chunks(e) {
            let (w, i) = naive(token, bias.as_deref(), desc);
            weights.extend(w);
            ids.extend(i);
        }
        let logits_te = tensor::<Flex, 2>(&logits, [t, e], DType::F32);
        let bias_e = bias.map(|b| tensor::<Flex, 1>(&b, [e], DType::F32));
        let found = route(logits_te.clone(), bias_e.clone(), None, desc).unwrap();
        assert_eq!(found.weights_tk.dtype(), DType::F32);
        assert_eq!(i64s(found.ids_tk), ids, "{desc:?}");
        assert_close(&format!("{desc:?}"), &f64s(found.weights_tk), &weights, 2e-6);

        let plain = reference::route::route::<Flex>(check::float(logits_te), bias_e.map(check::float), None, desc);
        assert_eq!(i64s(check::int_tensor::<Flex, 2>(plain.ids_tk)), ids, "reference {desc:?}");
        let plain: Tensor<Flex, 2> = check::tensor(plain.weights_tk);
        assert_close(&format!("reference {desc:?}"), &f64s(plain), &weights, 2e-6);
    }

    #[test]
    fn matches_the_definition() {
        for (t, e, k) in [(37, 12, 3), (1, 12, 12), (5, 1, 1), (0, 4, 2), (3, 128, 8)] {
            for desc in all_descs(e, k) {
                check_against_naive(t, &desc, None);
                check_against_naive(t, &desc, Some(values(9, e)));
            }
        }
    }

    #[test]
    fn groups_are_kept_by_their_best_or_two_best_scores() {
        for (groups, top_groups, top_k) in [(4, 2, 3), (3, 1, 4), (6, 3, 2), (12, 5, 5), (1, 1, 2)] {
            for mut desc in all_descs(12, top_k) {
                (desc.groups, desc.top_groups) = (groups, top_groups);
                for group_score in [GroupScore::TwoBest, GroupScore::Best] {
                    desc.group_score = group_score;
                    check_against_naive(29, &desc, None);
                    check_against_naive(29, &desc, Some(values(5, 12)));
                }
            }
        }
    }

    /// One strong expert beside a weak one against two of medium strength.
    #[test]
    fn the_two_group_scores_differ() {
        let logits_te = tensor::<Flex, 2>(&[3.0, -9.0, 2.0, 2.0], [1, 4], DType::F32);
        let ids = |group_score| {
            let desc = RouterDesc {
                score: RouterScore::Sigmoid,
                groups: 2,
                group_score,
                ..RouterDesc::softmax(4, 1, false)
            };
            i64s(route(logits_te.clone(), None, None, &desc).unwrap().ids_tk)
        };
        assert_eq!((ids(GroupScore::Best), ids(GroupScore::TwoBest)), (vec![0], vec![2]));
    }

    #[test]
    fn gradients_match_finite_differences() {
        let (t, e, k) = (3, 6, 3);
        let upstream = values(4, t * k);
        let logits: Vec<f64> = values(8, t * e).into_iter().map(|z| 2.0 * z).collect();
        for desc in all_descs(e, k) {
            for force_balanced in [false, true] {
                let desc = RouterDesc {
                    force_balanced,
                    groups: 2,
                    top_groups: 1,
                    ..desc.clone()
                };
                check_gradients(&format!("{desc:?}"), std::slice::from_ref(&logits), |inputs| {
                    let logits = inputs[0].clone().reshape([t, e]);
                    let bias = tensor(&[0.1, -0.2, 0.0, 0.3, 0.05, -0.1], [e], DType::F64);
                    let weights = route(logits, Some(bias), None, &desc).unwrap().weights_tk;
                    (weights * tensor(&upstream, [t, k], DType::F64)).sum()
                });
            }
        }
    }

    #[test]
    fn reference_gradient_equals_the_kernel() {
        let (t, e, k) = (9, 8, 3);
        for dtype in [DType::F32, DType::BF16] {
            for desc in all_descs(e, k) {
                let logits = tensor::<Flex, 2>(&values(1, t * e), [t, e], dtype);
                let grad = check::float(tensor::<Flex, 2>(&values(2, t * k), [t, k], DType::F32));
                let ids = route(logits.clone(), None, None, &desc).unwrap().ids_tk.into_primitive();
                let (logits, tolerance) = (check::float(logits), if dtype == DType::F32 { 1e-6 } else { 4e-3 });
                let kernel = Flex::moe_route_backward(logits.clone(), ids.clone(), grad.clone(), &desc);
                let plain = reference::route::route_backward::<Flex>(logits, ids, grad, &desc);
                let (kernel, plain): (Tensor<Flex, 2>, Tensor<Flex, 2>) = (check::tensor(kernel), check::tensor(plain));
                assert_eq!((kernel.dtype(), plain.dtype()), (dtype, dtype));
                assert_close(&format!("{desc:?}"), &f64s(kernel), &f64s(plain), tolerance);
            }
        }
    }

    #[test]
    fn replay_and_balanced_fix_the_ids() {
        let (t, e, k) = (5, 4, 3);
        for mut desc in all_descs(e, k) {
            let logits = tensor::<Flex, 2>(&values(6, t * e), [t, e], DType::F32);
            let chosen = route(logits.clone(), None, None, &desc).unwrap();
            let again = route(logits.clone(), None, Some(chosen.ids_tk.clone()), &desc).unwrap();
            assert_eq!(i64s(again.ids_tk), i64s(chosen.ids_tk));
            assert_eq!(f64s(again.weights_tk), f64s(chosen.weights_tk));

            desc.force_balanced = true;
            let balanced = route(logits.clone(), None, None, &desc).unwrap();
            let expected: Vec<i64> = (0..(t * k) as i64).map(|slot| slot % e as i64).collect();
            assert_eq!(i64s(balanced.ids_tk.clone()), expected);
            let plain = reference::route::route::<Flex>(check::float(logits.clone()), None, None, &desc);
            assert_eq!(i64s(check::int_tensor::<Flex, 2>(plain.ids_tk)), expected);
            let plain: Tensor<Flex, 2> = check::tensor(plain.weights_tk);
            assert_close("balanced weights", &f64s(balanced.weights_tk), &f64s(plain), 1e-6);
        }
    }

    #[test]
    fn ties_go_to_the_lower_id() {
        for desc in all_descs(6, 4) {
            let logits = tensor::<Flex, 2>(&[0.0, 1.0, 1.0, 0.0, 1.0, 0.0], [1, 6], DType::F32);
            assert_eq!(i64s(route(logits.clone(), None, None, &desc).unwrap().ids_tk), [1, 2, 4, 0]);
            let plain = reference::route::route::<Flex>(check::float(logits), None, None, &desc);
            assert_eq!(i64s(check::int_tensor::<Flex, 2>(plain.ids_tk)), [1, 2, 4, 0]);
        }
    }

    #[test]
    fn extreme_logits_give_finite_weights_and_gradients() {
        for force_balanced in [false, true] {
            for desc in all_descs(4, 2) {
                let desc = RouterDesc { force_balanced, ..desc };
                let logits = tensor::<Ad, 2>(
                    &[3e38, -3e38, 0.0, 1.0, -3e38, -3e38, -3e38, -3e38, 1e4, 1e4, -1e4, -1e4],
                    [3, 4],
                    DType::F32,
                )
                .require_grad();
                let routed = route(logits.clone(), None, None, &desc).unwrap();
                let weights = f64s(routed.weights_tk.clone());
                let upstream = tensor(&values(2, 6), [3, 2], DType::F32);
                let grads = (routed.weights_tk * upstream).sum().backward();
                let grad = f64s(logits.grad(&grads).unwrap());
                assert!(weights.iter().chain(&grad).all(|v| v.is_finite()), "{desc:?}: {weights:?} {grad:?}");
            }
        }
    }

    #[test]
    fn nan_logits_still_choose_valid_experts() {
        for desc in all_descs(4, 2) {
            let logits = tensor::<Flex, 2>(&[f64::NAN, 1.0, f64::NAN, f64::NAN], [1, 4], DType::F32);
            let mut ids = i64s(route(logits.clone(), None, None, &desc).unwrap().ids_tk);
            let plain = reference::route::route::<Flex>(check::float(logits), None, None, &desc);
            assert_eq!(i64s(check::int_tensor::<Flex, 2>(plain.ids_tk)), ids);
            ids.dedup();
            assert!(ids.len() == 2 && ids.iter().all(|id| (0..4).contains(id)), "{ids:?}");
        }
    }

    #[test]
    fn views_route_like_copies() {
        let desc = RouterDesc::softmax(5, 2, true);
        let wide = tensor::<Flex, 2>(&values(7, 70), [10, 7], DType::F32);
        let view = wide.transpose().slice([1..6, 2..7]);
        let copy = tensor::<Flex, 2>(&f64s(view.clone()), [5, 5], DType::F32);
        let (a, b) = (route(view, None, None, &desc).unwrap(), route(copy, None, None, &desc).unwrap());
        assert_eq!(i64s(a.ids_tk), i64s(b.ids_tk));
        assert_eq!(f64s(a.weights_tk), f64s(b.weights_tk));
    }

    #[test]
    fn settings_are_checked_by_name() {
        let logits = || tensor::<Flex, 2>(&values(1, 8), [2, 4], DType::F32);
        let message = |desc: RouterDesc| route(logits(), None, None, &desc).unwrap_err().to_string();
        assert!(message(RouterDesc::softmax(4, 5, true)).contains("`top_k` is 5, expected 1 to num_experts = 4"));
        let grouped = |groups, top_groups, top_k| RouterDesc {
            groups,
            top_groups,
            ..RouterDesc::softmax(4, top_k, true)
        };
        assert!(message(grouped(3, 1, 1)).contains("`groups` is 3"));
        assert!(message(grouped(2, 3, 1)).contains("`top_groups` is 3"));
        assert!(message(grouped(2, 1, 3)).contains("at most the 2 experts of 1 groups"));
        assert!(message(RouterDesc::softmax(5, 1, true)).contains("tensor `logits` has shape [2, 4]"));
    }
}

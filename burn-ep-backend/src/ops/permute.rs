//! Sorting routed rows by expert and back.

use burn_tensor::{Int, Tensor};

use super::check;
use crate::{ExpertOrderPrim, MoeBackend, Result};

/// Rows sorted by expert; see [`ExpertOrderPrim`].
#[derive(Debug, Clone)]
pub struct ExpertOrder<B: MoeBackend> {
    pub slots_r: Tensor<B, 1, Int>,
    pub positions_r: Tensor<B, 1, Int>,
    pub offsets_e1: Tensor<B, 1, Int>,
    pub top_k: usize,
}

impl<B: MoeBackend> ExpertOrder<B> {
    pub(super) fn prim(&self) -> ExpertOrderPrim<B> {
        ExpertOrderPrim {
            slots_r: self.slots_r.clone().into_primitive(),
            positions_r: self.positions_r.clone().into_primitive(),
            offsets_e1: self.offsets_e1.clone().into_primitive(),
        }
    }
}

/// Stable sort of the `T*K` slots of `ids [T, K]` by expert.
///
/// Every id must lie in `0..num_experts`, as those of [`super::route()`] do. This is not checked here, because ids live on
/// the device; the CPU backend panics on others.
pub fn sort_by_expert<B: MoeBackend>(ids_tk: Tensor<B, 2, Int>, num_experts: usize) -> Result<ExpertOrder<B>> {
    check::setting("sort_by_expert", "num_experts", num_experts > 0, num_experts, "at least 1")?;
    let [_, top_k] = ids_tk.dims();
    check::setting("sort_by_expert", "top_k", top_k > 0, top_k, "at least 1")?;
    let order = B::moe_sort_by_expert(ids_tk.into_primitive(), num_experts);
    Ok(ExpertOrder {
        slots_r: Tensor::from_primitive(order.slots_r),
        positions_r: Tensor::from_primitive(order.positions_r),
        offsets_e1: Tensor::from_primitive(order.offsets_e1),
        top_k,
    })
}

/// `rows[r] = x[slots[r] / K]`: `[T, D]` to `[R, D]`.
pub fn permute<B: MoeBackend>(x_td: Tensor<B, 2>, order: &ExpertOrder<B>) -> Result<Tensor<B, 2>> {
    let [t, d] = x_td.dims();
    let [r] = order.slots_r.dims();
    check::shape("permute", "x", [t, d], [r / order.top_k.max(1), d], "[T, D]")?;
    Ok(check::tensor(B::moe_permute(check::float(x_td), &order.prim(), order.top_k)))
}

/// Weighted sum of each token's `K` rows: `[R, D]` to `[T, D]`; weights default to 1.
pub fn unpermute<B: MoeBackend>(rows_rd: Tensor<B, 2>, order: &ExpertOrder<B>, weights_tk: Option<Tensor<B, 2>>) -> Result<Tensor<B, 2>> {
    let [r, d] = rows_rd.dims();
    let [slots] = order.slots_r.dims();
    check::shape("unpermute", "rows", [r, d], [slots, d], "[R, D]")?;
    if let Some(w) = &weights_tk {
        check::shape(
            "unpermute",
            "weights",
            w.dims(),
            [slots / order.top_k.max(1), order.top_k],
            "[T, K]",
        )?;
    }
    Ok(check::tensor(B::moe_unpermute(
        check::float(rows_rd),
        &order.prim(),
        weights_tk.map(check::float),
        order.top_k,
    )))
}

#[cfg(test)]
mod tests {
    use burn_backend::DType;
    use burn_flex::Flex;

    use super::*;
    use crate::reference;
    use crate::testing::*;

    fn ids(t: usize, k: usize, e: usize) -> Vec<usize> {
        values(11, t * k)
            .into_iter()
            .map(|v| ((v + 1.0) / 2.0 * e as f64) as usize)
            .collect()
    }

    /// `(T, K, E)` with empty experts, one expert, one token, no token and odd counts.
    const SIZES: [(usize, usize, usize); 6] = [(7, 3, 5), (1, 4, 4), (40, 2, 3), (5, 1, 1), (0, 2, 3), (3, 2, 64)];

    #[test]
    fn order_is_a_stable_sort() {
        for (t, k, e) in SIZES {
            let ids = ids(t, k, e);
            let mut slots: Vec<i64> = (0..(t * k) as i64).collect();
            slots.sort_by_key(|&slot| ids[slot as usize]);
            let mut positions = vec![0; t * k];
            slots
                .iter()
                .enumerate()
                .for_each(|(at, &slot)| positions[slot as usize] = at as i64);
            let offsets: Vec<i64> = (0..=e).map(|bound| ids.iter().filter(|&&id| id < bound).count() as i64).collect();

            let ids_tk = ints::<Flex, 2>(&ids, [t, k]);
            let order = sort_by_expert(ids_tk.clone(), e).unwrap();
            let plain = reference::permute::sort_by_expert::<Flex>(ids_tk.into_primitive(), e);
            for (found, name) in [(order.prim(), "kernel"), (plain, "reference")] {
                let read = |ints| i64s(Tensor::<Flex, 1, Int>::from_primitive(ints));
                assert_eq!(read(found.slots_r), slots, "{name}");
                assert_eq!(read(found.positions_r), positions, "{name}");
                assert_eq!(read(found.offsets_e1), offsets, "{name}");
            }
        }
    }

    #[test]
    fn all_tokens_on_one_expert_keep_their_order() {
        let order = sort_by_expert(ints::<Flex, 2>(&[2; 6], [6, 1]), 4).unwrap();
        assert_eq!(i64s(order.slots_r), [0, 1, 2, 3, 4, 5]);
        assert_eq!(i64s(order.offsets_e1), [0, 0, 0, 6, 6]);
    }

    #[test]
    fn permute_and_unpermute_match_loops() {
        for dtype in [DType::F32, DType::BF16] {
            for (t, k, e) in SIZES {
                let d = 5;
                let order = sort_by_expert(ints::<Flex, 2>(&ids(t, k, e), [t, k]), e).unwrap();
                let slots = i64s(order.slots_r.clone());
                let x_td = tensor::<Flex, 2>(&values(1, t * d), [t, d], dtype);
                let x = f64s(x_td.clone());
                let rows_rd = permute(x_td.clone(), &order).unwrap();
                let expected: Vec<f64> = slots.iter().flat_map(|&s| x[s as usize / k * d..][..d].to_vec()).collect();
                assert_eq!(f64s(rows_rd.clone()), expected);
                let plain = reference::permute::permute::<Flex>(check::float(x_td), &order.prim(), k);
                assert_eq!(f64s(check::tensor::<Flex, 2>(plain)), expected);

                let weights_tk = tensor::<Flex, 2>(&values(2, t * k), [t, k], DType::F32);
                let weights = f64s(weights_tk.clone());
                let mut expected = vec![0.0; t * d];
                for (at, &slot) in slots.iter().enumerate() {
                    for c in 0..d {
                        expected[slot as usize / k * d + c] += weights[slot as usize] * f64s(rows_rd.clone())[at * d + c];
                    }
                }
                let tolerance = if dtype == DType::F32 { 1e-6 } else { 2e-2 };
                let found = unpermute(rows_rd.clone(), &order, Some(weights_tk.clone())).unwrap();
                assert_eq!(found.dtype(), dtype);
                assert_close("unpermute", &f64s(found), &expected, tolerance);
                let plain = reference::permute::unpermute::<Flex>(check::float(rows_rd), &order.prim(), Some(check::float(weights_tk)), k);
                assert_close("reference", &f64s(check::tensor::<Flex, 2>(plain)), &expected, tolerance);
            }
        }
    }

    #[test]
    fn sum_of_bf16_rows_is_rounded_once() {
        // 256 + 1 + 1 in bf16 steps stays 256; the fp32 sum 258 is representable.
        let order = sort_by_expert(ints::<Flex, 2>(&[0, 1, 2], [1, 3]), 3).unwrap();
        let rows = tensor::<Flex, 2>(&[256.0, 1.0, 1.0], [3, 1], DType::BF16);
        assert_eq!(f64s(unpermute(rows, &order, None).unwrap()), [258.0]);
    }

    #[test]
    fn gradients_match_finite_differences() {
        let (t, k, e, d) = (4, 2, 3, 3);
        let order = |ids: &[usize]| sort_by_expert(ints::<Ad, 2>(ids, [t, k]), e).unwrap();
        let ids = ids(t, k, e);
        let inputs = [values(1, t * d), values(2, t * k)];
        let upstream = values(3, t * d);
        check_gradients("permute, scale, weighted unpermute", &inputs, |inputs| {
            let rows = permute(inputs[0].clone().reshape([t, d]), &order(&ids)).unwrap();
            let rows = rows.clone() * rows;
            let out = unpermute(rows, &order(&ids), Some(inputs[1].clone().reshape([t, k]))).unwrap();
            (out * tensor(&upstream, [t, d], DType::F64)).sum()
        });
        check_gradients("unweighted unpermute", &[values(5, t * k * d)], |inputs| {
            let rows = inputs[0].clone().reshape([t * k, d]);
            let out = unpermute(rows.clone() * rows, &order(&ids), None).unwrap();
            (out * tensor(&upstream, [t, d], DType::F64)).sum()
        });
    }

    #[test]
    fn reference_backward_equals_the_kernel() {
        let (t, k, e, d) = (6, 2, 4, 7);
        let order = sort_by_expert(ints::<Flex, 2>(&ids(t, k, e), [t, k]), e).unwrap().prim();
        let float = |n: usize, seed, shape| check::float(tensor::<Flex, 2>(&values(seed, n), shape, DType::F32));
        let (grad, rows, weights) = (float(t * d, 1, [t, d]), float(t * k * d, 2, [t * k, d]), float(t * k, 3, [t, k]));
        for weights in [Some(weights), None] {
            let kernel = Flex::moe_unpermute_backward(grad.clone(), rows.clone(), &order, weights.clone(), k);
            let plain = reference::permute::unpermute_backward::<Flex>(grad.clone(), rows.clone(), &order, weights, k);
            let read = |prim| f64s(check::tensor::<Flex, 2>(prim));
            assert_close("rows", &read(kernel.0), &read(plain.0), 1e-6);
            assert_eq!(kernel.1.is_some(), plain.1.is_some());
            if let (Some(kernel), Some(plain)) = (kernel.1, plain.1) {
                assert_close("weights", &read(kernel), &read(plain), 1e-5);
            }
        }
    }

    #[test]
    fn views_permute_like_copies() {
        let order = sort_by_expert(ints::<Flex, 2>(&[1, 0, 1], [3, 1]), 2).unwrap();
        let view = tensor::<Flex, 2>(&values(1, 24), [6, 4], DType::F32)
            .transpose()
            .slice([1..4, 1..5]);
        let copy = tensor::<Flex, 2>(&f64s(view.clone()), [3, 4], DType::F32);
        assert_eq!(f64s(permute(view, &order).unwrap()), f64s(permute(copy, &order).unwrap()));
    }

    #[test]
    fn sizes_are_checked_by_name() {
        let order = sort_by_expert(ints::<Flex, 2>(&[1, 0, 1, 0], [2, 2]), 2).unwrap();
        let x = tensor::<Flex, 2>(&values(1, 6), [3, 2], DType::F32);
        let message = permute(x.clone(), &order).unwrap_err().to_string();
        assert!(
            message.contains("permute: tensor `x` has shape [3, 2], expected [T, D] = [2, 2]"),
            "{message}"
        );
        let message = unpermute(x, &order, None).unwrap_err().to_string();
        assert!(message.contains("unpermute: tensor `rows` has shape [3, 2]"), "{message}");
    }
}

//! Rows grouped by expert times stacked weights.

use burn_tensor::{Int, Tensor};

use super::check;
use crate::{MoeBackend, Result};

/// `out[r] = rows[r] · weight[e]^T` where `offsets[e] <= r < offsets[e + 1]`: `[R, In] x [E, Out, In]` to `[R, Out]`.
///
/// Groups may be empty; `offsets [E + 1]` must end at R (not checked: it lives on the device).
pub fn grouped_matmul<B: MoeBackend>(
    rows_ri: Tensor<B, 2>,
    weight_eoi: Tensor<B, 3>,
    offsets_e1: Tensor<B, 1, Int>,
) -> Result<Tensor<B, 2>> {
    let [r, i] = rows_ri.dims();
    let [e, o, wi] = weight_eoi.dims();
    check::shape("grouped_matmul", "rows", [r, i], [r, wi], "[R, In]")?;
    check::shape("grouped_matmul", "offsets", offsets_e1.dims(), [e + 1], "[E + 1]")?;
    let out: Tensor<B, 2> = check::tensor(B::grouped_matmul(
        check::float(rows_ri),
        check::float(weight_eoi),
        check::int(offsets_e1),
    ));
    debug_assert_eq!(out.dims(), [r, o]);
    Ok(out)
}

#[cfg(test)]
mod tests {
    use burn_backend::DType;
    use burn_flex::Flex;

    use super::*;
    use crate::reference;
    use crate::testing::*;

    struct Case {
        offsets: Vec<usize>,
        inner: usize,
        out: usize,
    }

    /// Empty experts first, between and last; one expert; one with everything; no rows; sizes no tile divides.
    fn cases() -> Vec<Case> {
        let case = |offsets: &[usize], inner, out| Case {
            offsets: offsets.to_vec(),
            inner,
            out,
        };
        vec![
            case(&[0, 0, 3, 3, 10, 10], 24, 20),
            case(&[0, 5], 7, 3),
            case(&[0, 0, 301, 301], 20, 24),
            case(&[0, 0, 0], 4, 6),
            case(&[0, 1, 2], 1, 1),
            case(&[0, 130, 131, 300], 33, 17),
        ]
    }

    impl Case {
        fn experts(&self) -> usize {
            self.offsets.len() - 1
        }

        fn rows(&self) -> usize {
            *self.offsets.last().unwrap()
        }

        fn tensors(&self, dtype: DType) -> [Tensor<Flex, 2>; 2] {
            [
                tensor(&values(1, self.rows() * self.inner), [self.rows(), self.inner], dtype),
                tensor(&values(2, self.rows() * self.out), [self.rows(), self.out], dtype),
            ]
        }

        fn weight(&self, dtype: DType) -> Tensor<Flex, 3> {
            let (e, o, i) = (self.experts(), self.out, self.inner);
            tensor(&values(3, e * o * i), [e, o, i], dtype)
        }

        fn offsets(&self) -> Tensor<Flex, 1, Int> {
            ints(&self.offsets, [self.offsets.len()])
        }

        /// Output, gradient of the rows, gradient of the weight, by loops in f64 over the tensors' own values.
        fn naive(&self, dtype: DType) -> [Vec<f64>; 3] {
            let (o, i) = (self.out, self.inner);
            let [rows, grad] = self.tensors(dtype).map(f64s);
            let weight = f64s(self.weight(dtype));
            let mut results = [vec![0.0; self.rows() * o], vec![0.0; self.rows() * i], vec![0.0; weight.len()]];
            for e in 0..self.experts() {
                for r in self.offsets[e]..self.offsets[e + 1] {
                    for a in 0..o {
                        for b in 0..i {
                            let w = (e * o + a) * i + b;
                            results[0][r * o + a] += rows[r * i + b] * weight[w];
                            results[1][r * i + b] += grad[r * o + a] * weight[w];
                            results[2][w] += grad[r * o + a] * rows[r * i + b];
                        }
                    }
                }
            }
            results
        }

        /// The same three from `forward`, `grad_rows`, `grad_weight`.
        fn run(&self, dtype: DType, kernel: bool) -> [Vec<f64>; 3] {
            let [rows, grad] = self.tensors(dtype).map(check::float);
            let (weight, offsets) = (check::float(self.weight(dtype)), self.offsets().into_primitive());
            let results = if kernel {
                [
                    Flex::grouped_matmul(rows.clone(), weight.clone(), offsets.clone()),
                    Flex::grouped_matmul_grad_rows(grad.clone(), weight, offsets.clone()),
                    Flex::grouped_matmul_grad_weight(grad, rows, offsets),
                ]
            } else {
                use reference::grouped_matmul as plain;
                [
                    plain::grouped_matmul::<Flex>(rows.clone(), weight.clone(), offsets.clone()),
                    plain::grad_rows::<Flex>(grad.clone(), weight, offsets.clone()),
                    plain::grad_weight::<Flex>(grad, rows, offsets),
                ]
            };
            let [out, grad_rows, grad_weight] = results;
            [
                f64s(check::tensor::<Flex, 2>(out)),
                f64s(check::tensor::<Flex, 2>(grad_rows)),
                f64s(check::tensor::<Flex, 3>(grad_weight)),
            ]
        }
    }

    const NAMES: [&str; 3] = ["out", "grad_rows", "grad_weight"];

    #[test]
    fn matches_loops_in_fp32_and_f64() {
        for (dtype, tolerance) in [(DType::F32, 1e-4), (DType::F64, 1e-11)] {
            for case in cases() {
                let naive = case.naive(dtype);
                for kernel in [true, false] {
                    for ((found, expected), name) in case.run(dtype, kernel).iter().zip(&naive).zip(NAMES) {
                        assert_close(name, found, expected, tolerance);
                    }
                }
            }
        }
    }

    #[test]
    fn low_precision_follows_the_rule() {
        for dtype in [DType::BF16, DType::F16] {
            for case in cases() {
                let (kernel, plain) = (case.run(dtype, true), case.run(dtype, false));
                for (i, wide) in case.naive(dtype).iter().enumerate() {
                    assert_low_precision(NAMES[i], &kernel[i], &plain[i], wide);
                }
            }
        }
    }

    #[test]
    fn experts_without_rows_get_exact_zero_gradients() {
        let case = &cases()[0];
        let size = case.inner * case.out;
        let grad = &case.run(DType::F32, true)[2];
        for e in [0, 2, 4] {
            assert!(grad[e * size..(e + 1) * size].iter().all(|&g| g == 0.0));
        }
        assert!(grad[size..2 * size].iter().all(|&g| g != 0.0));
    }

    #[test]
    fn gradients_match_finite_differences() {
        let (offsets, i, o) = ([0, 2, 2, 5], 3, 2);
        let inputs = [values(1, 5 * i), values(2, 3 * o * i)];
        let upstream = values(3, 5 * o);
        check_gradients("grouped_matmul", &inputs, |inputs| {
            let rows = inputs[0].clone().reshape([5, i]);
            let weight = inputs[1].clone().reshape([3, o, i]);
            let out = grouped_matmul(rows, weight, ints(&offsets, [4])).unwrap();
            (out.clone() * out * tensor(&upstream, [5, o], DType::F64)).sum()
        });
    }

    #[test]
    fn only_tracked_inputs_get_gradients() {
        let rows = tensor::<Ad, 2>(&values(1, 6), [2, 3], DType::F32).require_grad();
        let weight = tensor::<Ad, 3>(&values(2, 12), [2, 2, 3], DType::F32);
        let out = grouped_matmul(rows.clone(), weight.clone(), ints(&[0, 1, 2], [3])).unwrap();
        let grads = out.sum().backward();
        assert!(rows.grad(&grads).is_some() && weight.grad(&grads).is_none());
    }

    #[test]
    fn views_multiply_like_copies() {
        let rows = tensor::<Flex, 2>(&values(1, 48), [6, 8], DType::F32)
            .transpose()
            .slice([1..6, 1..5]);
        let weight = tensor::<Flex, 3>(&values(2, 24), [2, 4, 3], DType::F32).swap_dims(1, 2);
        let offsets = || ints::<Flex, 1>(&[0, 2, 5], [3]);
        let copies = (
            tensor::<Flex, 2>(&f64s(rows.clone()), [5, 4], DType::F32),
            tensor::<Flex, 3>(&f64s(weight.clone()), [2, 3, 4], DType::F32),
        );
        let views = grouped_matmul(rows, weight, offsets()).unwrap();
        let copies = grouped_matmul(copies.0, copies.1, offsets()).unwrap();
        assert_eq!(f64s(views), f64s(copies));
    }

    #[test]
    fn rows_past_the_last_group_are_zero() {
        let rows = tensor::<Flex, 2>(&[1.0, 2.0, f64::NAN, f64::NAN], [2, 2], DType::F32);
        let weight = tensor::<Flex, 3>(&[1.0, 1.0], [1, 1, 2], DType::F32);
        let out = grouped_matmul(rows.clone(), weight.clone(), ints(&[0, 1], [2])).unwrap();
        assert_eq!(f64s(out), [3.0, 0.0]);
        let plain = reference::grouped_matmul::grouped_matmul::<Flex>(
            check::float(rows),
            check::float(weight),
            ints::<Flex, 1>(&[0, 1], [2]).into_primitive(),
        );
        assert_eq!(f64s(check::tensor::<Flex, 2>(plain)), [3.0, 0.0]);
    }
}

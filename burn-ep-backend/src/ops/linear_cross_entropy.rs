//! Vocabulary projection and cross entropy in one op.

use burn_tensor::{Int, Tensor};

use super::check;
use crate::{CrossEntropyDesc, MoeBackend, Result};

/// Sum over rows of `-log softmax(hidden · weight^T)[label]`, fp32 `[1]`: hidden `[T, D]`, weight `[V, D]`, labels `[T]`.
///
/// Never holds more than `desc.chunk` rows of logits. Labels outside the vocabulary other than `ignore_index` are for
/// callers to refuse on the host, where the data comes from; here such a row makes the loss NaN and gets no gradient.
pub fn linear_cross_entropy<B: MoeBackend>(
    hidden_td: Tensor<B, 2>,
    weight_vd: Tensor<B, 2>,
    labels_t: Tensor<B, 1, Int>,
    desc: &CrossEntropyDesc,
) -> Result<Tensor<B, 1>> {
    let op = "linear_cross_entropy";
    let [t, d] = hidden_td.dims();
    let [v, wd] = weight_vd.dims();
    check::shape(op, "weight", [v, wd], [v, d], "[V, D]")?;
    check::shape(op, "labels", labels_t.dims(), [t], "[T]")?;
    check::setting(op, "chunk", desc.chunk > 0, desc.chunk, "at least 1")?;
    let out = B::linear_cross_entropy(check::float(hidden_td), check::float(weight_vd), check::int(labels_t), false, desc);
    Ok(check::tensor(out.loss_sum))
}

#[cfg(test)]
mod tests {
    use burn_backend::DType;
    use burn_flex::Flex;

    use super::*;
    use crate::testing::*;
    use crate::{CrossEntropyPrim, reference};

    const IGNORE: i64 = -100;

    fn labels<B: MoeBackend>(labels: &[i64]) -> Tensor<B, 1, Int> {
        Tensor::from_data(burn_tensor::TensorData::new(labels.to_vec(), [labels.len()]), &B::Device::default())
    }

    /// Some ignored, first and last column used.
    fn some_labels(t: usize, v: usize) -> Vec<i64> {
        let label = |row: usize| if row % 3 == 1 { IGNORE } else { ((row * 7 + v - 1) % v) as i64 };
        (0..t).map(label).collect()
    }

    /// Loss and gradients (hidden, weight) from the full logits in f64.
    fn naive(hidden: &[f64], weight: &[f64], labels: &[i64], d: usize) -> (f64, Vec<f64>, Vec<f64>) {
        let (mut loss, mut grad_h, mut grad_w) = (0.0, vec![0.0; hidden.len()], vec![0.0; weight.len()]);
        for (row, &label) in labels.iter().enumerate().filter(|(_, label)| **label != IGNORE) {
            let h = &hidden[row * d..(row + 1) * d];
            let logits: Vec<f64> = weight.chunks(d).map(|w| dot(h, w)).collect();
            let sum: f64 = logits.iter().map(|z| z.exp()).sum();
            loss += sum.ln() - logits[label as usize];
            for (column, z) in logits.iter().enumerate() {
                let g = z.exp() / sum - f64::from(column == label as usize);
                for c in 0..d {
                    grad_h[row * d + c] += g * weight[column * d + c];
                    grad_w[column * d + c] += g * h[c];
                }
            }
        }
        (loss, grad_h, grad_w)
    }

    struct Case {
        t: usize,
        d: usize,
        v: usize,
        chunk: usize,
    }

    /// Chunks that divide the rows and that do not, more rows than a tile, a vocabulary beyond a tile, no row.
    const CASES: [Case; 5] = [
        Case {
            t: 7,
            d: 5,
            v: 11,
            chunk: 3,
        },
        Case {
            t: 1,
            d: 24,
            v: 20,
            chunk: 1024,
        },
        Case {
            t: 200,
            d: 3,
            v: 9,
            chunk: 150,
        },
        Case {
            t: 5,
            d: 2,
            v: 2500,
            chunk: 2,
        },
        Case {
            t: 0,
            d: 4,
            v: 6,
            chunk: 2,
        },
    ];

    fn run(case: &Case, labels_t: &[i64], dtype: DType, kernel: bool) -> (f64, Vec<f64>, Vec<f64>) {
        let hidden = check::float(tensor::<Flex, 2>(&values(1, case.t * case.d), [case.t, case.d], dtype));
        let weight = check::float(tensor::<Flex, 2>(&values(2, case.v * case.d), [case.v, case.d], dtype));
        let desc = CrossEntropyDesc {
            ignore_index: IGNORE,
            chunk: case.chunk,
        };
        let labels_t = labels::<Flex>(labels_t).into_primitive();
        let function = if kernel {
            Flex::linear_cross_entropy
        } else {
            reference::linear_cross_entropy::linear_cross_entropy::<Flex>
        };
        let CrossEntropyPrim { loss_sum, grads } = function(hidden, weight, labels_t, true, &desc);
        let (grad_hidden, grad_weight) = grads.expect("asked for");
        let grads = [grad_hidden, grad_weight].map(check::tensor::<Flex, 2>);
        assert!(grads.iter().all(|g| g.dtype() == dtype));
        let [grad_hidden, grad_weight] = grads.map(f64s);
        (f64s(check::tensor::<Flex, 1>(loss_sum))[0], grad_hidden, grad_weight)
    }

    #[test]
    fn loss_and_gradients_match_full_logits() {
        for case in &CASES {
            let labels = some_labels(case.t, case.v);
            let expected = naive(&values(1, case.t * case.d), &values(2, case.v * case.d), &labels, case.d);
            for (dtype, tolerance) in [(DType::F64, 1e-12), (DType::F32, 1e-5)] {
                for kernel in [true, false] {
                    let found = run(case, &labels, dtype, kernel);
                    assert_close("loss", &[found.0], &[expected.0], tolerance);
                    assert_close("hidden", &found.1, &expected.1, tolerance);
                    assert_close("weight", &found.2, &expected.2, tolerance);
                }
            }
        }
    }

    #[test]
    fn low_precision_follows_the_rule() {
        for dtype in [DType::BF16, DType::F16] {
            for case in &CASES {
                let labels = some_labels(case.t, case.v);
                let exact = naive(&values(1, case.t * case.d), &values(2, case.v * case.d), &labels, case.d);
                let (kernel, plain) = (run(case, &labels, dtype, true), run(case, &labels, dtype, false));
                assert_low_precision("loss", &[kernel.0], &[plain.0], &[exact.0]);
                assert_low_precision("hidden", &kernel.1, &plain.1, &exact.1);
                assert_low_precision("weight", &kernel.2, &plain.2, &exact.2);
            }
        }
    }

    #[test]
    fn backward_scales_by_the_upstream_gradient() {
        let (t, d, v) = (4, 3, 5);
        let labels_t = [4, IGNORE, 0, 2];
        let desc = CrossEntropyDesc {
            chunk: 2,
            ..CrossEntropyDesc::default()
        };
        check_gradients("loss^2 / 3", &[values(1, t * d), values(2, v * d)], |inputs| {
            let (hidden, weight) = (inputs[0].clone().reshape([t, d]), inputs[1].clone().reshape([v, d]));
            let loss = linear_cross_entropy(hidden, weight, labels(&labels_t), &desc).unwrap();
            loss.clone() * loss / 3.0
        });
    }

    #[test]
    fn frozen_inputs_get_no_gradient() {
        let hidden = tensor::<Ad, 2>(&values(1, 6), [2, 3], DType::BF16).require_grad();
        let weight = tensor::<Ad, 2>(&values(2, 12), [4, 3], DType::BF16);
        let loss = linear_cross_entropy(hidden.clone(), weight.clone(), labels(&[1, 3]), &CrossEntropyDesc::default()).unwrap();
        assert_eq!(loss.dtype(), DType::F32);
        let grads = loss.backward();
        assert_eq!(hidden.grad(&grads).expect("tracked").dtype(), DType::BF16);
        assert!(weight.grad(&grads).is_none());
    }

    #[test]
    fn nothing_to_count_is_zero() {
        let case = Case {
            t: 3,
            d: 2,
            v: 4,
            chunk: 2,
        };
        for kernel in [true, false] {
            let (loss, grad_hidden, grad_weight) = run(&case, &[IGNORE; 3], DType::F32, kernel);
            assert_eq!(loss, 0.0);
            assert!(grad_hidden.iter().chain(&grad_weight).all(|&g| g == 0.0));
        }
    }

    #[test]
    fn label_outside_the_vocabulary_is_nan_and_reads_nothing() {
        let case = Case {
            t: 3,
            d: 2,
            v: 4,
            chunk: 2,
        };
        let kept = run(&case, &[1, IGNORE, IGNORE], DType::F32, true);
        for bad in [4, 1 << 30, -1] {
            for kernel in [true, false] {
                let (loss, grad_hidden, grad_weight) = run(&case, &[1, bad, IGNORE], DType::F32, kernel);
                assert!(loss.is_nan(), "label {bad}");
                assert_close("hidden", &grad_hidden, &kept.1, 1e-6);
                assert_close("weight", &grad_weight, &kept.2, 1e-6);
            }
        }
    }

    #[test]
    fn extreme_logits_stay_finite() {
        let hidden = tensor::<Ad, 2>(&[1e4, -1e4], [2, 1], DType::F32).require_grad();
        let weight = tensor::<Ad, 2>(&[1e4, -1e4, 0.0], [3, 1], DType::F32);
        let loss = linear_cross_entropy(hidden.clone(), weight, labels(&[1, 1]), &CrossEntropyDesc::default()).unwrap();
        let grads = loss.clone().backward();
        assert_close("loss", &f64s(loss), &[2e8], 1e-6);
        assert!(f64s(hidden.grad(&grads).expect("tracked")).iter().all(|g| g.is_finite()));
    }

    #[test]
    fn views_give_the_result_of_copies() {
        let hidden = tensor::<Flex, 2>(&values(1, 35), [7, 5], DType::F32)
            .transpose()
            .slice([1..5, 2..5]);
        let weight = tensor::<Flex, 2>(&values(2, 12), [3, 4], DType::F32).transpose();
        let copy = |t: &Tensor<Flex, 2>| tensor::<Flex, 2>(&f64s(t.clone()), t.dims(), DType::F32);
        let loss = |h, w| f64s(linear_cross_entropy(h, w, labels(&[0, 3, 2, IGNORE]), &CrossEntropyDesc::default()).unwrap());
        assert_eq!(loss(hidden.clone(), weight.clone()), loss(copy(&hidden), copy(&weight)));
    }

    #[test]
    fn sizes_are_checked_by_name() {
        let message = |d: usize, t: usize, chunk: usize| {
            let hidden = tensor::<Flex, 2>(&values(1, 6), [2, 3], DType::F32);
            let weight = tensor::<Flex, 2>(&values(1, 4 * d), [4, d], DType::F32);
            let desc = CrossEntropyDesc {
                ignore_index: IGNORE,
                chunk,
            };
            linear_cross_entropy(hidden, weight, labels(&vec![0; t]), &desc)
                .unwrap_err()
                .to_string()
        };
        assert!(message(2, 2, 8).contains("tensor `weight` has shape [4, 2]"));
        assert!(message(3, 5, 8).contains("tensor `labels` has shape [5]"));
        assert!(message(3, 2, 0).contains("`chunk` is 0"));
    }
}

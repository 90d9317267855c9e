//! The convolution against loops in f64, in all dtypes and on both implementations.

use burn_flex::Flex;
use burn_std::DType;
use burn_tensor::Tensor;

use crate::ops::causal_conv1d;
use crate::reference::prim;
use crate::testing::{Ad, assert_close, assert_low_precision, dot, f64s, ints, numeric_gradient, relative_error, tensor, values};

#[derive(Clone)]
struct Case {
    b: usize,
    s: usize,
    c: usize,
    kernel: usize,
    bias: bool,
    history: bool,
    doc_start: Option<Vec<usize>>,
    silu: bool,
}

#[derive(Clone)]
struct Inputs {
    x: Vec<f64>,
    w: Vec<f64>,
    bias: Vec<f64>,
    history: Vec<f64>,
    up: Vec<f64>,
}

impl Case {
    fn inputs(&self) -> Inputs {
        Inputs {
            x: values(1, self.b * self.s * self.c),
            w: values(2, self.c * self.kernel),
            bias: values(3, self.c),
            history: values(4, self.b * (self.kernel - 1) * self.c),
            up: values(5, self.b * self.s * self.c),
        }
    }

    fn naive(&self, n: &Inputs) -> Vec<f64> {
        let mut out = Vec::new();
        for b in 0..self.b {
            for t in 0..self.s {
                for c in 0..self.c {
                    let mut sum = if self.bias { n.bias[c] } else { 0.0 };
                    for lag in 0..self.kernel {
                        let w = n.w[c * self.kernel + self.kernel - 1 - lag];
                        let doc = self.doc_start.as_ref().map_or(0, |d| d[b * self.s + t]);
                        if t >= lag && t - lag >= doc {
                            sum += w * n.x[(b * self.s + t - lag) * self.c + c];
                        } else if t < lag && doc == 0 && self.history {
                            sum += w * n.history[(b * (self.kernel - 1) + self.kernel - 1 + t - lag) * self.c + c];
                        }
                    }
                    out.push(if self.silu { sum / (1.0 + (-sum).exp()) } else { sum });
                }
            }
        }
        out
    }

    /// Output and gradients (x, weight, bias) through autodiff.
    fn run(&self, n: &Inputs, dtype: DType) -> [Vec<f64>; 4] {
        let x = tensor::<Ad, 3>(&n.x, [self.b, self.s, self.c], dtype).require_grad();
        let w = tensor::<Ad, 2>(&n.w, [self.c, self.kernel], dtype).require_grad();
        let bias = self.bias.then(|| tensor::<Ad, 1>(&n.bias, [self.c], dtype).require_grad());
        let history = self
            .history
            .then(|| tensor::<Ad, 3>(&n.history, [self.b, self.kernel - 1, self.c], dtype));
        let doc = self.doc_start.as_ref().map(|d| ints::<Ad, 2>(d, [self.b, self.s]));
        let out = causal_conv1d(x.clone(), w.clone(), bias.clone(), history, doc, self.silu).expect("valid shapes");
        let grads = (out.clone() * tensor(&n.up, [self.b, self.s, self.c], dtype)).sum().backward();
        [
            f64s(out),
            f64s(x.grad(&grads).expect("dx")),
            f64s(w.grad(&grads).expect("dw")),
            bias.map_or(Vec::new(), |bias| f64s(bias.grad(&grads).expect("dbias"))),
        ]
    }

    fn check(&self) {
        let n = self.inputs();
        let with = |f: &dyn Fn(&mut Inputs)| {
            let mut changed = n.clone();
            f(&mut changed);
            dot(&self.naive(&changed), &n.up)
        };
        let expected = [
            self.naive(&n),
            numeric_gradient(&n.x, |x| with(&|n| n.x = x.to_vec())),
            numeric_gradient(&n.w, |w| with(&|n| n.w = w.to_vec())),
            if self.bias {
                numeric_gradient(&n.bias, |bias| with(&|n| n.bias = bias.to_vec()))
            } else {
                Vec::new()
            },
        ];
        for (dtype, tolerance) in [(DType::F64, 1e-8), (DType::F32, 3e-6)] {
            for ((name, found), expected) in ["out", "dx", "dw", "dbias"].into_iter().zip(self.run(&n, dtype)).zip(&expected) {
                assert_close(&format!("{name} {dtype:?}"), &found, expected, tolerance);
            }
        }
    }
}

fn case(s: usize) -> Case {
    Case {
        b: 2,
        s,
        c: 3,
        kernel: 4,
        bias: true,
        history: false,
        doc_start: None,
        silu: true,
    }
}

#[test]
fn forward_and_gradients_match_loops() {
    for s in [1, 2, 3, 9, 131] {
        case(s).check();
    }
    Case { kernel: 1, ..case(5) }.check();
    Case {
        bias: false,
        silu: false,
        kernel: 3,
        ..case(6)
    }
    .check();
}

#[test]
fn documents_and_history() {
    let docs = vec![0, 0, 2, 3, 3, 3, 3, /* second row */ 0, 0, 0, 0, 0, 5, 5];
    Case {
        doc_start: Some(docs.clone()),
        ..case(7)
    }
    .check();
    for doc_start in [None, Some(docs)] {
        Case {
            history: true,
            doc_start,
            ..case(7)
        }
        .check();
    }
    Case { history: true, ..case(2) }.check();
}

// A row cut in two, with the tail of the first part as history of the second, gives the row.
#[test]
fn history_continues_a_row() {
    let (s, cut, c, kernel) = (9, 4, 3, 4);
    let x = tensor::<Flex, 3>(&values(1, s * c), [1, s, c], DType::F32);
    let w = tensor::<Flex, 2>(&values(2, c * kernel), [c, kernel], DType::F32);
    let run = |x: Tensor<Flex, 3>, history| f64s(causal_conv1d(x, w.clone(), None, history, None, true).expect("valid shapes"));
    let whole = run(x.clone(), None);
    let history = x.clone().narrow(1, cut - kernel + 1, kernel - 1);
    let second = run(x.narrow(1, cut, s - cut), Some(history));
    assert_eq!(second, whole[cut * c..]);
}

#[test]
fn low_precision_and_views() {
    let case = case(21);
    let n = case.inputs();
    let exact = case.run(&n, DType::F64);
    let kernel = case.run(&n, DType::BF16);
    // Plain bf16 path: the reference would widen, so build it from bf16 ops.
    let x = tensor::<Ad, 3>(&n.x, [2, 21, 3], DType::BF16).require_grad();
    let w = tensor::<Ad, 2>(&n.w, [3, 4], DType::BF16).require_grad();
    let bias = tensor::<Ad, 1>(&n.bias, [3], DType::BF16).require_grad();
    let padded = Tensor::cat(vec![Tensor::zeros([2, 3, 3], (&Default::default(), DType::BF16)), x.clone()], 1);
    let mut pre = bias.clone().reshape([1, 1, 3]).expand([2, 21, 3]);
    for j in 0..4 {
        pre = pre + padded.clone().narrow(1, j, 21) * w.clone().narrow(1, j, 1).reshape([1, 1, 3]);
    }
    let out = burn_tensor::activation::silu(pre);
    let grads = (out.clone() * tensor(&n.up, [2, 21, 3], DType::BF16)).sum().backward();
    let plain = [
        f64s(out),
        f64s(x.grad(&grads).expect("dx")),
        f64s(w.grad(&grads).expect("dw")),
        f64s(bias.grad(&grads).expect("dbias")),
    ];
    for (i, name) in ["out", "dx", "dw", "dbias"].into_iter().enumerate() {
        assert_low_precision(name, &kernel[i], &plain[i], &exact[i]);
    }
    // Stored [B, C, S], viewed as [B, S, C].
    let view = tensor::<Flex, 3>(&n.x, [2, 3, 21], DType::F32).swap_dims(1, 2);
    let copy = tensor::<Flex, 3>(&f64s(view.clone()), [2, 21, 3], DType::F32);
    let w = tensor::<Flex, 2>(&n.w, [3, 4], DType::F32);
    let run = |x| f64s(causal_conv1d(x, w.clone(), None, None, None, true).expect("valid shapes"));
    assert_eq!(relative_error(&run(view), &run(copy)), 0.0);
}

// Flex runs a kernel for f32, so the reference needs its own check there.
#[test]
fn reference_in_f32() {
    let case = Case {
        doc_start: Some(vec![0, 0, 2, 3, 3, 0, 1, 1, 1, 1]),
        ..case(5)
    };
    let n = case.inputs();
    let prim3 = |v: &[f64]| prim::primitive(tensor::<Flex, 3>(v, [2, 5, 3], DType::F32));
    let w = prim::primitive(tensor::<Flex, 2>(&n.w, [3, 4], DType::F32));
    let bias = Some(prim::primitive(tensor::<Flex, 1>(&n.bias, [3], DType::F32)));
    let doc = Some(ints::<Flex, 2>(case.doc_start.as_ref().expect("docs"), [2, 5]).into_primitive());
    let out = super::causal_conv1d::<Flex>(prim3(&n.x), w.clone(), bias.clone(), None, doc.clone(), true);
    let (dx, dw, dbias) = super::causal_conv1d_backward::<Flex>(prim3(&n.up), prim3(&n.x), w, bias, doc, true);
    let found = [
        f64s(prim::tensor::<Flex, 3>(out)),
        f64s(prim::tensor::<Flex, 3>(dx)),
        f64s(prim::tensor::<Flex, 2>(dw)),
        f64s(prim::tensor::<Flex, 1>(dbias.expect("dbias"))),
    ];
    for (found, expected) in found.iter().zip(case.run(&n, DType::F32)) {
        assert_close("f32 reference", found, &expected, 3e-6);
    }
}

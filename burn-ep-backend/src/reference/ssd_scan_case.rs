//! Test harness of the scan: a case, its recurrence in f64, and its runs through the op and through the reference.

use burn_flex::Flex;
use burn_std::DType;
use burn_tensor::Tensor;

use crate::backend::{SsdGrads, SsdOutPrim, SsdPrim};
use crate::desc::SsdDesc;
use crate::ops::{SsdInput, SsdOutput, ssd_scan};
use crate::reference::prim;
use crate::reference::ssd_scan as reference;
use crate::testing::{Ad, assert_close, dot, f64s, ints, numeric_gradient, tensor, values};

pub(super) const NO_CLAMP: (f32, f32) = (0.0, f32::INFINITY);

#[derive(Clone)]
pub(super) struct Case {
    pub(super) b: usize,
    pub(super) s: usize,
    pub(super) h: usize,
    pub(super) g: usize,
    pub(super) p: usize,
    pub(super) n: usize,
    pub(super) chunk: usize,
    pub(super) limits: (f32, f32),
    pub(super) initial: bool,
    pub(super) doc_start: Option<Vec<usize>>,
}

/// x, dt, a_log, b, c, d, dt_bias in the order of the op, then what has no gradient.
#[derive(Clone)]
pub(super) struct Inputs {
    pub(super) tensors: [Vec<f64>; 7],
    pub(super) initial: Vec<f64>,
    pub(super) up: Vec<f64>,
}

pub(super) const NAMES: [&str; 7] = ["x", "dt", "a_log", "b", "c", "d", "dt_bias"];

pub(super) struct Run {
    pub(super) y: Vec<f64>,
    pub(super) state: Vec<f64>,
    pub(super) grads: [Vec<f64>; 7],
}

impl Case {
    pub(super) fn inputs(&self) -> Inputs {
        let tokens = self.b * self.s;
        let scaled = |seed, n, scale: f64| values(seed, n).into_iter().map(|v| v * scale).collect::<Vec<f64>>();
        Inputs {
            tensors: [
                values(1, tokens * self.h * self.p),
                scaled(2, tokens * self.h, 2.0),
                values(3, self.h),
                values(4, tokens * self.g * self.n),
                values(5, tokens * self.g * self.n),
                values(6, self.h),
                values(7, self.h),
            ],
            initial: values(8, self.b * self.h * self.p * self.n),
            up: values(9, tokens * self.h * self.p),
        }
    }

    pub(super) fn desc(&self) -> SsdDesc {
        SsdDesc {
            chunk: self.chunk,
            dt_min: self.limits.0,
            dt_max: self.limits.1,
        }
    }

    /// The recurrence, token by token.
    pub(super) fn naive(&self, n: &Inputs) -> (Vec<f64>, Vec<f64>) {
        let [x, dt, a_log, b_in, c_in, d, dt_bias] = &n.tensors;
        let mut y = vec![0.0; x.len()];
        let mut states = if self.initial {
            n.initial.clone()
        } else {
            vec![0.0; n.initial.len()]
        };
        for b in 0..self.b {
            for h in 0..self.h {
                let group = h / (self.h / self.g);
                let state = &mut states[(b * self.h + h) * self.p * self.n..][..self.p * self.n];
                for t in 0..self.s {
                    let token = b * self.s + t;
                    if t > 0 && self.doc_start.as_ref().is_some_and(|doc| doc[token] == t) {
                        state.fill(0.0);
                    }
                    let pre = dt[token * self.h + h] + dt_bias[h];
                    let delta = (1.0 + pre.exp()).ln().clamp(f64::from(self.limits.0), f64::from(self.limits.1));
                    let decay = (-a_log[h].exp() * delta).exp();
                    for p in 0..self.p {
                        let at = (token * self.h + h) * self.p + p;
                        for k in 0..self.n {
                            let bc = (token * self.g + group) * self.n + k;
                            let s = &mut state[p * self.n + k];
                            *s = decay * *s + delta * x[at] * b_in[bc];
                            y[at] += *s * c_in[bc];
                        }
                        y[at] += d[h] * x[at];
                    }
                }
            }
        }
        (y, states)
    }

    pub(super) fn shapes(&self) -> ([usize; 4], [usize; 3], [usize; 4], [usize; 4]) {
        let (b, s) = (self.b, self.s);
        (
            [b, s, self.h, self.p],
            [b, s, self.h],
            [b, s, self.g, self.n],
            [b, self.h, self.p, self.n],
        )
    }

    /// Through the public op and autodiff; `dtype` for all but A_log, D and dt_bias, which are fp32 or f64.
    pub(super) fn run(&self, n: &Inputs, dtype: DType) -> Run {
        let (x_shape, dt_shape, bc_shape, state_shape) = self.shapes();
        let wide = prim::wide_dtype(dtype);
        let [x, dt, a_log, b, c, d, dt_bias] = &n.tensors;
        let x = tensor::<Ad, 4>(x, x_shape, dtype).require_grad();
        let dt = tensor::<Ad, 3>(dt, dt_shape, dtype).require_grad();
        let [b, c] = [b, c].map(|v| tensor::<Ad, 4>(v, bc_shape, dtype).require_grad());
        let [a_log, d, dt_bias] = [a_log, d, dt_bias].map(|v| tensor::<Ad, 1>(v, [self.h], wide).require_grad());
        let input = SsdInput {
            x_bshp: x.clone(),
            dt_bsh: dt.clone(),
            a_log_h: a_log.clone(),
            b_bsgn: b.clone(),
            c_bsgn: c.clone(),
            d_h: d.clone(),
            dt_bias_h: dt_bias.clone(),
            initial_state_bhpn: self.initial.then(|| tensor(&n.initial, state_shape, wide)),
            doc_start_bs: self.doc_start.as_ref().map(|doc| ints(doc, [self.b, self.s])),
        };
        let SsdOutput { y_bshp, final_state_bhpn } = ssd_scan(input, &self.desc()).expect("valid shapes");
        assert_eq!((y_bshp.dtype(), final_state_bhpn.dtype()), (dtype, wide));
        let grads = (y_bshp.clone() * tensor(&n.up, x_shape, dtype)).sum().backward();
        let of4 = |t: &Tensor<Ad, 4>| f64s(t.grad(&grads).expect("gradient"));
        let of1 = |t: &Tensor<Ad, 1>| f64s(t.grad(&grads).expect("gradient"));
        Run {
            y: f64s(y_bshp),
            state: f64s(final_state_bhpn),
            grads: [
                of4(&x),
                f64s(dt.grad(&grads).expect("gradient")),
                of1(&a_log),
                of4(&b),
                of4(&c),
                of1(&d),
                of1(&dt_bias),
            ],
        }
    }

    pub(super) fn run_reference(&self, n: &Inputs, dtype: DType) -> Run {
        let (x_shape, dt_shape, bc_shape, state_shape) = self.shapes();
        let four = |v: &[f64], shape| prim::primitive(tensor::<Flex, 4>(v, shape, dtype));
        let one = |v: &[f64]| prim::primitive(tensor::<Flex, 1>(v, [self.h], prim::wide_dtype(dtype)));
        let [x, dt, a_log, b, c, d, dt_bias] = &n.tensors;
        let input = SsdPrim::<Flex> {
            x: four(x, x_shape),
            dt: prim::primitive(tensor::<Flex, 3>(dt, dt_shape, dtype)),
            a_log: one(a_log),
            b: four(b, bc_shape),
            c: four(c, bc_shape),
            d: one(d),
            dt_bias: one(dt_bias),
            initial_state: self
                .initial
                .then(|| prim::primitive(tensor::<Flex, 4>(&n.initial, state_shape, DType::F32))),
            doc_start_bs: self
                .doc_start
                .as_ref()
                .map(|doc| ints::<Flex, 2>(doc, [self.b, self.s]).into_primitive()),
        };
        let SsdOutPrim { y, final_state } = reference::ssd_scan::<Flex>(input.clone(), &self.desc());
        let grads = reference::ssd_scan_backward::<Flex>(four(&n.up, x_shape), input, &self.desc());
        let SsdGrads {
            x,
            dt,
            a_log,
            b,
            c,
            d,
            dt_bias,
        } = grads;
        let of4 = |t| f64s(prim::tensor::<Flex, 4>(t));
        let of1 = |t| f64s(prim::tensor::<Flex, 1>(t));
        Run {
            y: of4(y),
            state: of4(final_state),
            grads: [
                of4(x),
                f64s(prim::tensor::<Flex, 3>(dt)),
                of1(a_log),
                of4(b),
                of4(c),
                of1(d),
                of1(dt_bias),
            ],
        }
    }

    pub(super) fn check(&self) {
        let n = self.inputs();
        let (y, state) = self.naive(&n);
        let expected: [Vec<f64>; 7] = std::array::from_fn(|i| {
            numeric_gradient(&n.tensors[i], |v| {
                let mut moved = n.clone();
                moved.tensors[i] = v.to_vec();
                dot(&self.naive(&moved).0, &n.up)
            })
        });
        let runs = [
            ("f64 reference", self.run(&n, DType::F64), 1e-8),
            ("kernel", self.run(&n, DType::F32), 3e-5),
            ("reference", self.run_reference(&n, DType::F32), 3e-5),
        ];
        for (path, run, tolerance) in runs {
            assert_close(&format!("{path} y"), &run.y, &y, tolerance);
            assert_close(&format!("{path} state"), &run.state, &state, tolerance);
            for ((name, found), expected) in NAMES.iter().zip(&run.grads).zip(&expected) {
                assert_close(&format!("{path} d{name}"), found, expected, tolerance.max(1e-7));
            }
        }
    }
}

/// A small case without packing; tests change what they are about.
pub(super) fn case(s: usize, chunk: usize) -> Case {
    Case {
        b: 1,
        s,
        h: 4,
        g: 2,
        p: 3,
        n: 5,
        chunk,
        limits: NO_CLAMP,
        initial: false,
        doc_start: None,
    }
}

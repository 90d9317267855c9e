//! The scan against the recurrence in f64, with all gradients by central differences.

use burn_flex::Flex;
use burn_std::DType;
use burn_tensor::Tensor;

use crate::backend::{SsdGrads, SsdOutPrim, SsdPrim};
use crate::desc::SsdDesc;
use crate::ops::{SsdInput, SsdOutput, ssd_scan};
use crate::reference::prim;
use crate::testing::{Ad, assert_close, assert_low_precision, dot, f64s, ints, numeric_gradient, tensor, values};

const NO_CLAMP: (f32, f32) = (0.0, f32::INFINITY);

#[derive(Clone)]
struct Case {
    b: usize,
    s: usize,
    h: usize,
    g: usize,
    p: usize,
    n: usize,
    chunk: usize,
    limits: (f32, f32),
    initial: bool,
    doc_start: Option<Vec<usize>>,
}

/// x, dt, a_log, b, c, d, dt_bias in the order of the op, then what has no gradient.
#[derive(Clone)]
struct Inputs {
    tensors: [Vec<f64>; 7],
    initial: Vec<f64>,
    up: Vec<f64>,
}

const NAMES: [&str; 7] = ["x", "dt", "a_log", "b", "c", "d", "dt_bias"];

struct Run {
    y: Vec<f64>,
    state: Vec<f64>,
    grads: [Vec<f64>; 7],
}

impl Case {
    fn inputs(&self) -> Inputs {
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

    fn desc(&self) -> SsdDesc {
        SsdDesc {
            chunk: self.chunk,
            dt_min: self.limits.0,
            dt_max: self.limits.1,
        }
    }

    /// The recurrence, token by token.
    fn naive(&self, n: &Inputs) -> (Vec<f64>, Vec<f64>) {
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

    fn shapes(&self) -> ([usize; 4], [usize; 3], [usize; 4], [usize; 4]) {
        let (b, s) = (self.b, self.s);
        (
            [b, s, self.h, self.p],
            [b, s, self.h],
            [b, s, self.g, self.n],
            [b, self.h, self.p, self.n],
        )
    }

    /// Through the public op and autodiff; `dtype` for all but A_log, D and dt_bias, which are fp32 or f64.
    fn run(&self, n: &Inputs, dtype: DType) -> Run {
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

    fn run_reference(&self, n: &Inputs, dtype: DType) -> Run {
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
        let SsdOutPrim { y, final_state } = super::ssd_scan::<Flex>(input.clone(), &self.desc());
        let grads = super::ssd_scan_backward::<Flex>(four(&n.up, x_shape), input, &self.desc());
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

    fn check(&self) {
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

fn case(s: usize, chunk: usize) -> Case {
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

#[test]
fn lengths_and_chunks() {
    for (s, chunk) in [(1, 1), (1, 8), (7, 1), (7, 3), (8, 4), (9, 4), (11, 128)] {
        case(s, chunk).check();
    }
    Case {
        b: 2,
        h: 3,
        g: 1,
        ..case(5, 2)
    }
    .check();
}

#[test]
fn initial_state_and_clamps() {
    Case {
        initial: true,
        ..case(7, 3)
    }
    .check();
    // Steps lie between 0.05 and 3.1: both limits are active for some tokens.
    let clamped = Case {
        limits: (0.4, 1.2),
        initial: true,
        ..case(9, 4)
    };
    clamped.check();
    let run = clamped.run(&clamped.inputs(), DType::F32);
    let zeros = run.grads[1].iter().filter(|&&v| v == 0.0).count();
    assert!(zeros > 0 && zeros < run.grads[1].len(), "{zeros} clamped tokens");
}

#[test]
fn packed_documents() {
    let docs = vec![0, 0, 0, 3, 4, 4, 4, 4, 8, 8, 8];
    for chunk in [1, 2, 4, 5, 64] {
        for initial in [false, true] {
            Case {
                initial,
                doc_start: Some(docs.clone()),
                ..case(11, chunk)
            }
            .check();
        }
    }
    Case {
        b: 2,
        doc_start: Some(vec![0, 0, 2, 2, 2, 5, 0, 1, 1, 1, 1, 1]),
        ..case(6, 4)
    }
    .check();
}

#[test]
fn chunk_length_does_not_matter() {
    let small = Case {
        n: 16,
        p: 8,
        ..case(300, 32)
    };
    let n = small.inputs();
    let one = small.run(&n, DType::F32);
    for chunk in [1, 7, 64, 128, 1000] {
        let other = Case { chunk, ..small.clone() }.run(&n, DType::F32);
        assert_close("y", &other.y, &one.y, 1e-5);
        assert_close("state", &other.state, &one.state, 1e-5);
        for ((name, found), expected) in NAMES.iter().zip(&other.grads).zip(&one.grads) {
            assert_close(name, found, expected, 5e-5);
        }
    }
    assert_close("y", &one.y, &small.naive(&n).0, 1e-5);
}

// Case 48 (prime-rl#3000, Megatron-Bridge#3484): document B does not see document A, to the bit; packed equals separate.
#[test]
fn documents_are_isolated() {
    let (s, cut) = (150, 70);
    let packed = Case {
        doc_start: Some((0..s).map(|t| if t < cut { 0 } else { cut }).collect()),
        ..case(s, 32)
    };
    let n = packed.inputs();
    let mut changed = n.clone();
    let widths = [12, 4, 0, 10, 10, 0, 0];
    for (values, width) in changed.tensors.iter_mut().zip(widths) {
        values[(cut.max(1) - 1) * width..cut * width].iter_mut().for_each(|v| *v = 3.0 - *v);
    }
    let (before, after) = (packed.run(&n, DType::F32), packed.run(&changed, DType::F32));
    assert_eq!(before.y[cut * 12..], after.y[cut * 12..]);
    assert_ne!(before.y[..cut * 12], after.y[..cut * 12]);
    assert_eq!(before.state, after.state);
    for i in [0, 1, 3, 4] {
        assert_eq!(
            before.grads[i][cut * widths[i]..],
            after.grads[i][cut * widths[i]..],
            "{}",
            NAMES[i]
        );
    }
    // Each document alone; the shared parameters' gradients add up.
    let part = |rows: std::ops::Range<usize>| {
        let mut own = n.clone();
        for (values, width) in own.tensors.iter_mut().zip(widths).filter(|(_, width)| *width > 0) {
            *values = values[rows.start * width..rows.end * width].to_vec();
        }
        own.up = n.up[rows.start * 12..rows.end * 12].to_vec();
        let alone = Case {
            s: rows.len(),
            doc_start: None,
            ..packed.clone()
        };
        alone.run(&own, DType::F32)
    };
    let (a, b) = (part(0..cut), part(cut..s));
    assert_close("y", &before.y, &[a.y, b.y].concat(), 1e-5);
    assert_close("state", &before.state, &b.state, 1e-5);
    for i in 0..7 {
        let expected = if widths[i] > 0 {
            [a.grads[i].clone(), b.grads[i].clone()].concat()
        } else {
            a.grads[i].iter().zip(&b.grads[i]).map(|(a, b)| a + b).collect()
        };
        assert_close(NAMES[i], &before.grads[i], &expected, 3e-5);
    }
}

// Fast decay and large steps: exponents are differences, so nothing overflows, forward or backward.
#[test]
fn extreme_decay_stays_finite() {
    let case = case(130, 64);
    let mut n = case.inputs();
    n.tensors[2].fill(4.0);
    n.tensors[6].fill(30.0);
    n.tensors[6][0] = -60.0;
    for run in [case.run(&n, DType::F32), case.run_reference(&n, DType::F32)] {
        assert!(
            run.y
                .iter()
                .chain(&run.state)
                .chain(run.grads.iter().flatten())
                .all(|v| v.is_finite())
        );
        assert_close("y", &run.y, &case.naive(&n).0, 1e-5);
    }
}

#[test]
fn low_precision() {
    let case = Case {
        n: 16,
        p: 8,
        ..case(70, 32)
    };
    let n = case.inputs();
    let exact = case.run(&n, DType::F64);
    let rounded = |v: &[f64]| v.iter().map(|&v| half::bf16::from_f64(v).to_f64()).collect::<Vec<_>>();
    let run = case.run(&n, DType::BF16);
    // The inputs are exact in bf16 and the inside is fp32, so the error is that of one rounding of each result.
    assert_low_precision("y", &run.y, &rounded(&exact.y), &exact.y);
    for ((name, found), exact) in NAMES.iter().zip(&run.grads).zip(&exact.grads) {
        assert_low_precision(name, found, &rounded(exact), exact);
    }
}

// Mamba splits one projection into x, B, C and dt: all inputs are slices of one buffer.
#[test]
fn views_are_read_by_their_strides() {
    let case = case(9, 4);
    let (s, h, g, p, n) = (case.s, case.h, case.g, case.p, case.n);
    let width = h * p + 2 * g * n + h;
    let packed = tensor::<Flex, 3>(&values(1, s * width), [1, s, width], DType::F32);
    let slice = |first: usize, len: usize| packed.clone().narrow(2, first, len);
    let scalar = |seed| tensor::<Flex, 1>(&values(seed, h), [h], DType::F32);
    let views = SsdInput {
        x_bshp: slice(0, h * p).reshape([1, s, h, p]),
        b_bsgn: slice(h * p, g * n).reshape([1, s, g, n]),
        c_bsgn: slice(h * p + g * n, g * n).reshape([1, s, g, n]),
        dt_bsh: slice(h * p + 2 * g * n, h),
        a_log_h: scalar(2),
        d_h: scalar(3),
        dt_bias_h: scalar(4),
        initial_state_bhpn: None,
        doc_start_bs: None,
    };
    let copy4 = |t: &Tensor<Flex, 4>| tensor::<Flex, 4>(&f64s(t.clone()), t.dims(), DType::F32);
    let copies = SsdInput {
        x_bshp: copy4(&views.x_bshp),
        b_bsgn: copy4(&views.b_bsgn),
        c_bsgn: copy4(&views.c_bsgn),
        dt_bsh: tensor(&f64s(views.dt_bsh.clone()), [1, s, h], DType::F32),
        ..views.clone()
    };
    let run = |input| f64s(ssd_scan(input, &case.desc()).expect("valid shapes").y_bshp);
    assert_eq!(run(views), run(copies));
}

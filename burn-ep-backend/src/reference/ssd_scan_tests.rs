//! The scan against the recurrence in f64, with all gradients by central differences.

use burn_flex::Flex;
use burn_std::DType;
use burn_tensor::Tensor;

use super::case::{Case, NAMES, case};
use crate::ops::{SsdInput, ssd_scan};
use crate::testing::{assert_close, assert_low_precision, f64s, tensor, values};

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

// prime-rl#3000, Megatron-Bridge#3484: document B does not see document A, to the bit; packed equals separate.
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

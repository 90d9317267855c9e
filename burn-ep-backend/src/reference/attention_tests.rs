//! Attention against loops in f64: every mask, both implementations, all dtypes.

use burn_flex::Flex;
use burn_std::DType;
use burn_tensor::Tensor;

use super::case::{Case, Inputs, NAMES, case};
use crate::ops::{AttentionMask, attention};
use crate::testing::{Ad, assert_close, assert_low_precision, bools, f64s, tensor};

#[test]
fn causal_lengths() {
    for s in [1, 2, 7, 63, 64, 65, 130] {
        case(s).check();
    }
}

#[test]
fn head_sizes() {
    for (dk, dv) in [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (3, 5)] {
        Case {
            b: 1,
            h: 2,
            hkv: 1,
            dk,
            dv,
            scale: (dk as f32).powf(-0.5),
            ..case(9)
        }
        .check();
    }
}

#[test]
fn windows_and_sinks() {
    for (s, window, sink) in [
        (1, Some(1), true),
        (5, Some(1), false),
        (20, Some(7), false),
        (65, Some(16), true),
        (20, None, true),
        (5, Some(usize::MAX), false),
    ] {
        Case { window, sink, ..case(s) }.check();
    }
}

#[test]
fn not_causal() {
    case_not_causal(None, None).check();
    case_not_causal(Some(3), None).check();
    case_not_causal(None, Some(vec![0, 0, 2, 2, 4, 4, 0, 0, 0, 3, 3, 3])).check();
}

fn case_not_causal(window: Option<usize>, doc_start: Option<Vec<usize>>) -> Case {
    Case {
        causal: false,
        sink: true,
        window,
        doc_start,
        ..case(6)
    }
}

#[test]
fn generation() {
    for (sq, skv) in [(1, 9), (3, 70), (66, 70)] {
        Case { sq, skv, ..case(1) }.check();
        Case {
            sq,
            skv,
            window: Some(4),
            sink: true,
            ..case(1)
        }
        .check();
    }
    // Documents of query rows 4 and 5 of six.
    for causal in [true, false] {
        Case {
            sq: 2,
            skv: 6,
            causal,
            doc_start: Some(vec![1, 5, 0, 4]),
            ..case(1)
        }
        .check();
    }
}

#[test]
fn padding_in_any_pattern() {
    let (t, f) = (true, false);
    for key_visible in [
        vec![t, t, t, t, f, f, /* second row */ t, f, t, f, t, t],
        vec![f, f, f, t, t, t, /* left padding: rows that see nothing */ f, t, t, t, t, t],
        vec![f; 12],
    ] {
        for sink in [true, false] {
            Case {
                sink,
                key_visible: Some(key_visible.clone()),
                ..case(6)
            }
            .check();
        }
    }
}

// A query without visible key: zeros out, zero gradients, nothing infinite but its log-sum-exp.
#[test]
fn rows_that_see_nothing() {
    let case = Case {
        key_visible: Some(vec![false; 10]),
        ..case(5)
    };
    let [out, lse, dq, dk, dv, _] = case.run(&case.inputs(), DType::F32);
    assert!([out, dq, dk, dv].iter().flatten().all(|&v| v == 0.0));
    assert!(lse.iter().all(|&v| v == f64::NEG_INFINITY));
}

#[test]
fn packed_documents() {
    let docs = vec![0, 0, 0, 3, 3, 5, 5, 5, 5, /* second row */ 0, 1, 2, 2, 2, 2, 2, 7, 7];
    for (window, sink) in [(None, false), (Some(2), true)] {
        Case {
            window,
            sink,
            doc_start: Some(docs.clone()),
            ..case(9)
        }
        .check();
    }
}

// prime-rl#3000, Megatron-Bridge#3484: document B does not see document A, to the bit, in either direction.
#[test]
fn documents_are_isolated() {
    let (s, cut) = (150, 70);
    let doc_start: Vec<usize> = (0..s).map(|i| if i < cut { 0 } else { cut }).collect();
    let case = Case {
        b: 1,
        sink: true,
        doc_start: Some(doc_start),
        ..case(s)
    };
    let n = case.inputs();
    let mut changed = n.clone();
    for (values, width) in [(&mut changed.q, 32), (&mut changed.k, 16), (&mut changed.v, 16)] {
        values[(cut - 1) * width..cut * width].iter_mut().for_each(|v| *v = 3.0 - *v);
    }
    let (before, after) = (case.run(&n, DType::F32), case.run(&changed, DType::F32));
    for (index, width) in [(0, 32), (2, 32), (3, 16), (4, 16)] {
        assert_eq!(before[index][cut * width..], after[index][cut * width..], "{}", NAMES[index]);
        assert_ne!(before[index][..cut * width], after[index][..cut * width], "{}", NAMES[index]);
    }
    // And packed equals separate.
    let alone = Case {
        sq: s - cut,
        skv: s - cut,
        doc_start: None,
        ..case.clone()
    };
    let tail = |v: &[f64], width: usize| v[cut * width..].to_vec();
    let part = Inputs {
        q: tail(&n.q, 32),
        k: tail(&n.k, 16),
        v: tail(&n.v, 16),
        sink: n.sink.clone(),
        up: tail(&n.up, 32),
    };
    let separate = alone.run(&part, DType::F32);
    for (index, width) in [(0, 32), (2, 32), (3, 16), (4, 16)] {
        assert_close(NAMES[index], &before[index][cut * width..], &separate[index], 1e-5);
    }
}

// flash-attention#1973, #2706: two equal keys and an equal sink logit share the softmax in thirds.
#[test]
fn sink_takes_its_third() {
    let case = Case {
        b: 1,
        h: 1,
        hkv: 1,
        dk: 1,
        dv: 2,
        sink: true,
        scale: 1.0,
        ..case(2)
    };
    let n = Inputs {
        q: vec![0.5, 0.5],
        k: vec![2.0, 2.0],
        v: vec![1.0, 0.0, 0.0, 1.0],
        sink: vec![1.0],
        up: vec![1.0; 4],
    };
    let [out, lse, .., dsink] = case.run(&n, DType::F32);
    let third = 1.0 / 3.0;
    assert_close("out", &out, &[0.5, 0.0, third, third], 1e-6);
    assert_close("lse", &lse, &[1.0 + 2f64.ln(), 1.0 + 3f64.ln()], 1e-6);
    // delta is 1/2 and 2/3, the sink's share 1/2 and 1/3.
    assert_close("dsink", &dsink, &[-(0.25 + 2.0 / 9.0)], 1e-6);
}

#[test]
fn large_scores_do_not_overflow() {
    let case = Case {
        sink: true,
        scale: 3000.0,
        ..case(40)
    };
    let n = case.inputs();
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for run in [case.run(&n, dtype), case.run_reference(&n, dtype)] {
            assert!(run.iter().flatten().all(|v| v.is_finite()), "{dtype:?}");
        }
    }
    assert_close("out", &case.run(&n, DType::F32)[0], &case.naive(&n).0, 1e-3);
}

#[test]
fn low_precision() {
    let case = Case {
        window: Some(16),
        sink: true,
        ..case(65)
    };
    let n = case.inputs();
    let exact = case.run(&n, DType::F64);
    for dtype in [DType::BF16, DType::F16] {
        let kernel = case.run(&n, dtype);
        let plain = plain_path(&case, &n, dtype);
        for (i, (kernel, plain)) in [0, 2, 3, 4, 5]
            .into_iter()
            .zip([0, 2, 3, 4, 5].map(|i| &kernel[i]).into_iter().zip(&plain))
        {
            assert_low_precision(NAMES[i], kernel, plain, &exact[i]);
        }
    }
}

/// Attention written with tensors of `dtype` all the way: output and gradients of q, k, v, sink.
fn plain_path(case: &Case, n: &Inputs, dtype: DType) -> [Vec<f64>; 5] {
    let q = tensor::<Ad, 4>(&n.q, case.q_shape(), dtype).require_grad();
    let k = tensor::<Ad, 4>(&n.k, case.kv_shape(case.dk), dtype).require_grad();
    let v = tensor::<Ad, 4>(&n.v, case.kv_shape(case.dv), dtype).require_grad();
    let sink = tensor::<Ad, 1>(&n.sink, [case.h], dtype).require_grad();
    let heads = |t: Tensor<Ad, 4>| super::repeat_heads::<Ad>(t.swap_dims(1, 2), case.h);
    let scores = q.clone().swap_dims(1, 2).matmul(heads(k.clone()).swap_dims(2, 3)) * case.scale;
    let hidden: Vec<bool> = (0..case.sq * case.skv)
        .map(|at| !case.sees(0, at / case.skv, at % case.skv))
        .collect();
    let hidden = bools::<Ad, 4>(&hidden, [1, 1, case.sq, case.skv]).expand(scores.dims());
    let sink_column = sink.clone().reshape([1, case.h, 1, 1]).expand([case.b, case.h, case.sq, 1]);
    let logits = Tensor::cat(vec![scores.mask_fill(hidden, -1e4), sink_column], 3);
    let p = burn_tensor::activation::softmax(logits, 3).narrow(3, 0, case.skv);
    let out = p.matmul(heads(v.clone())).swap_dims(1, 2);
    let up = tensor(&n.up, [case.b, case.sq, case.h, case.dv], dtype);
    let grads = (out.clone() * up).sum().backward();
    [
        f64s(out),
        f64s(q.grad(&grads).expect("dq")),
        f64s(k.grad(&grads).expect("dk")),
        f64s(v.grad(&grads).expect("dv")),
        f64s(sink.grad(&grads).expect("dsink")),
    ]
}

// Views: q, k, v stored [B, H, S, D], upstream gradient expanded from one value.
#[test]
fn views_are_read_by_their_strides() {
    let case = case(11);
    let n = case.inputs();
    let swap = |values: &[f64], [b, s, h, d]: [usize; 4]| f64s(tensor::<Flex, 4>(values, [b, s, h, d], DType::F32).swap_dims(1, 2));
    let stored = |values: &[f64], [b, s, h, d]: [usize; 4]| {
        tensor::<Ad, 4>(&swap(values, [b, s, h, d]), [b, h, s, d], DType::F32)
            .swap_dims(1, 2)
            .require_grad()
    };
    let q = stored(&n.q, case.q_shape());
    let k = stored(&n.k, case.kv_shape(8));
    let v = stored(&n.v, case.kv_shape(8));
    let out = attention(q.clone(), k.clone(), v.clone(), None, &AttentionMask::default(), &case.desc()).expect("valid shapes");
    let grads = out.out_bshd.clone().sum().backward();
    let dense = case.run(
        &Inputs {
            up: vec![1.0; n.up.len()],
            ..n
        },
        DType::F32,
    );
    assert_eq!(f64s(out.out_bshd), dense[0]);
    for (tensor, index) in [(q, 2), (k, 3), (v, 4)] {
        assert_eq!(f64s(tensor.grad(&grads).expect("gradient")), dense[index], "{}", NAMES[index]);
    }
}

#[test]
fn frozen_inputs_get_no_gradient() {
    let case = case(4);
    let n = case.inputs();
    let q = tensor::<Ad, 4>(&n.q, case.q_shape(), DType::F32);
    let k = tensor::<Ad, 4>(&n.k, case.kv_shape(8), DType::F32).require_grad();
    let v = tensor::<Ad, 4>(&n.v, case.kv_shape(8), DType::F32);
    let sink = tensor::<Ad, 1>(&n.sink, [4], DType::F32);
    let out = attention(
        q.clone(),
        k.clone(),
        v.clone(),
        Some(sink.clone()),
        &AttentionMask::default(),
        &case.desc(),
    );
    let grads = out.expect("valid shapes").out_bshd.sum().backward();
    assert!(k.grad(&grads).is_some());
    assert!(q.grad(&grads).is_none() && v.grad(&grads).is_none() && sink.grad(&grads).is_none());
}

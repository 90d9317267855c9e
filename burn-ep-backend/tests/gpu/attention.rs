//! Attention with its gradients: every mask, head sizes, layouts, precisions.

use burn::tensor::{Bool, FloatDType, Int, Tensor, TensorData, activation};
use burn_ep_backend::AttentionDesc;
use burn_ep_backend::ops::{AttentionMask, attention};

use crate::attention_case::{Case, Layout, Padding, case};
use crate::support::{Cpu, Gpu, close, host, random};

#[test]
fn attention_is_causal() {
    for dim in [128, 64] {
        for seq in [2, 64, 129, 300, 517] {
            case(seq, dim).check();
        }
    }
}

// One token: the softmax is constant, so the exact gradients of q and k are zero and those of v the upstream ones.
#[test]
fn attention_of_one_token() {
    for dim in [64, 128] {
        let one = case(1, dim);
        let (found, exact) = (one.run::<Gpu>(FloatDType::BF16), one.run::<Cpu>(FloatDType::F32));
        close("out", found[..1].to_vec(), exact[..1].to_vec(), 1e-6);
        close(
            "lse and dv",
            vec![found[1].clone(), found[4].clone()],
            vec![exact[1].clone(), exact[4].clone()],
            5e-3,
        );
        let rest = found[2].iter().chain(&found[3]).fold(0f32, |most, x| most.max(x.abs()));
        assert!(rest < 1e-2, "dq and dk up to {rest:.1e}");
    }
}

#[test]
fn attention_with_grouped_heads() {
    for (heads, kv_heads) in [(3, 3), (14, 2), (8, 1), (16, 1)] {
        Case {
            batch: 1,
            heads,
            kv_heads,
            ..case(130, 64)
        }
        .check();
    }
}

#[test]
fn attention_in_windows() {
    for (seq, window) in [(65, 16), (300, 1), (300, 128), (200, 500)] {
        for dim in [64, 128] {
            Case {
                window: Some(window),
                sink: dim == 64,
                ..case(seq, dim)
            }
            .check();
        }
    }
}

#[test]
fn attention_of_packed_documents() {
    for (seq, length, window, padding) in [
        (300, 37, None, Padding::None),
        (517, 130, Some(50), Padding::Right(45)),
        (200, 1, None, Padding::None),
    ] {
        for dim in [64, 128] {
            Case {
                documents: Some(length),
                window,
                padding,
                sink: window.is_some(),
                ..case(seq, dim)
            }
            .check();
        }
    }
}

#[test]
fn attention_under_padding() {
    for padding in [Padding::Right(60), Padding::Left(60), Padding::Holes, Padding::All] {
        for (dim, sink) in [(64, true), (128, false)] {
            Case {
                padding,
                sink,
                ..case(150, dim)
            }
            .check();
        }
    }
}

#[test]
fn attention_of_later_keys() {
    for (window, documents) in [(None, None), (Some(40), None), (None, Some(37))] {
        Case {
            causal: false,
            window,
            documents,
            ..case(200, 64)
        }
        .check();
    }
}

#[test]
fn attention_with_earlier_keys() {
    for (sq, skv, window) in [(1, 300, None), (70, 300, Some(100))] {
        Case {
            skv,
            window,
            sink: true,
            ..case(sq, 128)
        }
        .check();
    }
}

#[test]
fn attention_of_other_head_sizes() {
    for (dk, dv) in [(16, 16), (80, 80), (96, 96), (128, 64), (192, 128)] {
        Case { dv, ..case(150, dk) }.check();
    }
}

#[test]
fn attention_reads_strides() {
    for layout in [Layout::HeadsFirst, Layout::Fused] {
        for dim in [64, 96] {
            Case { layout, ..case(140, dim) }.check();
        }
    }
}

#[test]
fn attention_with_large_scores() {
    for dim in [64, 128] {
        Case {
            gain: 30.0,
            sink: true,
            ..case(300, dim)
        }
        .check();
    }
}

#[test]
fn attention_in_half_precision() {
    Case {
        sink: true,
        ..case(200, 128)
    }
    .check_in(FloatDType::F16);
}

#[test]
fn attention_of_a_long_row() {
    Case {
        batch: 1,
        heads: 8,
        kv_heads: 2,
        documents: Some(700),
        ..case(2048, 128)
    }
    .check();
}

/// Attention written with tensors, the whole score matrix in memory: output, gradients of q, k, v and the sink.
fn eager(case: &Case) -> Vec<Vec<f32>> {
    type B = Cpu;
    let device = Default::default();
    let q = case.input::<B>(case.sq, case.heads, case.dk, 1).require_grad();
    let k = case.input::<B>(case.skv, case.kv_heads, case.dk, 2).require_grad();
    let v = case.input::<B>(case.skv, case.kv_heads, case.dv, 3).require_grad();
    let sink = Tensor::<B, 1>::from_data(random(&[case.heads], 5), &device).require_grad();
    let up = Tensor::<B, 4>::from_data(random(&[case.batch, case.sq, case.heads, case.dv], 4), &device);
    let spread = |t: Tensor<B, 4>| {
        let [b, s, g, d] = t.dims();
        let repeat = case.heads / g;
        let t = t.swap_dims(1, 2).reshape([b, g, 1, s, d]).expand([b, g, repeat, s, d]);
        t.reshape([b, g * repeat, s, d])
    };
    let scores = q.clone().swap_dims(1, 2).matmul(spread(k.clone()).swap_dims(2, 3)) * case.desc().scale;
    let window = case.window.unwrap_or(usize::MAX);
    let hidden: Vec<bool> = (0..case.sq * case.skv)
        .map(|at| (at / case.skv, at % case.skv))
        .map(|(i, j)| j > i || i - j >= window)
        .collect();
    let hidden = Tensor::<B, 2, Bool>::from_data(TensorData::new(hidden, [case.sq, case.skv]), &device);
    let scores = scores
        .clone()
        .mask_fill(hidden.reshape([1, 1, case.sq, case.skv]).expand(scores.dims()), -1e30);
    let column = sink
        .clone()
        .reshape([1, case.heads, 1, 1])
        .expand([case.batch, case.heads, case.sq, 1]);
    let p = activation::softmax(Tensor::cat(vec![scores, column], 3), 3).narrow(3, 0, case.skv);
    let out = p.matmul(spread(v.clone())).swap_dims(1, 2);
    let grads = (out.clone() * up).sum().backward();
    let grad = |t: &Tensor<B, 4>| host(t.grad(&grads).expect("gradient"));
    vec![host(out), grad(&q), grad(&k), grad(&v), host(sink.grad(&grads).expect("gradient"))]
}

// Case 50 (flash-attention#1973, #2706): 65 tokens, window 16, sink, against attention written out.
#[test]
fn attention_with_sink_equals_eager() {
    for dim in [64, 128] {
        let case = Case {
            window: Some(16),
            sink: true,
            ..case(65, dim)
        };
        let mut found = case.run::<Gpu>(FloatDType::BF16);
        found.remove(1);
        close("case 50", found, eager(&case), 8e-3);
    }
}

// Two equal keys and an equal sink logit share the softmax in thirds.
#[test]
fn sink_takes_its_third() {
    let device = Default::default();
    let mut q = vec![0f32; 64];
    q[0] = 0.5;
    let mut k = vec![0f32; 64];
    k[0] = 2.0;
    let mut v = vec![0f32; 128];
    (v[0], v[65]) = (1.0, 1.0);
    let tensor =
        |values: Vec<f32>, n: usize| Tensor::<Gpu, 4>::from_data(TensorData::new(values, [1, n, 1, 64]), &device).cast(FloatDType::BF16);
    let (q, k, v) = (tensor([q.clone(), q].concat(), 2), tensor([k.clone(), k].concat(), 2), tensor(v, 2));
    let sink = Tensor::<Gpu, 1>::from_floats([1.0], &device).require_grad();
    let desc = AttentionDesc {
        causal: true,
        window: None,
        scale: 1.0,
    };
    let out = attention(q, k, v, Some(sink.clone()), &AttentionMask::default(), &desc).expect("valid shapes");
    let grads = out.out_bshd.clone().sum().backward();
    let values = host(out.out_bshd);
    let third = 1.0 / 3.0;
    close(
        "out",
        vec![vec![values[0], values[1], values[64], values[65]]],
        vec![vec![0.5, 0.0, third, third]],
        3e-3,
    );
    // delta is 1/2 and 2/3, the sink's share 1/2 and 1/3
    close(
        "dsink",
        vec![host(sink.grad(&grads).expect("gradient"))],
        vec![vec![-(0.25 + 2.0 / 9.0)]],
        3e-3,
    );
}

// Case 48: tokens of one document change nothing in the next, to the bit.
#[test]
fn documents_are_isolated() {
    let (seq, cut, width) = (300, 170, 128);
    let device = Default::default();
    let run = |changed: bool| {
        let input = |seed| {
            let mut values = random(&[1, seq, 1, width], seed).into_vec::<f32>().expect("fp32");
            if changed {
                values[(cut - 1) * width..cut * width].iter_mut().for_each(|x| *x = 3.0 - *x);
            }
            Tensor::<Gpu, 4>::from_data(TensorData::new(values, [1, seq, 1, width]), &device)
                .cast(FloatDType::BF16)
                .require_grad()
        };
        let (q, k, v) = (input(1), input(2), input(3));
        let starts: Vec<i32> = (0..seq).map(|i| if i < cut { 0 } else { cut as i32 }).collect();
        let mask = AttentionMask {
            doc_start_bs: Some(Tensor::<Gpu, 2, Int>::from_data(TensorData::new(starts, [1, seq]), &device)),
            key_visible_bs: None,
        };
        let out = attention(q.clone(), k.clone(), v.clone(), None, &mask, &case(seq, width).desc()).expect("valid shapes");
        let grads = out.out_bshd.clone().sum().backward();
        let grad = |t: &Tensor<Gpu, 4>| host(t.grad(&grads).expect("gradient"));
        [host(out.out_bshd), grad(&k), grad(&v)].map(|t| (t[..cut * width].to_vec(), t[cut * width..].to_vec()))
    };
    for ((before_a, before_b), (after_a, after_b)) in run(false).into_iter().zip(run(true)) {
        assert_eq!(before_b, after_b);
        assert_ne!(before_a, after_a);
    }
}

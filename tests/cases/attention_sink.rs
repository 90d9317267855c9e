//! flash-attention#1973, #2706: attention with a learned sink, forward and every gradient.

use burn::tensor::activation::softmax;
use burn::tensor::{Bool, Distribution, Tensor, TensorData};
use burn_ep_backend::AttentionDesc;
use burn_ep_backend::ops::{AttentionMask, attention};
use burn_moe::backend::Train;

const TOKENS: usize = 65;
const WINDOW: usize = 16;
const HEADS: usize = 4;
const KEY_HEADS: usize = 2;
const HEAD_SIZE: usize = 64;

/// Softmax over `[scores, sink]` written with plain tensors; the sink's column has no value.
fn eager(q: Tensor<Train, 4>, k: Tensor<Train, 4>, v: Tensor<Train, 4>, sink_h: Tensor<Train, 1>, scale: f32) -> Tensor<Train, 4> {
    let [b, s, h, d] = q.dims();
    let [_, _, hkv, _] = k.dims();
    let heads = |kv: Tensor<Train, 4>| {
        let kv = kv.swap_dims(1, 2).unsqueeze_dim::<5>(2).expand([b, hkv, h / hkv, s, d]);
        kv.reshape([b, h, s, d])
    };
    let hidden: Vec<bool> = (0..s * s)
        .map(|at| {
            let (i, j) = (at / s, at % s);
            j > i || j + WINDOW <= i
        })
        .collect();
    let hidden = Tensor::<Train, 2, Bool>::from_data(TensorData::new(hidden, [s, s]), &q.device());
    let scores = q.swap_dims(1, 2).matmul(heads(k).swap_dims(2, 3)) * scale;
    let scores = scores.mask_fill(hidden.unsqueeze::<4>().expand([b, h, s, s]), -1e30);
    let logits = Tensor::cat(vec![scores, sink_h.reshape([1, h, 1, 1]).expand([b, h, s, 1])], 3);
    softmax(logits, 3).narrow(3, 0, s).matmul(heads(v)).swap_dims(1, 2)
}

fn values<const D: usize>(tensor: Tensor<Train, D>) -> Vec<f32> {
    tensor.into_data().to_vec().expect("f32 tensor")
}

fn assert_close(name: &str, found: &[f32], expected: &[f32]) {
    let scale = expected.iter().fold(0.0_f32, |m, v| m.max(v.abs()));
    let error = found.iter().zip(expected).fold(0.0_f32, |m, (f, e)| m.max((f - e).abs()));
    assert_eq!(found.len(), expected.len(), "{name}");
    assert!(scale > 0.0 && error <= 1e-5 * scale, "{name}: off by {error} of {scale}");
}

#[test]
fn gradients_with_sink_and_window_match_the_eager_path() {
    let device = Default::default();
    let random = |heads| Tensor::<Train, 4>::random([2, TOKENS, heads, HEAD_SIZE], Distribution::Normal(0.0, 1.0), &device).require_grad();
    let (q, k, v) = (random(HEADS), random(KEY_HEADS), random(KEY_HEADS));
    let sink = Tensor::<Train, 1>::from_floats([-1.0, 0.0, 1.0, 3.0], &device).require_grad();
    let upstream = random(HEADS).detach();
    let desc = AttentionDesc {
        causal: true,
        window: Some(WINDOW),
        scale: (HEAD_SIZE as f32).powf(-0.5),
    };
    let fused = attention(
        q.clone(),
        k.clone(),
        v.clone(),
        Some(sink.clone()),
        &AttentionMask::default(),
        &desc,
    );
    let fused = fused.expect("valid shapes").out_bshd;
    let plain = eager(q.clone(), k.clone(), v.clone(), sink.clone(), desc.scale);
    assert_close("out", &values(fused.clone()), &values(plain.clone()));

    let (fused, plain) = ((fused * upstream.clone()).sum().backward(), (plain * upstream).sum().backward());
    for (name, tensor) in [("dq", &q), ("dk", &k), ("dv", &v)] {
        let of = |grads| tensor.grad(grads).expect("tracked input").into_data().to_vec::<f32>().expect("f32");
        assert_close(name, &of(&fused), &of(&plain));
    }
    let of = |grads| sink.grad(grads).expect("tracked sink").into_data().to_vec::<f32>().expect("f32");
    assert_close("dsink", &of(&fused), &of(&plain));
}

#[test]
fn two_equal_keys_and_an_equal_sink_share_in_thirds() {
    let device = Default::default();
    let q = Tensor::<Train, 4>::from_floats([[[[0.5]], [[0.5]]]], &device);
    let k = Tensor::<Train, 4>::from_floats([[[[2.0]], [[2.0]]]], &device);
    let v = Tensor::<Train, 4>::from_floats([[[[1.0, 0.0]], [[0.0, 1.0]]]], &device);
    let sink = Tensor::<Train, 1>::from_floats([1.0], &device);
    let desc = AttentionDesc {
        causal: true,
        window: None,
        scale: 1.0,
    };
    let out = attention(q, k, v, Some(sink), &AttentionMask::default(), &desc).expect("valid shapes");
    // The first token sees one key and the sink, the second two keys and the sink; all logits are 1.
    assert_close("out", &values(out.out_bshd), &[0.5, 0.0, 1.0 / 3.0, 1.0 / 3.0]);
}

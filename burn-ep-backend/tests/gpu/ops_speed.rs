//! Times of the ops that are bound by memory, at the sizes of one Qwen3-30B-A3B or Nemotron 3 Nano layer, on request: microseconds,
//! bandwidth, and its share of what a copy reaches on the same device. Products, attention, experts, scan and loss have speed tests of
//! their own.

use std::time::Instant;

use burn::tensor::FloatDType::{BF16, F32};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Distribution, FloatDType, Int, IntDType, Tensor, TensorPrimitive};
use burn_ep_backend::reference::adamw8::BLOCK;
use burn_ep_backend::{
    AdamW8Prim, AdamWDesc, AdamWPrim, Block8Prim, Cuda, ExpertOrderPrim, MoeBackend, NormDesc, NormRounding, RopeLayout, RouterDesc,
};

type Prim = <Cuda as burn::tensor::backend::BackendTypes>::FloatTensorPrimitive;

/// Median seconds of seven batches of calls of about 20 ms.
fn seconds(mut op: impl FnMut()) -> f64 {
    let device = Default::default();
    let sync = || Cuda::sync(&device).expect("no earlier kernel failed");
    (0..3).for_each(|_| op());
    sync();
    let mut batch = |calls: usize| {
        let start = Instant::now();
        (0..calls).for_each(|_| op());
        sync();
        start.elapsed().as_secs_f64() / calls as f64
    };
    let calls = (0.02 / batch(5)).ceil().clamp(2.0, 2000.0) as usize;
    let mut times: Vec<f64> = (0..7).map(|_| batch(calls)).collect();
    times.sort_by(f64::total_cmp);
    times[3]
}

fn normal<const D: usize>(shape: [usize; D], dtype: FloatDType) -> Prim {
    let tensor = Tensor::<Cuda, D>::random(shape, Distribution::Normal(0.0, 1.0), (&Default::default(), DType::F32));
    tensor.cast(dtype).into_primitive().tensor()
}

struct Report {
    /// Bytes a second that a copy reads and writes.
    ceiling: f64,
}

impl Report {
    /// `bytes`: what must be read and written once.
    fn row(&self, name: &str, bytes: usize, op: impl FnMut()) {
        let time = seconds(op);
        let rate = bytes as f64 / time;
        println!(
            "{name:<52} {:>9.1} us {:>7.0} GB/s {:>5.0} %",
            time * 1e6,
            rate / 1e9,
            100.0 * rate / self.ceiling
        );
    }
}

#[test]
#[ignore = "prints times"]
fn ops_speed() {
    let device = Default::default();
    // 1 GiB each way: no cache holds it.
    let big = Tensor::<Cuda, 1>::ones([1 << 28], &device);
    let copy = seconds(|| drop(big.clone().add_scalar(1.0)));
    let report = Report {
        ceiling: 2.0 * (1u64 << 30) as f64 / copy,
    };
    println!("a copy: {:.0} GB/s, read and written", report.ceiling / 1e9);
    drop(big);
    norms(&report);
    positions_and_routing(&report);
    optimizer(&report);
}

fn norms(report: &Report) {
    let desc = NormDesc {
        eps: 1e-6,
        rounding: NormRounding::Llama,
    };
    for (name, rows, width) in [
        ("of the residual stream", 16_384, 2048),
        ("of the residual stream (Nano)", 16_384, 2688),
        ("of query heads", 16_384 * 32, 128),
    ] {
        let one = 2 * rows * width;
        let [x, residual, grad] = [(); 3].map(|()| normal([rows, width], BF16));
        let weight = normal([width], BF16);
        report.row(&format!("rms_norm {name}"), 2 * one, || {
            drop(Cuda::rms_norm(x.clone(), weight.clone(), &desc));
        });
        report.row(&format!("rms_norm {name}, backward"), 3 * one, || {
            drop(Cuda::rms_norm_backward(grad.clone(), x.clone(), weight.clone(), &desc));
        });
        report.row(&format!("add_rms_norm {name}"), 4 * one, || {
            drop(Cuda::add_rms_norm(x.clone(), residual.clone(), weight.clone(), &desc));
        });
        report.row(&format!("add_rms_norm {name}, backward"), 4 * one, || {
            let grads = Cuda::add_rms_norm_backward(grad.clone(), residual.clone(), x.clone(), weight.clone(), &desc);
            drop(grads);
        });
    }
    let (rows, width) = (16_384, 4096);
    let [y, z, grad] = [(); 3].map(|()| normal([rows, width], BF16));
    let weight = normal([width], BF16);
    report.row("gated_rms_norm, 8 groups of 512", 3 * 2 * rows * width, || {
        drop(Cuda::gated_rms_norm(y.clone(), z.clone(), weight.clone(), 8, 1e-5));
    });
    report.row("gated_rms_norm, backward", 5 * 2 * rows * width, || {
        drop(Cuda::gated_rms_norm_backward(
            grad.clone(),
            y.clone(),
            z.clone(),
            weight.clone(),
            8,
            1e-5,
        ));
    });
}

fn positions_and_routing(report: &Report) {
    let (batch, seq, heads, size) = (4, 4096, 32, 128);
    let x = normal([batch, seq, heads, size], BF16);
    let [cos, sin] = [(); 2].map(|()| normal([1, seq, size / 2], F32));
    report.row("rope of query heads", 2 * 2 * batch * seq * heads * size, || {
        drop(Cuda::rope(x.clone(), cos.clone(), sin.clone(), RopeLayout::HalfSplit));
    });

    let (tokens, top_k, experts, width) = (16_384, 8, 128, 2048);
    let desc = RouterDesc::softmax(experts, top_k, true);
    let logits = normal([tokens, experts], BF16);
    let routed = tokens * top_k;
    report.row("route, 8 of 128", 2 * tokens * experts + 8 * routed, || {
        drop(Cuda::moe_route(logits.clone(), None, None, &desc));
    });
    let route = Cuda::moe_route(logits, None, None, &desc);
    let ids = Tensor::<Cuda, 2, Int>::from_primitive(route.ids_tk)
        .cast(IntDType::I32)
        .into_primitive();
    report.row("sort by expert", 3 * 4 * routed, || {
        drop(Cuda::moe_sort_by_expert(ids.clone(), experts))
    });
    report.row("count_experts", 4 * routed, || {
        drop(Cuda::count_experts(ids.clone(), None, experts))
    });
    let order: ExpertOrderPrim<Cuda> = Cuda::moe_sort_by_expert(ids, experts);
    let (x, rows) = (normal([tokens, width], BF16), normal([routed, width], BF16));
    report.row("permute", 2 * (tokens + routed) * width, || {
        drop(Cuda::moe_permute(x.clone(), &order, top_k))
    });
    report.row("unpermute, weighted", 2 * (tokens + routed) * width, || {
        drop(Cuda::moe_unpermute(rows.clone(), &order, Some(route.weights_tk.clone()), top_k));
    });
}

fn zeros<B: MoeBackend>(n: usize, dtype: FloatDType) -> B::FloatTensorPrimitive {
    B::float_zeros([n].into(), &Default::default(), dtype)
}

fn codes<B: MoeBackend>(n: usize) -> B::IntTensorPrimitive {
    B::int_zeros([n].into(), &Default::default(), IntDType::U8)
}

fn optimizer(report: &Report) {
    // The stacked up weights of a Qwen3-30B layer.
    let n = 128 * 1536 * 2048;
    let desc = AdamWDesc {
        lr: 1e-5,
        beta1: 0.9,
        beta2: 0.999,
        eps: 1e-8,
        weight_decay: 0.1,
        step: 3,
        stochastic_rounding: Some(1),
    };
    let grad = normal([n], BF16);
    report.row("squared_norms", 2 * n, || drop(Cuda::squared_norms(vec![grad.clone()])));
    let scale = normal([1], F32);
    let zeros = |dtype| zeros::<Cuda>(n, dtype);
    for (name, moments, master, bytes) in [
        ("adamw, bf16 moments", BF16, false, 2 + 6 + 6),
        ("adamw, fp32 moments and master", F32, true, 2 + 2 + 12 + 12),
    ] {
        let mut state = Some(AdamWPrim::<Cuda> {
            param: zeros(BF16),
            m: zeros(moments),
            v: zeros(moments),
            master: master.then(|| zeros(F32)),
        });
        report.row(name, bytes * n, || {
            let before = state.take().expect("put back below");
            state = Some(Cuda::adamw_step(before, grad.clone(), Some(scale.clone()), &desc));
        });
    }
    let block = || Block8Prim::<Cuda> {
        codes: codes::<Cuda>(n),
        scales: self::zeros::<Cuda>(n.div_ceil(BLOCK), F32),
    };
    let mut state = Some(AdamW8Prim::<Cuda> {
        param: zeros(BF16),
        m: block(),
        v: block(),
        master: None,
    });
    report.row("adamw, 8-bit moments", (2 + 4 + 4) * n, || {
        let before = state.take().expect("put back below");
        state = Some(Cuda::adamw8_step(before, grad.clone(), Some(scale.clone()), &desc));
    });
    let left = state.expect("put back").param;
    let left = Tensor::<Cuda, 1>::from_primitive(TensorPrimitive::Float(left)).cast(F32);
    assert!(left.abs().max().into_scalar().is_finite());
}

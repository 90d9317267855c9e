//! Speed of attention: `--ignored attention_speed --nocapture`.

use std::time::Instant;

use burn::tensor::backend::Backend;
use burn::tensor::{FloatDType, Int, Tensor, TensorData};
use burn_cubecl::CubeBackend;
use burn_ep_backend::kernels::attention::with_deterministic;
use burn_ep_backend::{AttentionDesc, AttentionMaskPrim, MoeBackend};
use cubecl::cuda::CudaRuntime;

use crate::support::documents;

type B = CubeBackend<CudaRuntime, f32, i32, u8>;

struct Shape {
    name: &'static str,
    batch: usize,
    seq: usize,
    heads: usize,
    kv_heads: usize,
    dk: usize,
    dv: usize,
    window: Option<usize>,
    documents: Option<usize>,
    sink: bool,
}

impl Shape {
    /// Pairs of a query and a key that it sees, per head.
    fn pairs(&self) -> f64 {
        let rows = |length: usize| {
            (0..length)
                .map(|i| (i + 1).min(self.window.unwrap_or(usize::MAX)) as f64)
                .sum::<f64>()
        };
        let per_row = match self.documents {
            // `documents` makes those of further rows one token shorter, which changes little
            Some(length) => (self.seq / length) as f64 * rows(length),
            None => rows(self.seq),
        };
        self.batch as f64 * per_row
    }

    fn run(&self) {
        let device = Default::default();
        let normal = |heads: usize, dim: usize| {
            let shape = [self.batch, self.seq, heads, dim];
            Tensor::<B, 4>::random(shape, burn::tensor::Distribution::Normal(0.0, 1.0), &device).cast(FloatDType::BF16)
        };
        let prim = |t: &Tensor<B, 4>| t.clone().into_primitive().tensor();
        let (q, k, v) = (
            normal(self.heads, self.dk),
            normal(self.kv_heads, self.dk),
            normal(self.kv_heads, self.dv),
        );
        let grad = normal(self.heads, self.dv);
        let sink = self.sink.then(|| {
            Tensor::<B, 1>::from_data(TensorData::zeros::<f32, _>([self.heads]), &device)
                .into_primitive()
                .tensor()
        });
        let doc_start: Option<Tensor<B, 2, Int>> = self.documents.map(|length| documents(self.batch, self.seq, length));
        let mask = AttentionMaskPrim {
            doc_start_bs: doc_start.map(Tensor::into_primitive),
            key_visible_bs: None,
        };
        let desc = AttentionDesc {
            causal: true,
            window: self.window,
            scale: (self.dk as f32).powf(-0.5),
        };
        let forward = || B::flash_attention(prim(&q), prim(&k), prim(&v), sink.clone(), &mask, &desc);
        let out = forward();
        let backward = || B::flash_attention_backward(prim(&grad), prim(&q), prim(&k), prim(&v), sink.clone(), &mask, &out, &desc);
        let products = self.pairs() * self.heads as f64 * 2.0;
        let forward = seconds(|| drop(forward()));
        let deterministic = with_deterministic(true, || seconds(|| drop(backward())));
        let backward = seconds(|| drop(backward()));
        let backward_products = products * (3 * self.dk + 2 * self.dv) as f64;
        println!(
            "{:28} forward {:7.0} us {:5.0} TFLOP/s   backward {:7.0} us {:5.0} TFLOP/s   deterministic {:7.0} us {:5.0} TFLOP/s",
            self.name,
            forward * 1e6,
            products * (self.dk + self.dv) as f64 / forward / 1e12,
            backward * 1e6,
            backward_products / backward / 1e12,
            deterministic * 1e6,
            backward_products / deterministic / 1e12,
        );
    }
}

/// Median over batches of launches between two syncs.
pub fn seconds(mut launch: impl FnMut()) -> f64 {
    let sync = || B::sync(&Default::default()).expect("no error on the device");
    launch();
    sync();
    let start = Instant::now();
    launch();
    sync();
    let launches = (0.02 / start.elapsed().as_secs_f64()).ceil().clamp(2.0, 50.0) as usize;
    let mut times: Vec<f64> = (0..7)
        .map(|_| {
            let start = Instant::now();
            (0..launches).for_each(|_| launch());
            sync();
            start.elapsed().as_secs_f64() / launches as f64
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

#[test]
#[ignore = "prints speeds"]
fn attention_speed() {
    let qwen = Shape {
        name: "Qwen3, causal",
        batch: 4,
        seq: 4096,
        heads: 32,
        kv_heads: 4,
        dk: 128,
        dv: 128,
        window: None,
        documents: None,
        sink: false,
    };
    let gpt_oss = Shape {
        name: "GPT-OSS, full, sink",
        batch: 2,
        heads: 64,
        kv_heads: 8,
        dk: 64,
        dv: 64,
        sink: true,
        ..qwen
    };
    let windowed = Shape {
        name: "GPT-OSS, window 128, sink",
        window: Some(128),
        ..gpt_oss
    };
    let nemotron = Shape {
        name: "Nemotron, causal",
        kv_heads: 2,
        ..qwen
    };
    let packed = Shape {
        name: "Qwen3, documents of 512",
        documents: Some(512),
        ..qwen
    };
    let latent = Shape {
        name: "MLA 192/128, causal",
        batch: 1,
        heads: 32,
        kv_heads: 32,
        dk: 192,
        ..qwen
    };
    let portable = Shape {
        name: "portable, 256, causal",
        batch: 1,
        dk: 256,
        dv: 256,
        ..qwen
    };
    let windowed_packed = Shape {
        name: "the same, documents of 512",
        documents: Some(512),
        ..windowed
    };
    let long = Shape {
        name: "Qwen3, 1 x 16384, causal",
        batch: 1,
        seq: 16384,
        ..qwen
    };
    let [heads_80, heads_96] = [80, 96].map(|dim| Shape {
        name: if dim == 80 {
            "Qwen3 with heads of 80"
        } else {
            "Qwen3 with heads of 96"
        },
        dk: dim,
        dv: dim,
        ..qwen
    });
    for shape in [
        qwen,
        long,
        nemotron,
        packed,
        gpt_oss,
        windowed,
        windowed_packed,
        latent,
        heads_80,
        heads_96,
        portable,
    ] {
        shape.run();
    }
}

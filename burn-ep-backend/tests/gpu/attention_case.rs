//! One call of attention on both backends, with every mask and layout.

use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Bool, FloatDType, Tensor, TensorData};
use burn_ep_backend::ops::{AttentionMask, attention};
use burn_ep_backend::{AttentionDesc, MoeBackend};

use crate::support::{Cpu, Gpu, close, compare, documents, host, poison, random};

/// Which keys padding hides.
#[derive(Clone, Copy, Debug)]
pub enum Padding {
    None,
    /// This many on the right, and as many more in every further row.
    Right(usize),
    Left(usize),
    /// Every third one and the ends.
    Holes,
    All,
}

impl Padding {
    fn visible(self, row: usize, key: usize, keys: usize) -> bool {
        match self {
            Self::None => true,
            Self::Right(n) => key + n * (row + 1) < keys,
            Self::Left(n) => key >= n * (row + 1),
            Self::Holes => key % 3 != 1 && key > 0 && key + 1 < keys,
            Self::All => false,
        }
    }
}

/// How q, k and v lie in memory.
#[derive(Clone, Copy, Debug)]
pub enum Layout {
    /// `[B, S, H, D]`.
    Dense,
    /// `[B, H, S, D]`.
    HeadsFirst,
    /// Parts of one `[B, S, 3, H, D]` product.
    Fused,
}

#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub batch: usize,
    pub sq: usize,
    pub skv: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub dk: usize,
    pub dv: usize,
    pub causal: bool,
    pub window: Option<usize>,
    pub sink: bool,
    /// Length of the packed documents.
    pub documents: Option<usize>,
    pub padding: Padding,
    pub layout: Layout,
    /// Multiplies the usual scale.
    pub gain: f32,
}

/// Batch 2, one key head for two query heads.
pub fn case(seq: usize, dim: usize) -> Case {
    Case {
        batch: 2,
        sq: seq,
        skv: seq,
        heads: 4,
        kv_heads: 2,
        dk: dim,
        dv: dim,
        causal: true,
        window: None,
        sink: false,
        documents: None,
        padding: Padding::None,
        layout: Layout::Dense,
        gain: 1.0,
    }
}

impl Case {
    pub fn desc(&self) -> AttentionDesc {
        AttentionDesc {
            causal: self.causal,
            window: self.window,
            scale: self.gain * (self.dk as f32).powf(-0.5),
        }
    }

    pub fn mask<B: MoeBackend>(&self) -> AttentionMask<B> {
        let key_visible_bs = (!matches!(self.padding, Padding::None)).then(|| {
            let visible = (0..self.batch * self.skv).map(|i| self.padding.visible(i / self.skv, i % self.skv, self.skv));
            let data = TensorData::new(visible.collect::<Vec<bool>>(), [self.batch, self.skv]);
            Tensor::<B, 2, Bool>::from_data(data, &Default::default())
        });
        AttentionMask {
            doc_start_bs: self.documents.map(|length| documents(self.batch, self.sq, length)),
            key_visible_bs,
        }
    }

    pub fn input<B: Backend>(&self, seq: usize, heads: usize, dim: usize, seed: u64) -> Tensor<B, 4> {
        let device = Default::default();
        let b = self.batch;
        match self.layout {
            Layout::Dense => Tensor::from_data(random(&[b, seq, heads, dim], seed), &device),
            Layout::HeadsFirst => Tensor::<B, 4>::from_data(random(&[b, heads, seq, dim], seed), &device).swap_dims(1, 2),
            Layout::Fused => Tensor::<B, 3>::from_data(random(&[b, seq, 3 * heads * dim], seed), &device)
                .narrow(2, heads * dim, heads * dim)
                .reshape([b, seq, heads, dim]),
        }
    }

    /// Output, log-sum-exp, gradients of q, k, v and the sink.
    pub fn run<B>(&self, dtype: FloatDType) -> Vec<Vec<f32>>
    where
        B: AutodiffBackend + MoeBackend,
    {
        let device = Default::default();
        let q = self.input::<B>(self.sq, self.heads, self.dk, 1).cast(dtype).require_grad();
        let k = self.input::<B>(self.skv, self.kv_heads, self.dk, 2).cast(dtype).require_grad();
        let v = self.input::<B>(self.skv, self.kv_heads, self.dv, 3).cast(dtype).require_grad();
        let sink = self.sink.then(|| {
            Tensor::<B, 1>::from_data(random(&[self.heads], 5), &device)
                .cast(dtype)
                .require_grad()
        });
        let up = Tensor::<B, 4>::from_data(random(&[self.batch, self.sq, self.heads, self.dv], 4), &device).cast(dtype);
        let out = attention(q.clone(), k.clone(), v.clone(), sink.clone(), &self.mask(), &self.desc()).expect("valid shapes");
        // a query that sees nothing has minus infinity on both sides; anything else must be finite
        let lse = host(out.lse_bhs).into_iter().map(|x| if x == f32::NEG_INFINITY { -1e3 } else { x });
        let lse = lse.collect();
        let grads = (out.out_bshd.clone() * up).sum().backward();
        let grad = |t: &Tensor<B, 4>| host(t.grad(&grads).expect("gradient"));
        let mut all = vec![host(out.out_bshd), lse, grad(&q), grad(&k), grad(&v)];
        all.extend(sink.map(|sink| host(sink.grad(&grads).expect("gradient of the sink"))));
        all
    }

    pub fn check_in(&self, dtype: FloatDType) {
        poison::<Gpu>(1 << 18);
        compare(
            &format!("{dtype:?} {self:?}"),
            self.run::<Gpu>(dtype),
            self.run::<Cpu>(FloatDType::F32),
            self.run::<Cpu>(dtype),
        );
    }

    /// In fp32 the rule leaves nothing but rounding.
    pub fn check_f32(&self) {
        poison::<Gpu>(1 << 18);
        let exact = self.run::<Cpu>(FloatDType::F32);
        close(&format!("fp32 {self:?}"), self.run::<Gpu>(FloatDType::F32), exact, 2e-5);
    }

    pub fn check(&self) {
        self.check_in(FloatDType::BF16);
    }
}

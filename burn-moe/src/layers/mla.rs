//! Multi-head latent attention (DeepSeek-V2, section 2.1).
//!
//! Keys and values of all heads are made from one latent vector per token; positions live in a few channels of their own,
//! whose key is shared by all heads. With `C` latent channels, `N` channels without and `R` with positions per head, and value
//! heads of size `V`:
//!
//! ```text
//! q           = W_qb RMSNorm(W_qa h)  or  W_q h       per head [q_nope (N) | q_rot (R)]
//! [c | k_rot] = W_kva h                               c (C) is normed, k_rot (R) is not
//! [k_nope | v] = W_kvb c                              per head N and V channels
//! scores      = scale * [q_nope | rope(q_rot)] · [k_nope | rope(k_rot)]
//! ```

use burn::module::Module;
use burn::tensor::Tensor;
use burn_ep_backend::{AttentionDesc, MoeBackend, RopeLayout, ops};

use super::attention::{check_cached, rope_tables};
use super::{Init, Linear, ParamBuilder, RmsNorm};
use crate::error::Result;
use crate::model::{LayerCache, ModelInput};

/// Epsilon of the norms of the compressed vectors, whatever that of the model is.
const LATENT_NORM_EPS: f64 = 1e-6;

/// Settings of [`Mla`].
#[derive(Debug, Clone, Copy)]
pub struct MlaConfig {
    /// Hidden width D.
    pub hidden: usize,
    /// Heads H.
    pub heads: usize,
    /// Width of the compressed queries; None: queries from one matrix.
    pub q_rank: Option<usize>,
    /// Width C of the compressed keys and values.
    pub kv_rank: usize,
    /// Channels N of a query or key head without positions.
    pub nope_dim: usize,
    /// Channels R with positions.
    pub rope_dim: usize,
    /// Size V of a value head.
    pub value_dim: usize,
    /// Bias of the matrices that read or write hidden states, except a plain query matrix.
    pub bias: bool,
    /// Factor on the scores, usually `(N + R)^-0.5`.
    pub scale: f64,
    pub layout: RopeLayout,
    pub init: Init,
}

/// Causal attention over packed documents with padding, keys and values compressed.
#[derive(Module, Debug)]
pub struct Mla<B: MoeBackend> {
    /// `[H*(N+R), D]`, without query compression.
    pub q_proj: Option<Linear<B>>,
    /// `[Q, D]`, with query compression.
    pub q_a_proj: Option<Linear<B>>,
    /// `[Q]`.
    pub q_a_layernorm: Option<RmsNorm<B>>,
    /// `[H*(N+R), Q]`.
    pub q_b_proj: Option<Linear<B>>,
    /// `[C+R, D]`.
    pub kv_a_proj_with_mqa: Linear<B>,
    /// `[C]`.
    pub kv_a_layernorm: RmsNorm<B>,
    /// `[H*(N+V), C]`.
    pub kv_b_proj: Linear<B>,
    /// `[D, H*V]`.
    pub o_proj: Linear<B>,
    heads: usize,
    kv_rank: usize,
    nope_dim: usize,
    rope_dim: usize,
    value_dim: usize,
    layout: RopeLayout,
    desc: AttentionDesc,
}

impl<B: MoeBackend> Mla<B> {
    /// A layer of `config`.
    pub fn new(pb: &ParamBuilder<B>, config: &MlaConfig) -> Self {
        let MlaConfig {
            hidden,
            heads,
            q_rank,
            kv_rank,
            nope_dim,
            rope_dim,
            value_dim,
            bias,
            scale,
            layout,
            init,
        } = *config;
        let q_width = heads * (nope_dim + rope_dim);
        let linear = |name: &str, inputs, outputs, bias| Linear::new(&pb.at(name), inputs, outputs, bias, init);
        let norm = |name: &str, width| RmsNorm::new(&pb.at(name), width, LATENT_NORM_EPS);
        Self {
            q_proj: q_rank.is_none().then(|| linear("q_proj", hidden, q_width, false)),
            q_a_proj: q_rank.map(|rank| linear("q_a_proj", hidden, rank, bias)),
            q_a_layernorm: q_rank.map(|rank| norm("q_a_layernorm", rank)),
            q_b_proj: q_rank.map(|rank| linear("q_b_proj", rank, q_width, false)),
            kv_a_proj_with_mqa: linear("kv_a_proj_with_mqa", hidden, kv_rank + rope_dim, bias),
            kv_a_layernorm: norm("kv_a_layernorm", kv_rank),
            kv_b_proj: linear("kv_b_proj", kv_rank, heads * (nope_dim + value_dim), false),
            o_proj: linear("o_proj", heads * value_dim, hidden, bias),
            heads,
            kv_rank,
            nope_dim,
            rope_dim,
            value_dim,
            layout,
            desc: AttentionDesc {
                causal: true,
                window: None,
                scale: scale as f32,
            },
        }
    }

    /// `[B, S, D]` to `[B, S, D]`. A cache is read for the tokens before this batch and extended by it; it holds the
    /// compressed vectors, `C + R` numbers per token.
    pub fn forward(&self, h_bsd: Tensor<B, 3>, input: &ModelInput<B>, cache: Option<&mut LayerCache<B>>) -> Result<Tensor<B, 3>> {
        let [b, s, _] = h_bsd.dims();
        let (n, r) = (self.nope_dim, self.rope_dim);
        let (cos, sin) = rope_tables(input)?;
        let rotate = |x: Tensor<B, 4>| ops::rope(x, cos.clone(), sin.clone(), self.layout);

        let q_bshp = self.queries(h_bsd.clone())?.reshape([b, s, self.heads, n + r]);
        let q_rot = rotate(q_bshp.clone().narrow(3, n, r))?;
        let q_bshp = Tensor::cat(vec![q_bshp.narrow(3, 0, n), q_rot], 3);

        let compressed = self.kv_a_proj_with_mqa.forward(h_bsd)?;
        let mut c_bsc = self.kv_a_layernorm.forward(compressed.clone().narrow(2, 0, self.kv_rank))?;
        let mut k_rot = rotate(compressed.narrow(2, self.kv_rank, r).reshape([b, s, 1, r]))?;
        if let Some(cache) = cache {
            if let LayerCache::Latent { c, k_rot: past } = &*cache {
                check_cached(input)?;
                c_bsc = Tensor::cat(vec![c.clone(), c_bsc], 1);
                k_rot = Tensor::cat(vec![past.clone(), k_rot], 1);
            }
            *cache = LayerCache::Latent {
                c: c_bsc.clone(),
                k_rot: k_rot.clone(),
            };
        }

        let keys = c_bsc.dims()[1];
        let kv = self.kv_b_proj.forward(c_bsc)?.reshape([b, keys, self.heads, n + self.value_dim]);
        let k_rot = k_rot.expand([b, keys, self.heads, r]);
        let k_bshp = Tensor::cat(vec![kv.clone().narrow(3, 0, n), k_rot], 3);
        let v_bshv = kv.narrow(3, n, self.value_dim);
        let out_bshv = ops::attention(q_bshp, k_bshp, v_bshv, None, &input.mask, &self.desc)?.out_bshd;
        self.o_proj.forward(out_bshv.reshape([b, s, self.heads * self.value_dim]))
    }

    /// `[B, S, D]` to `[B, S, H*(N+R)]`.
    fn queries(&self, h_bsd: Tensor<B, 3>) -> Result<Tensor<B, 3>> {
        match (&self.q_proj, &self.q_a_proj, &self.q_a_layernorm, &self.q_b_proj) {
            (Some(q_proj), ..) => q_proj.forward(h_bsd),
            (None, Some(q_a), Some(norm), Some(q_b)) => q_b.forward(norm.forward(q_a.forward(h_bsd)?)?),
            _ => unreachable!("`Mla::new` sets one matrix, or all three"),
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::module::Param;
    use burn::tensor::{FloatDType, TensorData};
    use burn_flex::Flex;

    use super::*;
    use crate::batch::HostBatch;

    fn values(seed: usize, len: usize) -> Vec<f64> {
        (0..len).map(|i| ((i * 37 + seed * 101) as f64 * 0.7).sin()).collect()
    }

    fn set<const R: usize>(param: &mut Param<Tensor<Flex, R>>, seed: usize) -> Vec<f64> {
        let shape = param.dims();
        let values = values(seed, shape.iter().product());
        let data = TensorData::new(values.iter().map(|&v| v as f32).collect(), shape.to_vec());
        *param = Param::from_tensor(Tensor::from_data(data, &Default::default()));
        values
    }

    fn times(w: &[f64], x: &[f64]) -> Vec<f64> {
        w.chunks(x.len()).map(|row| row.iter().zip(x).map(|(a, b)| a * b).sum()).collect()
    }

    fn normed(x: &[f64], w: &[f64]) -> Vec<f64> {
        let mean = x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64;
        x.iter().zip(w).map(|(x, w)| x * w / (mean + 1e-6).sqrt()).collect()
    }

    fn turned(x: &[f64], position: usize) -> Vec<f64> {
        let angle = |j: usize| position as f64 * 0.3 / (j + 1) as f64;
        let pair = |(j, p): (usize, &[f64])| {
            let (cos, sin) = (angle(j).cos(), angle(j).sin());
            [p[0] * cos - p[1] * sin, p[1] * cos + p[0] * sin]
        };
        x.chunks(2).enumerate().flat_map(pair).collect()
    }

    /// One token after the other with loops, in f64.
    #[test]
    fn matches_the_definition() {
        let (d, h, q, c, n, r, v, s) = (7, 3, 5, 4, 3, 4, 2, 6);
        let device = Default::default();
        let pb = ParamBuilder::<Flex>::new(&device, FloatDType::F32);
        let mut layer = Mla::new(
            &pb,
            &MlaConfig {
                hidden: d,
                heads: h,
                q_rank: Some(q),
                kv_rank: c,
                nope_dim: n,
                rope_dim: r,
                value_dim: v,
                bias: false,
                scale: 0.4,
                layout: RopeLayout::Interleaved,
                init: Init::Zeros,
            },
        );
        let qa = set(&mut layer.q_a_proj.as_mut().unwrap().weight, 1);
        let qn = set(&mut layer.q_a_layernorm.as_mut().unwrap().weight, 2);
        let qb = set(&mut layer.q_b_proj.as_mut().unwrap().weight, 3);
        let kva = set(&mut layer.kv_a_proj_with_mqa.weight, 4);
        let kvn = set(&mut layer.kv_a_layernorm.weight, 5);
        let kvb = set(&mut layer.kv_b_proj.weight, 6);
        let o = set(&mut layer.o_proj.weight, 7);
        let x = values(8, s * d);

        let (mut expected, mut past) = (Vec::new(), Vec::new());
        for (t, x) in x.chunks(d).enumerate() {
            let queries = times(&qb, &normed(&times(&qa, x), &qn));
            let compressed = times(&kva, x);
            let kv = times(&kvb, &normed(&compressed[..c], &kvn));
            past.push((kv, turned(&compressed[c..], t)));
            let mut out = Vec::new();
            for (head, query) in queries.chunks(n + r).enumerate() {
                let q_rot = turned(&query[n..], t);
                let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
                let of_head = |kv: &[f64]| kv[head * (n + v)..(head + 1) * (n + v)].to_vec();
                let weights: Vec<f64> = past
                    .iter()
                    .map(|(kv, k_rot)| (0.4 * (dot(&query[..n], &of_head(kv)[..n]) + dot(&q_rot, k_rot))).exp())
                    .collect();
                let total: f64 = weights.iter().sum();
                out.extend((0..v).map(|i| {
                    let terms = weights.iter().zip(&past).map(|(w, (kv, _))| w * of_head(kv)[n + i]);
                    terms.sum::<f64>() / total
                }));
            }
            expected.extend(times(&o, &out));
        }

        let batch = HostBatch {
            batch: 1,
            seq: s,
            input_ids: vec![0; s],
            labels: vec![0; s],
            ..Default::default()
        };
        let table = |from: usize, to: usize, f: fn(f64) -> f64| {
            let angles = (from..to).flat_map(|t| (0..r / 2).map(move |j| f(t as f64 * 0.3 / (j + 1) as f64) as f32));
            Tensor::<Flex, 3>::from_data(TensorData::new(angles.collect::<Vec<f32>>(), [1, to - from, r / 2]), &device)
        };
        let x = Tensor::<Flex, 3>::from_data(
            TensorData::new(x.iter().map(|&v| v as f32).collect::<Vec<f32>>(), [1, s, d]),
            &device,
        );
        let run = |from: usize, to: usize, cache: Option<&mut LayerCache<Flex>>| -> Vec<f32> {
            let mut input = ModelInput::<Flex>::new(&batch, &device);
            input.rope = Some((table(from, to, f64::cos), table(from, to, f64::sin)));
            let out = layer.forward(x.clone().narrow(1, from, to - from), &input, cache).unwrap();
            out.into_data().to_vec().unwrap()
        };
        let close = |found: &[f32], expected: &[f64]| {
            assert_eq!(found.len(), expected.len());
            let largest = expected.iter().fold(0.0f64, |m, v| m.max(v.abs()));
            for (f, e) in found.iter().zip(expected) {
                assert!((f64::from(*f) - e).abs() < 2e-6 * largest, "{f} expected {e}");
            }
        };
        close(&run(0, s, None), &expected);
        let mut cache = LayerCache::Empty;
        for (from, to) in [(0, 2), (2, 3), (3, 6)] {
            close(&run(from, to, Some(&mut cache)), &expected[from * d..to * d]);
        }
        let LayerCache::Latent { c: latent, k_rot } = cache else {
            panic!("{cache:?}")
        };
        assert_eq!((latent.dims(), k_rot.dims()), ([1, s, c], [1, s, 1, r]));
    }
}

//! Test harness of attention: a case, its loops in f64, and its runs through the op and through the reference.

use burn_flex::Flex;
use burn_std::DType;
use burn_tensor::Tensor;

use crate::MoeBackend;
use crate::backend::{AttentionMaskPrim, AttentionPrim};
use crate::desc::AttentionDesc;
use crate::ops::{Attention, AttentionMask, attention};
use crate::reference::attention as reference;
use crate::reference::prim;
use crate::testing::{Ad, assert_close, bools, dot, f64s, ints, tensor, values};

#[derive(Clone)]
pub(super) struct Case {
    pub(super) b: usize,
    pub(super) sq: usize,
    pub(super) skv: usize,
    pub(super) h: usize,
    pub(super) hkv: usize,
    pub(super) dk: usize,
    pub(super) dv: usize,
    pub(super) causal: bool,
    pub(super) window: Option<usize>,
    pub(super) sink: bool,
    pub(super) doc_start: Option<Vec<usize>>,
    pub(super) key_visible: Option<Vec<bool>>,
    pub(super) scale: f32,
}

#[derive(Clone)]
pub(super) struct Inputs {
    pub(super) q: Vec<f64>,
    pub(super) k: Vec<f64>,
    pub(super) v: Vec<f64>,
    pub(super) sink: Vec<f64>,
    pub(super) up: Vec<f64>,
}

/// Output, log-sum-exp, gradients of q, k, v and the sink.
pub(super) type Run = [Vec<f64>; 6];
pub(super) const NAMES: [&str; 6] = ["out", "lse", "dq", "dk", "dv", "dsink"];

impl Case {
    pub(super) fn inputs(&self) -> Inputs {
        let keys = self.b * self.skv * self.hkv;
        let queries = self.b * self.sq * self.h;
        Inputs {
            q: values(1, queries * self.dk),
            k: values(2, keys * self.dk),
            v: values(3, keys * self.dv),
            sink: values(4, self.h),
            up: values(5, queries * self.dv),
        }
    }

    pub(super) fn sees(&self, b: usize, i: usize, j: usize) -> bool {
        let row = i + self.skv - self.sq;
        let doc_of = |row: usize| match &self.doc_start {
            Some(doc) if row + self.sq >= self.skv => doc[b * self.sq + row + self.sq - self.skv],
            _ => 0,
        };
        (!self.causal || j <= row)
            && self.window.is_none_or(|window| row.saturating_sub(j) < window)
            && j >= doc_of(row)
            && (self.doc_start.is_none() || doc_of(j) <= row)
            && self.key_visible.as_ref().is_none_or(|visible| visible[b * self.skv + j])
    }

    pub(super) fn naive(&self, n: &Inputs) -> (Vec<f64>, Vec<f64>) {
        let mut out = vec![0.0; self.b * self.sq * self.h * self.dv];
        let mut lse = vec![f64::NEG_INFINITY; self.b * self.h * self.sq];
        for b in 0..self.b {
            for h in 0..self.h {
                let g = h / (self.h / self.hkv);
                for i in 0..self.sq {
                    let query = (b * self.sq + i) * self.h + h;
                    let key = |j: usize| (b * self.skv + j) * self.hkv + g;
                    let seen: Vec<usize> = (0..self.skv).filter(|&j| self.sees(b, i, j)).collect();
                    let mut logits: Vec<f64> = seen
                        .iter()
                        .map(|&j| {
                            let product = dot(&n.q[query * self.dk..][..self.dk], &n.k[key(j) * self.dk..][..self.dk]);
                            product * f64::from(self.scale)
                        })
                        .collect();
                    if self.sink {
                        logits.push(n.sink[h]);
                    }
                    let top = logits.iter().fold(f64::NEG_INFINITY, |m, &l| m.max(l));
                    let sum: f64 = logits.iter().map(|l| (l - top).exp()).sum();
                    if !logits.is_empty() {
                        lse[(b * self.h + h) * self.sq + i] = top + sum.ln();
                    }
                    for (&j, logit) in seen.iter().zip(&logits) {
                        for d in 0..self.dv {
                            out[query * self.dv + d] += (logit - top).exp() / sum * n.v[key(j) * self.dv + d];
                        }
                    }
                }
            }
        }
        (out, lse)
    }

    pub(super) fn desc(&self) -> AttentionDesc {
        AttentionDesc {
            causal: self.causal,
            window: self.window,
            scale: self.scale,
        }
    }

    pub(super) fn mask<B: MoeBackend>(&self) -> AttentionMask<B> {
        AttentionMask {
            doc_start_bs: self.doc_start.as_ref().map(|doc| ints(doc, [self.b, self.sq])),
            key_visible_bs: self.key_visible.as_ref().map(|keys| bools(keys, [self.b, self.skv])),
        }
    }

    pub(super) fn q_shape(&self) -> [usize; 4] {
        [self.b, self.sq, self.h, self.dk]
    }

    pub(super) fn kv_shape(&self, width: usize) -> [usize; 4] {
        [self.b, self.skv, self.hkv, width]
    }

    /// Through the public op and autodiff.
    pub(super) fn run(&self, n: &Inputs, dtype: DType) -> Run {
        let q = tensor::<Ad, 4>(&n.q, self.q_shape(), dtype).require_grad();
        let k = tensor::<Ad, 4>(&n.k, self.kv_shape(self.dk), dtype).require_grad();
        let v = tensor::<Ad, 4>(&n.v, self.kv_shape(self.dv), dtype).require_grad();
        let sink = self.sink.then(|| tensor::<Ad, 1>(&n.sink, [self.h], dtype).require_grad());
        let Attention { out_bshd, lse_bhs } =
            attention(q.clone(), k.clone(), v.clone(), sink.clone(), &self.mask(), &self.desc()).expect("valid shapes");
        let up = tensor(&n.up, [self.b, self.sq, self.h, self.dv], dtype);
        let grads = (out_bshd.clone() * up).sum().backward();
        [
            f64s(out_bshd),
            f64s(lse_bhs),
            f64s(q.grad(&grads).expect("dq")),
            f64s(k.grad(&grads).expect("dk")),
            f64s(v.grad(&grads).expect("dv")),
            sink.map_or(Vec::new(), |sink| f64s(sink.grad(&grads).expect("dsink"))),
        ]
    }

    /// The reference alone, without autodiff.
    pub(super) fn run_reference(&self, n: &Inputs, dtype: DType) -> Run {
        let q = prim::primitive(tensor::<Flex, 4>(&n.q, self.q_shape(), dtype));
        let k = prim::primitive(tensor::<Flex, 4>(&n.k, self.kv_shape(self.dk), dtype));
        let v = prim::primitive(tensor::<Flex, 4>(&n.v, self.kv_shape(self.dv), dtype));
        let up = prim::primitive(tensor::<Flex, 4>(&n.up, [self.b, self.sq, self.h, self.dv], dtype));
        let sink = self.sink.then(|| prim::primitive(tensor::<Flex, 1>(&n.sink, [self.h], dtype)));
        let mask = self.mask::<Flex>();
        let mask = AttentionMaskPrim {
            doc_start_bs: mask.doc_start_bs.map(Tensor::into_primitive),
            key_visible_bs: mask.key_visible_bs.map(Tensor::into_primitive),
        };
        let out = reference::attention::<Flex>(q.clone(), k.clone(), v.clone(), sink.clone(), &mask, &self.desc());
        let grads = reference::attention_backward::<Flex>(up, q, k, v, sink, &mask, &out, &self.desc());
        let AttentionPrim { out_bshd, lse_bhs } = out;
        [
            f64s(prim::tensor::<Flex, 4>(out_bshd)),
            f64s(prim::tensor::<Flex, 3>(lse_bhs)),
            f64s(prim::tensor::<Flex, 4>(grads.q)),
            f64s(prim::tensor::<Flex, 4>(grads.k)),
            f64s(prim::tensor::<Flex, 4>(grads.v)),
            grads.sink.map_or(Vec::new(), |sink| f64s(prim::tensor::<Flex, 1>(sink))),
        ]
    }

    /// Forward against loops, gradients against central differences at about forty places of each input, then the kernel
    /// and the fp32 reference against the f64 one.
    pub(super) fn check(&self) {
        let n = self.inputs();
        let exact = self.run(&n, DType::F64);
        let (out, lse) = self.naive(&n);
        assert_close("out", &exact[0], &out, 1e-10);
        assert_close("lse", &exact[1], &lse, 1e-10);
        let loss = |n: &Inputs| dot(&self.naive(n).0, &n.up);
        let fields: [(fn(&mut Inputs) -> &mut Vec<f64>, usize); 4] =
            [(|n| &mut n.q, 2), (|n| &mut n.k, 3), (|n| &mut n.v, 4), (|n| &mut n.sink, 5)];
        for (field, index) in fields {
            let len = exact[index].len();
            let places: Vec<usize> = (0..len).step_by((len / 40).max(1)).collect();
            let slope = |at: usize| {
                let mut moved = n.clone();
                let value = field(&mut moved)[at];
                field(&mut moved)[at] = value + 1e-5;
                let up = loss(&moved);
                field(&mut moved)[at] = value - 1e-5;
                (up - loss(&moved)) / 2e-5
            };
            let expected: Vec<f64> = places.iter().map(|&at| slope(at)).collect();
            let found: Vec<f64> = places.iter().map(|&at| exact[index][at]).collect();
            assert_close(NAMES[index], &found, &expected, 1e-7);
        }
        for (path, run) in [
            ("kernel", self.run(&n, DType::F32)),
            ("reference", self.run_reference(&n, DType::F32)),
        ] {
            for ((name, found), expected) in NAMES.iter().zip(&run).zip(&exact) {
                assert_close(&format!("{path} {name}"), found, expected, 2e-5);
            }
        }
    }
}

/// A small causal case; tests change what they are about.
pub(super) fn case(s: usize) -> Case {
    Case {
        b: 2,
        sq: s,
        skv: s,
        h: 4,
        hkv: 2,
        dk: 8,
        dv: 8,
        causal: true,
        window: None,
        sink: false,
        doc_start: None,
        key_visible: None,
        scale: 0.6,
    }
}

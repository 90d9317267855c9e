//! Router: scores, choice and weights of one token at a time, tokens in parallel.

use burn_flex::{Flex, FlexTensor};
use num_traits::Zero;
use rayon::prelude::*;

use super::expert_activation::sigmoid;
use super::numeric::{Real, dense, dims, float_tensor, int_tensor, wide, with_real};
use super::slice::ints;
use crate::backend::RoutePrim;
use crate::desc::{GroupScore, RouterDesc, RouterScore};

/// Tokens per task at least.
const MIN_TOKENS: usize = 16;

/// Keeps the sum of sigmoid scores away from zero (DeepSeek-V3).
pub(crate) const SIGMOID_EPS: f64 = 1e-20;

pub(crate) fn route(
    logits_te: FlexTensor,
    selection_bias_e: Option<FlexTensor>,
    replay_tk: Option<FlexTensor>,
    desc: &RouterDesc,
) -> RoutePrim<Flex> {
    let replay = replay_tk.as_ref().map(ints);
    let bias = selection_bias_e.map(dense);
    with_real!(logits_te.dtype(), A => {
        let logits = dense(logits_te);
        let [t, e] = dims(&logits);
        let k = desc.top_k;
        let logits = wide::<A>(&logits);
        let bias = bias.as_ref().map(wide::<A>);
        let mut weights = vec![A::zero(); t * k];
        let mut ids = vec![0i32; t * k];
        weights
            .par_chunks_mut(k)
            .zip(ids.par_chunks_mut(k))
            .zip(logits.par_chunks(e))
            .enumerate()
            .with_min_len(MIN_TOKENS)
            .for_each_init(Scratch::<A>::default, |scratch, (token, ((weights, ids), logits))| {
                if let Some(replay) = &replay {
                    ids.iter_mut().zip(&replay[token * k..]).for_each(|(id, &r)| *id = r as i32);
                } else if desc.force_balanced {
                    ids.iter_mut().enumerate().for_each(|(j, id)| *id = ((token * k + j) % e) as i32);
                } else {
                    scratch.choose(logits, bias.as_deref(), desc, ids);
                }
                weigh(logits, ids, desc, weights);
            });
        RoutePrim {
            weights_tk: float_tensor(weights, [t, k], A::DTYPE),
            ids_tk: int_tensor(ids, [t, k]),
        }
    })
}

pub(crate) fn route_backward(logits_te: FlexTensor, ids_tk: FlexTensor, grad_tk: FlexTensor, desc: &RouterDesc) -> FlexTensor {
    let dtype = logits_te.dtype();
    let ids: Vec<i32> = ints(&ids_tk).into_iter().map(|id| id as i32).collect();
    with_real!(dtype, A => {
        let (logits, grad) = (dense(logits_te), dense(grad_tk));
        let [t, e] = dims(&logits);
        let mut grad_logits = vec![A::zero(); t * e];
        grad_logits
            .par_chunks_mut(e)
            .zip(wide::<A>(&logits).par_chunks(e))
            .zip(wide::<A>(&grad).par_chunks(desc.top_k))
            .zip(ids.par_chunks(desc.top_k))
            .with_min_len(MIN_TOKENS)
            .for_each(|(((grad_logits, logits), grad), ids)| weigh_backward(logits, ids, grad, desc, grad_logits));
        float_tensor(grad_logits, [t, e], dtype)
    })
}

/// Buffers of one thread.
struct Scratch<A> {
    /// `[E]`: what the choice is made by.
    choice: Vec<A>,
    best: Vec<(A, usize)>,
    groups: Vec<usize>,
}

impl<A> Default for Scratch<A> {
    fn default() -> Self {
        Self {
            choice: Vec::new(),
            best: Vec::new(),
            groups: Vec::new(),
        }
    }
}

impl<A: Real> Scratch<A> {
    fn choose(&mut self, logits: &[A], bias: Option<&[A]>, desc: &RouterDesc, ids: &mut [i32]) {
        self.choice.clear();
        match desc.score {
            RouterScore::Softmax => {
                let (max, sum) = softmax_terms(logits.iter().copied());
                self.choice.extend(logits.iter().map(|&z| (z - max).exp() / sum));
            }
            RouterScore::TopKSoftmax => self.choice.extend_from_slice(logits),
            RouterScore::Sigmoid => self.choice.extend(logits.iter().map(|&z| sigmoid(z))),
        }
        if let Some(bias) = bias {
            self.choice.iter_mut().zip(bias).for_each(|(c, &b)| *c += b);
        }
        // NaN compares with nothing; as the lowest finite value it is a valid last choice.
        self.choice
            .iter_mut()
            .for_each(|c| *c = if c.is_nan() { A::min_value() } else { c.max(A::min_value()) });

        let (choice, size) = (&self.choice, desc.num_experts / desc.groups);
        if desc.groups == 1 {
            top_k(0..desc.num_experts, |e| choice[e], desc.top_k, &mut self.best);
        } else {
            let score = |group: usize| {
                let members = &choice[group * size..(group + 1) * size];
                match desc.group_score {
                    GroupScore::Best => members.iter().copied().fold(A::neg_infinity(), A::max),
                    GroupScore::TwoBest => best_two(members),
                }
            };
            top_k(0..desc.groups, score, desc.top_groups, &mut self.best);
            self.groups.clear();
            self.groups.extend(self.best.iter().map(|&(_, group)| group));
            self.groups.sort_unstable();
            let candidates = self.groups.iter().flat_map(|&group| group * size..(group + 1) * size);
            top_k(candidates, |e| choice[e], desc.top_k, &mut self.best);
        }
        ids.iter_mut().zip(&self.best).for_each(|(id, &(_, e))| *id = e as i32);
    }
}

/// The `k` best of ascending candidates, descending by score; ties stay in candidate order.
fn top_k<A: Real>(candidates: impl Iterator<Item = usize>, score: impl Fn(usize) -> A, k: usize, best: &mut Vec<(A, usize)>) {
    best.clear();
    for candidate in candidates {
        let score = score(candidate);
        let at = best.iter().rposition(|&(s, _)| s >= score).map_or(0, |last| last + 1);
        if at == k {
            continue;
        }
        best.truncate(k - 1);
        best.insert(at, (score, candidate));
    }
}

/// Sum of the two largest values, or the only one.
fn best_two<A: Real>(values: &[A]) -> A {
    let (mut first, mut second) = (A::neg_infinity(), A::neg_infinity());
    for &v in values {
        if v > first {
            (first, second) = (v, first);
        } else if v > second {
            second = v;
        }
    }
    if values.len() < 2 { first } else { first + second }
}

/// Maximum and sum of `exp(z - max)`.
fn softmax_terms<A: Real>(logits: impl Iterator<Item = A> + Clone) -> (A, A) {
    let max = logits.clone().fold(A::neg_infinity(), A::max);
    (max, logits.fold(A::zero(), |sum, z| sum + (z - max).exp()))
}

/// Softmax over the chosen logits only? Renormalised softmax is the same function: the full denominator cancels, and
/// leaving it out keeps `0 / 0` away when forced ids have vanishing probability.
fn softmax_over_chosen(desc: &RouterDesc) -> bool {
    match desc.score {
        RouterScore::TopKSoftmax => true,
        RouterScore::Softmax => desc.renormalize,
        RouterScore::Sigmoid => false,
    }
}

fn weigh<A: Real>(logits: &[A], ids: &[i32], desc: &RouterDesc, weights: &mut [A]) {
    weights.iter_mut().zip(ids).for_each(|(w, &id)| *w = logits[id as usize]);
    if desc.score == RouterScore::Sigmoid {
        weights.iter_mut().for_each(|w| *w = sigmoid(*w));
        if desc.renormalize {
            let sum = weights.iter().fold(A::zero(), |sum, &w| sum + w) + A::of(SIGMOID_EPS);
            weights.iter_mut().for_each(|w| *w = *w / sum);
        }
    } else {
        let (max, sum) = if softmax_over_chosen(desc) {
            softmax_terms(weights.iter().copied())
        } else {
            softmax_terms(logits.iter().copied())
        };
        weights.iter_mut().for_each(|w| *w = (*w - max).exp() / sum);
    }
    let scale = A::of(desc.scale.into());
    weights.iter_mut().for_each(|w| *w = *w * scale);
}

/// Adds the gradient of [`weigh`] to `grad_logits`.
fn weigh_backward<A: Real>(logits: &[A], ids: &[i32], grad: &[A], desc: &RouterDesc, grad_logits: &mut [A]) {
    let scale = A::of(desc.scale.into());
    if desc.score == RouterScore::Sigmoid {
        let scores = || ids.iter().map(|&id| sigmoid(logits[id as usize]));
        let (mut mean, mut sum) = (A::zero(), A::one());
        if desc.renormalize {
            // w = s / S: dw_a/ds_b = (delta_ab - w_a) / S.
            sum = scores().fold(A::zero(), |sum, s| sum + s) + A::of(SIGMOID_EPS);
            mean = scores().zip(grad).fold(A::zero(), |mean, (s, &g)| mean + g * s / sum);
        }
        for ((s, &id), &g) in scores().zip(ids).zip(grad) {
            grad_logits[id as usize] += scale * (g - mean) / sum * (s * (A::one() - s));
        }
        return;
    }
    let over_chosen = softmax_over_chosen(desc);
    let (max, sum) = if over_chosen {
        softmax_terms(ids.iter().map(|&id| logits[id as usize]))
    } else {
        softmax_terms(logits.iter().copied())
    };
    let p = |e: usize| (logits[e] - max).exp() / sum;
    let mean = ids.iter().zip(grad).fold(A::zero(), |mean, (&id, &g)| mean + g * p(id as usize));
    for (&id, &g) in ids.iter().zip(grad) {
        let subtract = if over_chosen { mean } else { A::zero() };
        grad_logits[id as usize] += scale * p(id as usize) * (g - subtract);
    }
    if !over_chosen {
        grad_logits
            .iter_mut()
            .enumerate()
            .for_each(|(e, out)| *out += -(scale * p(e) * mean));
    }
}

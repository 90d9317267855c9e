//! Text generation: greedy or sampled, with one cache per block.
//!
//! One prompt at a time: rows of unequal length would need left padding, which Mamba caches cannot represent.

use std::collections::HashSet;

use burn::tensor::Tensor;
use burn_ep_backend::MoeBackend;
use burn_ep_backend::comm::EpGroup;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::batch::{HostBatch, IGNORE_INDEX};
use crate::error::{Error, Result};
use crate::layers::linear;
use crate::model::{CausalLm, LayerCache};

/// How to choose the next token.
#[derive(Debug, Clone)]
pub struct GenerateOptions {
    /// Most tokens to add.
    pub max_new_tokens: usize,
    /// Divides the logits; 0 chooses the best token (greedy).
    pub temperature: f64,
    /// Sample among the k best tokens only, and those as good as the k-th; 0: among all.
    pub top_k: usize,
    /// Sample among the fewest best tokens whose probabilities sum to at least this, in (0, 1].
    pub top_p: f64,
    /// Sample among tokens with at least this much of the best one's probability only, in [0, 1].
    pub min_p: f64,
    /// Divides the positive and multiplies the negative logits of tokens that are already in the text (CTRL, Keskar et al.
    /// 2019), greedy or not; 1 changes nothing.
    pub repetition_penalty: f64,
    /// Seed of the sampling.
    pub seed: u64,
    /// Generation ends after one of these.
    pub stop_tokens: Vec<i32>,
    /// Expert-parallel group; every rank generates the same tokens.
    pub ep: Option<EpGroup>,
}

impl Default for GenerateOptions {
    fn default() -> Self {
        Self {
            max_new_tokens: 128,
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            seed: 0,
            stop_tokens: Vec::new(),
            ep: None,
        }
    }
}

impl GenerateOptions {
    /// Checks the ranges of the settings.
    ///
    /// # Errors
    /// [`Error::Config`] naming the field.
    pub fn validate(&self) -> Result<()> {
        if !self.temperature.is_finite() || self.temperature < 0.0 {
            return Err(Error::config("temperature", self.temperature, "0 (greedy) or a positive number"));
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return Err(Error::config("top_p", self.top_p, "more than 0 and at most 1"));
        }
        if !(0.0..=1.0).contains(&self.min_p) {
            return Err(Error::config("min_p", self.min_p, "from 0 to 1"));
        }
        if !(self.repetition_penalty.is_finite() && self.repetition_penalty > 0.0) {
            return Err(Error::config("repetition_penalty", self.repetition_penalty, "a positive number"));
        }
        Ok(())
    }
}

/// Continue `prompt`. The result holds the new tokens only, with the stop token if one ended it.
///
/// # Errors
/// An empty prompt, an id outside the vocabulary, more positions than the model has, or a setting out of range.
pub fn generate<B: MoeBackend, M: CausalLm<B>>(
    model: &M,
    prompt: &[i32],
    options: &GenerateOptions,
    device: &B::Device,
) -> Result<Vec<i32>> {
    options.validate()?;
    let mut session = Session::new(model, device, options.ep.clone());
    let mut rng = StdRng::seed_from_u64(options.seed);
    let mut new = Vec::new();
    let mut seen: HashSet<i32> = prompt.iter().copied().collect();
    let mut pending = prompt.to_vec();
    while new.len() < options.max_new_tokens {
        let mut logits = session.extend(&pending)?;
        penalise(&mut logits, seen.iter().copied(), options.repetition_penalty);
        let token = choose(&logits, options, &mut rng) as i32;
        new.push(token);
        seen.insert(token);
        if options.stop_tokens.contains(&token) {
            break;
        }
        pending = vec![token];
    }
    Ok(new)
}

/// A sequence under construction and its caches.
pub struct Session<'a, B: MoeBackend, M: CausalLm<B>> {
    model: &'a M,
    device: &'a B::Device,
    ep: Option<EpGroup>,
    caches: Vec<LayerCache<B>>,
    past: usize,
}

impl<'a, B: MoeBackend, M: CausalLm<B>> Session<'a, B, M> {
    /// An empty sequence.
    pub fn new(model: &'a M, device: &'a B::Device, ep: Option<EpGroup>) -> Self {
        Self {
            model,
            device,
            ep,
            caches: (0..model.num_blocks()).map(|_| LayerCache::Empty).collect(),
            past: 0,
        }
    }

    /// Append tokens; fp32 logits `[V]` of the token after them.
    pub fn extend(&mut self, tokens: &[i32]) -> Result<Vec<f32>> {
        let batch = HostBatch {
            batch: 1,
            seq: tokens.len(),
            input_ids: tokens.to_vec(),
            labels: vec![IGNORE_INDEX; tokens.len()],
            ..Default::default()
        };
        let mut input = self.model.prepare(&batch, self.past, self.device)?;
        input.ep = self.ep.clone();
        let mut x = self.model.embed(&input)?;
        for (index, cache) in self.caches.iter_mut().enumerate() {
            x = self.model.block(index, x, &input, None, Some(cache))?.x_bsd;
        }
        self.past += tokens.len();
        let last: Tensor<B, 3> = x.narrow(1, tokens.len() - 1, 1);
        let head = self.model.head(last)?;
        let logits = linear(head.hidden_td, head.weight_vd)?.into_data().convert::<f32>();
        Ok(logits.into_vec().expect("just converted to f32"))
    }
}

/// Applies the repetition penalty for every token of `seen`, each given once.
fn penalise(logits: &mut [f32], seen: impl Iterator<Item = i32>, penalty: f64) {
    if penalty == 1.0 {
        return;
    }
    for token in seen {
        if let Some(logit) = usize::try_from(token).ok().and_then(|at| logits.get_mut(at)) {
            let penalty = penalty as f32;
            *logit = if *logit < 0.0 { *logit * penalty } else { *logit / penalty };
        }
    }
}

/// The tokens that may come next with their probabilities, best first: `logits` after repetition penalty for the tokens of
/// `seen`, temperature, top-k, top-p and min-p, in this order, as transformers applies them. Greedy: the best token alone.
///
/// # Errors
/// A setting out of range.
pub fn candidates(logits: &[f32], seen: &[i32], options: &GenerateOptions) -> Result<Vec<(usize, f64)>> {
    options.validate()?;
    let mut logits = logits.to_vec();
    let seen: HashSet<i32> = seen.iter().copied().collect();
    penalise(&mut logits, seen.into_iter(), options.repetition_penalty);
    let mut kept = filtered(&logits, options);
    let total: f64 = kept.iter().map(|(_, weight)| weight).sum();
    kept.iter_mut().for_each(|(_, weight)| *weight /= total);
    Ok(kept)
}

/// Tokens that may be chosen, best first, with weights that need not sum to 1. Ties go to the lower id. NaN sorts last, so
/// that it is never chosen while a number is left.
fn filtered(logits: &[f32], options: &GenerateOptions) -> Vec<(usize, f64)> {
    let key = |i: usize| if logits[i].is_nan() { f32::NEG_INFINITY } else { logits[i] };
    let by_logit = |a: &usize, b: &usize| key(*b).total_cmp(&key(*a)).then(a.cmp(b));
    let mut order: Vec<usize> = (0..logits.len()).collect();
    if options.temperature == 0.0 {
        let best = order.into_iter().min_by(by_logit).unwrap_or(0);
        return vec![(best, 1.0)];
    }
    if options.top_k > 0 && options.top_k < order.len() {
        let (_, last, _) = order.select_nth_unstable_by(options.top_k - 1, by_logit);
        let least = key(*last);
        order.retain(|&i| key(i) >= least);
    }
    order.sort_unstable_by(by_logit);
    let Some(&best) = order.first() else { return Vec::new() };
    let best = f64::from(key(best));
    let weight = |i: usize| ((f64::from(key(i)) - best) / options.temperature).exp();
    let mut kept: Vec<(usize, f64)> = order.into_iter().map(|i| (i, weight(i))).collect();
    let total: f64 = kept.iter().map(|(_, weight)| weight).sum();
    let mut sum = 0.0;
    if let Some(last) = kept.iter().position(|(_, weight)| {
        sum += weight;
        sum >= options.top_p * total
    }) {
        kept.truncate(last + 1);
    }
    // The best weight is 1.
    kept.retain(|(_, weight)| *weight >= options.min_p);
    kept
}

/// Index of the next token.
fn choose(logits: &[f32], options: &GenerateOptions, rng: &mut StdRng) -> usize {
    let kept = filtered(logits, options);
    if options.temperature == 0.0 {
        return kept[0].0;
    }
    let mut point = rng.random::<f64>() * kept.iter().map(|(_, weight)| weight).sum::<f64>();
    for (token, weight) in &kept {
        point -= weight;
        if point < 0.0 {
            return *token;
        }
    }
    kept.last().map_or(0, |(token, _)| *token)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frequencies(options: &GenerateOptions) -> Vec<f64> {
        // Probabilities 0.5, 0.25, 0.125, 0.125 at temperature 1.
        let logits = [0.0f32, -(2f32.ln()), -(4f32.ln()), -(4f32.ln())];
        let mut rng = StdRng::seed_from_u64(1);
        let mut counts = vec![0.0; 4];
        for _ in 0..20_000 {
            counts[choose(&logits, options, &mut rng)] += 1.0 / 20_000.0;
        }
        counts
    }

    fn assert_near(found: &[f64], expected: [f64; 4]) {
        for (f, e) in found.iter().zip(expected) {
            assert!((f - e).abs() < 0.02, "{found:?} expected {expected:?}");
        }
    }

    #[test]
    fn sampling_follows_temperature_top_k_and_top_p() {
        let base = GenerateOptions {
            temperature: 1.0,
            ..Default::default()
        };
        assert_near(&frequencies(&base), [0.5, 0.25, 0.125, 0.125]);
        let top_k = GenerateOptions { top_k: 2, ..base.clone() };
        assert_near(&frequencies(&top_k), [2.0 / 3.0, 1.0 / 3.0, 0.0, 0.0]);
        // 0.75 is reached by two tokens, anything above needs the third (the tie goes to the lower id).
        let top_p = GenerateOptions {
            top_p: 0.76,
            ..base.clone()
        };
        assert_near(&frequencies(&top_p), [4.0 / 7.0, 2.0 / 7.0, 1.0 / 7.0, 0.0]);
        let half = GenerateOptions { temperature: 0.5, ..base };
        let z = 0.25 + 0.0625 + 2.0 * 0.015625;
        assert_near(&frequencies(&half), [0.25 / z, 0.0625 / z, 0.015625 / z, 0.015625 / z]);
    }

    #[test]
    fn greedy_takes_the_first_best_and_never_a_nan() {
        let mut rng = StdRng::seed_from_u64(0);
        let options = GenerateOptions::default();
        assert_eq!(choose(&[1.0, 3.0, 3.0, f32::NAN], &options, &mut rng), 1);
    }

    #[test]
    fn settings_out_of_range_are_named() {
        for (options, field) in [
            (
                GenerateOptions {
                    temperature: -1.0,
                    ..Default::default()
                },
                "temperature",
            ),
            (
                GenerateOptions {
                    top_p: 0.0,
                    ..Default::default()
                },
                "top_p",
            ),
            (
                GenerateOptions {
                    min_p: 1.5,
                    ..Default::default()
                },
                "min_p",
            ),
            (
                GenerateOptions {
                    repetition_penalty: 0.0,
                    ..Default::default()
                },
                "repetition_penalty",
            ),
        ] {
            assert!(options.validate().unwrap_err().to_string().contains(field));
        }
    }
}

//! Text generation: greedy or sampled, with one cache per block.
//!
//! One prompt at a time: rows of unequal length would need left padding, which Mamba caches cannot represent.

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
    /// Sample among the k best tokens only; 0: among all.
    pub top_k: usize,
    /// Sample among the fewest best tokens whose probabilities sum to at least this, in (0, 1].
    pub top_p: f64,
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
            seed: 0,
            stop_tokens: Vec::new(),
            ep: None,
        }
    }
}

impl GenerateOptions {
    fn validate(&self) -> Result<()> {
        if !self.temperature.is_finite() || self.temperature < 0.0 {
            return Err(Error::config("temperature", self.temperature, "0 (greedy) or a positive number"));
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return Err(Error::config("top_p", self.top_p, "more than 0 and at most 1"));
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
    let mut pending = prompt.to_vec();
    while new.len() < options.max_new_tokens {
        let logits = session.extend(&pending)?;
        let token = choose(&logits, options, &mut rng) as i32;
        new.push(token);
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

/// Index of the next token.
fn choose(logits: &[f32], options: &GenerateOptions, rng: &mut StdRng) -> usize {
    // Best first; ties go to the lower id. NaN sorts last, so that it is never chosen while a number is left.
    let mut order: Vec<usize> = (0..logits.len()).collect();
    let key = |i: usize| if logits[i].is_nan() { f32::NEG_INFINITY } else { logits[i] };
    let by_logit = |a: &usize, b: &usize| key(*b).total_cmp(&key(*a)).then(a.cmp(b));
    if options.temperature == 0.0 {
        return order.into_iter().min_by(by_logit).unwrap_or(0);
    }
    let k = if options.top_k == 0 {
        order.len()
    } else {
        options.top_k.min(order.len())
    };
    if k < order.len() {
        order.select_nth_unstable_by(k - 1, by_logit);
        order.truncate(k);
    }
    order.sort_unstable_by(by_logit);

    let best = f64::from(key(order[0]));
    let mut weights: Vec<f64> = order
        .iter()
        .map(|&i| ((f64::from(key(i)) - best) / options.temperature).exp())
        .collect();
    let total: f64 = weights.iter().sum();
    let mut kept = 0.0;
    if let Some(last) = weights.iter().position(|w| {
        kept += w;
        kept >= options.top_p * total
    }) {
        weights.truncate(last + 1);
    }
    let mut point = rng.random::<f64>() * weights.iter().sum::<f64>();
    for (&token, weight) in order.iter().zip(&weights) {
        point -= weight;
        if point < 0.0 {
            return token;
        }
    }
    order[weights.len() - 1]
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
        ] {
            assert!(options.validate().unwrap_err().to_string().contains(field));
        }
    }
}

//! Rotary position tables: which frequencies, and their cosines and sines.
//!
//! Everything is computed on the host in fp32, as the published models were trained; only the finished tables are
//! rounded to the model's dtype. Kinds and formulas follow the Hugging Face `rope_type` names.

use std::f64::consts::PI;

use burn::tensor::{FloatDType, Tensor, TensorData, backend::Backend};
use rayon::prelude::*;

use crate::batch::HostBatch;
use crate::error::{Error, Result};

/// How the base frequencies `theta^(-2j/d)` are changed for longer contexts.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeKind {
    /// Unchanged.
    Default,
    /// Divided by `factor` (Chen et al. 2023, position interpolation).
    Linear { factor: f64 },
    /// The base grows with the length of the batch once it exceeds `max_positions` ("NTK-aware" scaling).
    Dynamic { factor: f64, max_positions: usize },
    /// Blend of scaled and unscaled frequencies by wavelength (Peng et al. 2023).
    Yarn {
        factor: f64,
        original_positions: f64,
        beta_fast: f64,
        beta_slow: f64,
        truncate: bool,
        /// Multiplies cos and sin.
        attention_factor: f64,
    },
    /// Llama 3.1: long waves scaled, short ones kept, a linear blend between.
    Llama3 {
        factor: f64,
        low_freq_factor: f64,
        high_freq_factor: f64,
        original_positions: f64,
    },
    /// A divisor per frequency, one set for short and one for long batches (Phi-3, "LongRoPE").
    LongRope {
        /// `dim / 2` divisors for batches of up to `original_positions`.
        short_factor: Vec<f64>,
        /// `dim / 2` divisors for longer ones.
        long_factor: Vec<f64>,
        original_positions: f64,
        /// Multiplies cos and sin.
        attention_factor: f64,
    },
}

/// Rotary embedding of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeConfig {
    /// Rotated channels per head, an even number.
    pub dim: usize,
    /// Base theta.
    pub theta: f64,
    pub kind: RopeKind,
}

impl RopeKind {
    /// YaRN's attention factor when the config gives none: `0.1 ln(factor) + 1`, or the quotient of the two `mscale`
    /// values when both are given and not zero.
    pub fn yarn_attention_factor(factor: f64, mscale: Option<f64>, mscale_all_dim: Option<f64>) -> f64 {
        let scale = |m: f64| if factor <= 1.0 { 1.0 } else { 0.1 * m * factor.ln() + 1.0 };
        match (mscale, mscale_all_dim) {
            (Some(a), Some(b)) if a != 0.0 && b != 0.0 => scale(a) / scale(b),
            _ => scale(1.0),
        }
    }

    /// LongRoPE's attention factor when the config gives none: `sqrt(1 + ln(factor) / ln(original))`.
    pub fn longrope_attention_factor(factor: f64, original_positions: f64) -> f64 {
        if factor <= 1.0 {
            1.0
        } else {
            (1.0 + factor.ln() / original_positions.ln()).sqrt()
        }
    }
}

impl RopeConfig {
    /// Factor on cos and sin.
    pub fn attention_factor(&self) -> f64 {
        match self.kind {
            RopeKind::Yarn { attention_factor, .. } | RopeKind::LongRope { attention_factor, .. } => attention_factor,
            _ => 1.0,
        }
    }

    /// The `dim / 2` angular frequencies for a batch whose largest position is `length - 1`.
    pub fn inv_freq(&self, length: usize) -> Vec<f32> {
        let half = self.dim / 2;
        let base = |theta: f64| -> Vec<f32> {
            (0..half)
                .map(|j| {
                    // The power is rounded to fp32 before it is inverted, as in the reference.
                    let exponent = (2 * j) as f32 / self.dim as f32;
                    1.0 / (theta.powf(f64::from(exponent)) as f32)
                })
                .collect()
        };
        let freq = base(self.theta);
        match &self.kind {
            RopeKind::Default => freq,
            RopeKind::Linear { factor } => freq.iter().map(|f| f / *factor as f32).collect(),
            &RopeKind::Dynamic { factor, max_positions } => {
                let s = length.max(max_positions) as f64;
                let d = self.dim as f64;
                base(self.theta * (factor * s / max_positions as f64 - (factor - 1.0)).powf(d / (d - 2.0)))
            }
            &RopeKind::Yarn {
                factor,
                original_positions,
                beta_fast,
                beta_slow,
                truncate,
                ..
            } => {
                let d = self.dim as f64;
                let turn = |beta: f64| d * (original_positions / (beta * 2.0 * PI)).ln() / (2.0 * self.theta.ln());
                let (mut low, mut high) = (turn(beta_fast), turn(beta_slow));
                if truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                let low = low.max(0.0);
                let mut high = high.min(d - 1.0);
                if low == high {
                    high += 0.001;
                }
                blend(&freq, factor, |j, _| ((j as f64 - low) / (high - low)).clamp(0.0, 1.0))
            }
            &RopeKind::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_positions,
            } => blend(&freq, factor, |_, f| {
                let wavelengths = original_positions * f / (2.0 * PI);
                let kept = (wavelengths - low_freq_factor) / (high_freq_factor - low_freq_factor);
                1.0 - kept.clamp(0.0, 1.0)
            }),
            RopeKind::LongRope {
                short_factor,
                long_factor,
                original_positions,
                ..
            } => {
                let divisors = if length as f64 > *original_positions {
                    long_factor
                } else {
                    short_factor
                };
                freq.iter().zip(divisors).map(|(f, d)| f / *d as f32).collect()
            }
        }
    }

    /// Longest sequence the settings were made for, when the model itself was trained for `max_positions`.
    pub fn max_length(&self, max_positions: usize) -> usize {
        match &self.kind {
            RopeKind::Default | RopeKind::LongRope { .. } => max_positions,
            RopeKind::Linear { factor }
            | RopeKind::Dynamic { factor, .. }
            | RopeKind::Yarn { factor, .. }
            | RopeKind::Llama3 { factor, .. } => (max_positions as f64 * factor.max(1.0)) as usize,
        }
    }

    /// Cosines and sines of every position of a batch. `past` tokens come before it (generation), which shifts the
    /// positions only when the batch does not name its own.
    ///
    /// # Errors
    /// When a position is negative or not below [`RopeConfig::max_length`].
    pub fn table(&self, batch: &HostBatch, past: usize, max_positions: usize) -> Result<RopeTable> {
        let limit = self.max_length(max_positions);
        let (rows, positions) = match &batch.position_ids {
            Some(ids) => (batch.batch, ids.clone()),
            None => (1, (0..batch.seq).map(|t| (past + t) as i32).collect()),
        };
        if let Some((i, p)) = positions.iter().enumerate().find(|(_, p)| **p < 0 || **p as usize >= limit) {
            return Err(Error::batch(
                "position_ids",
                format!("position {p} at index {i}"),
                format!(
                    "0 to {} (`max_position_embeddings` = {max_positions}): shorten the sequences, or raise the config \
                     field together with a `rope_scaling` entry",
                    limit.saturating_sub(1)
                ),
            ));
        }
        let length = positions.iter().max().map_or(0, |&p| p as usize + 1);
        let inv_freq = self.inv_freq(length);
        let factor = self.attention_factor() as f32;
        // On all cores: a training step waits for these numbers before its first kernel.
        let angle = |&p: &i32| inv_freq.iter().map(move |f| f64::from(p as f32 * f));
        let cos = positions
            .par_iter()
            .flat_map_iter(|p| angle(p).map(|a| a.cos() as f32 * factor))
            .collect();
        let sin = positions
            .par_iter()
            .flat_map_iter(|p| angle(p).map(|a| a.sin() as f32 * factor))
            .collect();
        Ok(RopeTable {
            rows,
            seq: batch.seq,
            half: inv_freq.len(),
            cos,
            sin,
        })
    }
}

/// `scaled / factor` and `freq` mixed by `share(j, f)`, the share of the scaled one.
fn blend(freq: &[f32], factor: f64, share: impl Fn(usize, f64) -> f64) -> Vec<f32> {
    let mix = |(j, f): (usize, &f32)| {
        let f = f64::from(*f);
        let scaled = share(j, f);
        (scaled * f / factor + (1.0 - scaled) * f) as f32
    };
    freq.iter().enumerate().map(mix).collect()
}

/// Cosines and sines `[rows, S, dim / 2]` on the host; one row serves a whole batch with default positions.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeTable {
    pub rows: usize,
    pub seq: usize,
    pub half: usize,
    pub cos: Vec<f32>,
    pub sin: Vec<f32>,
}

impl RopeTable {
    /// (cos, sin) as tensors of the model's dtype.
    pub fn tensors<B: Backend>(self, device: &B::Device, dtype: FloatDType) -> (Tensor<B, 3>, Tensor<B, 3>) {
        let shape = [self.rows, self.seq, self.half];
        let tensor = |values: Vec<f32>| {
            let data = TensorData::new(values, shape).convert_dtype(dtype.into());
            Tensor::from_data(data, (device, dtype.into()))
        };
        (tensor(self.cos), tensor(self.sin))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(found: &[f32], index: usize, expected: f64) {
        let error = (f64::from(found[index]) / expected - 1.0).abs();
        assert!(
            error < 3e-7,
            "[{index}] = {} expected {expected} (relative {error:e})",
            found[index]
        );
    }

    /// Values of the published long-context setting of Qwen2.5 and Qwen3, computed with the reference.
    #[test]
    fn yarn_matches_published_values() {
        let attention_factor = RopeKind::yarn_attention_factor(4.0, None, None);
        assert!((attention_factor - 1.1386294).abs() < 1e-7);
        let config = RopeConfig {
            dim: 128,
            theta: 1e6,
            kind: RopeKind::Yarn {
                factor: 4.0,
                original_positions: 32768.0,
                beta_fast: 32.0,
                beta_slow: 1.0,
                truncate: true,
                attention_factor,
            },
        };
        let inv = config.inv_freq(1);
        for (j, v) in [
            (0, 1.0),
            (23, 6.978306e-3),
            (24, 5.3753215e-3),
            (30, 1.0643610e-3),
            (35, 2.4625839e-4),
            (40, 4.4456985e-5),
            (63, 3.1023443e-7),
        ] {
            close(&inv, j, v);
        }
    }

    /// Values of Llama 3.1, computed with the reference.
    #[test]
    fn llama3_matches_published_values() {
        let config = RopeConfig {
            dim: 128,
            theta: 5e5,
            kind: RopeKind::Llama3 {
                factor: 8.0,
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
                original_positions: 8192.0,
            },
        };
        let inv = config.inv_freq(1);
        for (j, v) in [
            (0, 1.0),
            (20, 0.01656044),
            (28, 0.003211446),
            (30, 0.0013718936),
            (32, 5.2484616e-4),
            (34, 1.7850781e-4),
            (36, 7.7846553e-5),
            (63, 3.068926e-7),
        ] {
            close(&inv, j, v);
        }
    }

    #[test]
    fn linear_and_dynamic_follow_their_formulas() {
        let linear = RopeConfig {
            dim: 4,
            theta: 100.0,
            kind: RopeKind::Linear { factor: 2.0 },
        };
        assert_eq!(linear.inv_freq(1), [0.5, 0.05]);
        let dynamic = RopeConfig {
            kind: RopeKind::Dynamic {
                factor: 2.0,
                max_positions: 10,
            },
            ..linear
        };
        // Up to the trained length nothing changes; at twice the length theta' = 100 * (2*2 - 1)^(4/2) = 900.
        assert_eq!(dynamic.inv_freq(10), [1.0, 0.1]);
        close(&dynamic.inv_freq(20), 1, 1.0 / 30.0);
    }

    #[test]
    fn longrope_switches_its_divisors_at_the_original_length() {
        let config = RopeConfig {
            dim: 4,
            theta: 100.0,
            kind: RopeKind::LongRope {
                short_factor: vec![1.0, 2.0],
                long_factor: vec![4.0, 8.0],
                original_positions: 16.0,
                attention_factor: RopeKind::longrope_attention_factor(4.0, 16.0),
            },
        };
        assert_eq!(config.inv_freq(16), [1.0, 0.05]);
        assert_eq!(config.inv_freq(17), [0.25, 0.0125]);
        assert!((config.attention_factor() - 1.5f64.sqrt()).abs() < 1e-12);
    }

    #[test]
    fn positions_are_shifted_by_the_past_or_taken_from_the_batch() {
        let config = RopeConfig {
            dim: 2,
            theta: 10.0,
            kind: RopeKind::Default,
        };
        let mut batch = HostBatch {
            batch: 2,
            seq: 2,
            ..Default::default()
        };
        let table = config.table(&batch, 3, 8).unwrap();
        assert_eq!((table.rows, table.cos.len()), (1, 2));
        assert_eq!(table.cos, [3f64.cos() as f32, 4f64.cos() as f32]);
        batch.position_ids = Some(vec![0, 1, 5, 0]);
        let table = config.table(&batch, 3, 8).unwrap();
        assert_eq!(table.rows, 2);
        assert_eq!(table.sin[2], 5f64.sin() as f32);
        batch.position_ids = Some(vec![0, 1, 8, 0]);
        let error = config.table(&batch, 0, 8).unwrap_err().to_string();
        assert!(error.contains("position 8") && error.contains("max_position_embeddings"), "{error}");
    }
}

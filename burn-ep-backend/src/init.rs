//! Initial values of parameters: counter-based random numbers, so that every device, thread and rank draws the same.

use burn_backend::{DType, FloatDType, TensorData};
use rayon::prelude::*;

/// Initial values of a parameter that is not loaded from a checkpoint.
///
/// Every element depends only on the seed, the parameter's path and the element's index in the whole tensor, never on
/// the order of construction, the number of threads or the share of the experts that a rank holds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Init {
    /// All 0.
    Zeros,
    /// All 1.
    Ones,
    /// Normal with mean 0.
    Normal { std: f64 },
    /// Normal with mean 0, except one row of zeros (the padding token of an embedding).
    NormalWithZeroRow { std: f64, row: usize },
    /// Uniform on `(-bound, bound)`.
    Uniform { bound: f64 },
    /// `ln(1), ln(2), ..`: the decay rates of Mamba-2.
    LogCount,
    /// Inverse softplus of a step size whose logarithm is uniform on `(ln min, ln max)` and which is at least `floor`:
    /// the step bias of Mamba-2.
    SoftplusInverse { min: f64, max: f64, floor: f64 },
}

/// A slice of a tensor of initial values.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct InitDesc {
    pub init: Init,
    /// Key of the random stream, see [`stream_key`].
    pub key: u64,
    /// Index of the first element in the whole tensor.
    pub offset: usize,
    /// Width of the last axis.
    pub row_len: usize,
}

impl InitDesc {
    /// `shape` of these values on the host.
    pub(crate) fn data(&self, shape: &[usize], dtype: FloatDType) -> TensorData {
        let values = self.init.values(self.key, self.offset, shape.iter().product(), self.row_len);
        TensorData::new(values, shape.to_vec()).convert_dtype(DType::from(dtype))
    }
}

impl Init {
    /// Elements `offset..offset + len` of the whole tensor, whose rows have `row_len` elements.
    fn values(self, key: u64, offset: usize, len: usize, row_len: usize) -> Vec<f32> {
        match self {
            Self::Zeros => return vec![0.0; len],
            Self::Ones => return vec![1.0; len],
            _ => {}
        }
        const CHUNK: usize = 1 << 14;
        let mut values = vec![0.0; len];
        values.par_chunks_mut(CHUNK).enumerate().for_each(|(chunk, out)| {
            let first = offset + chunk * CHUNK;
            for (i, value) in out.iter_mut().enumerate() {
                *value = self.value(key, first + i, row_len) as f32;
            }
        });
        values
    }

    fn value(self, key: u64, index: usize, row_len: usize) -> f64 {
        match self {
            Self::Zeros => 0.0,
            Self::Ones => 1.0,
            Self::Normal { std } => std * normal(key, index),
            Self::NormalWithZeroRow { std, row } => {
                if index / row_len == row {
                    0.0
                } else {
                    std * normal(key, index)
                }
            }
            Self::Uniform { bound } => bound * (2.0 * uniform(key, index as u64) - 1.0),
            Self::LogCount => ((index + 1) as f64).ln(),
            Self::SoftplusInverse { min, max, floor } => {
                let step = (uniform(key, index as u64) * (max.ln() - min.ln()) + min.ln()).exp().max(floor);
                // softplus(x) = step  <=>  x = step + ln(1 - e^-step)
                step + (-(-step).exp_m1()).ln()
            }
        }
    }
}

/// Key of a parameter's random stream: FNV-1a of its path, mixed with the seed.
pub fn stream_key(seed: u64, path: &str) -> u64 {
    let hash = path
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
    mix(hash ^ mix(seed.wrapping_add(GOLDEN)))
}

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// Finaliser of SplitMix64 (Steele, Lea, Flood 2014).
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Number `counter` of the stream, in the open interval (0, 1).
fn uniform(key: u64, counter: u64) -> f64 {
    let bits = mix(key.wrapping_add(counter.wrapping_add(1).wrapping_mul(GOLDEN))) >> 11;
    (bits as f64 + 0.5) / (1u64 << 53) as f64
}

/// Standard normal number `index` of the stream (Box-Muller: neighbours share a radius).
fn normal(key: u64, index: usize) -> f64 {
    let pair = index as u64 & !1;
    let radius = (-2.0 * uniform(key, pair).ln()).sqrt();
    let angle = std::f64::consts::TAU * uniform(key, pair + 1);
    if index.is_multiple_of(2) {
        radius * angle.cos()
    } else {
        radius * angle.sin()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moments(values: &[f32]) -> (f64, f64) {
        let n = values.len() as f64;
        let mean = values.iter().map(|&v| f64::from(v)).sum::<f64>() / n;
        let var = values.iter().map(|&v| (f64::from(v) - mean).powi(2)).sum::<f64>() / n;
        (mean, var.sqrt())
    }

    #[test]
    fn normal_values_have_the_asked_mean_and_deviation() {
        let values = Init::Normal { std: 0.02 }.values(7, 0, 200_000, 100);
        let (mean, std) = moments(&values);
        // Five standard errors.
        assert!(mean.abs() < 5.0 * 0.02 / 200_000f64.sqrt(), "mean {mean}");
        assert!((std / 0.02 - 1.0).abs() < 5.0 / 400_000f64.sqrt(), "std {std}");
        // Shape: 68.27 % within one deviation, neighbours uncorrelated although they share a radius.
        let inside = values.iter().filter(|v| v.abs() < 0.02).count() as f64 / 200_000.0;
        assert!((inside - 0.6827).abs() < 0.005, "{inside}");
        let lag: f64 = values.windows(2).map(|w| f64::from(w[0]) * f64::from(w[1])).sum::<f64>() / 200_000.0 / 4e-4;
        assert!(lag.abs() < 5.0 / 200_000f64.sqrt(), "lag-1 correlation {lag}");
    }

    #[test]
    fn a_rank_draws_the_slice_of_the_whole_tensor() {
        let whole = Init::Normal { std: 1.0 }.values(3, 0, 4 * 15, 5);
        let part = Init::Normal { std: 1.0 }.values(3, 2 * 15, 2 * 15, 5);
        assert_eq!(part, whole[30..]);
    }

    #[test]
    fn paths_and_seeds_give_different_streams() {
        let keys = [stream_key(0, "a.weight"), stream_key(0, "b.weight"), stream_key(1, "a.weight")];
        assert!(keys[0] != keys[1] && keys[0] != keys[2] && keys[1] != keys[2]);
    }

    #[test]
    fn special_forms() {
        let rows = Init::NormalWithZeroRow { std: 1.0, row: 1 }.values(1, 0, 9, 3);
        assert_eq!(&rows[3..6], &[0.0; 3]);
        assert!(rows[..3].iter().chain(&rows[6..]).all(|v| *v != 0.0));

        let logs = Init::LogCount.values(1, 0, 3, 3);
        assert_eq!(logs, [0.0, 2f32.ln(), 3f32.ln()]);

        let init = Init::SoftplusInverse {
            min: 0.001,
            max: 0.1,
            floor: 1e-4,
        };
        for x in init.values(9, 0, 1000, 1000) {
            let step = f64::from(x).exp().ln_1p();
            assert!((0.00099..0.1001).contains(&step), "softplus({x}) = {step}");
        }

        let uniform = Init::Uniform { bound: 0.25 }.values(5, 0, 50_000, 1);
        let (mean, std) = moments(&uniform);
        assert!(mean.abs() < 0.002 && (std - 0.25 / 3f64.sqrt()).abs() < 0.001);
        assert!(uniform.iter().all(|v| v.abs() < 0.25));
    }
}

//! Learning-rate schedules with linear warm-up. The factors are those of the schedulers of transformers.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// What the learning rate does after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Decay {
    /// Stays.
    Constant,
    /// Falls linearly until the last step.
    #[default]
    Linear,
    /// Falls along half a cosine until the last step.
    Cosine,
    /// Stays, then falls linearly over the last `decay_steps` steps (warm-up, stable, decay).
    Wsd { decay_steps: u64 },
}

/// A schedule over a known number of steps.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Schedule {
    /// Peak learning rate.
    pub lr: f64,
    pub decay: Decay,
    /// Steps over which the learning rate rises linearly from 0.
    pub warmup_steps: u64,
    /// Learning rate at the end of the decay, as a share of the peak.
    pub min_ratio: f64,
}

impl Default for Schedule {
    fn default() -> Self {
        Self {
            lr: 1e-4,
            decay: Decay::default(),
            warmup_steps: 0,
            min_ratio: 0.0,
        }
    }
}

impl Schedule {
    /// Checks the settings against the number of steps.
    pub fn validate(&self, total_steps: u64) -> Result<()> {
        if !(self.lr.is_finite() && self.lr >= 0.0) {
            return Err(Error::config("schedule.lr", self.lr, "a number of at least 0"));
        }
        if !(0.0..=1.0).contains(&self.min_ratio) {
            return Err(Error::config("schedule.min_ratio", self.min_ratio, "a number from 0 to 1"));
        }
        if self.warmup_steps > total_steps {
            return Err(Error::config(
                "schedule.warmup_steps",
                self.warmup_steps,
                format!("at most the number of steps, {total_steps}"),
            ));
        }
        if let Decay::Wsd { decay_steps } = self.decay
            && decay_steps + self.warmup_steps > total_steps
        {
            return Err(Error::config(
                "schedule.decay.wsd.decay_steps",
                decay_steps,
                format!("at most the {} steps after the warm-up", total_steps - self.warmup_steps),
            ));
        }
        Ok(())
    }

    /// Learning rate of the step after `done` steps, of `total_steps`.
    pub fn lr(&self, done: u64, total_steps: u64) -> f64 {
        self.lr * self.factor(done, total_steps)
    }

    /// Share of the peak learning rate for the step after `done` steps. With a warm-up the first step has factor 0.
    pub fn factor(&self, done: u64, total_steps: u64) -> f64 {
        if done < self.warmup_steps {
            return done as f64 / self.warmup_steps as f64;
        }
        let (start, length) = match self.decay {
            Decay::Constant => return 1.0,
            Decay::Linear | Decay::Cosine => (self.warmup_steps, total_steps.saturating_sub(self.warmup_steps)),
            Decay::Wsd { decay_steps } => (total_steps.saturating_sub(decay_steps), decay_steps),
        };
        let progress = (done.saturating_sub(start) as f64 / length.max(1) as f64).min(1.0);
        let left = match self.decay {
            Decay::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * progress).cos()),
            _ => 1.0 - progress,
        };
        self.min_ratio + (1.0 - self.min_ratio) * left
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn factors(decay: Decay, min_ratio: f64, at: &[u64]) -> Vec<f64> {
        let schedule = Schedule {
            lr: 2.0,
            decay,
            warmup_steps: 4,
            min_ratio,
        };
        schedule.validate(20).unwrap();
        at.iter().map(|&done| schedule.lr(done, 20) / 2.0).collect()
    }

    fn close(got: Vec<f64>, want: &[f64]) {
        assert!(
            got.len() == want.len() && got.iter().zip(want).all(|(g, w)| (g - w).abs() < 1e-12),
            "{got:?} {want:?}"
        );
    }

    #[test]
    fn hand_values() {
        // Warm-up over 4 of 20 steps; the decay runs over 16.
        close(factors(Decay::Constant, 0.0, &[0, 1, 3, 4, 19]), &[0.0, 0.25, 0.75, 1.0, 1.0]);
        close(
            factors(Decay::Linear, 0.0, &[0, 2, 4, 8, 12, 19, 20]),
            &[0.0, 0.5, 1.0, 0.75, 0.5, 0.0625, 0.0],
        );
        let cos = |p: f64| 0.5 * (1.0 + (std::f64::consts::PI * p).cos());
        close(factors(Decay::Cosine, 0.0, &[4, 8, 12, 20]), &[1.0, cos(0.25), 0.5, 0.0]);
        close(factors(Decay::Cosine, 0.1, &[12, 20]), &[0.55, 0.1]);
        close(
            factors(Decay::Wsd { decay_steps: 5 }, 0.2, &[2, 4, 15, 16, 19, 20, 25]),
            &[0.5, 1.0, 1.0, 0.84, 0.36, 0.2, 0.2],
        );
    }

    #[test]
    fn without_warm_up_the_first_step_has_the_full_rate() {
        let schedule = Schedule::default();
        assert_eq!(schedule.factor(0, 10), 1.0);
        assert!((schedule.factor(9, 10) - 0.1).abs() < 1e-12);
    }

    #[test]
    fn bad_settings_name_their_field() {
        let wsd = Schedule {
            decay: Decay::Wsd { decay_steps: 8 },
            warmup_steps: 4,
            ..Schedule::default()
        };
        let error = wsd.validate(10).unwrap_err().to_string();
        assert!(
            error.contains("decay_steps") && error.contains('8') && error.contains('6'),
            "{error}"
        );
        let negative = Schedule {
            lr: -1.0,
            ..Schedule::default()
        };
        assert!(negative.validate(10).unwrap_err().to_string().contains("schedule.lr"));
    }
}

//! Load balancing without a loss (Wang et al. 2024; DeepSeek-V3, section 2.1.2): after each step the selection bias of
//! overloaded experts goes down and that of the others up.

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Tensor, TensorData, backend::Backend};
use serde::{Deserialize, Serialize};

use super::{ParamTable, PathStack, ResolvedGroups};
use crate::error::{Error, Result};

/// Name of the selection bias in every model family that has one.
const BIAS_NAME: &str = "e_score_correction_bias";

/// Settings of the router-bias update.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RouterBiasConfig {
    /// Size of one update; DeepSeek-V3 trains with 1e-3.
    pub rate: f64,
}

impl RouterBiasConfig {
    /// Checks the rate.
    pub fn validate(&self) -> Result<()> {
        if self.rate.is_finite() && self.rate > 0.0 {
            return Ok(());
        }
        Err(Error::config("router_bias.rate", self.rate, "a positive number"))
    }
}

/// Fails when no parameter in `table` is a selection bias, because a [`RouterBiasConfig`] would then do nothing.
pub fn check_router_bias(table: &ParamTable, config: &RouterBiasConfig) -> Result<()> {
    config.validate()?;
    if table.entries().iter().any(|info| is_bias(&info.path)) {
        return Ok(());
    }
    Err(Error::config(
        "router_bias",
        format!("a rate of {}", config.rate),
        format!("none: no block of this model has an `{BIAS_NAME}`"),
    ))
}

fn is_bias(path: &str) -> bool {
    path.rsplit('.').next() == Some(BIAS_NAME)
}

/// Change of one layer's bias: `rate * (s - mean(s))` with `s_e = sign(mean load - load_e)`. Centred, so that the biases do
/// not drift together.
pub fn router_bias_delta(load_e: &[f64], rate: f64) -> Vec<f64> {
    let n = load_e.len().max(1) as f64;
    let mean = load_e.iter().sum::<f64>() / n;
    let sign = |load: &f64| match mean.total_cmp(load) {
        std::cmp::Ordering::Less => -1.0,
        std::cmp::Ordering::Equal => 0.0,
        std::cmp::Ordering::Greater => 1.0,
    };
    let signs: Vec<f64> = load_e.iter().map(sign).collect();
    let centre = signs.iter().sum::<f64>() / n;
    signs.iter().map(|s| rate * (s - centre)).collect()
}

/// Updates the selection bias of every block that has one and is not frozen. `load` holds the global number of rows per
/// expert of each block (None: no router).
pub fn update_router_bias<B: Backend, M: Module<B>>(
    model: M,
    load: &[Option<Vec<f64>>],
    config: &RouterBiasConfig,
    groups: &ResolvedGroups,
) -> Result<M> {
    let mut updater = Updater {
        path: PathStack::default(),
        load,
        rate: config.rate,
        groups,
        error: None,
    };
    let model = model.map(&mut updater);
    match updater.error {
        Some(error) => Err(error),
        None => Ok(model),
    }
}

struct Updater<'a> {
    path: PathStack,
    load: &'a [Option<Vec<f64>>],
    rate: f64,
    groups: &'a ResolvedGroups,
    error: Option<Error>,
}

/// Block index in `layers.{index}.…`.
fn block_index(path: &str) -> Option<usize> {
    let mut names = path.split('.');
    names.find(|name| *name == "layers")?;
    names.next()?.parse().ok()
}

impl<B: Backend> ModuleMapper<B> for Updater<'_> {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.path.enter(name, container_type);
    }

    fn exit_module(&mut self, _name: &str, container_type: &str) {
        self.path.exit(container_type);
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let path = self.path.path();
        if self.error.is_some() || !is_bias(&path) || self.groups.get(param.id).frozen {
            return param;
        }
        let load_e = block_index(&path).and_then(|i| self.load.get(i)).and_then(Option::as_ref);
        let shape = param.val().dims();
        let Some(load_e) = load_e.filter(|load| shape[..] == [load.len()]) else {
            self.error = Some(Error::config(
                path,
                format!("shape {shape:?}"),
                "one entry per expert of the block's router",
            ));
            return param;
        };
        let delta: Vec<f32> = router_bias_delta(load_e, self.rate).iter().map(|&d| d as f32).collect();
        param.map(|bias| {
            let tracked = bias.is_require_grad();
            let delta = Tensor::<B, D>::from_data(TensorData::new(delta, bias.shape()), &bias.device());
            let dtype = bias.dtype();
            (bias + delta.cast(burn::tensor::FloatDType::from(dtype)))
                .detach()
                .set_require_grad(tracked)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_overloaded_expert_loses_what_the_others_gain() {
        // torchtitan#1506, #3686, maxtext#2494: the centred variant.
        let delta = router_bias_delta(&[4.0, 0.0, 0.0, 0.0], 1e-3);
        for (got, want) in delta.iter().zip([-1.5e-3, 0.5e-3, 0.5e-3, 0.5e-3]) {
            assert!((got - want).abs() < 1e-12, "{got} {want}");
        }
        assert_eq!(router_bias_delta(&[2.0, 2.0], 1e-3), [0.0, 0.0]);
    }

    #[test]
    fn blocks_are_found_by_their_path() {
        assert_eq!(block_index("layers.12.mixer.gate.e_score_correction_bias"), Some(12));
        assert_eq!(block_index("gate.e_score_correction_bias"), None);
    }
}

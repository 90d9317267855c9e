//! Parameter groups: settings by name pattern.

use std::collections::HashMap;

use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::tensor::{Tensor, backend::Backend};
use regex::Regex;
use serde::{Deserialize, Serialize};

use super::ParamTable;
use crate::error::{Error, Result};

/// Settings for the parameters whose path matches a regular expression (anywhere in the path). Where several groups match,
/// the later one wins, field by field.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ParamGroup {
    /// E.g. `"norm|bias"`; a pattern that matches no parameter is an error.
    pub pattern: String,
    /// Multiplies the learning rate.
    #[serde(default)]
    pub lr_scale: Option<f64>,
    /// Replaces the optimizer's weight decay.
    #[serde(default)]
    pub weight_decay: Option<f64>,
    /// No gradient, no update, no weight decay, no router-bias update.
    #[serde(default)]
    pub frozen: Option<bool>,
}

impl ParamGroup {
    /// Norm weights, biases, the per-head constants of Mamba-2 and the attention sinks of GPT-OSS: commonly exempt from weight
    /// decay.
    pub const NORMS_AND_BIASES: &str = r"norm|bias$|(^|\.)(A_log|D|sinks)$";
    /// Router weight and biases, under every name the model families use.
    pub const ROUTER: &str = r"(^|\.)(gate|router)\.(weight|bias|e_score_correction_bias)$";

    /// A group that changes nothing yet.
    pub fn new(pattern: impl Into<String>) -> Self {
        Self {
            pattern: pattern.into(),
            lr_scale: None,
            weight_decay: None,
            frozen: None,
        }
    }

    /// Sets the factor of the learning rate.
    #[must_use]
    pub fn with_lr_scale(mut self, lr_scale: f64) -> Self {
        self.lr_scale = Some(lr_scale);
        self
    }

    /// Sets the weight decay.
    #[must_use]
    pub fn with_weight_decay(mut self, weight_decay: f64) -> Self {
        self.weight_decay = Some(weight_decay);
        self
    }

    /// Freezes the group.
    #[must_use]
    pub fn frozen(mut self) -> Self {
        self.frozen = Some(true);
        self
    }
}

/// Settings of one parameter.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GroupSettings {
    pub lr_scale: f64,
    pub weight_decay: f64,
    pub frozen: bool,
}

/// The groups applied to a model's parameters.
#[derive(Debug, Clone)]
pub struct ResolvedGroups {
    default: GroupSettings,
    by_id: HashMap<ParamId, GroupSettings>,
}

impl ResolvedGroups {
    /// Applies `groups` in order. Fails on an invalid pattern, a bad number, or a pattern without any match.
    pub fn new(groups: &[ParamGroup], table: &ParamTable, weight_decay: f64) -> Result<Self> {
        let default = GroupSettings {
            lr_scale: 1.0,
            weight_decay,
            frozen: false,
        };
        let mut by_id = HashMap::new();
        for (i, group) in groups.iter().enumerate() {
            let field = |name: &str| format!("groups[{i}].{name}");
            let pattern = Regex::new(&group.pattern)
                .map_err(|e| Error::config(field("pattern"), format!("`{}`: {e}", group.pattern), "a regular expression"))?;
            for (name, value) in [("lr_scale", group.lr_scale), ("weight_decay", group.weight_decay)] {
                if let Some(value) = value.filter(|v| !v.is_finite() || *v < 0.0) {
                    return Err(Error::config(field(name), value, "a number of at least 0"));
                }
            }
            let mut matched = false;
            for info in table.entries() {
                let mut paths = std::iter::once(&info.path).chain(&info.aliases);
                if !paths.any(|path| pattern.is_match(path)) {
                    continue;
                }
                matched = true;
                let settings: &mut GroupSettings = by_id.entry(info.id).or_insert(default);
                settings.lr_scale = group.lr_scale.unwrap_or(settings.lr_scale);
                settings.weight_decay = group.weight_decay.unwrap_or(settings.weight_decay);
                settings.frozen = group.frozen.unwrap_or(settings.frozen);
            }
            if !matched {
                let example = table.entries().first().map_or("none", |info| info.path.as_str());
                return Err(Error::config(
                    field("pattern"),
                    format!("`{}`, which matches no parameter", group.pattern),
                    format!(
                        "a pattern of at least one of the {} paths, such as `{example}`",
                        table.entries().len()
                    ),
                ));
            }
        }
        Ok(Self { default, by_id })
    }

    /// Settings of a parameter.
    pub fn get(&self, id: ParamId) -> GroupSettings {
        self.by_id.get(&id).copied().unwrap_or(self.default)
    }
}

/// Switches gradients off for the frozen parameters, so that their backward work is skipped too.
pub fn freeze<B: Backend, M: Module<B>>(model: M, groups: &ResolvedGroups) -> M {
    model.map(&mut Freezer(groups))
}

struct Freezer<'a>(&'a ResolvedGroups);

impl<B: Backend> ModuleMapper<B> for Freezer<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        if self.0.get(param.id).frozen {
            return param.set_require_grad(false);
        }
        param
    }
}

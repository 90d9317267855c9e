//! Routers with expert groups: Nemotron-H, DeepSeek and GLM name these fields alike.

use burn_ep_backend::{GroupScore, RouterDesc, RouterScore};
use burn_moe::{Error, Result};

use crate::json::Fields;

/// What a family takes for missing fields.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GroupedDefaults {
    pub experts: usize,
    pub top_k: usize,
    pub groups: usize,
    pub top_groups: usize,
    pub scale: f64,
}

/// Sigmoid scores; the choice is shifted by the correction bias and limited to groups (DeepSeek-V3, GLM).
pub(crate) fn grouped_sigmoid(f: &Fields<'_>, defaults: GroupedDefaults) -> Result<RouterDesc> {
    f.choice(&["scoring_func"], (), &[("sigmoid", ())])?;
    f.choice(&["topk_method"], (), &[("noaux_tc", ())])?;
    for name in ["n_group", "topk_group"] {
        if f.contains(name) && f.get(&[name])?.is_none() {
            return Err(Error::config(name, "null", "a number: 1 for a choice among all experts"));
        }
    }
    let experts = num_experts(f, defaults.experts)?;
    let top_k = f.size(&["num_experts_per_tok"], defaults.top_k)?;
    Ok(RouterDesc {
        score: RouterScore::Sigmoid,
        scale: f.positive(&["routed_scaling_factor"], defaults.scale)? as f32,
        groups: f.size(&["n_group"], defaults.groups)?,
        top_groups: f.size(&["topk_group"], defaults.top_groups)?,
        group_score: GroupScore::TwoBest,
        ..RouterDesc::softmax(experts, top_k, f.flag(&["norm_topk_prob"], true)?)
    })
}

/// Number of routed experts, under any of its names.
pub(crate) fn num_experts(f: &Fields<'_>, default: usize) -> Result<usize> {
    f.size(&["n_routed_experts", "num_local_experts", "num_experts"], default)
}

/// Checks the counts against each other.
///
/// # Errors
/// Names the field, what was found and what it may be.
pub(crate) fn check_grouped(router: &RouterDesc) -> Result<()> {
    let (e, k, g, kept) = (router.num_experts, router.top_k, router.groups, router.top_groups);
    if k > e {
        return Err(Error::config("num_experts_per_tok", k, format!("at most n_routed_experts = {e}")));
    }
    if !e.is_multiple_of(g) {
        return Err(Error::config("n_group", g, format!("a divisor of n_routed_experts = {e}")));
    }
    if router.group_score == GroupScore::TwoBest && g > 1 && e / g < 2 {
        return Err(Error::config(
            "n_group",
            g,
            format!("at most {}: a group is scored by its two best experts", e / 2),
        ));
    }
    if kept > g {
        return Err(Error::config("topk_group", kept, format!("at most n_group = {g}")));
    }
    if k > kept * (e / g) {
        return Err(Error::config(
            "num_experts_per_tok",
            k,
            format!("at most the {} experts of topk_group = {kept} groups", kept * (e / g)),
        ));
    }
    Ok(())
}

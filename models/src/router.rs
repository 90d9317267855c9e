//! Checks that the families with expert groups share: Nemotron-H, DeepSeek and what follows them name these fields alike.

use burn_ep_backend::{GroupScore, RouterDesc};
use burn_moe::{Error, Result};

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

//! RMSNorm and the gated group norm of Mamba-2.

use burn::module::{Module, Param};
use burn::tensor::Tensor;
use burn_ep_backend::{MoeBackend, NormDesc, NormRounding, RopeLayout, ops};

use super::{Init, ParamBuilder};
use crate::error::Result;

/// RMSNorm over the last axis, statistics in fp32 (Zhang and Sennrich 2019).
#[derive(Module, Debug)]
pub struct RmsNorm<B: MoeBackend> {
    /// `[D]`.
    pub weight: Param<Tensor<B, 1>>,
    desc: NormDesc,
}

impl<B: MoeBackend> RmsNorm<B> {
    /// Weights 1, rounding as in Llama (`w * cast(y)`).
    pub fn new(pb: &ParamBuilder<B>, width: usize, eps: f64) -> Self {
        Self {
            weight: pb.param("weight", [width], Init::Ones),
            desc: NormDesc {
                eps: eps as f32,
                rounding: NormRounding::Llama,
            },
        }
    }

    /// The same layer with another rounding.
    #[must_use]
    pub fn with_rounding(mut self, rounding: NormRounding) -> Self {
        self.desc.rounding = rounding;
        self
    }

    /// `[.., D]` to `[.., D]`.
    pub fn forward<const R: usize>(&self, x: Tensor<B, R>) -> Result<Tensor<B, R>> {
        Ok(ops::rms_norm(x, self.weight.val(), &self.desc)?)
    }

    /// The norm of every head `[B, S, H, D]`, then the rotary embedding by `cos` and `sin` `[B or 1, S, D_rot / 2]`.
    pub fn forward_rope(&self, x_bshd: Tensor<B, 4>, cos: Tensor<B, 3>, sin: Tensor<B, 3>, layout: RopeLayout) -> Result<Tensor<B, 4>> {
        Ok(ops::rms_norm_rope(x_bshd, self.weight.val(), cos, sin, layout, &self.desc)?)
    }

    /// `x + residual` and its norm, `[.., D]` each: the step from one sublayer of a block to the next.
    pub fn forward_sum<const R: usize>(&self, x: Tensor<B, R>, residual: Tensor<B, R>) -> Result<(Tensor<B, R>, Tensor<B, R>)> {
        Ok(ops::add_rms_norm(x, residual, self.weight.val(), &self.desc)?)
    }
}

/// `RMSNorm_groups(y * silu(z)) * weight`: gate first, then norm.
#[derive(Module, Debug)]
pub struct GatedRmsNorm<B: MoeBackend> {
    /// `[D]`.
    pub weight: Param<Tensor<B, 1>>,
    groups: usize,
    eps: f32,
}

impl<B: MoeBackend> GatedRmsNorm<B> {
    /// Weights 1; statistics over each of `groups` equal parts of the width.
    pub fn new(pb: &ParamBuilder<B>, width: usize, groups: usize, eps: f64) -> Self {
        Self {
            weight: pb.param("weight", [width], Init::Ones),
            groups,
            eps: eps as f32,
        }
    }

    /// y and z `[.., D]` to `[.., D]`.
    pub fn forward<const R: usize>(&self, y: Tensor<B, R>, z: Tensor<B, R>) -> Result<Tensor<B, R>> {
        Ok(ops::gated_rms_norm(y, z, self.weight.val(), self.groups, self.eps)?)
    }
}

//! The Mamba-2 mixer (Dao and Gu 2024) as Nemotron-H uses it.
// `A_log` and `D` are the names in the checkpoint.
#![allow(non_snake_case)]

use burn::module::{Module, Param};
use burn::tensor::{FloatDType, Tensor};
use burn_ep_backend::{MoeBackend, SsdDesc, ops};

use super::linear::as_dtype;
use super::{GatedRmsNorm, Init, Linear, ParamBuilder};
use crate::error::{Error, Result};
use crate::model::{LayerCache, ModelInput};

/// Settings of [`Mamba2`].
#[derive(Debug, Clone, Copy)]
pub struct Mamba2Config {
    /// Hidden width D.
    pub hidden: usize,
    /// Heads H; the inner width is `H * P`.
    pub heads: usize,
    /// Head size P.
    pub head_dim: usize,
    /// Groups G of B and C, a divisor of H; also the groups of the gated norm.
    pub groups: usize,
    /// State size N.
    pub state: usize,
    /// Taps of the convolution, at least 2.
    pub conv_kernel: usize,
    pub conv_bias: bool,
    /// Bias of the input and the output projection.
    pub proj_bias: bool,
    pub norm_eps: f64,
    /// Chunk of the scan and clamp of its step size.
    pub scan: SsdDesc,
    /// Reset state and convolution where a document starts. Off only to compare with implementations that leak.
    pub reset_documents: bool,
    pub init: Init,
    /// Initial output projection.
    pub out_init: Init,
    /// Initial step bias.
    pub dt_init: Init,
}

impl Mamba2Config {
    /// `H * P`.
    pub fn inner(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Channels C of the convolution: x, B and C.
    pub fn conv_channels(&self) -> usize {
        self.inner() + 2 * self.groups * self.state
    }

    /// Rows of the input projection: gate, convolution channels, step sizes.
    pub fn projected(&self) -> usize {
        self.inner() + self.conv_channels() + self.heads
    }
}

/// Weights of the depthwise convolution.
#[derive(Module, Debug)]
pub struct Conv1d<B: MoeBackend> {
    /// `[C, 1, Kw]`.
    pub weight: Param<Tensor<B, 3>>,
    /// `[C]`.
    pub bias: Option<Param<Tensor<B, 1>>>,
}

/// Mamba-2 mixer, in this order: input projection to gate, x, B, C and step; convolution with SiLU over x, B, C; scan;
/// gated group norm; output projection.
#[derive(Module, Debug)]
pub struct Mamba2<B: MoeBackend> {
    /// `[2*H*P + 2*G*N + H, D]`, rows: gate, x, B, C, step.
    pub in_proj: Linear<B>,
    pub conv1d: Conv1d<B>,
    /// `[H]`.
    pub dt_bias: Param<Tensor<B, 1>>,
    /// `[H]`, fp32 unless the checkpoint says otherwise; the decay rate is `-exp(A_log)`.
    pub A_log: Param<Tensor<B, 1>>,
    /// `[H]`, the skip weight, fp32 unless the checkpoint says otherwise.
    pub D: Param<Tensor<B, 1>>,
    /// `[H*P]`.
    pub norm: GatedRmsNorm<B>,
    /// `[D, H*P]`.
    pub out_proj: Linear<B>,
    config: Mamba2Config,
}

impl<B: MoeBackend> Mamba2<B> {
    /// A layer of `config`.
    pub fn new(pb: &ParamBuilder<B>, config: &Mamba2Config) -> Self {
        let c = *config;
        let (inner, channels) = (c.inner(), c.conv_channels());
        let conv = pb.at("conv1d");
        // bf16 would destroy the differences between neighbouring decay rates, and published files keep these in fp32.
        let wide = pb.clone().with_dtype(FloatDType::F32);
        Self {
            in_proj: Linear::new(&pb.at("in_proj"), c.hidden, c.projected(), c.proj_bias, c.init),
            conv1d: Conv1d {
                weight: conv.param("weight", [channels, 1, c.conv_kernel], c.init),
                bias: c.conv_bias.then(|| conv.param("bias", [channels], Init::Zeros)),
            },
            dt_bias: pb.param("dt_bias", [c.heads], c.dt_init),
            A_log: wide.param("A_log", [c.heads], Init::LogCount),
            D: wide.param("D", [c.heads], Init::Ones),
            norm: GatedRmsNorm::new(&pb.at("norm"), inner, c.groups, c.norm_eps),
            out_proj: Linear::new(&pb.at("out_proj"), inner, c.hidden, c.proj_bias, c.out_init),
            config: c,
        }
    }

    /// `[B, S, D]` to `[B, S, D]`. A cache carries convolution inputs and scan state from the tokens before this batch.
    pub fn forward(&self, h_bsd: Tensor<B, 3>, input: &ModelInput<B>, cache: Option<&mut LayerCache<B>>) -> Result<Tensor<B, 3>> {
        let c = &self.config;
        let [b, s, _] = h_bsd.dims();
        let dtype = h_bsd.dtype();
        let (inner, channels, bc) = (c.inner(), c.conv_channels(), c.groups * c.state);
        let visible_bs1 = input.visible_bs.clone().map(|v| as_dtype(v, dtype).unsqueeze_dim::<3>(2));
        let doc_start = input.mask.doc_start_bs.clone().filter(|_| c.reset_documents);
        let hide_padding = |x: Tensor<B, 3>| match &visible_bs1 {
            Some(v) => x * v.clone(),
            None => x,
        };

        let u = self.in_proj.forward(hide_padding(h_bsd))?;
        let z_bsi = u.clone().narrow(2, 0, inner);
        let xbc_bsc = u.clone().narrow(2, inner, channels);
        let dt_bsh = u.narrow(2, inner + channels, c.heads);

        let (history, initial_state) = match cache.as_deref() {
            Some(LayerCache::Mamba { conv, state }) => {
                if doc_start.is_some() || visible_bs1.is_some() {
                    return Err(Error::batch(
                        "attention_mask",
                        "documents or padding together with cached tokens",
                        "one document without padding per row while generating",
                    ));
                }
                (Some(conv.clone()), Some(state.clone()))
            }
            _ => (None, None),
        };
        let next_history = cache.is_some().then(|| {
            let past = history
                .clone()
                .unwrap_or_else(|| Tensor::zeros([b, c.conv_kernel - 1, channels], (&xbc_bsc.device(), dtype)));
            Tensor::cat(vec![past, xbc_bsc.clone()], 1).narrow(1, s, c.conv_kernel - 1)
        });

        let xbc_bsc = ops::causal_conv1d(
            xbc_bsc,
            self.conv1d.weight.val().reshape([channels, c.conv_kernel]),
            self.conv1d.bias.as_ref().map(Param::val),
            history,
            doc_start.clone(),
            true,
        )?;
        // A convolution bias makes padded tokens non-zero again.
        let xbc_bsc = hide_padding(xbc_bsc);
        let scan = ops::ssd_scan(
            ops::SsdInput {
                x_bshp: xbc_bsc.clone().narrow(2, 0, inner).reshape([b, s, c.heads, c.head_dim]),
                dt_bsh,
                a_log_h: self.A_log.val(),
                b_bsgn: xbc_bsc.clone().narrow(2, inner, bc).reshape([b, s, c.groups, c.state]),
                c_bsgn: xbc_bsc.narrow(2, inner + bc, bc).reshape([b, s, c.groups, c.state]),
                d_h: self.D.val(),
                dt_bias_h: self.dt_bias.val(),
                initial_state_bhpn: initial_state,
                doc_start_bs: doc_start,
            },
            &c.scan,
        )?;
        if let (Some(cache), Some(conv)) = (cache, next_history) {
            *cache = LayerCache::Mamba {
                conv,
                state: scan.final_state_bhpn,
            };
        }
        let y_bsi = self.norm.forward(scan.y_bshp.reshape([b, s, inner]), z_bsi)?;
        self.out_proj.forward(y_bsi)
    }
}

//! The layers, in the order in which hidden states meet them.
//!
//! Every layer is a Burn module whose field names are the names of the checkpoint, so that the module path of a
//! parameter is its in-memory checkpoint name (`layers.3.mixer.experts.up_proj`; enum variants are not part of it).
//! Parameters are lazy: building a model allocates nothing, loading replaces them, and only a parameter that is read
//! without having been loaded draws its initial values (see [`ParamBuilder`]).
//!
//! Shape legend: `B` batch, `S` sequence, `T = B*S` tokens, `D` hidden width, `V` vocabulary, `E` experts, `K` experts
//! per token, `F` expert width, `H` heads, `P` head size, `G` groups, `N` state size, `C` channels of the convolution.

mod attention;
mod embedding;
mod experts;
mod feed_forward;
mod linear;
mod mamba2;
mod mla;
mod mlp;
mod moe;
mod norm;
mod params;
mod rope;
mod router;

pub use attention::{Attention, AttentionConfig, QkNorm};
pub use embedding::Embedding;
pub use experts::{Experts, ExpertsConfig};
pub use feed_forward::FeedForward;
pub use linear::{Linear, linear};
pub use mamba2::{Conv1d, Mamba2, Mamba2Config};
pub use mla::{Mla, MlaConfig};
pub use mlp::{Mlp, MlpActivation, MlpConfig};
pub use moe::{LatentConfig, Moe, MoeConfig};
pub use norm::{GatedRmsNorm, RmsNorm};
pub use params::{Init, ParamBuilder};
pub use rope::{RopeConfig, RopeKind, RopeTable};
pub use router::{Router, RouterConfig, RouterPrecision};

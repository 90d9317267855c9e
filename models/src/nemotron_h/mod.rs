//! Nemotron-H and Nemotron 3 (`model_type = "nemotron_h"`): a stack of single-mixer blocks, each Mamba-2, attention,
//! mixture of experts or dense feed-forward.

mod config;
mod init;
mod model;
mod schedule;
mod weights;

pub use config::{MambaSettings, MoeSettings, NemotronHConfig, Parity};
pub use model::{Block, Mixer, NemotronH};
pub use schedule::LayerKind;
pub use weights::weight_map;

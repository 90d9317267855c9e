//! Initial values of a model built from a config alone.

use burn_moe::layers::Init;

use super::config::GptOssConfig;

impl GptOssConfig {
    /// Matrices, experts, sinks, and the router with its bias: normal with deviation `initializer_range`. The embedding as
    /// well, except the padding row, which is zero; norms are 1, all other biases 0.
    pub(super) fn matrix_init(&self) -> Init {
        Init::Normal {
            std: self.initializer_range,
        }
    }
}

//! Initial values of a model built from a config alone.

use burn_moe::layers::Init;

use super::config::Glm4MoeConfig;

impl Glm4MoeConfig {
    /// Matrices, router and experts: normal with deviation `initializer_range`. The embedding as well, except the padding
    /// row, which is zero; norms are 1, biases and the correction bias 0.
    pub(super) fn matrix_init(&self) -> Init {
        Init::Normal {
            std: self.initializer_range,
        }
    }
}

//! Initial values of a model built from a config alone.

use burn_moe::layers::Init;

use super::config::NemotronHConfig;

impl NemotronHConfig {
    /// Matrices, convolutions, embedding and experts: normal with deviation `initializer_range`.
    pub(super) fn matrix_init(&self) -> Init {
        Init::Normal {
            std: self.initializer_range,
        }
    }

    /// Output projection of the Mamba-2 mixer. With `rescale_prenorm_residual` it is Kaiming-uniform with `a = sqrt(5)`,
    /// which is `U(-1/sqrt(inner), 1/sqrt(inner))`, divided by `sqrt(layers)`: the residual stream then does not grow with
    /// the depth (GPT-2). Only this projection is rescaled.
    pub(super) fn mamba_out_init(&self) -> Init {
        if !self.rescale_prenorm_residual {
            return self.matrix_init();
        }
        let inner = (self.mamba.num_heads * self.mamba.head_dim) as f64;
        Init::Uniform {
            bound: (inner * self.layers.len() as f64).powf(-0.5),
        }
    }

    /// Step bias of the Mamba-2 mixer: the inverse softplus of log-uniform step sizes.
    pub(super) fn dt_init(&self) -> Init {
        Init::SoftplusInverse {
            min: self.mamba.time_step_min,
            max: self.mamba.time_step_max,
            floor: self.mamba.time_step_floor,
        }
    }
}

//! How parameters are made: device, dtype, seed, and this rank's share of the experts.

use std::fmt::Display;
use std::ops::Range;

use burn::module::{Param, ParamId};
use burn::tensor::{FloatDType, Tensor, TensorPrimitive, backend::Backend};
pub use burn_ep_backend::Init;
use burn_ep_backend::comm::EpGroup;
use burn_ep_backend::{InitDesc, MoeBackend, stream_key};

use crate::error::Result;

/// Makes the parameters of one module; [`ParamBuilder::at`] descends into a child.
#[derive(Debug, Clone)]
pub struct ParamBuilder<B: Backend> {
    device: B::Device,
    dtype: FloatDType,
    seed: u64,
    path: String,
    ep: Option<EpGroup>,
}

impl<B: MoeBackend> ParamBuilder<B> {
    /// Parameters of `dtype` on `device`, seed 0, all experts.
    pub fn new(device: &B::Device, dtype: FloatDType) -> Self {
        B::prepare_device(device);
        Self {
            device: device.clone(),
            dtype,
            seed: 0,
            path: String::new(),
            ep: None,
        }
    }

    /// Seed of the initial values.
    #[must_use]
    pub fn with_seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Hold only the experts of this rank.
    #[must_use]
    pub fn with_ep(mut self, ep: Option<EpGroup>) -> Self {
        self.ep = ep;
        self
    }

    /// The same builder with another dtype (Mamba-2's decay rates stay in fp32).
    #[must_use]
    pub fn with_dtype(mut self, dtype: FloatDType) -> Self {
        self.dtype = dtype;
        self
    }

    /// Builder of a child module.
    #[must_use]
    pub fn at(&self, name: impl Display) -> Self {
        Self {
            path: self.full_name(name),
            ..self.clone()
        }
    }

    /// Experts that live on this rank; fails unless they divide evenly.
    pub fn local_experts(&self, num_experts: usize) -> Result<Range<usize>> {
        match &self.ep {
            Some(ep) => Ok(ep.local_experts(num_experts)?),
            None => Ok(0..num_experts),
        }
    }

    /// A trainable parameter.
    pub fn param<const R: usize>(&self, name: &str, shape: [usize; R], init: Init) -> Param<Tensor<B, R>> {
        self.lazy(name, shape, 0, init, self.dtype, true)
    }

    /// A trainable stack of which this rank holds the experts `local` along the first axis: `[local.len(), ..]`.
    pub fn expert_param(&self, name: &str, local: Range<usize>, rows: usize, cols: usize, init: Init) -> Param<Tensor<B, 3>> {
        self.lazy(name, [local.len(), rows, cols], local.start * rows * cols, init, self.dtype, true)
    }

    /// A trainable stack of biases, 0 at first, of which this rank holds the experts `local`: `[local.len(), rows]`.
    pub fn expert_bias(&self, name: &str, local: Range<usize>, rows: usize) -> Param<Tensor<B, 2>> {
        self.lazy(name, [local.len(), rows], local.start * rows, Init::Zeros, self.dtype, true)
    }

    /// An fp32 tensor that is saved but not trained.
    pub fn buffer<const R: usize>(&self, name: &str, shape: [usize; R], init: Init) -> Param<Tensor<B, R>> {
        self.lazy(name, shape, 0, init, FloatDType::F32, false)
    }

    fn lazy<const R: usize>(
        &self,
        name: &str,
        shape: [usize; R],
        offset: usize,
        init: Init,
        dtype: FloatDType,
        trainable: bool,
    ) -> Param<Tensor<B, R>> {
        let desc = InitDesc {
            init,
            key: stream_key(self.seed, &self.full_name(name)),
            offset,
            row_len: shape[R - 1],
        };
        let make = move |device: &B::Device, require_grad: bool| {
            let value = B::resident_init(&desc, &shape, dtype, device);
            Tensor::from_primitive(TensorPrimitive::Float(value)).set_require_grad(require_grad)
        };
        Param::uninitialized(ParamId::new(), make, self.device.clone(), trainable, shape.into())
    }

    fn full_name(&self, name: impl Display) -> String {
        if self.path.is_empty() {
            name.to_string()
        } else {
            format!("{}.{name}", self.path)
        }
    }
}

#[cfg(test)]
mod tests {
    use burn_flex::Flex;

    use super::*;

    #[test]
    fn parameters_are_lazy_and_keep_dtype_and_gradient_flag() {
        let pb = ParamBuilder::<Flex>::new(&Default::default(), FloatDType::BF16);
        let w = pb.param("weight", [2, 3], Init::Ones);
        assert!(!w.is_initialized());
        assert_eq!(w.lazy_shape().as_slice(), [2, 3]);
        assert!(!w.is_initialized());
        assert_eq!(w.val().dtype(), burn::tensor::DType::BF16);
        assert_eq!(pb.buffer("bias", [2], Init::Zeros).val().dtype(), burn::tensor::DType::F32);
    }
}

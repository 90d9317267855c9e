//! The decorator `EpBackend<B>`: B's own tensors, every op delegated, slow ops rerouted.

mod autodiff;
#[rustfmt::skip]
mod generated;
mod moe;
mod routing;

#[cfg(test)]
mod coverage;
#[cfg(test)]
mod tests;

use core::fmt;
use core::marker::PhantomData;

use burn_backend::tensor::Device;
use burn_backend::{Backend, BackendTypes, DType, DTypeUsageSet, ExecutionError, TensorData};

pub use routing::{Routing, with_routing};

use crate::MoeBackend;

/// A Burn backend with the ops of this crate.
///
/// It keeps the tensors of `B` and delegates every op to it, so results are those of `B`; a few ops that `B` may do
/// slowly take another path (see [`Routing`]). Put it outside `Autodiff`, so that a rerouted op brings its own backward:
///
/// ```
/// use burn::backend::{Autodiff, Flex};
/// use burn::tensor::{Device, Tensor};
/// use burn_ep_backend::EpBackend;
///
/// type B = EpBackend<Autodiff<Flex>>;
///
/// let device = Device::<B>::default();
/// let x = Tensor::<B, 1>::from_floats([1.0, 2.0], &device).require_grad();
/// let grads = (x.clone() * x.clone()).sum().backward();
/// assert_eq!(x.grad(&grads).unwrap().into_data().to_vec::<f32>().unwrap(), [2.0, 4.0]);
/// ```
pub struct EpBackend<B>(PhantomData<B>);

// Written by hand: derives would ask `B` for the same traits.
impl<B> Clone for EpBackend<B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B> Copy for EpBackend<B> {}

impl<B> Default for EpBackend<B> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<B> fmt::Debug for EpBackend<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("EpBackend")
    }
}

impl<B: MoeBackend> BackendTypes for EpBackend<B> {
    type Device = B::Device;
    type FloatTensorPrimitive = B::FloatTensorPrimitive;
    type FloatElem = B::FloatElem;
    type IntTensorPrimitive = B::IntTensorPrimitive;
    type IntElem = B::IntElem;
    type BoolTensorPrimitive = B::BoolTensorPrimitive;
    type BoolElem = B::BoolElem;
    type QuantizedTensorPrimitive = B::QuantizedTensorPrimitive;
}

impl<B: MoeBackend> Backend for EpBackend<B> {
    fn ad_enabled(device: &Device<Self>) -> bool {
        B::ad_enabled(device)
    }

    fn memory_persistent_allocations<Output: Send, Input: Send, Func: Fn(Input) -> Output + Send>(
        device: &Device<Self>,
        input: Input,
        func: Func,
    ) -> Output {
        B::memory_persistent_allocations(device, input, func)
    }

    fn memory_cleanup(device: &Device<Self>) {
        B::memory_cleanup(device);
    }

    fn name(device: &Device<Self>) -> String {
        format!("ep<{}>", B::name(device))
    }

    fn seed(device: &Device<Self>, seed: u64) {
        B::seed(device, seed);
    }

    fn sync(device: &Device<Self>) -> Result<(), ExecutionError> {
        crate::device::note_read();
        B::sync(device)
    }

    fn staging<'a, Iter>(data: Iter, device: &Device<Self>)
    where
        Iter: Iterator<Item = &'a mut TensorData>,
    {
        B::staging(data, device);
    }

    fn supports_dtype(device: &Device<Self>, dtype: DType) -> bool {
        B::supports_dtype(device, dtype)
    }

    fn dtype_usage(device: &Device<Self>, dtype: DType) -> DTypeUsageSet {
        B::dtype_usage(device, dtype)
    }

    fn device_count(type_id: u16) -> usize {
        B::device_count(type_id)
    }
}

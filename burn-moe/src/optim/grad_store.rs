//! Gradients of one optimizer step, by parameter.

use std::collections::HashMap;

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{DType, FloatDType, Tensor, TensorMetadata, TensorPrimitive};
use burn_backend::tensor::FloatTensor;
use burn_ep_backend::MoeBackend;

use super::ParamTable;

/// Gradients of one optimizer step, summed over segments and micro-batches.
///
/// `B` is the backend without gradient recording. A gradient keeps the dtype of its parameter while it is a single
/// contribution; from the second contribution on (a tied parameter, another micro-batch) the sum is kept in fp32, because
/// bf16 sums lose small terms.
#[derive(Debug, Clone)]
pub struct GradStore<B: Backend> {
    grads: HashMap<ParamId, FloatTensor<B>>,
}

impl<B: Backend> Default for GradStore<B> {
    fn default() -> Self {
        Self { grads: HashMap::new() }
    }
}

impl<B: Backend> GradStore<B> {
    /// Without gradients.
    pub fn new() -> Self {
        Self::default()
    }

    /// Parameters with a gradient.
    pub fn len(&self) -> usize {
        self.grads.len()
    }

    /// True when nothing was added yet.
    pub fn is_empty(&self) -> bool {
        self.grads.is_empty()
    }

    /// True when `id` has a gradient.
    pub fn contains(&self, id: ParamId) -> bool {
        self.grads.contains_key(&id)
    }

    /// Shape of the gradient of `id`.
    pub fn shape(&self, id: ParamId) -> Option<Vec<usize>> {
        self.grads.get(&id).map(|grad| grad.shape().as_slice().to_vec())
    }

    /// Device of the gradient of `id`.
    pub(crate) fn device(&self, id: ParamId) -> Option<B::Device> {
        self.grads.get(&id).map(|grad| B::float_device(grad))
    }

    /// Adds a contribution.
    pub fn add<const D: usize>(&mut self, id: ParamId, grad: Tensor<B, D>) {
        let grad = grad.into_primitive().tensor();
        let sum = match self.grads.remove(&id) {
            None => grad,
            Some(old) => B::float_add(widen::<B>(old), widen::<B>(grad)),
        };
        self.grads.insert(id, sum);
    }

    /// Moves the gradient of `id` into `other`, adding it to one that is there.
    pub(crate) fn transfer(&mut self, id: ParamId, other: &mut Self) {
        if let Some(grad) = self.grads.remove(&id) {
            // The store keeps primitives and forgets the rank, so any D serves.
            other.add::<1>(id, Tensor::from_primitive(TensorPrimitive::Float(grad)));
        }
    }

    /// Drops all gradients.
    pub fn clear(&mut self) {
        self.grads.clear();
    }

    /// The gradient of `id`; `D` must be the rank of the parameter.
    pub fn get<const D: usize>(&self, id: ParamId) -> Option<Tensor<B, D>> {
        self.grads
            .get(&id)
            .map(|grad| Tensor::from_primitive(TensorPrimitive::Float(grad.clone())))
    }

    /// Takes the gradient of `id`; `D` must be the rank of the parameter.
    pub fn remove<const D: usize>(&mut self, id: ParamId) -> Option<Tensor<B, D>> {
        self.grads
            .remove(&id)
            .map(|grad| Tensor::from_primitive(TensorPrimitive::Float(grad)))
    }

    /// Takes the gradient of `id` flattened, for code that does not know the rank.
    pub fn remove_flat(&mut self, id: ParamId) -> Option<(Tensor<B, 1>, Vec<usize>)> {
        let grad = self.grads.remove(&id)?;
        let shape = grad.shape();
        let flat = B::float_reshape(grad, [shape.num_elements()].into());
        Some((Tensor::from_primitive(TensorPrimitive::Float(flat)), shape.as_slice().to_vec()))
    }

    /// Sets the gradient of `id` from a flat tensor, e.g. after a reduction over ranks.
    pub fn insert_flat(&mut self, id: ParamId, flat: Tensor<B, 1>, shape: &[usize]) {
        let grad = B::float_reshape(flat.into_primitive().tensor(), shape.to_vec().into());
        self.grads.insert(id, grad);
    }

    /// Multiplies every gradient by `factor`.
    pub fn scale(&mut self, factor: f64) {
        for grad in self.grads.values_mut() {
            *grad = B::float_mul_scalar(grad.clone(), factor.into());
        }
    }

    /// Moves the gradients that a backward pass left for the parameters of `module` into the store; returns whose.
    ///
    /// A parameter that two places of the module hold (tied) gets the sum.
    pub fn collect<AB, M>(&mut self, module: &M, gradients: &mut AB::Gradients) -> Vec<ParamId>
    where
        AB: AutodiffBackend<InnerBackend = B>,
        M: Module<AB>,
    {
        let mut collector = Collector::<AB> {
            store: self,
            gradients,
            ids: Vec::new(),
        };
        module.visit(&mut collector);
        collector.ids
    }

    /// Sum of squares of the gradients of those `ids` that have one, `[n]` in the given order. Nothing is read from the device.
    /// None without any gradient.
    pub fn squares(&self, ids: impl IntoIterator<Item = ParamId>) -> Option<Tensor<B, 1>>
    where
        B: MoeBackend,
    {
        let grads: Vec<FloatTensor<B>> = ids.into_iter().filter_map(|id| self.grads.get(&id).cloned()).collect();
        (!grads.is_empty()).then(|| Tensor::from_primitive(TensorPrimitive::Float(B::squared_norms(grads))))
    }

    /// Sum of squares of the gradients of `ids`, one number each in the given order (0 without gradient), on any backend. One
    /// read from the device.
    pub fn squared_norms(&self, ids: impl IntoIterator<Item = ParamId>) -> Vec<f64> {
        let ids: Vec<ParamId> = ids.into_iter().collect();
        let sums: Vec<Tensor<B, 1>> = ids
            .iter()
            .filter_map(|id| self.grads.get(id))
            .map(|grad| {
                let grad = widen::<B>(grad.clone());
                let square = B::float_mul(grad.clone(), grad);
                Tensor::from_primitive(TensorPrimitive::Float(B::float_sum(square)))
            })
            .collect();
        if sums.is_empty() {
            return vec![0.0; ids.len()];
        }
        let values: Vec<f64> = Tensor::cat(sums, 0).into_data().iter::<f64>().collect();
        let mut values = values.into_iter();
        ids.iter()
            .map(|id| match self.contains(*id) {
                true => values.next().unwrap_or(f64::NAN),
                false => 0.0,
            })
            .collect()
    }

    /// The same gradients as Burn's container.
    pub fn into_gradients_params(self) -> GradientsParams {
        let mut params = GradientsParams::new();
        for (id, grad) in self.grads {
            // The container stores primitives and forgets the rank, so any D serves.
            params.register::<B, 1>(id, Tensor::from_primitive(TensorPrimitive::Float(grad)));
        }
        params
    }

    /// Takes the gradients of the parameters in `table` out of Burn's container.
    pub fn from_gradients_params(params: &mut GradientsParams, table: &ParamTable) -> Self {
        let mut store = Self::new();
        for info in table.entries() {
            if let Some(grad) = params.remove::<B, 1>(info.id) {
                store.grads.insert(info.id, grad.into_primitive().tensor());
            }
        }
        store
    }
}

/// fp32 unless it is that or wider already.
fn widen<B: Backend>(tensor: FloatTensor<B>) -> FloatTensor<B> {
    match tensor.dtype() {
        DType::F32 | DType::F64 => tensor,
        _ => B::float_cast(tensor, FloatDType::F32),
    }
}

struct Collector<'a, B: AutodiffBackend> {
    store: &'a mut GradStore<B::InnerBackend>,
    gradients: &'a mut B::Gradients,
    ids: Vec<ParamId>,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Collector<'_, B> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if let Some(grad) = param.val().grad_remove(self.gradients) {
            self.store.add(param.id, grad);
            self.ids.push(param.id);
        }
    }
}

#[cfg(test)]
mod tests {
    use burn_flex::Flex;

    use super::*;

    fn tensor(values: &[f32]) -> Tensor<Flex, 1> {
        Tensor::from_floats(values, &Default::default())
    }

    #[test]
    fn a_single_bf16_gradient_keeps_its_dtype_and_a_sum_is_fp32() {
        let id = ParamId::new();
        let mut store = GradStore::<Flex>::new();
        store.add(id, tensor(&[1.0, 256.0]).cast(FloatDType::BF16));
        assert_eq!(store.get::<1>(id).unwrap().dtype(), DType::BF16);
        // 256 + 1 is not a bf16 number: bf16 has 8 significant bits.
        store.add(id, tensor(&[2.0, 1.0]).cast(FloatDType::BF16));
        let sum = store.get::<1>(id).unwrap();
        assert_eq!(sum.dtype(), DType::F32);
        assert_eq!(sum.into_data().to_vec::<f32>().unwrap(), [3.0, 257.0]);
    }

    #[test]
    fn squared_norms_follow_the_given_order() {
        let (a, b, missing) = (ParamId::new(), ParamId::new(), ParamId::new());
        let mut store = GradStore::<Flex>::new();
        store.add(a, tensor(&[3.0, 4.0]));
        store.add(b, tensor(&[2.0]).reshape([1, 1]));
        assert_eq!(store.squared_norms([b, missing, a]), [4.0, 0.0, 25.0]);
        assert_eq!(store.squared_norms([a, b]), [25.0, 4.0]);
        assert_eq!(store.squared_norms([missing]), [0.0]);
    }

    #[test]
    fn flat_access_keeps_the_shape() {
        let id = ParamId::new();
        let mut store = GradStore::<Flex>::new();
        store.add(id, tensor(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).reshape([2, 3]));
        let (flat, shape) = store.remove_flat(id).unwrap();
        assert_eq!(shape, [2, 3]);
        store.insert_flat(id, flat * 2.0, &shape);
        let back = store.remove::<2>(id).unwrap();
        assert_eq!(back.dims(), [2, 3]);
        assert_eq!(back.into_data().to_vec::<f32>().unwrap(), [2.0, 4.0, 6.0, 8.0, 10.0, 12.0]);
        assert!(store.is_empty());
    }
}

//! Our optimizer and schedule in Burn's terms.

use burn::lr_scheduler::LrScheduler;
use burn::module::{AutodiffModule, ParamId};
use burn::optim::{GradientsParams, MultiGradientsParams, Optimizer};
use burn::record::Record;
use burn::tensor::backend::Backend;
use burn::tensor::{FloatDType, Shape, Tensor, TensorMetadata, TensorPrimitive};
use burn_backend::tensor::FloatTensor;

use super::super::{Schedule, TrainBackend};
use super::Failure;
use crate::optim::{AdamW, AdamWMoments, GradStore, ParamTable};

/// [`AdamW`] as Burn's `Optimizer`.
#[derive(Debug, Clone)]
pub struct LearnerOptimizer<B: TrainBackend> {
    optimizer: AdamW<B::InnerBackend>,
    table: ParamTable,
    device: B::Device,
    failure: Failure,
}

impl<B: TrainBackend> LearnerOptimizer<B> {
    /// The optimizer for the parameters in `table`; gradients that do not fit them end in `failure`.
    pub fn new(optimizer: AdamW<B::InnerBackend>, table: ParamTable, device: B::Device, failure: Failure) -> Self {
        Self {
            optimizer,
            table,
            device,
            failure,
        }
    }

    fn step_store<M: AutodiffModule<B>>(&mut self, lr: f64, module: M, mut grads: GradStore<B::InnerBackend>) -> M {
        match self.optimizer.check(&grads) {
            Ok(()) => self.optimizer.step_checked::<B, M>(module, &mut grads, lr, None),
            Err(error) => {
                self.failure.set(error);
                module
            }
        }
    }
}

/// State of one parameter, flattened because a record fixes the rank.
#[derive(Record, Clone)]
pub struct AdamWRecord<B: Backend> {
    id: u64,
    step: u64,
    m: Tensor<B, 1>,
    v: Tensor<B, 1>,
    master: Option<Tensor<B, 1>>,
}

impl<B: TrainBackend, M: AutodiffModule<B>> Optimizer<M, B> for LearnerOptimizer<B> {
    type Record = Vec<AdamWRecord<B>>;

    fn step(&mut self, lr: f64, module: M, mut grads: GradientsParams) -> M {
        let store = GradStore::from_gradients_params(&mut grads, &self.table);
        self.step_store(lr, module, store)
    }

    fn step_multi(&mut self, lr: f64, module: M, mut grads: MultiGradientsParams) -> M {
        let mut store = GradStore::new();
        for info in self.table.entries() {
            if let Some((grad, _)) = grads.remove::<B::InnerBackend, 1>(info.id) {
                store.add(info.id, grad.to_device(&self.device));
            }
        }
        self.step_store(lr, module, store)
    }

    fn to_record(&self) -> Self::Record {
        let flat = |tensor: &FloatTensor<B::InnerBackend>| {
            let length = tensor.shape().num_elements();
            let flat = <B::InnerBackend as burn::tensor::ops::FloatTensorOps<B::InnerBackend>>::float_reshape(
                tensor.clone(),
                Shape::new([length]),
            );
            Tensor::<B, 1>::from_inner(Tensor::from_primitive(TensorPrimitive::Float(flat)))
        };
        let record = |info: &crate::optim::ParamInfo| {
            let state = self.optimizer.state(info.id)?;
            Some(AdamWRecord {
                id: info.id.val(),
                step: state.step,
                m: flat(&state.m),
                v: flat(&state.v),
                master: state.master.as_ref().map(flat),
            })
        };
        self.table.entries().iter().filter_map(record).collect()
    }

    fn load_record(mut self, record: Self::Record) -> Self {
        for AdamWRecord { id, step, m, v, master } in record {
            let id = ParamId::from(id);
            let Some(info) = self.table.get(id) else { continue };
            let moments = self.optimizer.moment_dtype(info.dtype);
            // Burn's recorders store every float as fp32 or fp16, so the dtype has to be restored.
            let shaped = |flat: Tensor<B, 1>, dtype: FloatDType| {
                let flat = flat.inner().cast(dtype).into_primitive().tensor();
                <B::InnerBackend as burn::tensor::ops::FloatTensorOps<B::InnerBackend>>::float_reshape(
                    flat,
                    Shape::from(info.shape.clone()),
                )
            };
            let state = AdamWMoments {
                step,
                m: shaped(m, moments),
                v: shaped(v, moments),
                master: master.map(|master| shaped(master, FloatDType::F32)),
            };
            self.optimizer.set_state(id, state);
        }
        self
    }
}

/// [`Schedule`] as Burn's `LrScheduler`.
#[derive(Debug, Clone)]
pub struct LearnerSchedule {
    schedule: Schedule,
    steps: u64,
    done: u64,
}

impl LearnerSchedule {
    /// The schedule from its first step on, over `steps` steps.
    pub fn new(schedule: Schedule, steps: u64) -> Self {
        Self { schedule, steps, done: 0 }
    }
}

impl LrScheduler for LearnerSchedule {
    type Record<B: Backend> = u64;

    fn step(&mut self) -> f64 {
        let lr = self.schedule.lr(self.done, self.steps);
        self.done += 1;
        lr
    }

    fn to_record<B: Backend>(&self) -> Self::Record<B> {
        self.done
    }

    fn load_record<B: Backend>(mut self, record: Self::Record<B>) -> Self {
        self.done = record;
        self
    }
}

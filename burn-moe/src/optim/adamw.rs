//! AdamW (Loshchilov and Hutter 2019) with state per parameter.
//!
//! ```text
//! m <- b1 m + (1 - b1) g            v <- b2 v + (1 - b2) g^2
//! w <- w (1 - lr decay) - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
//! ```

use std::collections::HashMap;

use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{DType, FloatDType, Tensor, TensorData, TensorMetadata, TensorPrimitive};
use burn_backend::tensor::FloatTensor;
use burn_ep_backend::{AdamWDesc, AdamWPrim, Init, InitDesc, MoeBackend};
use serde::{Deserialize, Serialize};

use super::{GradStore, ParamGroup, ParamInfo, ParamTable, ResolvedGroups};
use crate::error::{Error, Result};

/// Dtype of the moments.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MomentDType {
    /// fp32.
    #[default]
    F32,
    /// That of the parameter, as in PyTorch: half the memory for bf16 parameters.
    Param,
}

/// Settings of [`AdamW`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdamWConfig {
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    pub weight_decay: f64,
    /// Keep an fp32 copy of parameters that are not fp32 and update that copy; without it, steps smaller than half a unit
    /// in the last place of a bf16 weight are lost.
    pub master_weights: bool,
    pub moments: MomentDType,
    /// Exceptions by name pattern.
    pub groups: Vec<ParamGroup>,
}

impl Default for AdamWConfig {
    fn default() -> Self {
        Self {
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.01,
            master_weights: true,
            moments: MomentDType::default(),
            groups: Vec::new(),
        }
    }
}

impl AdamWConfig {
    /// Checks every number (the groups are checked against the model by [`ResolvedGroups::new`]).
    pub fn validate(&self) -> Result<()> {
        for (field, beta) in [("optimizer.beta1", self.beta1), ("optimizer.beta2", self.beta2)] {
            if !(0.0..1.0).contains(&beta) {
                return Err(Error::config(field, beta, "a number from 0 to below 1"));
            }
        }
        if !(self.eps.is_finite() && self.eps > 0.0) {
            return Err(Error::config("optimizer.eps", self.eps, "a positive number"));
        }
        if !(self.weight_decay.is_finite() && self.weight_decay >= 0.0) {
            return Err(Error::config("optimizer.weight_decay", self.weight_decay, "a number of at least 0"));
        }
        Ok(())
    }
}

/// Optimizer state of one parameter.
#[derive(Debug, Clone)]
pub struct AdamWMoments<B: MoeBackend> {
    /// Updates so far.
    pub step: u64,
    /// First moment, shape of the parameter.
    pub m: FloatTensor<B>,
    /// Second moment.
    pub v: FloatTensor<B>,
    /// fp32 copy of the parameter.
    pub master: Option<FloatTensor<B>>,
}

/// The optimizer. `B` is the backend without gradient recording.
#[derive(Debug, Clone)]
pub struct AdamW<B: MoeBackend> {
    config: AdamWConfig,
    groups: ResolvedGroups,
    table: ParamTable,
    state: HashMap<ParamId, AdamWMoments<B>>,
    /// Parameters of the last update.
    updated: Vec<ParamId>,
}

impl<B: MoeBackend> AdamW<B> {
    /// An optimizer for the parameters in `table`.
    pub fn new(config: AdamWConfig, table: ParamTable) -> Result<Self> {
        config.validate()?;
        let groups = ResolvedGroups::new(&config.groups, &table, config.weight_decay)?;
        Ok(Self {
            config,
            groups,
            table,
            state: HashMap::new(),
            updated: Vec::new(),
        })
    }

    /// The settings.
    pub fn config(&self) -> &AdamWConfig {
        &self.config
    }

    /// Settings per parameter.
    pub fn groups(&self) -> &ResolvedGroups {
        &self.groups
    }

    /// State of a parameter; None before its first update.
    pub fn state(&self, id: ParamId) -> Option<&AdamWMoments<B>> {
        self.state.get(&id)
    }

    /// Checks that a loaded state is one that this optimizer could have made; else says what was found and expected.
    pub(crate) fn check_state(&self, info: &ParamInfo, state: &AdamWMoments<B>) -> Result<(), (String, String)> {
        let moments = DType::from(self.moment_dtype(info.dtype));
        let found = (state.m.dtype(), state.v.dtype(), state.master.as_ref().map(TensorMetadata::dtype));
        let expected = (moments, moments, self.wants_master(info.dtype).then_some(DType::F32));
        if found == expected {
            return Ok(());
        }
        let show = |(m, v, master): (DType, DType, Option<DType>)| format!("moments in {m:?} and {v:?}, master copy in {master:?}");
        Err((show(found), format!("{} (settings `moments` and `master_weights`)", show(expected))))
    }

    /// Dtype of the moments of a parameter of dtype `param`.
    pub(crate) fn moment_dtype(&self, param: DType) -> FloatDType {
        match self.config.moments {
            MomentDType::F32 => FloatDType::F32,
            MomentDType::Param => param.into(),
        }
    }

    fn wants_master(&self, dtype: DType) -> bool {
        self.config.master_weights && !matches!(dtype, DType::F32 | DType::F64)
    }

    /// Replaces the state of a parameter (resuming).
    pub fn set_state(&mut self, id: ParamId, state: AdamWMoments<B>) {
        self.state.insert(id, state);
    }

    /// Updates every parameter that has a gradient and takes the gradients out of `grads`. `grad_factor` multiplies each
    /// gradient first (clipping). The model is moved, so that buffers without another owner are updated in place.
    pub fn step<AB, M>(&mut self, model: M, grads: &mut GradStore<B>, lr: f64, grad_factor: f64) -> Result<M>
    where
        AB: AutodiffBackend<InnerBackend = B>,
        M: Module<AB>,
    {
        self.check(grads)?;
        let device = self.table.entries().iter().find_map(|info| grads.device(info.id));
        let scale = device
            .filter(|_| grad_factor != 1.0)
            .map(|device| Tensor::from_data(TensorData::new(vec![grad_factor as f32], [1]), (&device, DType::F32)));
        Ok(self.step_checked(model, grads, lr, scale))
    }

    /// [`AdamW::step`] after [`AdamW::check`], with the factor `[1]` on the device. A factor that is not finite leaves all
    /// values as they are; [`AdamW::undo_step_count`] then takes the step back altogether.
    pub(crate) fn step_checked<AB, M>(&mut self, model: M, grads: &mut GradStore<B>, lr: f64, grad_scale: Option<Tensor<B, 1>>) -> M
    where
        AB: AutodiffBackend<InnerBackend = B>,
        M: Module<AB>,
    {
        self.updated.clear();
        let mut update = Update::<AB> {
            optimizer: self,
            grads,
            lr,
            grad_scale: grad_scale.map(|scale| scale.into_primitive().tensor()),
            tied: HashMap::new(),
        };
        model.map(&mut update)
    }

    /// Counts the last update as not done, which is what it was if its factor was not finite.
    pub(crate) fn undo_step_count(&mut self) {
        for id in self.updated.drain(..) {
            if let Some(state) = self.state.get_mut(&id) {
                state.step = state.step.saturating_sub(1);
            }
        }
    }

    /// What [`AdamW::step`] requires of the gradients, without consuming anything.
    pub fn check(&self, grads: &GradStore<B>) -> Result<()> {
        for info in self.table.entries() {
            let Some(shape) = grads.shape(info.id) else { continue };
            if shape != info.shape {
                return Err(Error::Mismatch(format!(
                    "gradient of `{}`: found shape {shape:?}, expected {:?}; build the optimizer from the model it updates",
                    info.path, info.shape
                )));
            }
        }
        Ok(())
    }

    fn update(
        &mut self,
        id: ParamId,
        param: FloatTensor<B>,
        grad: FloatTensor<B>,
        lr: f64,
        grad_scale: Option<FloatTensor<B>>,
    ) -> FloatTensor<B> {
        let settings = self.groups.get(id);
        let AdamWMoments { step, m, v, master } = self.state.remove(&id).unwrap_or_else(|| self.fresh(&param));
        let desc = AdamWDesc {
            lr: lr * settings.lr_scale,
            beta1: self.config.beta1 as f32,
            beta2: self.config.beta2 as f32,
            eps: self.config.eps as f32,
            weight_decay: settings.weight_decay as f32,
            step: step + 1,
        };
        let AdamWPrim { param, m, v, master } = B::adamw_step(AdamWPrim { param, m, v, master }, grad, grad_scale, &desc);
        self.updated.push(id);
        self.state.insert(
            id,
            AdamWMoments {
                step: step + 1,
                m,
                v,
                master,
            },
        );
        param
    }

    fn fresh(&self, param: &FloatTensor<B>) -> AdamWMoments<B> {
        let (device, shape) = (B::float_device(param), param.shape());
        let zero = InitDesc {
            init: Init::Zeros,
            key: 0,
            offset: 0,
            row_len: 1,
        };
        let zeros = || B::resident_init(&zero, shape.as_slice(), self.moment_dtype(param.dtype()), &device);
        AdamWMoments {
            step: 0,
            m: zeros(),
            v: zeros(),
            master: self
                .wants_master(param.dtype())
                .then(|| B::memory_persistent_allocations(&device, param.clone(), |param| B::float_cast(param, FloatDType::F32))),
        }
    }
}

struct Update<'a, AB: AutodiffBackend<InnerBackend: MoeBackend>> {
    optimizer: &'a mut AdamW<AB::InnerBackend>,
    grads: &'a mut GradStore<AB::InnerBackend>,
    lr: f64,
    grad_scale: Option<FloatTensor<AB::InnerBackend>>,
    /// New values of parameters that appear again, so that tied weights stay one tensor.
    tied: HashMap<ParamId, FloatTensor<AB>>,
}

impl<AB: AutodiffBackend<InnerBackend: MoeBackend>> ModuleMapper<AB> for Update<'_, AB> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<AB, D>>) -> Param<Tensor<AB, D>> {
        let id = param.id;
        if let Some(value) = self.tied.get(&id) {
            let (id, _, mapper) = param.consume();
            return Param::from_mapped_value(id, Tensor::from_primitive(TensorPrimitive::Float(value.clone())), mapper);
        }
        let Some(grad) = self.grads.remove::<D>(id) else {
            return param;
        };
        let (id, value, mapper) = param.consume();
        // The parameter must own its buffer alone for the update to happen in place.
        let value = value.inner().into_primitive().tensor();
        let grad = grad.into_primitive().tensor();
        let value = self.optimizer.update(id, value, grad, self.lr, self.grad_scale.clone());
        let value = Tensor::<AB, D>::from_inner(Tensor::from_primitive(TensorPrimitive::Float(value))).require_grad();
        if self.optimizer.table.get(id).is_some_and(|info| !info.aliases.is_empty()) {
            self.tied.insert(id, value.clone().into_primitive().tensor());
        }
        Param::from_mapped_value(id, value, mapper)
    }
}

//! AdamW (Loshchilov and Hutter 2019) with state per parameter.
//!
//! ```text
//! m <- b1 m + (1 - b1) g            v <- b2 v + (1 - b2) g^2
//! w <- w (1 - lr decay) - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
//! ```

use std::collections::HashMap;

use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{DType, FloatDType, IntDType, Shape, Tensor, TensorData, TensorMetadata, TensorPrimitive};
use burn_backend::tensor::FloatTensor;
use burn_ep_backend::comm::EpGroup;
use burn_ep_backend::reference::adamw8;
use burn_ep_backend::{AdamW8Prim, AdamWDesc, AdamWPrim, Block8Prim, Init, InitDesc, MoeBackend, stream_key};
use serde::{Deserialize, Serialize};

use super::{GradStore, ParamGroup, ParamInfo, ParamTable, ResolvedGroups, Shard, Shards};
use super::{global_norm, reduce_gradients, reduce_to_shards, sharded_norm};
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
    /// 8-bit codes with an fp32 scale for every 256 elements: a quarter of the memory of fp32. Rounded at random.
    Block8,
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
    /// Round what is kept in bf16 (moments with [`MomentDType::Param`], parameters without a master copy) up or down at random so
    /// that the mean stays: updates too small for bf16 then add up over the steps instead of being lost.
    pub stochastic_rounding: bool,
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
            stochastic_rounding: false,
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
    /// First moment, shape of the parameter; with [`Shards`], this rank's share of it, flat.
    pub m: FloatTensor<B>,
    /// Second moment.
    pub v: FloatTensor<B>,
    /// fp32 copy of the parameter.
    pub master: Option<FloatTensor<B>>,
}

/// State of one parameter with [`MomentDType::Block8`].
#[derive(Debug, Clone)]
struct Moments8<B: MoeBackend> {
    step: u64,
    m: Block8Prim<B>,
    v: Block8Prim<B>,
    master: Option<FloatTensor<B>>,
    shape: Shape,
}

/// The optimizer. `B` is the backend without gradient recording.
#[derive(Debug, Clone)]
pub struct AdamW<B: MoeBackend> {
    config: AdamWConfig,
    groups: ResolvedGroups,
    table: ParamTable,
    shards: Option<Shards>,
    state: HashMap<ParamId, AdamWMoments<B>>,
    state8: HashMap<ParamId, Moments8<B>>,
    /// Parameters of the last update.
    updated: Vec<ParamId>,
}

impl<B: MoeBackend> AdamW<B> {
    /// An optimizer for the parameters in `table`.
    pub fn new(config: AdamWConfig, table: ParamTable) -> Result<Self> {
        config.validate()?;
        let groups = ResolvedGroups::new(&config.groups, &table, config.weight_decay)?;
        // 8-bit moments are rounded at random in any case.
        let kept_in_bf16 = !config.master_weights || config.moments == MomentDType::Param;
        if config.stochastic_rounding && !(kept_in_bf16 && table.trainable().any(|info| info.dtype == DType::BF16)) {
            let expected = "bf16 parameters, with moments `param` or without master weights: nothing else is rounded";
            return Err(Error::config("optimizer.stochastic_rounding", true, expected));
        }
        Ok(Self {
            config,
            groups,
            table,
            shards: None,
            state: HashMap::new(),
            state8: HashMap::new(),
            updated: Vec::new(),
        })
    }

    /// Deals the state over ranks: [`AdamW::step`] then takes the gradients that
    /// [`reduce_to_shards`](super::reduce_to_shards) leaves, and every rank must call it. Before the first step.
    #[must_use]
    pub fn with_shards(mut self, shards: Option<Shards>) -> Self {
        self.shards = shards;
        self
    }

    /// How the state is dealt over ranks; None when each rank keeps all of its own.
    pub fn shards(&self) -> Option<&Shards> {
        self.shards.as_ref()
    }

    /// Sums the gradients over ranks, into this optimizer's shares if it has any; see [`reduce_gradients`] and [`reduce_to_shards`].
    pub(crate) fn reduce(&self, grads: &mut GradStore<B>, table: &ParamTable, ep: Option<&EpGroup>, device: &B::Device) -> Result<()> {
        match (&self.shards, ep) {
            (Some(shards), Some(ep)) => reduce_to_shards(grads, table, ep, shards, device),
            _ => reduce_gradients(grads, table, ep, device),
        }
    }

    /// Norm of the gradients that [`AdamW::reduce`] leaves, the same on every rank.
    pub(crate) fn norm(&self, grads: &GradStore<B>, table: &ParamTable, ep: Option<&EpGroup>) -> Result<f64> {
        match &self.shards {
            Some(shards) => sharded_norm(grads, table, shards),
            None => global_norm(grads, table, ep),
        }
    }

    pub(crate) fn shard(&self, info: &ParamInfo) -> Option<Shard> {
        self.shards.as_ref().and_then(|shards| shards.get(info))
    }

    /// The settings.
    pub fn config(&self) -> &AdamWConfig {
        &self.config
    }

    /// Settings per parameter.
    pub fn groups(&self) -> &ResolvedGroups {
        &self.groups
    }

    /// State of a parameter; None before its first update. 8-bit moments come as fp32.
    pub fn state(&self, id: ParamId) -> Option<AdamWMoments<B>> {
        if let Some(state) = self.state8.get(&id) {
            return Some(AdamWMoments {
                step: state.step,
                m: adamw8::decode::<B>(state.m.clone(), true, state.shape.clone()),
                v: adamw8::decode::<B>(state.v.clone(), false, state.shape.clone()),
                master: state.master.clone(),
            });
        }
        self.state.get(&id).cloned()
    }

    /// Updates of a parameter so far; None before the first.
    pub(crate) fn updates(&self, id: ParamId) -> Option<u64> {
        let eight = self.state8.get(&id).map(|state| state.step);
        eight.or_else(|| self.state.get(&id).map(|state| state.step))
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

    /// Dtype of the moments of a parameter of dtype `param` as [`AdamW::state`] gives them.
    pub(crate) fn moment_dtype(&self, param: DType) -> FloatDType {
        match self.config.moments {
            MomentDType::F32 | MomentDType::Block8 => FloatDType::F32,
            MomentDType::Param => param.into(),
        }
    }

    /// What [`AdamW::state`] holds of a parameter once it has been updated: name in a checkpoint and dtype.
    pub(crate) fn state_dtypes(&self, info: &ParamInfo) -> impl Iterator<Item = (&'static str, DType)> {
        let moments = DType::from(self.moment_dtype(info.dtype));
        let master = self.wants_master(info.dtype).then_some(("master", DType::F32));
        [("exp_avg", moments), ("exp_avg_sq", moments)].into_iter().chain(master)
    }

    fn wants_master(&self, dtype: DType) -> bool {
        self.config.master_weights && !matches!(dtype, DType::F32 | DType::F64)
    }

    /// Replaces the state of a parameter (resuming).
    pub fn set_state(&mut self, id: ParamId, state: AdamWMoments<B>) {
        if self.config.moments == MomentDType::Block8 {
            self.state8.insert(id, self.in_eight_bits(state));
        } else {
            self.state.insert(id, state);
        }
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
        self.begin_step();
        self.step_segment(model, grads, lr, grad_scale)
    }

    /// Starts a step of several [`AdamW::step_segment`].
    pub(crate) fn begin_step(&mut self) {
        self.updated.clear();
    }

    /// Updates the parameters with a gradient in `grads`, as [`AdamW::step_checked`] does, as a part of a step.
    pub(crate) fn step_segment<AB, M>(&mut self, model: M, grads: &mut GradStore<B>, lr: f64, grad_scale: Option<Tensor<B, 1>>) -> M
    where
        AB: AutodiffBackend<InnerBackend = B>,
        M: Module<AB>,
    {
        let mut update = Update::<AB> {
            optimizer: self,
            grads,
            lr,
            grad_scale: grad_scale.map(|scale| scale.into_primitive().tensor()),
            tied: HashMap::new(),
        };
        model.map(&mut update)
    }

    /// Parameters updated in this step so far.
    pub(crate) fn updated(&self) -> usize {
        self.updated.len()
    }

    /// Counts the last step as not done for the parameters from the `first` updated one on, which is what it was for them if their
    /// factor was not finite.
    pub(crate) fn undo_step_count(&mut self, first: usize) {
        for id in self.updated.drain(first..) {
            let step = match (self.state.get_mut(&id), self.state8.get_mut(&id)) {
                (Some(state), _) => &mut state.step,
                (None, Some(state)) => &mut state.step,
                (None, None) => continue,
            };
            *step = step.saturating_sub(1);
        }
    }

    /// What [`AdamW::step`] requires of the gradients, without consuming anything.
    pub fn check(&self, grads: &GradStore<B>) -> Result<()> {
        for info in self.table.entries() {
            let Some(shape) = grads.shape(info.id) else { continue };
            let expected = self.shard(info).map_or_else(|| info.shape.clone(), |shard| vec![shard.share]);
            if shape != expected {
                return Err(Error::Mismatch(format!(
                    "gradient of `{}`: found shape {shape:?}, expected {expected:?}; build the optimizer from the model it updates",
                    info.path
                )));
            }
        }
        Ok(())
    }

    /// Updates a parameter: all of it, or this rank's share, which the other ranks then get.
    fn update(
        &mut self,
        id: ParamId,
        param: FloatTensor<B>,
        grad: FloatTensor<B>,
        lr: f64,
        grad_scale: Option<FloatTensor<B>>,
    ) -> FloatTensor<B> {
        let Some(shard) = self.table.get(id).and_then(|info| self.shard(info)) else {
            return self.update_own(id, param, grad, lr, grad_scale);
        };
        let shape = param.shape();
        let share = shard.take::<B>(param);
        let share = self.update_own(id, share, grad, lr, grad_scale);
        shard.join::<B>(share, shape.as_slice())
    }

    fn update_own(
        &mut self,
        id: ParamId,
        param: FloatTensor<B>,
        grad: FloatTensor<B>,
        lr: f64,
        grad_scale: Option<FloatTensor<B>>,
    ) -> FloatTensor<B> {
        let eight = self.config.moments == MomentDType::Block8;
        let step = self.updates(id).unwrap_or(0);
        let settings = self.groups.get(id);
        let desc = AdamWDesc {
            lr: lr * settings.lr_scale,
            beta1: self.config.beta1 as f32,
            beta2: self.config.beta2 as f32,
            eps: self.config.eps as f32,
            weight_decay: settings.weight_decay as f32,
            step: step + 1,
            stochastic_rounding: self.config.stochastic_rounding.then(|| self.rounding_seed(id, step)),
        };
        self.updated.push(id);
        if eight {
            let state = self.state8.remove(&id);
            let Moments8 { m, v, master, shape, .. } = state.unwrap_or_else(|| self.fresh8(&param));
            let AdamW8Prim { param, m, v, master } = B::adamw8_step(AdamW8Prim { param, m, v, master }, grad, grad_scale, &desc);
            let state = Moments8 {
                step: step + 1,
                m,
                v,
                master,
                shape,
            };
            self.state8.insert(id, state);
            return param;
        }
        let AdamWMoments { m, v, master, .. } = self.state.remove(&id).unwrap_or_else(|| self.fresh(&param));
        let AdamWPrim { param, m, v, master } = B::adamw_step(AdamWPrim { param, m, v, master }, grad, grad_scale, &desc);
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

    /// fp32 moments as codes, in memory of their own.
    fn in_eight_bits(&self, state: AdamWMoments<B>) -> Moments8<B> {
        let shape = state.m.shape();
        let device = B::float_device(&state.m);
        let encode = |(values, signed)| adamw8::encode::<B>(values, signed, None);
        Moments8 {
            step: state.step,
            m: B::memory_persistent_allocations(&device, (state.m, true), encode),
            v: B::memory_persistent_allocations(&device, (state.v, false), encode),
            master: state.master,
            shape,
        }
    }

    /// Another one for every parameter and step, the same in every run.
    fn rounding_seed(&self, id: ParamId, step: u64) -> u32 {
        let path = self.table.get(id).map_or("", |info| info.path.as_str());
        stream_key(step, path) as u32
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
            master: self.fresh_master(param),
        }
    }

    fn fresh8(&self, param: &FloatTensor<B>) -> Moments8<B> {
        let (device, shape) = (B::float_device(param), param.shape());
        let n = shape.num_elements();
        let zeros = || {
            B::memory_persistent_allocations(&device, (), |()| Block8Prim {
                codes: B::int_zeros(Shape::new([n]), &device, IntDType::U8),
                scales: B::float_zeros(Shape::new([n.div_ceil(adamw8::BLOCK)]), &device, FloatDType::F32),
            })
        };
        Moments8 {
            step: 0,
            m: zeros(),
            v: zeros(),
            master: self.fresh_master(param),
            shape,
        }
    }

    fn fresh_master(&self, param: &FloatTensor<B>) -> Option<FloatTensor<B>> {
        let device = B::float_device(param);
        let copy = |param| B::memory_persistent_allocations(&device, param, |param| B::float_cast(param, FloatDType::F32));
        self.wants_master(param.dtype()).then(|| copy(param.clone()))
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

//! AdamW in one pass over memory, in place where a buffer has no other owner.

use std::borrow::Cow;

use burn_backend::DType;
use burn_flex::{Flex, FlexTensor};
use burn_std::{bf16, f16};
use num_traits::One;
use rayon::prelude::*;

use super::numeric::{Real, dense, wide, wide_range, with_real};
use crate::backend::AdamWPrim;
use crate::desc::AdamWDesc;
use crate::ops::{AdamWFactors, Rounded, stochastic_bf16};

/// Elements per block: the widened copies of one block stay in the second-level cache.
const BLOCK: usize = 4096;
/// Blocks per task at least.
const MIN_BLOCKS: usize = 4;

pub(crate) fn adamw_step(state: AdamWPrim<Flex>, grad: FlexTensor, grad_scale: Option<FlexTensor>, desc: &AdamWDesc) -> AdamWPrim<Flex> {
    with_real!(state.param.dtype(), A => {
        let scale = grad_scale.map_or(A::one(), |scale| wide::<A>(&dense(scale))[0]);
        if !scale.as_f64().is_finite() {
            return state;
        }
        step::<A>(state, &dense(grad), &Factors::new(&desc.factors(), scale), desc.stochastic_rounding)
    })
}

/// [`AdamWFactors`] in the arithmetic type.
struct Factors<A> {
    grad_scale: A,
    decay: A,
    take_m: A,
    keep_v: A,
    take_v: A,
    v_root: A,
    eps: A,
    step_size: A,
}

impl<A: Real> Factors<A> {
    fn new(factors: &AdamWFactors, grad_scale: A) -> Self {
        Self {
            grad_scale,
            decay: A::of(factors.decay),
            take_m: A::of(factors.take_m),
            keep_v: A::of(factors.keep_v),
            take_v: A::of(factors.take_v),
            v_root: A::of(factors.v_root),
            eps: A::of(factors.eps),
            step_size: A::of(factors.step_size),
        }
    }
}

fn step<A: Real>(state: AdamWPrim<Flex>, grad: &FlexTensor, factors: &Factors<A>, seed: Option<u32>) -> AdamWPrim<Flex> {
    let (mut param, mut m, mut v) = (dense(state.param), dense(state.m), dense(state.v));
    let mut master = state.master.map(dense);
    let params = blocks(&mut param);
    let masters: Vec<Option<Elements<'_>>> = match &mut master {
        Some(master) => blocks(master).into_iter().map(Some).collect(),
        None => params.iter().map(|_| None).collect(),
    };
    params
        .into_par_iter()
        .zip(masters)
        .zip(blocks(&mut m))
        .zip(blocks(&mut v))
        .enumerate()
        .with_min_len(MIN_BLOCKS)
        .for_each(|(index, (((mut param, mut master), mut m), mut v))| {
            let (mut m_wide, mut v_wide) = (m.load::<A>(), v.load::<A>());
            let mut p_wide = master.as_ref().unwrap_or(&param).load::<A>();
            let first = index * BLOCK;
            let grad = wide_range::<A>(grad, first..first + p_wide.len());
            update(&mut p_wide, &mut m_wide, &mut v_wide, &grad, factors);
            let random = |tensor| seed.map(|seed| Random { seed, tensor, first });
            m.store(&m_wide, random(Rounded::M));
            v.store(&v_wide, random(Rounded::V));
            match &mut master {
                Some(master) => {
                    param.store(&p_wide, None);
                    master.store(&p_wide, None);
                }
                None => param.store(&p_wide, random(Rounded::Param)),
            }
        });
    AdamWPrim { param, m, v, master }
}

fn update<A: Real>(param: &mut [A], m: &mut [A], v: &mut [A], grad: &[A], factors: &Factors<A>) {
    for (((p, m), v), &g) in param.iter_mut().zip(m).zip(v).zip(grad) {
        let g = g * factors.grad_scale;
        *m += (g - *m) * factors.take_m;
        *v = *v * factors.keep_v + factors.take_v * g * g;
        let denominator = v.sqrt() / factors.v_root + factors.eps;
        *p = *p * factors.decay - factors.step_size * (*m / denominator);
    }
}

/// Stochastic rounding of the elements from `first` on.
struct Random {
    seed: u32,
    tensor: Rounded,
    first: usize,
}

/// Writable elements of a dense tensor.
enum Elements<'a> {
    F64(&'a mut [f64]),
    F32(&'a mut [f32]),
    BF16(&'a mut [bf16]),
    F16(&'a mut [f16]),
}

/// The tensor in blocks; copies the buffer first if it is shared.
fn blocks(tensor: &mut FlexTensor) -> Vec<Elements<'_>> {
    match tensor.dtype() {
        DType::F64 => tensor.storage_mut().chunks_mut(BLOCK).map(Elements::F64).collect(),
        DType::F32 => tensor.storage_mut().chunks_mut(BLOCK).map(Elements::F32).collect(),
        DType::BF16 => tensor.storage_mut().chunks_mut(BLOCK).map(Elements::BF16).collect(),
        DType::F16 => tensor.storage_mut().chunks_mut(BLOCK).map(Elements::F16).collect(),
        other => panic!("{other:?} is not a float dtype of the Flex backend"),
    }
}

impl Elements<'_> {
    fn load<A: Real>(&self) -> Vec<A> {
        match self {
            Self::F64(values) => A::from_f64s(values).into_owned(),
            Self::F32(values) => A::from_f32s(Cow::Borrowed(values)).into_owned(),
            Self::BF16(values) => A::from_f32s(values.iter().map(|v| v.to_f32()).collect()).into_owned(),
            Self::F16(values) => A::from_f32s(values.iter().map(|v| v.to_f32()).collect()).into_owned(),
        }
    }

    fn store<A: Real>(&mut self, from: &[A], random: Option<Random>) {
        match (self, random) {
            (Self::BF16(to), Some(Random { seed, tensor, first })) => {
                let rounded = from
                    .iter()
                    .enumerate()
                    .map(|(i, v)| stochastic_bf16(v.as_f32(), seed, tensor, first + i));
                to.iter_mut().zip(rounded).for_each(|(to, v)| *to = v);
            }
            (Self::F64(to), _) => to.iter_mut().zip(from).for_each(|(to, v)| *to = v.as_f64()),
            (Self::F32(to), _) => to.iter_mut().zip(from).for_each(|(to, v)| *to = v.as_f32()),
            (Self::BF16(to), _) => to.iter_mut().zip(from).for_each(|(to, v)| *to = bf16::from_f32(v.as_f32())),
            (Self::F16(to), _) => to.iter_mut().zip(from).for_each(|(to, v)| *to = f16::from_f32(v.as_f32())),
        }
    }
}

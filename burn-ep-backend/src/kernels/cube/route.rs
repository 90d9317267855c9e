//! Router and its gradient: one plane per token. Formulas as in `reference/route.rs`.

use burn_backend::{DType, TensorMetadata};
use cubecl::prelude::*;

use super::super::raw::{CudaTensor, dense, empty};
use super::launch::{PLANE, addresses, dense_f32, matrix_dims};
use crate::desc::{GroupScore, RouterDesc, RouterScore};

/// Keeps the sum of sigmoid scores away from zero (DeepSeek-V3).
const SIGMOID_EPS: f32 = 1e-20;
/// Lowest score of an expert that may be chosen; NaN counts as this.
const LOWEST: f32 = -1e38;
/// Score of an expert that is taken or masked.
const TAKEN: f32 = -3e38;
/// Scores of all experts lie in shared memory.
const MAX_EXPERTS: usize = 4096;

/// Where the ids come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Choice {
    Scores { biased: bool },
    Balanced,
    Replay,
}

/// Settings of a kernel that are fixed when it is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Fixed {
    experts: usize,
    top_k: usize,
    score: RouterScore,
    renormalize: bool,
    groups: usize,
    top_groups: usize,
    group_score: GroupScore,
}

impl Fixed {
    fn new(desc: &RouterDesc) -> Self {
        Self {
            experts: desc.num_experts,
            top_k: desc.top_k,
            score: desc.score,
            renormalize: desc.renormalize,
            groups: desc.groups,
            top_groups: desc.top_groups,
            group_score: desc.group_score,
        }
    }

    /// Softmax over the chosen logits only? Renormalised softmax is the same function: the full denominator cancels.
    fn over_chosen(self) -> bool {
        self.score == RouterScore::TopKSoftmax || (self.score == RouterScore::Softmax && self.renormalize)
    }

    /// Softmax over all logits?
    fn over_all(self) -> bool {
        self.score == RouterScore::Softmax && !self.renormalize
    }
}

#[cube]
fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + f32::exp(-x))
}

/// Index of the largest of `n` shared values, the lowest one of equals; it becomes [`TAKEN`]. Same in every unit.
#[cube]
fn take_best(values: &mut SharedMemory<f32>, #[comptime] n: usize) -> u32 {
    let mut best = f32::new(TAKEN);
    let mut at = u32::cast_from(n);
    let mut i = UNIT_POS;
    while i < n as u32 {
        let value = values[i as usize];
        if value > best {
            best = value;
            at = i;
        }
        i += PLANE_DIM;
    }
    let highest = plane_max(best);
    let mut candidate = u32::cast_from(n);
    if best == highest {
        candidate = at;
    }
    let winner = plane_min(candidate);
    if UNIT_POS == 0 {
        values[winner as usize] = f32::new(TAKEN);
    }
    sync_cube();
    winner
}

/// Maximum of the row's logits and sum of `exp(z - max)`.
#[derive(CubeType)]
struct SoftmaxTerms {
    max: f32,
    sum: f32,
}

#[cube]
fn row_terms<T: Float>(logits: &Tensor<T>, base: usize, #[comptime] experts: usize) -> SoftmaxTerms {
    let mut peak = f32::cast_from(logits[base]);
    let mut e = UNIT_POS as usize;
    while e < experts {
        peak = max(peak, f32::cast_from(logits[base + e]));
        e += PLANE_DIM as usize;
    }
    let peak = plane_max(peak);
    let mut sum = f32::new(0.0);
    let mut e = UNIT_POS as usize;
    while e < experts {
        sum += f32::exp(f32::cast_from(logits[base + e]) - peak);
        e += PLANE_DIM as usize;
    }
    SoftmaxTerms {
        max: peak,
        sum: plane_sum(sum),
    }
}

/// The same over `top_k` shared values; every unit computes it in the same order.
#[cube]
fn chosen_terms(values: &SharedMemory<f32>, #[comptime] top_k: usize) -> SoftmaxTerms {
    let mut peak = values[0];
    for j in 1..top_k {
        peak = max(peak, values[j]);
    }
    let mut sum = f32::new(0.0);
    for j in 0..top_k {
        sum += f32::exp(values[j] - peak);
    }
    SoftmaxTerms { max: peak, sum }
}

/// What turns the values of the chosen experts into shares: `exp(value - max) / sum` for a softmax, `value / sum` else.
#[cube]
fn denominator<T: Float>(logits: &Tensor<T>, base: usize, values: &SharedMemory<f32>, #[comptime] fixed: Fixed) -> SoftmaxTerms {
    let mut peak = f32::new(0.0);
    let mut sum = f32::new(1.0);
    if comptime!(fixed.over_chosen()) {
        let terms = chosen_terms(&values, fixed.top_k);
        peak = terms.max;
        sum = terms.sum;
    } else if comptime!(fixed.over_all()) {
        let terms = row_terms::<T>(logits, base, fixed.experts);
        peak = terms.max;
        sum = terms.sum;
    } else if comptime!(fixed.renormalize) {
        sum = f32::new(0.0);
        for j in 0..fixed.top_k {
            sum += values[j];
        }
        sum += SIGMOID_EPS;
    }
    SoftmaxTerms { max: peak, sum }
}

/// Masks the experts outside of the `top_groups` groups with the best score, or the largest sum of their two best scores.
#[cube]
fn mask_groups(choice: &mut SharedMemory<f32>, #[comptime] fixed: Fixed) {
    let size = comptime!(fixed.experts / fixed.groups);
    let mut best = SharedMemory::<f32>::new(fixed.groups);
    let mut kept = SharedMemory::<u32>::new(fixed.groups);
    let mut g = UNIT_POS as usize;
    while g < fixed.groups {
        let mut first = f32::new(TAKEN);
        let mut second = f32::new(TAKEN);
        for i in 0..size {
            let value = choice[g * size + i];
            if value > first {
                second = first;
                first = value;
            } else if value > second {
                second = value;
            }
        }
        if comptime!(size > 1 && fixed.group_score == GroupScore::TwoBest) {
            first += second;
        }
        best[g] = max(first, f32::new(LOWEST));
        kept[g] = 0u32;
        g += PLANE_DIM as usize;
    }
    sync_cube();
    for _ in 0..fixed.top_groups {
        let group = take_best(&mut best, fixed.groups);
        if UNIT_POS == 0 {
            kept[group as usize] = 1u32;
        }
    }
    sync_cube();
    let mut e = UNIT_POS as usize;
    while e < fixed.experts {
        if kept[e / size] == 0 {
            choice[e] = f32::new(TAKEN);
        }
        e += PLANE_DIM as usize;
    }
    sync_cube();
}

#[cube]
fn choose<T: Float>(
    logits: &Tensor<T>,
    bias: &Tensor<f32>,
    ids: &mut SharedMemory<u32>,
    base: usize,
    #[comptime] biased: bool,
    #[comptime] fixed: Fixed,
) {
    let mut choice = SharedMemory::<f32>::new(fixed.experts);
    let terms = row_terms::<T>(logits, base, fixed.experts);
    let mut e = UNIT_POS as usize;
    while e < fixed.experts {
        let mut score = f32::cast_from(logits[base + e]);
        if comptime!(fixed.score == RouterScore::Softmax) {
            score = f32::exp(score - terms.max) / terms.sum;
        } else if comptime!(fixed.score == RouterScore::Sigmoid) {
            score = sigmoid(score);
        }
        if comptime!(biased) {
            score += bias[e];
        }
        if score > LOWEST {
            choice[e] = score;
        } else {
            // NaN compares with nothing and ends up here
            choice[e] = f32::new(LOWEST);
        }
        e += PLANE_DIM as usize;
    }
    sync_cube();
    if comptime!(fixed.groups > 1) {
        mask_groups(&mut choice, fixed);
    }
    for j in 0..fixed.top_k {
        let winner = take_best(&mut choice, fixed.experts);
        if UNIT_POS == 0 {
            ids[j] = winner;
        }
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn forward_kernel<T: Float>(
    logits: &Tensor<T>,
    bias: &Tensor<f32>,
    replay: &Tensor<i32>,
    weights: &mut Tensor<f32>,
    ids_out: &mut Tensor<i32>,
    scale: f32,
    #[comptime] choice: Choice,
    #[comptime] fixed: Fixed,
    #[define(T)] _dtype: StorageType,
) {
    let base = CUBE_POS * fixed.experts;
    let first = CUBE_POS * fixed.top_k;
    let mut ids = SharedMemory::<u32>::new(fixed.top_k);
    let mut values = SharedMemory::<f32>::new(fixed.top_k);
    if comptime!(matches!(choice, Choice::Scores { .. })) {
        choose::<T>(
            logits,
            bias,
            &mut ids,
            base,
            comptime!(choice == Choice::Scores { biased: true }),
            fixed,
        );
    } else {
        let mut j = UNIT_POS as usize;
        while j < fixed.top_k {
            if comptime!(choice == Choice::Replay) {
                ids[j] = u32::cast_from(clamp(replay[first + j], 0i32, i32::cast_from(fixed.experts - 1)));
            } else {
                ids[j] = u32::cast_from((first + j) % fixed.experts);
            }
            j += PLANE_DIM as usize;
        }
    }
    sync_cube();
    let mut j = UNIT_POS as usize;
    while j < fixed.top_k {
        let mut value = f32::cast_from(logits[base + ids[j] as usize]);
        if comptime!(fixed.score == RouterScore::Sigmoid) {
            value = sigmoid(value);
        }
        values[j] = value;
        j += PLANE_DIM as usize;
    }
    sync_cube();
    let terms = denominator::<T>(logits, base, &values, fixed);
    let mut j = UNIT_POS as usize;
    while j < fixed.top_k {
        let mut value = values[j];
        if comptime!(fixed.score != RouterScore::Sigmoid) {
            value = f32::exp(value - terms.max);
        }
        weights[first + j] = value / terms.sum * scale;
        ids_out[first + j] = i32::cast_from(ids[j]);
        j += PLANE_DIM as usize;
    }
}

/// An expert's gradient adds up over the choices with its id, so ids that occur twice need no atomics.
#[cube(launch_unchecked, address_type = "dynamic")]
fn backward_kernel<T: Float>(
    logits: &Tensor<T>,
    ids: &Tensor<i32>,
    grad: &Tensor<f32>,
    out: &mut Tensor<T>,
    scale: f32,
    #[comptime] fixed: Fixed,
    #[define(T)] _dtype: StorageType,
) {
    let base = CUBE_POS * fixed.experts;
    let first = CUBE_POS * fixed.top_k;
    let mut values = SharedMemory::<f32>::new(fixed.top_k);
    let mut to_logit = SharedMemory::<f32>::new(fixed.top_k);
    let mut j = UNIT_POS as usize;
    while j < fixed.top_k {
        let id = clamp(ids[first + j], 0i32, i32::cast_from(fixed.experts - 1));
        let mut value = f32::cast_from(logits[base + id as usize]);
        if comptime!(fixed.score == RouterScore::Sigmoid) {
            value = sigmoid(value);
        }
        values[j] = value;
        j += PLANE_DIM as usize;
    }
    sync_cube();
    let terms = denominator::<T>(logits, base, &values, fixed);
    // the share of each choice: softmax probability, or score over the sum of scores
    let mut mean = f32::new(0.0);
    for j in 0..fixed.top_k {
        let mut share = values[j];
        if comptime!(fixed.score != RouterScore::Sigmoid) {
            share = f32::exp(share - terms.max);
        }
        mean += grad[first + j] * share / terms.sum;
    }
    let mut j = UNIT_POS as usize;
    while j < fixed.top_k {
        let value = values[j];
        let mut g = grad[first + j];
        if comptime!(fixed.over_all()) {
            g *= f32::exp(value - terms.max) / terms.sum;
        } else if comptime!(fixed.over_chosen()) {
            g = (g - mean) * f32::exp(value - terms.max) / terms.sum;
        } else {
            if comptime!(fixed.renormalize) {
                g = (g - mean) / terms.sum;
            }
            g *= value * (1.0 - value);
        }
        to_logit[j] = g * scale;
        j += PLANE_DIM as usize;
    }
    sync_cube();
    let mut e = UNIT_POS as usize;
    while e < fixed.experts {
        let mut total = f32::new(0.0);
        if comptime!(fixed.over_all()) {
            total -= f32::exp(f32::cast_from(logits[base + e]) - terms.max) / terms.sum * mean * scale;
        }
        for j in 0..fixed.top_k {
            if ids[first + j] == i32::cast_from(e) {
                total += to_logit[j];
            }
        }
        out[base + e] = T::cast_from(total);
        e += PLANE_DIM as usize;
    }
}

/// Whether the kernels of this file take the problem.
pub fn supports(logits: &CudaTensor, ids: Option<&CudaTensor>, desc: &RouterDesc) -> bool {
    let ids_fit = ids.is_none_or(|ids| ids.dtype == DType::I32);
    super::fits([logits]) && logits.shape().num_elements() > 0 && ids_fit && desc.num_experts <= MAX_EXPERTS
}

/// See [`crate::MoeBackend::moe_route`]: weights and ids.
pub fn route(logits: CudaTensor, bias: Option<CudaTensor>, replay: Option<CudaTensor>, desc: &RouterDesc) -> [CudaTensor; 2] {
    let logits = dense(logits);
    let [t, _] = matrix_dims(&logits);
    let shape = [t, desc.top_k];
    let (weights, ids) = (empty(&logits, &shape, DType::F32), empty(&logits, &shape, DType::I32));
    let choice = match (&replay, desc.force_balanced) {
        (Some(_), _) => Choice::Replay,
        (None, true) => Choice::Balanced,
        (None, false) => Choice::Scores { biased: bias.is_some() },
    };
    // Absent inputs are never read; any tensor stands in for them.
    let bias = bias.map_or_else(|| empty(&logits, &[1], DType::F32), dense_f32);
    let replay = replay.map_or_else(|| empty(&logits, &[1], DType::I32), dense);
    // SAFETY: one cube per token; ids are clamped to the experts; all tensors are dense.
    unsafe {
        forward_kernel::launch_unchecked(
            &logits.client.clone(),
            CubeCount::Static(t as u32, 1, 1),
            CubeDim::new_1d(PLANE),
            addresses(&[&logits]),
            logits.clone().into_tensor_arg(),
            bias.into_tensor_arg(),
            replay.into_tensor_arg(),
            weights.clone().into_tensor_arg(),
            ids.clone().into_tensor_arg(),
            desc.scale,
            choice,
            Fixed::new(desc),
            logits.dtype.into(),
        );
    }
    [weights, ids]
}

/// See [`crate::MoeBackend::moe_route_backward`].
pub fn route_backward(logits: CudaTensor, ids: CudaTensor, grad: CudaTensor, desc: &RouterDesc) -> CudaTensor {
    let logits = dense(logits);
    let [t, e] = matrix_dims(&logits);
    let out = empty(&logits, &[t, e], logits.dtype);
    // SAFETY: one cube per token; ids are clamped to the experts; all tensors are dense.
    unsafe {
        backward_kernel::launch_unchecked(
            &logits.client.clone(),
            CubeCount::Static(t as u32, 1, 1),
            CubeDim::new_1d(PLANE),
            addresses(&[&logits]),
            logits.clone().into_tensor_arg(),
            dense(ids).into_tensor_arg(),
            dense_f32(grad).into_tensor_arg(),
            out.clone().into_tensor_arg(),
            desc.scale,
            Fixed::new(desc),
            logits.dtype.into(),
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use super::super::compile_check::*;
    use super::*;

    #[test]
    fn route_kernels_compile_for_sm_90a() {
        let choices = [
            Choice::Scores { biased: true },
            Choice::Scores { biased: false },
            Choice::Balanced,
            Choice::Replay,
        ];
        for score in [RouterScore::Softmax, RouterScore::TopKSoftmax, RouterScore::Sigmoid] {
            for (i, choice) in choices.into_iter().enumerate() {
                let fixed = Fixed {
                    experts: 60,
                    top_k: 6,
                    score,
                    renormalize: i % 2 == 0,
                    groups: [1, 4, 30, 60][i],
                    top_groups: [1, 2, 20, 30][i],
                    group_score: if i == 2 { GroupScore::Best } else { GroupScore::TwoBest },
                };
                let dtype = if i == 0 { DType::F32 } else { DType::BF16 };
                compile(PLANE, |b| {
                    use forward_kernel::T;
                    b.scope.register_type::<T>(dtype.into());
                    let (logits, bias, replay) = (input(b), input(b), input(b));
                    let (weights, ids, scale) = (output(b), output(b), scalar::<f32>(b));
                    let scope = &mut b.scope;
                    forward_kernel::expand::<T>(scope, logits, bias, replay, weights, ids, scale, choice, fixed, dtype.into());
                });
                compile(PLANE, |b| {
                    use backward_kernel::T;
                    b.scope.register_type::<T>(dtype.into());
                    let (logits, ids, grad) = (input(b), input(b), input(b));
                    let (out, scale) = (output(b), scalar::<f32>(b));
                    backward_kernel::expand::<T>(&mut b.scope, logits, ids, grad, out, scale, fixed, dtype.into());
                });
            }
        }
    }
}

//! One fused AdamW update.

use burn_tensor::Tensor;

use super::check;
use crate::{AdamWDesc, AdamWPrim, MoeBackend, Result};

/// A parameter and its optimizer state.
#[derive(Debug, Clone)]
pub struct AdamWState<B: MoeBackend, const D: usize> {
    pub param: Tensor<B, D>,
    /// First moment, fp32 or the parameter's dtype.
    pub m: Tensor<B, D>,
    /// Second moment.
    pub v: Tensor<B, D>,
    /// fp32 copy; when present the update happens here and `param` is its rounding.
    pub master: Option<Tensor<B, D>>,
}

/// Decoupled AdamW (Loshchilov and Hutter 2019); arithmetic in fp32. `grad_scale [1]` multiplies the gradient first; one that is
/// not finite leaves everything as it is.
pub fn adamw_step<B: MoeBackend, const D: usize>(
    state: AdamWState<B, D>,
    grad: Tensor<B, D>,
    grad_scale: Option<Tensor<B, 1>>,
    desc: &AdamWDesc,
) -> Result<AdamWState<B, D>> {
    let op = "adamw";
    let (shape, legend) = (state.param.dims(), "the parameter's shape");
    check::shape(op, "grad", grad.dims(), shape, legend)?;
    check::shape(op, "m", state.m.dims(), shape, legend)?;
    check::shape(op, "v", state.v.dims(), shape, legend)?;
    if let Some(master) = &state.master {
        check::shape(op, "master", master.dims(), shape, legend)?;
    }
    check::setting(op, "step", desc.step > 0, desc.step, "1 for the first update")?;
    if let Some(scale) = &grad_scale {
        check::shape(op, "grad_scale", scale.dims(), [1], "[1]")?;
    }
    let prim = AdamWPrim {
        param: check::float(state.param),
        m: check::float(state.m),
        v: check::float(state.v),
        master: state.master.map(check::float),
    };
    let out = B::adamw_step(prim, check::float(grad), grad_scale.map(check::float), desc);
    Ok(AdamWState {
        param: check::tensor(out.param),
        m: check::tensor(out.m),
        v: check::tensor(out.v),
        master: out.master.map(check::tensor),
    })
}

/// The scalars of one update, in double precision:
/// `m += (g - m) * take_m`, `v = v * keep_v + g² * take_v`,
/// `p = p * decay - step_size * m / (sqrt(v) / v_root + eps)`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AdamWFactors {
    pub decay: f64,
    pub take_m: f64,
    pub keep_v: f64,
    pub take_v: f64,
    pub v_root: f64,
    pub eps: f64,
    pub step_size: f64,
}

impl AdamWDesc {
    pub(crate) fn factors(&self) -> AdamWFactors {
        let (beta1, beta2) = (decimal(self.beta1), decimal(self.beta2));
        let step = self.step as f64;
        AdamWFactors {
            decay: 1.0 - self.lr * decimal(self.weight_decay),
            take_m: 1.0 - beta1,
            keep_v: beta2,
            take_v: 1.0 - beta2,
            v_root: (1.0 - beta2.powf(step)).sqrt(),
            eps: decimal(self.eps),
            step_size: self.lr / (1.0 - beta1.powf(step)),
        }
    }
}

/// Which of the three tensors of an update is rounded: their noise is independent.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Rounded {
    Param = 1,
    M = 2,
    V = 3,
}

/// `value` rounded to bf16 at random: 16 bits of noise, the same on every device, are added below the kept ones, which are then
/// cut off. Infinities and NaN stay.
pub(crate) fn stochastic_bf16(value: f32, seed: u32, tensor: Rounded, index: usize) -> burn_std::bf16 {
    if !value.is_finite() {
        return burn_std::bf16::from_f32(value);
    }
    let noise = rounding_noise(seed, tensor, index);
    burn_std::bf16::from_bits(((value.to_bits() + (noise & 0xffff)) >> 16) as u16)
}

/// 32 random bits for an element: a function of its arguments, the same on every device.
pub(crate) fn rounding_noise(seed: u32, tensor: Rounded, index: usize) -> u32 {
    let mut x = (index as u32).wrapping_mul(0x9e37_79b1) ^ seed ^ (tensor as u32).wrapping_mul(0x85eb_ca77);
    x = (x ^ (x >> 16)).wrapping_mul(0x7feb_352d);
    x = (x ^ (x >> 15)).wrapping_mul(0x846c_a68b);
    x ^ (x >> 16)
}

/// The decimal number a setting was written as: `0.999` rather than `0.99900001`, whose complement is off by 1e-5.
fn decimal(setting: f32) -> f64 {
    setting.to_string().parse().unwrap_or(f64::from(setting))
}

#[cfg(test)]
mod tests {
    use burn_backend::DType;
    use burn_flex::{Flex, FlexTensor};

    use super::*;
    use crate::reference;
    use crate::testing::*;

    const DESC: AdamWDesc = AdamWDesc {
        lr: 1e-2,
        beta1: 0.9,
        beta2: 0.999,
        eps: 1e-8,
        weight_decay: 0.1,
        step: 1,
        stochastic_rounding: None,
    };

    /// One parameter in f64, as torch.optim.AdamW writes it.
    fn naive(param: &mut f64, m: &mut f64, v: &mut f64, grad: f64, step: i32) {
        let (lr, beta1, beta2, eps, decay) = (1e-2, 0.9f64, 0.999f64, 1e-8, 0.1);
        *param *= 1.0 - lr * decay;
        *m = beta1 * *m + (1.0 - beta1) * grad;
        *v = beta2 * *v + (1.0 - beta2) * grad * grad;
        let (bias1, bias2) = (1.0 - beta1.powi(step), 1.0 - beta2.powi(step));
        *param -= lr / bias1 * *m / (v.sqrt() / bias2.sqrt() + eps);
    }

    type Function = fn(AdamWPrim<Flex>, FlexTensor, Option<FlexTensor>, &AdamWDesc) -> AdamWPrim<Flex>;

    const FUNCTIONS: [(&str, Function); 2] = [
        ("kernel", <Flex as MoeBackend>::adamw_step),
        ("reference", reference::adamw::adamw_step::<Flex>),
    ];

    fn flat(values: &[f64], dtype: DType) -> FlexTensor {
        check::float(tensor::<Flex, 1>(values, [values.len()], dtype))
    }

    fn read(tensor: FlexTensor) -> Vec<f64> {
        f64s(check::tensor::<Flex, 1>(tensor))
    }

    #[test]
    fn several_steps_match_torch_semantics() {
        // More than one block, and not a multiple of it.
        let n = 4096 * 5 + 3;
        let scale = 0.25;
        for (dtype, tolerance) in [(DType::F64, 1e-13), (DType::F32, 2e-6)] {
            for (name, step) in FUNCTIONS {
                let (mut param, mut m, mut v) = (values(1, n), vec![0.0; n], vec![0.0; n]);
                let mut state = AdamWPrim::<Flex> {
                    param: flat(&param, dtype),
                    m: flat(&m, dtype),
                    v: flat(&v, dtype),
                    master: None,
                };
                for index in 1..=3 {
                    let grad = values(10 + index, n);
                    let desc = AdamWDesc { step: index, ..DESC };
                    state = step(state, flat(&grad, dtype), Some(flat(&[scale], DType::F32)), &desc);
                    for i in 0..n {
                        naive(&mut param[i], &mut m[i], &mut v[i], grad[i] * scale, index as i32);
                    }
                }
                assert_close(&format!("{name} param"), &read(state.param), &param, tolerance);
                assert_close(&format!("{name} m"), &read(state.m), &m, tolerance);
                // Squares of gradients are small; compare relative to themselves.
                let ratio: Vec<f64> = read(state.v)
                    .iter()
                    .zip(&v)
                    .map(|(f, e)| if *e == 0.0 { 1.0 } else { f / e })
                    .collect();
                assert_close(&format!("{name} v"), &ratio, &vec![1.0; n], tolerance);
            }
        }
    }

    #[test]
    fn master_accumulates_what_bf16_would_lose() {
        for (name, step) in FUNCTIONS {
            let desc = |index| AdamWDesc {
                lr: 1e-4,
                weight_decay: 0.0,
                step: index,
                ..DESC
            };
            let state = |master: bool| AdamWPrim::<Flex> {
                param: flat(&[1.0, -1.0], DType::BF16),
                m: flat(&[0.0, 0.0], DType::F32),
                v: flat(&[0.0, 0.0], DType::F32),
                master: master.then(|| flat(&[1.0, -1.0], DType::F32)),
            };
            let (mut with, mut without) = (state(true), state(false));
            for index in 1..=60 {
                let grad = || flat(&[1.0, -1.0], DType::BF16);
                with = step(with, grad(), None, &desc(index));
                without = step(without, grad(), None, &desc(index));
            }
            // Every step moves by 1e-4; half a bf16 step below 1 is 2^-9 = 0.00195.
            assert_eq!(read(without.param), [1.0, -1.0], "{name}");
            let master = with.master.expect("kept");
            assert_eq!((with.param.dtype(), master.dtype()), (DType::BF16, DType::F32), "{name}");
            assert_close(name, &read(master), &[0.994, -0.994], 1e-5);
            assert_eq!(read(with.param), [0.9921875, -0.9921875], "{name}: param is the rounded master");
        }
    }

    /// Decay does not depend on the gradient (burn#5228), and weight 0 in a group switches it off (torchtitan#2859).
    #[test]
    fn zero_gradients_only_decay() {
        for (name, step) in FUNCTIONS {
            for (weight_decay, expected) in [(0.1, [0.9, -1.8, 0.0]), (0.0, [1.0, -2.0, 0.0])] {
                let zeros = || flat(&[0.0; 3], DType::F32);
                let state = AdamWPrim::<Flex> {
                    param: flat(&[1.0, -2.0, 0.0], DType::F32),
                    m: zeros(),
                    v: zeros(),
                    master: None,
                };
                let desc = AdamWDesc {
                    lr: 1.0,
                    weight_decay,
                    ..DESC
                };
                let param = read(step(state, zeros(), None, &desc).param);
                let expected: Vec<f64> = expected.iter().map(|&v| f64::from(v as f32)).collect();
                assert_eq!(param, expected, "{name}");
            }
        }
    }

    #[test]
    fn moments_of_low_precision_keep_their_dtype() {
        for (name, step) in FUNCTIONS {
            let state = AdamWPrim::<Flex> {
                param: flat(&values(1, 9), DType::BF16),
                m: flat(&[0.0; 9], DType::BF16),
                v: flat(&[0.0; 9], DType::BF16),
                master: None,
            };
            let out = step(state, flat(&values(2, 9), DType::F32), None, &DESC);
            assert_eq!([out.param.dtype(), out.m.dtype(), out.v.dtype()], [DType::BF16; 3], "{name}");
            let (mut param, mut m, mut v) = (values(1, 9), [0.0; 9], [0.0; 9]);
            for i in 0..9 {
                naive(&mut param[i], &mut m[i], &mut v[i], values(2, 9)[i], 1);
            }
            assert_close(name, &read(out.param), &param, 4e-3);
        }
    }

    #[test]
    fn unique_buffers_are_updated_in_place_and_shared_ones_are_left_alone() {
        let state = || AdamWPrim::<Flex> {
            param: flat(&[1.0; 8], DType::F32),
            m: flat(&[0.0; 8], DType::F32),
            v: flat(&[0.0; 8], DType::F32),
            master: None,
        };
        let address = |tensor: &FlexTensor| tensor.bytes().as_ptr() as usize;
        let grad = || flat(&[1.0; 8], DType::F32);
        let unique = state();
        let before = [address(&unique.param), address(&unique.m), address(&unique.v)];
        let after = <Flex as MoeBackend>::adamw_step(unique, grad(), None, &DESC);
        assert_eq!(before, [address(&after.param), address(&after.m), address(&after.v)]);

        let shared = state();
        let other = shared.param.clone();
        <Flex as MoeBackend>::adamw_step(shared, grad(), None, &DESC);
        assert_eq!(read(other), [1.0; 8]);
    }

    #[test]
    fn stochastic_rounding_keeps_the_mean_and_both_neighbours() {
        for value in [1.001f32, -3.3415, 2e-20, 1.0, 0.0, 255.3] {
            let rounded: Vec<f64> = (0..100_000)
                .map(|i| f64::from(stochastic_bf16(value, 7, Rounded::V, i).to_f32()))
                .collect();
            let mean = rounded.iter().sum::<f64>() / 1e5;
            let unit = f64::from(value.abs()) / 128.0;
            // Five standard errors of a two-point distribution half a unit wide.
            assert!(
                (mean - f64::from(value)).abs() <= 5.0 * 0.5 * unit / 1e5f64.sqrt(),
                "{value}: {mean}"
            );
            assert!(rounded.iter().all(|r| (r - f64::from(value)).abs() <= unit), "{value}");
        }
        for value in [f32::INFINITY, f32::NEG_INFINITY] {
            assert_eq!(stochastic_bf16(value, 1, Rounded::M, 3).to_f32(), value);
        }
        assert!(stochastic_bf16(f32::from_bits(0x7fff_ffff), 1, Rounded::M, 3).is_nan());
    }

    /// Second moments in bf16 stop decaying under rounding to nearest: 0.999 of a value is the value again.
    #[test]
    fn small_changes_of_bf16_state_add_up() {
        for (name, step) in FUNCTIONS {
            let run = |stochastic: bool| {
                let n = 4096;
                let mut state = AdamWPrim::<Flex> {
                    param: flat(&vec![1.0; n], DType::BF16),
                    m: flat(&vec![0.0; n], DType::BF16),
                    v: flat(&vec![1.0; n], DType::BF16),
                    master: None,
                };
                for index in 1..=100 {
                    let desc = AdamWDesc {
                        lr: 1e-3,
                        step: index,
                        stochastic_rounding: stochastic.then_some(index as u32),
                        ..DESC
                    };
                    state = step(state, flat(&vec![0.0; n], DType::BF16), None, &desc);
                }
                let mean = |tensor| read(tensor).iter().sum::<f64>() / n as f64;
                (mean(state.param), mean(state.v))
            };
            assert_eq!(run(false), (1.0, 1.0), "{name}");
            let (param, v) = run(true);
            // Decay of 1e-4 and of 1e-3 a step.
            assert!((param - 0.99).abs() < 5e-4, "{name}: {param}");
            assert!((v - 0.999f64.powi(100)).abs() < 2e-3, "{name}: {v}");
        }
    }

    #[test]
    fn a_scale_that_is_not_finite_changes_nothing() {
        for (name, step) in FUNCTIONS {
            for scale in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
                let state = AdamWPrim::<Flex> {
                    param: flat(&values(1, 9), DType::F32),
                    m: flat(&values(2, 9), DType::F32),
                    v: flat(&[0.5; 9], DType::F32),
                    master: Some(flat(&values(3, 9), DType::F32)),
                };
                // The gradient is what made the norm infinite.
                let out = step(
                    state,
                    flat(&[f64::INFINITY; 9], DType::F32),
                    Some(flat(&[scale], DType::F32)),
                    &DESC,
                );
                assert_eq!((read(out.m), read(out.v)), (values(2, 9), vec![0.5; 9]), "{name}");
                assert_eq!(read(out.master.expect("kept")), values(3, 9), "{name}");
            }
        }
    }

    #[test]
    fn any_rank_and_view_goes_through_the_op() {
        let view = tensor::<Flex, 2>(&values(1, 6), [2, 3], DType::F32).transpose();
        let before = f64s(view.clone());
        let state = AdamWState {
            param: view,
            m: Tensor::zeros([3, 2], &Default::default()),
            v: Tensor::zeros([3, 2], &Default::default()),
            master: None,
        };
        let grad = Tensor::<Flex, 2>::ones([3, 2], &Default::default());
        let out = adamw_step(state, grad, None, &DESC).unwrap();
        assert_eq!(out.param.dims(), [3, 2]);
        let expected: Vec<f64> = before
            .into_iter()
            .map(|mut param| {
                naive(&mut param, &mut 0.0, &mut 0.0, 1.0, 1);
                param
            })
            .collect();
        assert_close("param", &f64s(out.param), &expected, 1e-6);
    }

    #[test]
    fn settings_are_checked_by_name() {
        let zeros = |n: usize| Tensor::<Flex, 1>::zeros([n], &Default::default());
        let state = |m: usize| AdamWState {
            param: zeros(3),
            m: zeros(m),
            v: zeros(3),
            master: None,
        };
        let message = adamw_step(state(3), zeros(3), None, &AdamWDesc { step: 0, ..DESC })
            .unwrap_err()
            .to_string();
        assert!(message.contains("`step` is 0"), "{message}");
        let message = adamw_step(state(2), zeros(3), None, &DESC).unwrap_err().to_string();
        assert!(message.contains("tensor `m` has shape [2]"), "{message}");
    }
}

//! Router, sort by expert, permutation and its inverse.

use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{Distribution, FloatDType, Int, Tensor, TensorData, backend::Backend};
use burn_ep_backend::ops::{ExpertOrder, permute, route, sort_by_expert, unpermute};
use burn_ep_backend::{GroupScore, MoeBackend, RouterDesc, RouterScore};

use crate::support::{Cpu, Gpu, compare, host, poison, random, relative};

/// Expert ids of `n` slots, skewed so that some experts stay empty.
pub fn ids(n: usize, experts: usize, seed: u64) -> Vec<i32> {
    let values = random(&[n], seed).into_vec::<f32>().expect("fp32");
    values
        .iter()
        .map(|v| ((v.abs() / 3.0).min(0.999) * experts as f32) as i32)
        .collect()
}

fn ints<B: Backend, const D: usize>(tensor: Tensor<B, D, Int>) -> Vec<i64> {
    tensor.into_data().convert::<i64>().into_vec().expect("i64 data")
}

#[test]
fn sort_is_the_stable_order() {
    for (t, k, e) in [
        (1, 1, 1),
        (7, 3, 5),
        (33, 2, 64),
        (1024, 1, 8),
        (1025, 4, 7),
        (3000, 6, 512),
        (20_000, 8, 128),
        (500, 2, 1),
    ] {
        for transposed in [false, true] {
            let host_ids = ids(t * k, e, (t + k + e) as u64);
            let device = Default::default();
            let by_slot: Vec<i32> = if transposed {
                (0..t * k).map(|slot| host_ids[slot % k * t + slot / k]).collect()
            } else {
                host_ids.clone()
            };
            let ids_tk = if transposed {
                Tensor::<Gpu, 2, Int>::from_data(TensorData::new(host_ids, [k, t]), &device).swap_dims(0, 1)
            } else {
                Tensor::<Gpu, 2, Int>::from_data(TensorData::new(host_ids, [t, k]), &device)
            };
            poison::<Gpu>(t * k);
            let order = sort_by_expert(ids_tk, e).expect("valid sizes");
            let mut slots: Vec<i64> = (0..(t * k) as i64).collect();
            slots.sort_by_key(|&slot| by_slot[slot as usize]);
            let mut positions = vec![0i64; t * k];
            slots
                .iter()
                .enumerate()
                .for_each(|(at, &slot)| positions[slot as usize] = at as i64);
            let offsets: Vec<i64> = (0..=e as i32)
                .map(|bound| by_slot.iter().filter(|&&id| id < bound).count() as i64)
                .collect();
            let name = format!("{t} tokens, {k} of {e} experts, transposed {transposed}");
            assert_eq!(ints(order.offsets_e1), offsets, "offsets of {name}");
            assert_eq!(ints(order.positions_r), positions, "positions of {name}");
            assert_eq!(ints(order.slots_r), slots, "slots of {name}");
        }
    }
}

pub fn order<B: MoeBackend>(t: usize, k: usize, e: usize) -> ExpertOrder<B> {
    let ids_tk = Tensor::from_data(TensorData::new(ids(t * k, e, 5), [t, k]), &Default::default());
    sort_by_expert(ids_tk, e).expect("valid sizes")
}

fn moved<B>([t, k, e, d]: [usize; 4], weighted: bool, strided: bool, dtype: FloatDType) -> Vec<Vec<f32>>
where
    B: AutodiffBackend + MoeBackend,
{
    let device = Default::default();
    let matrix = |n: usize, seed| {
        let data = if strided {
            Tensor::<B, 2>::from_data(random(&[d, n], seed), &device).swap_dims(0, 1)
        } else {
            Tensor::<B, 2>::from_data(random(&[n, d], seed), &device)
        };
        data.cast(dtype).require_grad()
    };
    let order = order::<B>(t, k, e);
    let (x, rows) = (matrix(t, 1), matrix(t * k, 2));
    let weights = Tensor::<B, 2>::from_data(random(&[t, k], 3), &device).require_grad();
    poison::<B>(t * k * d);
    let gathered = permute(x.clone(), &order).expect("valid shapes");
    poison::<B>(t * d);
    let combined = unpermute(rows.clone(), &order, weighted.then(|| weights.clone())).expect("valid shapes");
    let (up_rows, up) = (matrix(t * k, 4).detach(), matrix(t, 6).detach());
    let grads = ((gathered.clone() * up_rows).sum() + (combined.clone() * up).sum()).backward();
    let mut out = vec![host(gathered), host(combined)];
    out.extend([&x, &rows].map(|t| host(t.grad(&grads).expect("gradient"))));
    if weighted {
        out.push(host(weights.grad(&grads).expect("gradient")));
    }
    out
}

#[test]
fn permute_and_unpermute_match_the_reference() {
    for sizes in [
        [1, 1, 1, 8],
        [9, 3, 4, 7],
        [130, 6, 60, 2880],
        [64, 2, 8, 20],
        [5, 4, 4, 1],
        [333, 8, 128, 2048],
    ] {
        for (weighted, strided) in [(true, false), (false, true), (true, true)] {
            let run = |dtype| moved::<Cpu>(sizes, weighted, strided, dtype);
            compare(
                &format!("permutation {sizes:?} weighted {weighted} strided {strided}"),
                moved::<Gpu>(sizes, weighted, strided, FloatDType::BF16),
                run(FloatDType::F32),
                run(FloatDType::BF16),
            );
            let exact = moved::<Gpu>(sizes, weighted, strided, FloatDType::F32);
            for (i, (gpu, cpu)) in exact.iter().zip(run(FloatDType::F32)).enumerate() {
                let error = relative(gpu, &cpu);
                assert!(error < 1e-5, "permutation {sizes:?} in fp32, output {i}: {error:.2e}");
            }
        }
    }
}

/// Ids, weights and gradient of the logits.
fn routed<B>(t: usize, desc: &RouterDesc, bias: bool, replay: Option<&[i32]>, dtype: FloatDType) -> (Vec<i64>, [Vec<f32>; 2])
where
    B: AutodiffBackend + MoeBackend,
{
    let device = Default::default();
    let (e, k) = (desc.num_experts, desc.top_k);
    let logits = Tensor::<B, 2>::from_data(random(&[t, e], 11), &device).cast(dtype).require_grad();
    let bias = bias.then(|| Tensor::<B, 1>::from_data(random(&[e], 12), &device) * 0.3);
    let replay = replay.map(|ids| Tensor::<B, 2, Int>::from_data(TensorData::new(ids.to_vec(), [t, k]), &device));
    let out = route(logits.clone(), bias, replay, desc).expect("valid settings");
    let up = Tensor::<B, 2>::from_data(random(&[t, k], 13), &device);
    let grads = (out.weights_tk.clone() * up).sum().backward();
    (
        ints(out.ids_tk),
        [host(out.weights_tk), host(logits.grad(&grads).expect("gradient"))],
    )
}

#[test]
fn route_matches_the_reference() {
    let sizes = [
        (1, 4, 4, 1, 1),
        (50, 60, 6, 1, 1),
        (33, 128, 8, 8, 4),
        (17, 512, 22, 1, 1),
        (40, 30, 3, 30, 7),
        (8, 24, 5, 12, 3),
    ];
    for (t, e, k, groups, top_groups) in sizes {
        for score in [RouterScore::Softmax, RouterScore::TopKSoftmax, RouterScore::Sigmoid] {
            for (renormalize, bias, force_balanced, replayed) in [
                (true, false, false, false),
                (false, true, false, false),
                (true, true, false, true),
                (false, false, true, false),
            ] {
                let desc = RouterDesc {
                    score,
                    scale: 2.5,
                    groups,
                    top_groups,
                    group_score: if renormalize { GroupScore::TwoBest } else { GroupScore::Best },
                    force_balanced,
                    ..RouterDesc::softmax(e, k, renormalize)
                };
                // the ids of one token differ, as those of an earlier call do
                let replay: Vec<i32> = (0..t * k).map(|slot| ((slot / k * 7 + slot % k * (e / k)) % e) as i32).collect();
                let replay = replayed.then_some(&replay[..]);
                for dtype in [FloatDType::F32, FloatDType::BF16] {
                    poison::<Gpu>(t * e);
                    let (ids, found) = routed::<Gpu>(t, &desc, bias, replay, dtype);
                    let (cpu_ids, expected) = routed::<Cpu>(t, &desc, bias, replay, dtype);
                    let name = format!("{desc:?} bias {bias} replay {replayed} {dtype:?}");
                    assert_eq!(ids, cpu_ids, "ids of {name}");
                    let weights = relative(&found[0], &expected[0]);
                    assert!(weights < 1e-5, "weights of {name}: {weights:.2e}");
                    // a bf16 gradient may round the other way
                    let tolerance = if dtype == FloatDType::F32 { 1e-5 } else { 4e-3 };
                    let grad = relative(&found[1], &expected[1]);
                    assert!(grad < tolerance, "gradient of {name}: {grad:.2e}");
                }
            }
        }
    }
}

#[test]
fn equal_scores_go_to_the_lower_expert() {
    let device = Default::default();
    for score in [RouterScore::Softmax, RouterScore::TopKSoftmax, RouterScore::Sigmoid] {
        let desc = RouterDesc {
            score,
            ..RouterDesc::softmax(70, 5, true)
        };
        let logits = Tensor::<Gpu, 2>::ones([3, 70], &device);
        let ids = ints(route(logits, None, None, &desc).expect("valid settings").ids_tk);
        assert_eq!(ids, [0, 1, 2, 3, 4].repeat(3));
    }
}

#[test]
fn fresh_ids_sort_like_a_permutation() {
    // unseeded on purpose: every run checks another order
    let device = Default::default();
    let ids_tk = Tensor::<Gpu, 2>::random([4099, 3], Distribution::Uniform(0.0, 255.9), &device).int();
    let by_slot = ints(ids_tk.clone());
    let order = sort_by_expert(ids_tk, 256).expect("valid sizes");
    let mut expected: Vec<i64> = (0..by_slot.len() as i64).collect();
    expected.sort_by_key(|&slot| by_slot[slot as usize]);
    assert_eq!(ints(order.slots_r), expected);
}

//! What a training step does besides its layers: rows per expert, sums of squares, initial values, and the
//! memory counters.

use burn::tensor::{DType, FloatDType, Int, Tensor, TensorData, TensorPrimitive, backend::AutodiffBackend, backend::Backend};
use burn_ep_backend::{Init, InitDesc, MoeBackend, stream_key};

use crate::support::{Cpu, Gpu, float, host, random, relative};

type GpuInner = <Gpu as AutodiffBackend>::InnerBackend;
type CpuInner = <Cpu as AutodiffBackend>::InnerBackend;

fn wrap<B: Backend, const D: usize>(primitive: B::FloatTensorPrimitive) -> Tensor<B, D> {
    Tensor::from_primitive(TensorPrimitive::Float(primitive))
}

fn unwrap<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> B::FloatTensorPrimitive {
    tensor.into_primitive().tensor()
}

fn ids<B: Backend>(values: &[i32], shape: [usize; 2]) -> Tensor<B, 2, Int> {
    Tensor::from_data(TensorData::new(values.to_vec(), shape), &Default::default())
}

/// Ids from 0 to below `n`, the last of them often and some not at all.
fn skewed(count: usize, n: usize) -> Vec<i32> {
    (0..count)
        .map(|i| (if i % 3 == 0 { n - 1 } else { i * i * 7 % n }) as i32)
        .collect()
}

#[test]
fn rows_per_expert_are_exact() {
    for (tokens, top_k, experts) in [(1, 1, 1), (7, 3, 5), (4096, 8, 128), (1000, 6, 300)] {
        let values = skewed(tokens * top_k, experts);
        let mask: Vec<f32> = (0..tokens).map(|t| if t % 4 == 1 { 0.0 } else { 1.0 }).collect();
        fn counts<B: MoeBackend>(values: &[i32], shape: [usize; 2], mask: Option<&[f32]>, experts: usize) -> Vec<f32> {
            let mask = mask.map(|m| unwrap(Tensor::<B, 1>::from_floats(m, &Default::default())));
            host(wrap::<B, 1>(B::count_experts(
                ids::<B>(values, shape).into_primitive(),
                mask,
                experts,
            )))
        }
        for mask in [None, Some(mask.as_slice())] {
            let found = counts::<GpuInner>(&values, [tokens, top_k], mask, experts);
            assert_eq!(found, counts::<CpuInner>(&values, [tokens, top_k], mask, experts));
        }
    }
}

#[test]
fn sums_of_squares_match_f64_and_repeat_bit_for_bit() {
    let shapes = [[1, 1], [3, 5], [257, 512], [2000, 2688], [1, 100_003]];
    for dtype in [FloatDType::F32, FloatDType::BF16, FloatDType::F16] {
        let squares = || {
            // Every second one is a transposed view.
            let grads = shapes
                .iter()
                .enumerate()
                .map(|(i, &shape)| unwrap(float::<GpuInner, 2>(shape, 5 + i as u64, i % 2 == 1, dtype)));
            host(wrap::<GpuInner, 1>(GpuInner::squared_norms(grads.collect())))
        };
        let found = squares();
        for (i, (found, shape)) in found.iter().zip(shapes).enumerate() {
            let values = host(float::<CpuInner, 2>(shape, 5 + i as u64, i % 2 == 1, dtype));
            let exact: f64 = values.iter().map(|v| f64::from(*v).powi(2)).sum();
            assert!(
                (f64::from(*found) / exact - 1.0).abs() < 1e-5,
                "{shape:?} {dtype:?}: {found} for {exact}"
            );
        }
        assert_eq!(found, squares());
    }
}

#[test]
fn initial_values_are_those_of_the_host() {
    let shape = [37, 2688];
    for init in [
        Init::Zeros,
        Init::Ones,
        Init::Normal { std: 0.02 },
        Init::NormalWithZeroRow { std: 1.0, row: 5 },
        Init::Uniform { bound: 0.25 },
        Init::LogCount,
        Init::SoftplusInverse {
            min: 0.001,
            max: 0.1,
            floor: 1e-4,
        },
    ] {
        for (offset, dtype) in [
            (0, FloatDType::F32),
            (2688, FloatDType::BF16),
            (3 * 2688, FloatDType::F16),
            (13, FloatDType::F32),
        ] {
            let desc = InitDesc {
                init,
                key: stream_key(3, "layers.0.weight"),
                offset,
                row_len: 2688,
            };
            fn drawn<B: MoeBackend>(desc: &InitDesc, shape: [usize; 2], dtype: FloatDType) -> Vec<f32> {
                let tensor = wrap::<B, 2>(B::resident_init(desc, &shape, dtype, &Default::default()));
                assert_eq!(tensor.dtype(), DType::from(dtype));
                host(tensor)
            }
            let (found, expected) = (drawn::<GpuInner>(&desc, shape, dtype), drawn::<CpuInner>(&desc, shape, dtype));
            // Double precision everywhere: a few values may round the other way.
            let different = found.iter().zip(&expected).filter(|(a, b)| a != b).count();
            assert!(different * 1000 <= found.len(), "{init:?} {dtype:?}: {different} values differ");
            assert!(relative(&found, &expected) < 1e-6, "{init:?} {dtype:?}");
        }
    }
}

#[test]
fn residents_are_dense_and_come_back() {
    let data = random(&[3, 2688], 9);
    let tensor = GpuInner::resident_from_data(data.clone(), &Default::default());
    assert!(tensor.is_contiguous());
    assert_eq!(wrap::<GpuInner, 2>(tensor).into_data(), data);
}

/// Weights that several threads make piece by piece: sizes around the chunk and the small-tensor bounds, units that divide
/// neither, one unit larger than a chunk.
#[test]
fn chunked_uploads_arrive_in_place() {
    let device = Default::default();
    let fill = |offset: usize, out: &mut [u8]| {
        for (i, element) in out.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            // Finite fp32 numbers, all different.
            *element = (((offset / 4 + i) as f32) - 5e5).to_le_bytes();
        }
        Ok::<(), usize>(())
    };
    for (rows, columns, unit) in [
        (3usize, 5usize, 4usize),
        (1 << 18, 1, 4),
        (1 << 20, 1, 4),
        ((1 << 20) + 1, 1, 4),
        (70_001, 77, 4 * 77),
        (5, 1_200_000, 4_800_000),
    ] {
        let tensor = GpuInner::resident_from_chunks(&[rows, columns], DType::F32, unit, &fill, &device).unwrap();
        assert!(tensor.is_contiguous());
        let found = wrap::<GpuInner, 2>(tensor).into_data().to_vec::<f32>().unwrap();
        assert_eq!(found.len(), rows * columns);
        let wrong = found.iter().enumerate().find(|(i, v)| **v != *i as f32 - 5e5);
        assert_eq!(wrong, None, "{rows} x {columns} in units of {unit}");
    }
    // The error at the lowest offset, and the device goes on afterwards.
    let fails = |offset: usize, _: &mut [u8]| if offset < 9 << 20 { Ok(()) } else { Err(offset) };
    let error = GpuInner::resident_from_chunks(&[64 << 20], DType::U8, 1, &fails, &device).unwrap_err();
    assert_eq!(error, 12 << 20);
    GpuInner::release_staging(&device);
    let again = GpuInner::resident_from_chunks(&[1 << 20], DType::F32, 4, &fill, &device).unwrap();
    assert_eq!(wrap::<GpuInner, 1>(again).into_data().to_vec::<f32>().unwrap()[7], 7.0 - 5e5);
    GpuInner::release_staging(&device);
}

#[test]
fn memory_counters_follow_a_large_tensor() {
    let device = Default::default();
    let zeros = || {
        wrap::<GpuInner, 1>(GpuInner::resident_init(
            &InitDesc {
                init: Init::Zeros,
                key: 0,
                offset: 0,
                row_len: 1,
            },
            &[1 << 28],
            FloatDType::F32,
            &device,
        ))
    };
    GpuInner::sync(&device).unwrap();
    GpuInner::reset_peak_memory(&device);
    let before = GpuInner::device_memory(&device).expect("counters of the CUDA pool");
    let tensor = zeros();
    GpuInner::sync(&device).unwrap();
    let during = GpuInner::device_memory(&device).expect("counters");
    assert!(
        during.used >= before.used + (1 << 30) && during.reserved >= during.used,
        "{before:?} {during:?}"
    );
    drop(tensor);
    GpuInner::sync(&device).unwrap();
    GpuInner::memory_cleanup(&device);
    GpuInner::sync(&device).unwrap();
    let after = GpuInner::device_memory(&device).expect("counters");
    assert!(after.used < during.used && after.peak_used >= during.used, "{during:?} {after:?}");
    GpuInner::reset_peak_memory(&device);
    assert!(GpuInner::device_memory(&device).expect("counters").peak_used < during.used);
}

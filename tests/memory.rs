//! Host memory of loading, saving and the vocabulary loss, under a counting allocator. A binary of its own: the counter sees every thread.

#[path = "checkpoint/toy.rs"]
#[allow(dead_code, reason = "shared with the main suite")]
mod toy;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::prelude::*;
use burn_flex::Flex;
use burn_moe::checkpoint::{CheckpointSource, LoadOptions, SaveOptions, load, save};
use rand::prelude::*;
use rand::rngs::StdRng;
use safetensors::Dtype;

use toy::{Experts, Folder, Stored};

struct Counting;

static CURRENT: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

fn grow(bytes: usize) {
    let now = CURRENT.fetch_add(bytes, Ordering::Relaxed) + bytes;
    PEAK.fetch_max(now, Ordering::Relaxed);
}

// SAFETY: every call goes to the system allocator with the caller's own arguments; counting touches no memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        grow(layout.size());
        // SAFETY: the caller's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        grow(layout.size());
        // SAFETY: the caller's contract.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        CURRENT.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's contract.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// One test at a time, because the counter is one for all threads.
static TURN: Mutex<()> = Mutex::new(());

/// Largest amount of memory in use during `f`, beyond what was in use before.
fn peak<T>(f: impl FnOnce() -> T) -> (T, usize) {
    let before = CURRENT.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    let result = f();
    (result, PEAK.load(Ordering::Relaxed) - before)
}

const LAYERS: usize = 8;
const EXPERTS: usize = 16;
const WIDTH: usize = 512;
const FUSED: usize = EXPERTS * 2 * WIDTH * WIDTH * 2;
const MODEL: usize = LAYERS * FUSED * 3 / 2;
const BOUND: usize = 2 * FUSED + (64 << 20);

#[derive(Module, Debug)]
struct Big<B: Backend> {
    layers: Vec<BigLayer<B>>,
}

#[derive(Module, Debug)]
struct BigLayer<B: Backend> {
    mixer: BigMixer<B>,
}

#[derive(Module, Debug)]
struct BigMixer<B: Backend> {
    experts: Experts<B>,
}

fn big() -> Big<Flex> {
    let device = Default::default();
    let layer = || BigLayer {
        mixer: BigMixer {
            experts: Experts {
                gate_up_proj: toy::unloaded([EXPERTS, 2 * WIDTH, WIDTH], true, &device),
                down_proj: toy::unloaded([EXPERTS, WIDTH, WIDTH], true, &device),
            },
        },
    };
    Big {
        layers: (0..LAYERS).map(|_| layer()).collect(),
    }
}

/// burn#3598, transformers#47514. Every layer's experts are spread over all shards.
#[test]
fn loading_and_saving_need_little_more_than_the_model() {
    let _turn = TURN.lock().unwrap_or_else(|e| e.into_inner());
    const { assert!(MODEL > BOUND, "a loader that reads everything at once must fail") };
    let dir = tempfile::tempdir().unwrap();
    let mut folder = Folder::new();
    for layer in 0..LAYERS {
        for e in 0..EXPERTS {
            for projection in ["gate_proj", "up_proj", "down_proj"] {
                let tensor = Stored {
                    dtype: Dtype::BF16,
                    shape: vec![WIDTH, WIDTH],
                    bytes: vec![(layer * EXPERTS + e) as u8 & 0x3f; 2 * WIDTH * WIDTH],
                };
                folder.insert(format!("model.layers.{layer}.mixer.experts.{e}.{projection}.weight"), tensor);
            }
        }
    }
    toy::write_shards(dir.path(), &folder, 8, |i, _| i % 8);
    drop(folder);

    let ((source, model), during_load) = peak(|| {
        let source = CheckpointSource::open(dir.path()).unwrap();
        let (model, _) = load(big(), &source, &toy::map(), &LoadOptions::default()).unwrap();
        (source, model)
    });
    assert!(during_load >= MODEL, "{during_load}: the counter misses the model of {MODEL} bytes");
    let extra = during_load - MODEL;
    println!("load: {extra} bytes beyond the model of {MODEL}, bound {BOUND}");
    assert!(extra <= BOUND, "{extra} bytes beyond the model, bound {BOUND}");
    // All threads fill one parameter at a time, in place: nothing is held beside it but names and headers.
    assert!(extra <= FUSED / 4, "{extra} bytes beyond the model, largest tensor {FUSED}");

    let out = tempfile::tempdir().unwrap();
    let options = SaveOptions {
        like: Some(&source),
        max_shard_bytes: 30 << 20,
        ..SaveOptions::default()
    };
    let (_, during_save) = peak(|| save(&model, &toy::map(), out.path(), &options).unwrap());
    println!("save: {during_save} bytes beyond the model, bound {BOUND}");
    assert!(during_save <= BOUND, "{during_save} bytes beyond the model, bound {BOUND}");
}

/// One layer of experts, all of it in the given layout.
fn packed_folder(dir: &std::path::Path, fp8: bool) -> burn_moe::checkpoint::WeightMap {
    use burn_moe::checkpoint::{QuantFormat, Rule, Step, WeightMap};
    let mut folder = Folder::new();
    let mut insert = |name: String, dtype, shape: Vec<usize>, bytes| folder.insert(name, Stored { dtype, shape, bytes });
    let mut map = WeightMap::new([""]);
    for layer in 0..PACKED_LAYERS {
        for (name, rows) in [("gate_up_proj", 2 * WIDTH), ("down_proj", WIDTH)] {
            let name = format!("layers.{layer}.mixer.experts.{name}");
            let weights = rows * WIDTH;
            if fp8 {
                for e in 0..EXPERTS {
                    insert(
                        format!("{name}.{e}"),
                        Dtype::F8_E4M3,
                        vec![rows, WIDTH],
                        vec![0x38 + (e as u8 & 7); weights],
                    );
                    let grid = vec![rows.div_ceil(128), WIDTH.div_ceil(128)];
                    let scales = 0.5f32.to_le_bytes().repeat(grid[0] * grid[1]);
                    insert(format!("{name}.{e}.scale"), Dtype::F32, grid, scales);
                }
            } else {
                let blocks = WIDTH / 32;
                insert(
                    format!("{name}_blocks"),
                    Dtype::U8,
                    vec![EXPERTS, rows, blocks, 16],
                    vec![0x21; EXPERTS * weights / 2],
                );
                insert(
                    format!("{name}_scales"),
                    Dtype::U8,
                    vec![EXPERTS, rows, blocks],
                    vec![127; EXPERTS * rows * blocks],
                );
            }
        }
    }
    for name in ["gate_up_proj", "down_proj"] {
        let target = format!("layers.{{layer}}.mixer.experts.{name}");
        let (sources, format) = match fp8 {
            true => (
                ["{expert}", "{expert}.scale"].map(|s| format!("{target}.{s}")),
                QuantFormat::Fp8 { rows: 128, columns: 128 },
            ),
            false => (["blocks", "scales"].map(|s| format!("{target}_{s}")), QuantFormat::Mxfp4),
        };
        let sources = sources.each_ref().map(String::as_str);
        map = map.rule(
            Rule::experts(&target)
                .stored_as([target.as_str()], [])
                .stored_as(sources, [Step::Dequantise(format)]),
        );
    }
    toy::write_shards(dir, &folder, 3, |i, _| i % 3);
    map
}

const PACKED_LAYERS: usize = 4;

/// Quantised experts are decoded straight into the parameter, by all threads at once: beyond the model itself there is a
/// buffer of rows for each thread, not a decoded expert, and never a second copy of a tensor.
#[test]
fn quantised_loads_need_little_more_than_the_model() {
    let _turn = TURN.lock().unwrap_or_else(|e| e.into_inner());
    const BF16_MODEL: usize = PACKED_LAYERS * FUSED * 3 / 2;
    const EXTRA: usize = FUSED / 4;
    for fp8 in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let map = packed_folder(dir.path(), fp8);
        let mut empty = big();
        empty.layers.truncate(PACKED_LAYERS);
        let (model, used) = peak(|| {
            let source = CheckpointSource::open(dir.path()).unwrap();
            load(empty, &source, &map, &LoadOptions::default()).unwrap().0
        });
        let expected = if fp8 { 0.5 } else { 1.0 };
        let first = model.layers[3].mixer.experts.down_proj.val().slice([0..1, 0..1, 1..2]).into_data();
        assert_eq!(first.convert::<f32>().to_vec::<f32>().unwrap(), [expected], "FP8: {fp8}");
        assert!(used >= BF16_MODEL, "{used}: the counter misses the model of {BF16_MODEL} bytes");
        let extra = used - BF16_MODEL;
        println!("FP8 {fp8}: {extra} bytes beyond the model of {BF16_MODEL}, bound {EXTRA}");
        assert!(
            extra <= EXTRA,
            "FP8 {fp8}: {extra} bytes beyond the model, bound {EXTRA} (largest tensor {FUSED})"
        );
    }
}

/// Sizes in a damaged file are claims: believing one must not cost memory.
#[test]
fn damaged_headers_and_indexes_allocate_little() {
    let _turn = TURN.lock().unwrap_or_else(|e| e.into_inner());
    let dir = tempfile::tempdir().unwrap();
    toy::write_shards(dir.path(), &toy::folder("model."), 2, |i, _| i % 2);
    let mut rng = StdRng::seed_from_u64(5);
    let mut largest = 0;
    for name in ["part-0.safetensors", "model.safetensors.index.json", "config.json"] {
        let path = dir.path().join(name);
        let whole = std::fs::read(&path).unwrap();
        for round in 0..800 {
            let mut bytes = whole.clone();
            // The length of the header first, then digits anywhere.
            let digits: Vec<usize> = (8..bytes.len().min(4000)).filter(|&i| bytes[i].is_ascii_digit()).collect();
            match round % 4 {
                0 => bytes[rng.random_range(0..8)] = rng.random(),
                1 => bytes.truncate(rng.random_range(0..whole.len())),
                _ => {
                    if let Some(&at) = digits.choose(&mut rng) {
                        let many = "9".repeat(rng.random_range(1..18));
                        bytes.splice(at..at, many.bytes());
                    }
                }
            }
            std::fs::write(&path, &bytes).unwrap();
            let (_, bytes) = peak(|| {
                let source = CheckpointSource::open(dir.path())?;
                load(
                    toy::Toy::<Flex>::new(false, toy::E, &Default::default()),
                    &source,
                    &toy::map(),
                    &LoadOptions::default(),
                )
            });
            largest = largest.max(bytes);
        }
        std::fs::write(&path, whole).unwrap();
    }
    assert!(largest < 4 << 20, "{largest} bytes for a checkpoint of a few kilobytes");
}

/// Automodel#3907, #2336. A published vocabulary without a full set of logits (2.5 GB in bf16). All rows are equal, so one
/// row in double precision gives every expected value.
#[test]
fn the_vocabulary_loss_needs_less_than_half_a_gigabyte() {
    use burn::backend::Autodiff;
    use burn::tensor::{FloatDType, Int, Tensor, TensorData};
    use burn_ep_backend::{CrossEntropyDesc, ops::linear_cross_entropy};

    let _turn = TURN.lock().unwrap_or_else(|e| e.into_inner());
    const T: usize = 8192;
    const V: usize = 151_936;
    const D: usize = 8;
    type B = Autodiff<Flex>;
    let device = Default::default();
    let bf16 = |i: usize, scale: f32| half::bf16::from_f32(scale * (1.7 * i as f32).sin()).to_f32();
    let row: Vec<f32> = (0..D).map(|i| bf16(i, 2.0)).collect();
    let weight: Vec<f32> = (0..V * D).map(|i| bf16(i, 1.0)).collect();
    let labels: Vec<i32> = (0..T).map(|t| ((t * 7919) % V) as i32).collect();

    let hidden = Tensor::<B, 2>::from_data(TensorData::new(row.repeat(T), [T, D]), &device).cast(FloatDType::BF16);
    let vocabulary = Tensor::<B, 2>::from_data(TensorData::new(weight.clone(), [V, D]), &device).cast(FloatDType::BF16);
    let (hidden, vocabulary) = (hidden.detach().require_grad(), vocabulary.detach().require_grad());
    let targets = Tensor::<B, 1, Int>::from_data(TensorData::new(labels.clone(), [T]), &device);
    let ((loss, grads), extra) = peak(|| {
        let loss = linear_cross_entropy(hidden.clone(), vocabulary.clone(), targets, &CrossEntropyDesc::default()).unwrap();
        let grads = loss.backward();
        (loss.into_scalar(), grads)
    });
    println!("loss over {V} entries: {extra} bytes");
    assert!(extra < 500_000_000, "{extra} bytes beyond the inputs");

    let logits: Vec<f64> = weight
        .chunks(D)
        .map(|w| w.iter().zip(&row).map(|(w, h)| f64::from(*w) * f64::from(*h)).sum())
        .collect();
    let sum: f64 = logits.iter().map(|l| l.exp()).sum();
    let expected: f64 = labels.iter().map(|l| sum.ln() - logits[*l as usize]).sum();
    assert!((f64::from(loss) / expected - 1.0).abs() < 1e-5, "{loss} for {expected}");

    let list = |t: Tensor<Flex, 2>| t.cast(FloatDType::F32).into_data().to_vec::<f32>().unwrap();
    let grad_hidden = list(hidden.grad(&grads).unwrap());
    let label = labels[T - 1] as usize;
    for d in 0..D {
        let mean: f64 = logits
            .iter()
            .zip(weight.chunks(D))
            .map(|(l, w)| l.exp() / sum * f64::from(w[d]))
            .sum();
        let expected = mean - f64::from(weight[label * D + d]);
        let found = f64::from(grad_hidden[(T - 1) * D + d]);
        assert!(
            (found - expected).abs() < 1e-2,
            "gradient of the last row, channel {d}: {found} for {expected}"
        );
    }
    let grad_vocabulary = list(vocabulary.grad(&grads).unwrap());
    for entry in [0, label, V - 1] {
        let count = labels.iter().filter(|l| **l as usize == entry).count() as f64;
        for d in 0..D {
            let expected = (T as f64 * logits[entry].exp() / sum - count) * f64::from(row[d]);
            let found = f64::from(grad_vocabulary[entry * D + d]);
            assert!(
                (found - expected).abs() < 1e-2 * (1.0 + expected.abs()),
                "gradient of entry {entry}, channel {d}: {found} for {expected}"
            );
        }
    }
}

/// The optimizer in the backward holds the gradients of one block at a time; the update after the backward holds all of them.
#[cfg(not(feature = "cuda"))]
#[test]
fn gradients_of_one_segment_exist_at_a_time() {
    use burn::tensor::FloatDType;
    use burn_moe::backend::{Device, Train};
    use burn_moe::batch::HostBatch;
    use burn_moe::optim::AdamWConfig;
    use burn_moe::train::{Recompute, Schedule, Trainer, TrainerConfig};
    use burn_moe_models::benchmark::Preset;
    use burn_moe_models::{AutoModelForCausalLm, FromConfigOptions};

    let _turn = TURN.lock().unwrap_or_else(|e| e.into_inner());
    // 256 experts of 3 * 48 * 64 in each of 4 blocks: 9.4 MB each in fp32, next to which all else is small.
    let config = Preset::find("tiny_qwen3_moe").unwrap().config(None, Some(256)).unwrap();
    let block = 256 * 3 * 48 * 64 * 4;
    let peak_of = |optimizer_in_backward| {
        let options = FromConfigOptions {
            dtype: Some(FloatDType::F32),
            ..FromConfigOptions::default()
        };
        let model = AutoModelForCausalLm::<Train>::from_config(&config, &options, &Device::default()).unwrap();
        let settings = TrainerConfig {
            steps: 3,
            schedule: Schedule {
                warmup_steps: 0,
                ..Schedule::default()
            },
            optimizer: AdamWConfig::default(),
            recompute: Recompute::All,
            optimizer_in_backward,
            ..TrainerConfig::default()
        };
        let mut trainer = Trainer::<Train, _>::new(model, settings, Device::default(), None).unwrap();
        let ids: Vec<i32> = (0..16).map(|i| i * 31 % 512).collect();
        let batch = HostBatch {
            batch: 1,
            seq: 16,
            labels: ids.clone(),
            input_ids: ids,
            ..HostBatch::default()
        };
        // The first step makes the moments.
        trainer.train_step(std::slice::from_ref(&batch)).unwrap();
        peak(|| trainer.train_step(std::slice::from_ref(&batch)).unwrap()).1
    };
    let (after, within) = (peak_of(false), peak_of(true));
    println!("beyond model and moments: {after} bytes, with the optimizer in the backward {within}; a block has {block}");
    assert!(after >= 4 * block, "{after}: the counter misses the gradients");
    assert!(within >= block && within < 2 * block, "{within} bytes, a block has {block}");
}

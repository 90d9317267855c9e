//! A small model with everything a family can have, and its files written without the library's own writer.

#![allow(non_snake_case, reason = "`A_log` is named as in the checkpoint")]

use std::collections::BTreeMap;
use std::path::Path;

use burn::module::{Module, Param, ParamId};
use burn::tensor::{Shape, Tensor, TensorData, backend::Backend};
use burn_moe::checkpoint::{Rule, Step, WeightMap};
use half::bf16;
use safetensors::{Dtype, SafeTensors, tensor::TensorView};

/// Hidden size, expert width, experts (more than ten, so that the order of names matters), vocabulary.
pub const D: usize = 3;
pub const F: usize = 2;
pub const E: usize = 12;
pub const V: usize = 5;

/// A parameter that must be loaded: initialising it is a failure.
pub fn unloaded<B: Backend, const R: usize>(shape: [usize; R], grad: bool, device: &B::Device) -> Param<Tensor<B, R>> {
    let init = move |_: &B::Device, _| -> Tensor<B, R> { panic!("a parameter of shape {shape:?} was initialised") };
    Param::uninitialized(ParamId::new(), init, device.clone(), grad, Shape::from(shape))
}

#[derive(Module, Debug)]
pub struct Weight<B: Backend> {
    pub weight: Param<Tensor<B, 2>>,
}

#[derive(Module, Debug)]
pub struct Norm<B: Backend> {
    pub weight: Param<Tensor<B, 1>>,
}

#[derive(Module, Debug)]
pub struct Gate<B: Backend> {
    pub weight: Param<Tensor<B, 2>>,
    pub e_score_correction_bias: Param<Tensor<B, 1>>,
}

#[derive(Module, Debug)]
pub struct Experts<B: Backend> {
    pub gate_up_proj: Param<Tensor<B, 3>>,
    pub down_proj: Param<Tensor<B, 3>>,
}

#[derive(Module, Debug)]
pub struct Moe<B: Backend> {
    pub gate: Gate<B>,
    pub experts: Experts<B>,
}

#[derive(Module, Debug)]
pub struct Scan<B: Backend> {
    pub A_log: Param<Tensor<B, 1>>,
    pub up_proj: Weight<B>,
}

#[derive(Module, Debug)]
#[allow(clippy::large_enum_variant, reason = "a test holds two")]
pub enum Mixer<B: Backend> {
    Scan(Scan<B>),
    Moe(Moe<B>),
}

#[derive(Module, Debug)]
pub struct Layer<B: Backend> {
    pub mixer: Mixer<B>,
    pub norm: Norm<B>,
}

#[derive(Module, Debug)]
pub struct Toy<B: Backend> {
    pub embed_tokens: Weight<B>,
    pub layers: Vec<Layer<B>>,
    pub norm: Norm<B>,
    pub lm_head: Option<Weight<B>>,
}

impl<B: Backend> Toy<B> {
    /// Layer 0 is a scan, layer 1 has experts. `held`: experts of this rank.
    pub fn new(tied: bool, held: usize, device: &B::Device) -> Self {
        let matrix = |rows, columns| Weight {
            weight: unloaded([rows, columns], true, device),
        };
        let norm = || Norm {
            weight: unloaded([D], true, device),
        };
        let scan = Scan {
            A_log: unloaded([4], true, device),
            up_proj: matrix(F, D),
        };
        let moe = Moe {
            gate: Gate {
                weight: unloaded([E, D], true, device),
                e_score_correction_bias: unloaded([E], false, device),
            },
            experts: Experts {
                gate_up_proj: unloaded([held, 2 * F, D], true, device),
                down_proj: unloaded([held, D, F], true, device),
            },
        };
        let layers = [Mixer::Scan(scan), Mixer::Moe(moe)]
            .into_iter()
            .map(|mixer| Layer { mixer, norm: norm() });
        Self {
            embed_tokens: matrix(V, D),
            layers: layers.collect(),
            norm: norm(),
            lm_head: (!tied).then(|| matrix(V, D)),
        }
    }

    pub fn moe(&self) -> &Moe<B> {
        match &self.layers[1].mixer {
            Mixer::Moe(moe) => moe,
            Mixer::Scan(_) => panic!("layer 1 has experts"),
        }
    }
}

pub fn map() -> WeightMap {
    let source = |name: &str| format!("{{base}}layers.{{layer}}.mixer.experts.{name}");
    WeightMap::new(["backbone.", "model."])
        .rule(
            Rule::experts("layers.{layer}.mixer.experts.gate_up_proj")
                .stored_as(
                    [
                        source("{expert}.gate_proj.weight").as_str(),
                        source("{expert}.up_proj.weight").as_str(),
                    ],
                    [Step::Concat { axis: 1 }],
                )
                .stored_as([source("gate_up_proj").as_str()], []),
        )
        .rule(
            Rule::experts("layers.{layer}.mixer.experts.down_proj")
                .stored_as([source("{expert}.down_proj.weight").as_str()], [])
                .stored_as([source("down_proj").as_str()], []),
        )
        .rule(Rule::tensor("lm_head.weight").stored_as(["lm_head.weight"], []))
        .rule(Rule::tensor("{path}").stored_as(["{base}{path}"], []))
        .tie("embed_tokens.weight", "lm_head.weight")
        .carry("mtp.{path}")
        .keep_fp32("{path}.A_log")
        .keep_fp32("{path}.e_score_correction_bias")
}

/// A stored tensor.
#[derive(Debug, Clone, PartialEq)]
pub struct Stored {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

/// Tensors by name.
pub type Folder = BTreeMap<String, Stored>;

/// Distinct bf16-exact values that depend on the name only.
pub fn values(name: &str, n: usize) -> Vec<f32> {
    let seed = name.bytes().fold(17u32, |h, b| h.wrapping_mul(31).wrapping_add(b.into()));
    let value = |i: u32| bf16::from_f32((seed.wrapping_add(i.wrapping_mul(2_654_435_761)) >> 8) as f32 / 1e7).to_f32();
    (0..n as u32).map(value).collect()
}

fn stored(name: &str, dtype: Dtype, shape: &[usize]) -> Stored {
    let values = values(name, shape.iter().product());
    Stored {
        dtype,
        shape: shape.to_vec(),
        bytes: match dtype {
            Dtype::BF16 => values.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect(),
            Dtype::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
            _ => values.iter().map(|&v| v as u8).collect(),
        },
    }
}

/// The per-expert layout under the prefix `base`, bf16 with fp32 exceptions, with a tensor the model does not use.
pub fn folder(base: &str) -> Folder {
    let mut folder = Folder::new();
    let mut add = |name: String, dtype: Dtype, shape: &[usize]| {
        let tensor = stored(&name, dtype, shape);
        folder.insert(name, tensor);
    };
    add(format!("{base}embed_tokens.weight"), Dtype::BF16, &[V, D]);
    add("lm_head.weight".into(), Dtype::BF16, &[V, D]);
    add(format!("{base}norm.weight"), Dtype::BF16, &[D]);
    for layer in 0..2 {
        add(format!("{base}layers.{layer}.norm.weight"), Dtype::BF16, &[D]);
    }
    add(format!("{base}layers.0.mixer.A_log"), Dtype::F32, &[4]);
    add(format!("{base}layers.0.mixer.up_proj.weight"), Dtype::BF16, &[F, D]);
    let moe = format!("{base}layers.1.mixer");
    add(format!("{moe}.gate.weight"), Dtype::BF16, &[E, D]);
    add(format!("{moe}.gate.e_score_correction_bias"), Dtype::F32, &[E]);
    for e in 0..E {
        add(format!("{moe}.experts.{e}.gate_proj.weight"), Dtype::BF16, &[F, D]);
        add(format!("{moe}.experts.{e}.up_proj.weight"), Dtype::BF16, &[F, D]);
        add(format!("{moe}.experts.{e}.down_proj.weight"), Dtype::BF16, &[D, F]);
    }
    add("mtp.layers.0.weight".into(), Dtype::F8_E4M3, &[7]);
    folder
}

/// The same weights with stacked experts.
pub fn stacked_folder(base: &str) -> Folder {
    let mut folder = folder(base);
    let moe = format!("{base}layers.1.mixer.experts");
    let (mut gate_up, mut down) = (Vec::new(), Vec::new());
    for e in 0..E {
        let mut take = |projection: &str| folder.remove(&format!("{moe}.{e}.{projection}.weight")).unwrap().bytes;
        gate_up.extend(take("gate_proj"));
        gate_up.extend(take("up_proj"));
        down.extend(take("down_proj"));
    }
    for (name, shape, bytes) in [("gate_up_proj", vec![E, 2 * F, D], gate_up), ("down_proj", vec![E, D, F], down)] {
        let dtype = Dtype::BF16;
        folder.insert(format!("{moe}.{name}"), Stored { dtype, shape, bytes });
    }
    folder
}

pub const CONFIG: &str =
    "{\n    \"model_type\": \"toy\",\n    \"limit\": [0.0, Infinity],\n    \"unknown\": {\"b\": 1e-05, \"a\": []}\n}\n";

/// Writes `config.json` and `model.safetensors`.
pub fn write(dir: &Path, folder: &Folder) {
    std::fs::create_dir_all(dir).unwrap();
    std::fs::write(dir.join("config.json"), CONFIG).unwrap();
    write_file(&dir.join("model.safetensors"), folder.iter());
}

pub fn write_file<'a>(path: &Path, tensors: impl Iterator<Item = (&'a String, &'a Stored)>) {
    let views = tensors.map(|(name, t)| (name, TensorView::new(t.dtype, t.shape.clone(), &t.bytes).unwrap()));
    safetensors::serialize_to_file(views, None, path).unwrap();
}

/// Writes shards; `shard` tells which one a tensor goes to.
pub fn write_shards(dir: &Path, folder: &Folder, shards: usize, shard: impl Fn(usize, &str) -> usize) {
    std::fs::create_dir_all(dir).unwrap();
    std::fs::write(dir.join("config.json"), CONFIG).unwrap();
    let mut weight_map = serde_json::Map::new();
    let mut parts = vec![Folder::new(); shards];
    for (i, (name, tensor)) in folder.iter().enumerate() {
        let shard = shard(i, name);
        weight_map.insert(name.clone(), format!("part-{shard}.safetensors").into());
        parts[shard].insert(name.clone(), tensor.clone());
    }
    for (shard, part) in parts.iter().enumerate() {
        write_file(&dir.join(format!("part-{shard}.safetensors")), part.iter());
    }
    let index = serde_json::json!({"metadata": {"total_size": 0}, "weight_map": weight_map});
    std::fs::write(dir.join("model.safetensors.index.json"), index.to_string()).unwrap();
}

/// Reads a folder with the `safetensors` crate: the index decides which files count.
pub fn read(dir: &Path) -> Folder {
    let mut files = vec!["model.safetensors".to_string()];
    let mut promised = None;
    if !dir.join(&files[0]).exists() {
        let text = std::fs::read_to_string(dir.join("model.safetensors.index.json")).unwrap();
        let index: serde_json::Value = serde_json::from_str(&text).unwrap();
        let map: BTreeMap<String, String> = serde_json::from_value(index["weight_map"].clone()).unwrap();
        files = map.values().cloned().collect();
        files.sort();
        files.dedup();
        promised = Some(map);
    }
    let mut folder = Folder::new();
    for file in files {
        let bytes = std::fs::read(dir.join(&file)).unwrap();
        for (name, view) in SafeTensors::deserialize(&bytes).unwrap().tensors() {
            if let Some(map) = &promised {
                assert_eq!(map.get(&name), Some(&file));
            }
            let tensor = Stored {
                dtype: view.dtype(),
                shape: view.shape().to_vec(),
                bytes: view.data().to_vec(),
            };
            assert!(folder.insert(name, tensor).is_none());
        }
    }
    if let Some(map) = promised {
        assert_eq!(map.len(), folder.len());
    }
    folder
}

/// Values of a parameter as fp32.
pub fn floats(data: TensorData) -> Vec<f32> {
    data.convert::<f32>().to_vec().unwrap()
}

/// Stacked values of layer 1, by a plain loop over the names.
pub fn expected_experts(base: &str, projections: &[&str], experts: std::ops::Range<usize>) -> Vec<f32> {
    let mut all = Vec::new();
    for e in experts {
        for projection in projections {
            all.extend(values(&format!("{base}layers.1.mixer.experts.{e}.{projection}.weight"), F * D));
        }
    }
    all
}

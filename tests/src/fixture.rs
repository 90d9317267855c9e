//! Reads a folder of `tests/fixtures` (see the README there for the tensor names).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use burn_moe::batch::HostBatch;
use half::bf16;
use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;

/// A tensor of a fixture, widened to f32.
#[derive(Debug, Clone, PartialEq)]
pub struct HostTensor {
    pub shape: Vec<usize>,
    pub values: Vec<f32>,
}

/// Two optimizer steps on the same batch.
#[derive(Debug, Clone, Deserialize)]
pub struct Training {
    /// Before the first, between, and after the second step.
    pub losses: Vec<f64>,
    /// Before clipping.
    pub grad_norms: Vec<f64>,
    pub max_grad_norm: f64,
    pub lr: f64,
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    pub weight_decay: f64,
    /// Norm of the change of every parameter over both steps.
    pub change_norms: BTreeMap<String, f64>,
}

/// Scalars of one run of the reference.
#[derive(Debug, Clone, Deserialize)]
pub struct Run {
    pub name: String,
    pub dtype: String,
    pub loss: f64,
    pub aux_loss: Option<f64>,
    pub grad_norm: f64,
    pub num_label_tokens: usize,
    pub train: Option<Training>,
}

/// `expected.json`.
#[derive(Debug, Clone, Deserialize)]
pub struct Expected {
    pub family: String,
    pub case: String,
    pub about: String,
    pub seed: u64,
    pub num_items_in_batch: Option<usize>,
    /// Floor of the Mamba step in the runs other than `no_floor`.
    pub reference_dt_floor: Option<f64>,
    /// None without a router.
    pub min_routing_gap: Option<f64>,
    pub runs: Vec<Run>,
}

/// One fixture: a Hugging Face folder with expected values.
#[derive(Debug, Clone)]
pub struct Fixture {
    pub dir: PathBuf,
    pub expected: Expected,
    tensors: BTreeMap<String, HostTensor>,
}

/// The folder `tests/fixtures`, or `BURN_MOE_FIXTURES` where the tests run without the sources.
pub fn root() -> PathBuf {
    match std::env::var_os("BURN_MOE_FIXTURES") {
        Some(folder) => folder.into(),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures"),
    }
}

/// A file or folder of the examples; `BURN_MOE_ASSETS` replaces the folder.
pub fn asset(name: &str) -> PathBuf {
    match std::env::var_os("BURN_MOE_ASSETS") {
        Some(folder) => PathBuf::from(folder).join(name),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/assets").join(name),
    }
}

/// Names of the families that have fixtures, sorted. Panics when there are none, so that a moved folder is noticed.
pub fn families() -> Vec<String> {
    let entries = std::fs::read_dir(root()).unwrap_or_else(|e| panic!("{}: {e}", root().display()));
    let mut names: Vec<String> = entries
        .map(|entry| entry.expect("readable folder"))
        .filter(|family| family.path().is_dir() && has_cases(&family.path()))
        .map(|family| family.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    assert!(names.len() > 1, "no families in {}", root().display());
    names
}

fn has_cases(family: &Path) -> bool {
    let mut entries = std::fs::read_dir(family).expect("readable folder");
    entries.any(|case| case.expect("readable folder").path().join("expected.json").is_file())
}

/// Names of the fixtures of a family, sorted. Panics when there are none, so that a moved folder is noticed.
pub fn cases(family: &str) -> Vec<String> {
    let dir = root().join(family);
    let mut names: Vec<String> = std::fs::read_dir(&dir)
        .unwrap_or_else(|e| panic!("{}: {e}", dir.display()))
        .map(|entry| entry.expect("readable folder").path())
        .filter(|path| path.join("expected.json").is_file())
        .map(|path| path.file_name().expect("named folder").to_string_lossy().into_owned())
        .collect();
    names.sort();
    assert!(!names.is_empty(), "no fixtures in {}", dir.display());
    names
}

impl Fixture {
    /// Reads `tests/fixtures/<family>/<case>`.
    pub fn open(family: &str, case: &str) -> Self {
        let dir = root().join(family).join(case);
        let read = |name: &str| std::fs::read(dir.join(name)).unwrap_or_else(|e| panic!("{family}/{case}/{name}: {e}"));
        let expected = serde_json::from_slice(&read("expected.json")).expect("expected.json of the documented form");
        let bytes = read("expected.safetensors");
        let file = SafeTensors::deserialize(&bytes).expect("a safetensors file");
        let tensors = file
            .tensors()
            .into_iter()
            .map(|(name, view)| {
                let values = widen(&name, view.dtype(), view.data());
                (
                    name,
                    HostTensor {
                        shape: view.shape().to_vec(),
                        values,
                    },
                )
            })
            .collect();
        Self { dir, expected, tensors }
    }

    /// Scalars of a run. Panics when the fixture does not have it.
    pub fn run(&self, name: &str) -> &Run {
        let found = self.expected.runs.iter().find(|r| r.name == name);
        found.unwrap_or_else(|| panic!("{}: no run {name}", self.dir.display()))
    }

    /// True when the fixture has the run.
    pub fn has_run(&self, name: &str) -> bool {
        self.expected.runs.iter().any(|r| r.name == name)
    }

    /// A tensor by its full name. Panics when it is missing.
    pub fn tensor(&self, name: &str) -> &HostTensor {
        self.tensors
            .get(name)
            .unwrap_or_else(|| panic!("{}: no tensor {name}", self.dir.display()))
    }

    /// Tensors whose name starts with `prefix`, by the rest of their name.
    pub fn tensors_under(&self, prefix: &str) -> BTreeMap<&str, &HostTensor> {
        self.tensors
            .iter()
            .filter_map(|(name, t)| Some((name.strip_prefix(prefix)?, t)))
            .collect()
    }

    /// The batch of the fixture.
    pub fn batch(&self) -> HostBatch {
        let ints = |name: &str| -> Option<Vec<i32>> {
            let tensor = self.tensors.get(&format!("input.{name}"))?;
            Some(tensor.values.iter().map(|&v| v as i32).collect())
        };
        let shape = &self.tensor("input.input_ids").shape;
        HostBatch {
            batch: shape[0],
            seq: shape[1],
            input_ids: ints("input_ids").expect("input_ids"),
            labels: ints("labels").expect("labels"),
            attention_mask: ints("attention_mask").map(|mask| mask.iter().map(|&m| m != 0).collect()),
            position_ids: ints("position_ids"),
            doc_start: ints("doc_start"),
        }
    }
}

fn widen(name: &str, dtype: Dtype, data: &[u8]) -> Vec<f32> {
    let words = |n: usize| data.chunks_exact(n);
    match dtype {
        Dtype::F32 => words(4).map(|b| f32::from_le_bytes(b.try_into().expect("four bytes"))).collect(),
        Dtype::BF16 => words(2)
            .map(|b| bf16::from_le_bytes(b.try_into().expect("two bytes")).to_f32())
            .collect(),
        Dtype::I32 => words(4)
            .map(|b| i32::from_le_bytes(b.try_into().expect("four bytes")) as f32)
            .collect(),
        Dtype::U8 => data.iter().map(|&b| f32::from(b)).collect(),
        other => panic!("{name}: dtype {other:?} does not occur in fixtures"),
    }
}

/// `||a - b|| / ||b||` in f64; the norm of `a` where `b` is zero. A NaN in `a` gives NaN.
pub fn relative_error(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len(), "lengths differ");
    let norm = |it: &mut dyn Iterator<Item = f64>| it.map(|v| v * v).sum::<f64>().sqrt();
    let difference = norm(&mut a.iter().zip(b).map(|(&x, &y)| f64::from(x) - f64::from(y)));
    let size = norm(&mut b.iter().map(|&y| f64::from(y)));
    if size > 0.0 { difference / size } else { difference }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fixture_is_readable_and_consistent() {
        for family in families() {
            for case in cases(&family) {
                let fixture = Fixture::open(&family, &case);
                assert_eq!((&fixture.expected.family, &fixture.expected.case), (&family, &case));
                let batch = fixture.batch();
                batch.validate(1000).unwrap_or_else(|e| panic!("{family}/{case}: {e}"));
                for run in &fixture.expected.runs {
                    assert_eq!(run.num_label_tokens, batch.num_label_tokens(), "{family}/{case}");
                    let grads = fixture.tensors_under(&format!("{}.grad.", run.name));
                    let squares: f64 = grads.values().flat_map(|t| &t.values).map(|&g| f64::from(g).powi(2)).sum();
                    // The recorded norm is that of the gradients in their own dtype.
                    assert!((squares.sqrt() / run.grad_norm - 1.0).abs() < 1e-5, "{family}/{case}: {}", run.name);
                }
            }
        }
    }

    #[test]
    fn relative_error_sees_differences_and_nan() {
        assert!((relative_error(&[3.0, 4.0], &[0.0, 4.0]) - 0.75).abs() < 1e-12);
        assert_eq!(relative_error(&[2.0], &[0.0]), 2.0);
        assert!(relative_error(&[f32::NAN], &[1.0]).is_nan());
    }
}

//! What a load did, or would do.

use std::collections::HashMap;
use std::fmt;
use std::path::PathBuf;

use safetensors::Dtype;

use super::quantise::QuantFormat;

/// Lines per list in the printed report; the lists themselves are complete.
const MAX_LINES: usize = 20;
/// Names compared for suggestions: enough for a renamed layer, bounded for hostile files.
const MAX_COMPARED: usize = 2000;

/// A parameter that gets its values from the checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadedTensor {
    /// Module path.
    pub path: String,
    /// Shape on this rank.
    pub shape: Vec<usize>,
    /// Element type in memory.
    pub dtype: Dtype,
    /// Element type in the file; of the packed weights when they are quantised.
    pub stored: Dtype,
    /// Format from which it is dequantised.
    pub format: Option<QuantFormat>,
    /// Names in the file, with `{expert}` where experts are numbered.
    pub names: Vec<String>,
    /// Tensors of the file it is made of.
    pub sources: usize,
    /// Elements over all expert-parallel ranks.
    pub elements: u64,
    /// Whether axis 0 counts routed experts.
    pub experts: bool,
}

/// A parameter without data in the checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MissingTensor {
    /// Module path.
    pub path: String,
    /// Names that were looked for and are not there.
    pub names: Vec<String>,
    /// The most similar unused name.
    pub suggestion: Option<String>,
}

/// A tensor of the checkpoint that nothing in the model takes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnusedTensor {
    /// Name in the file.
    pub name: String,
    /// The most similar missing name.
    pub suggestion: Option<String>,
}

/// A parameter whose data does not fit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MismatchedTensor {
    /// Module path.
    pub path: String,
    /// Name in the file.
    pub name: String,
    /// What is stored.
    pub found: String,
    /// What the module needs.
    pub expected: String,
}

/// Everything a load did, or would do. Prints itself.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LoadReport {
    /// The folder.
    pub dir: PathBuf,
    /// Parameters with data, in module order.
    pub loaded: Vec<LoadedTensor>,
    /// Parameters without data; they keep their initialisation in partial mode.
    pub missing: Vec<MissingTensor>,
    /// Tensors nothing takes; written back on saving.
    pub unused: Vec<UnusedTensor>,
    /// Tensors the family carries through by design (multi-token prediction heads and the like).
    pub carried: Vec<String>,
    /// Parameters whose data does not fit.
    pub mismatched: Vec<MismatchedTensor>,
    /// What else a reader should know.
    pub notes: Vec<String>,
    /// Bytes read on this rank.
    pub bytes: u64,
}

impl LoadReport {
    /// Whether names and shapes fit exactly.
    pub fn is_exact(&self) -> bool {
        self.missing.is_empty() && self.unused.is_empty() && self.mismatched.is_empty()
    }

    /// Parameters whose element type changes on loading.
    pub fn cast(&self) -> impl Iterator<Item = &LoadedTensor> {
        self.loaded.iter().filter(|t| t.dtype != t.stored)
    }

    /// Parameters over all ranks.
    pub fn num_params(&self) -> u64 {
        self.loaded.iter().map(|t| t.elements).sum()
    }

    /// Parameters of routed experts over all ranks.
    pub fn num_expert_params(&self) -> u64 {
        self.loaded.iter().filter(|t| t.experts).map(|t| t.elements).sum()
    }

    /// Which stored names make up which parameters, one line per kind: parameters that differ only in numbers share one.
    pub fn mapping(&self) -> Vec<String> {
        let lines = self
            .loaded
            .iter()
            .map(|t| without_numbers(&format!("{} <- {}", t.path, t.names.join(" + "))));
        let mut counts: Vec<(String, usize)> = Vec::new();
        for line in lines {
            match counts.iter_mut().find(|(known, _)| *known == line) {
                Some((_, count)) => *count += 1,
                None => counts.push((line, 1)),
            }
        }
        counts
            .into_iter()
            .map(|(line, count)| if count > 1 { format!("{line} ({count} times)") } else { line })
            .collect()
    }

    /// Fill in the "did you mean" of missing and unused names.
    pub(crate) fn suggest(&mut self) {
        let unused: Vec<String> = self.unused.iter().map(|u| u.name.clone()).take(MAX_COMPARED).collect();
        let missing: Vec<String> = self
            .missing
            .iter()
            .filter_map(|m| m.names.first().cloned())
            .take(MAX_COMPARED)
            .collect();
        for tensor in self.missing.iter_mut().take(MAX_LINES) {
            tensor.suggestion = tensor.names.first().and_then(|name| nearest(name, &unused));
        }
        for tensor in self.unused.iter_mut().take(MAX_LINES) {
            tensor.suggestion = nearest(&tensor.name, &missing);
        }
    }
}

impl fmt::Display for LoadReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = self.bytes as f64 / (1 << 20) as f64;
        let sources: usize = self.loaded.iter().map(|t| t.sources).sum();
        writeln!(
            f,
            "{}: {} parameters from {sources} tensors, {mib:.1} MiB",
            self.dir.display(),
            self.loaded.len()
        )?;
        let changed = |t: &LoadedTensor| match t.format {
            Some(format) => format!("{} ({format} -> {})", t.path, t.dtype),
            None => format!("{} ({} -> {})", t.path, t.stored, t.dtype),
        };
        let cast: Vec<String> = self.cast().map(changed).collect();
        list(f, "cast", cast.iter().map(|line| (line.as_str(), None)))?;
        list(f, "carried through", self.carried.iter().map(|name| (name.as_str(), None)))?;
        list(
            f,
            "missing in the checkpoint",
            self.missing
                .iter()
                .flat_map(|m| m.names.iter().map(|n| (n.as_str(), m.suggestion.as_deref()))),
        )?;
        list(
            f,
            "unused by the model",
            self.unused.iter().map(|u| (u.name.as_str(), u.suggestion.as_deref())),
        )?;
        let mismatched: Vec<String> = self
            .mismatched
            .iter()
            .map(|m| format!("{} (for {}): found {}, expected {}", m.name, m.path, m.found, m.expected))
            .collect();
        list(f, "mismatched", mismatched.iter().map(|line| (line.as_str(), None)))?;
        for note in &self.notes {
            writeln!(f, "note: {note}")?;
        }
        Ok(())
    }
}

/// Prints names, those that differ only in numbers on one line.
fn list<'a>(f: &mut fmt::Formatter<'_>, title: &str, names: impl Iterator<Item = (&'a str, Option<&'a str>)>) -> fmt::Result {
    let mut order: Vec<(&str, Option<&str>, usize)> = Vec::new();
    let mut groups: HashMap<String, usize> = HashMap::new();
    let mut total = 0;
    for (name, suggestion) in names {
        total += 1;
        let at = *groups.entry(without_numbers(name)).or_insert_with(|| {
            order.push((name, suggestion, 0));
            order.len() - 1
        });
        order[at].2 += 1;
    }
    if total == 0 {
        return Ok(());
    }
    writeln!(f, "{title} ({total}):")?;
    for (name, suggestion, count) in order.iter().take(MAX_LINES) {
        write!(f, "  {name}")?;
        if *count > 1 {
            write!(f, " and {} more like it", count - 1)?;
        }
        match suggestion {
            Some(suggestion) => writeln!(f, " (did you mean {suggestion}?)")?,
            None => writeln!(f)?,
        }
    }
    if order.len() > MAX_LINES {
        writeln!(f, "  and {} other kinds", order.len() - MAX_LINES)?;
    }
    Ok(())
}

/// The name with every numeric part replaced by `*`.
fn without_numbers(name: &str) -> String {
    let star = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    name.split('.')
        .map(|part| if star(part) { "*" } else { part })
        .collect::<Vec<_>>()
        .join(".")
}

/// The candidate with the smallest edit distance, if it is close enough to be a slip.
fn nearest(name: &str, candidates: &[String]) -> Option<String> {
    let mut limit = name.len() / 3 + 1;
    let mut best = None;
    for candidate in candidates {
        if let Some(distance) = edit_distance(name.as_bytes(), candidate.as_bytes(), limit) {
            best = Some(candidate);
            if distance == 0 {
                break;
            }
            limit = distance - 1;
        }
    }
    best.cloned()
}

/// Levenshtein distance if it is at most `limit`.
fn edit_distance(a: &[u8], b: &[u8], limit: usize) -> Option<usize> {
    if a.len().abs_diff(b.len()) > limit {
        return None;
    }
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        let mut smallest = row[0];
        for (j, y) in b.iter().enumerate() {
            let substituted = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(row[j] + 1).min(diagonal + 1);
            smallest = smallest.min(row[j + 1]);
        }
        if smallest > limit {
            return None;
        }
    }
    (row[b.len()] <= limit).then_some(row[b.len()])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edit_distance_counts_single_letter_changes() {
        let d = |a: &str, b: &str| edit_distance(a.as_bytes(), b.as_bytes(), 10);
        assert_eq!(d("kitten", "sitting"), Some(3));
        assert_eq!(d("", "abc"), Some(3));
        assert_eq!(d("same", "same"), Some(0));
        assert_eq!(edit_distance(b"abcdef", b"ghijkl", 3), None);
    }

    #[test]
    fn renamed_tensors_suggest_each_other() {
        let mut report = LoadReport {
            missing: vec![MissingTensor {
                path: "layers.0.q_proj.weight".into(),
                names: vec!["model.layers.0.q_proj.weight".into()],
                suggestion: None,
            }],
            unused: ["model.layers.1.q_prok.weight", "model.layers.0.q_prok.weight"]
                .map(|name| UnusedTensor {
                    name: name.into(),
                    suggestion: None,
                })
                .to_vec(),
            ..LoadReport::default()
        };
        report.suggest();
        assert_eq!(report.missing[0].suggestion.as_deref(), Some("model.layers.0.q_prok.weight"));
        let text = report.to_string();
        assert!(
            text.contains("model.layers.0.q_proj.weight (did you mean model.layers.0.q_prok.weight?)"),
            "{text}"
        );
        assert!(text.contains("unused by the model (2):"), "{text}");
    }

    #[test]
    fn the_mapping_has_one_line_per_kind() {
        let tensor = |path: &str, names: &[&str]| LoadedTensor {
            path: path.into(),
            shape: vec![1],
            dtype: Dtype::F32,
            stored: Dtype::F32,
            format: None,
            names: names.iter().map(|n| n.to_string()).collect(),
            sources: 1,
            elements: 1,
            experts: false,
        };
        let report = LoadReport {
            loaded: vec![
                tensor("layers.0.up", &["m.layers.0.{expert}.a", "m.layers.0.{expert}.b"]),
                tensor("layers.11.up", &["m.layers.11.{expert}.a", "m.layers.11.{expert}.b"]),
                tensor("norm", &["m.norm"]),
            ],
            ..LoadReport::default()
        };
        let expected = [
            "layers.*.up <- m.layers.*.{expert}.a + m.layers.*.{expert}.b (2 times)",
            "norm <- m.norm",
        ];
        assert_eq!(report.mapping(), expected);
    }

    #[test]
    fn long_lists_are_condensed() {
        let report = LoadReport {
            carried: (0..640)
                .map(|i| format!("mtp.layers.{}.experts.{}.weight", i / 64, i % 64))
                .collect(),
            ..LoadReport::default()
        };
        let text = report.to_string();
        assert!(text.contains("mtp.layers.0.experts.0.weight and 639 more like it"), "{text}");
        assert!(text.lines().count() < 5);
    }
}

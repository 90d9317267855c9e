//! The tensors of a file that make up one parameter: a rule applied to one module path.

use super::mapping::{Layout, Rule};
use super::pattern::{Captures, EXPERT, Pattern};
use super::quantise::QuantFormat;
use super::source::CheckpointSource;
use super::transform::{Step, quantised};

/// One parameter's place in a file, in one layout.
#[derive(Debug, Clone)]
pub(crate) struct Binding {
    patterns: Vec<Pattern>,
    captures: Captures,
    base: String,
    /// Counted in one expert's slab when axis 0 counts experts.
    pub steps: Vec<Step>,
    /// Experts of all ranks, when axis 0 counts them.
    pub experts: Option<usize>,
}

/// One stored tensor, or one entry of its axis 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Piece {
    pub name: String,
    /// None: the whole tensor.
    pub slab: Option<usize>,
}

impl Binding {
    /// `layout` of `rule` for the path that gave `captures`.
    pub fn new(rule: &Rule, layout: &Layout, captures: &Captures, base: &str, experts: usize) -> Self {
        let steps = layout.steps().iter();
        Self {
            patterns: layout.sources().to_vec(),
            captures: captures.clone(),
            base: base.to_string(),
            steps: match rule.is_experts() {
                true => steps.map(|step| step.within_slab()).collect(),
                false => steps.copied().collect(),
            },
            experts: rule.is_experts().then_some(experts),
        }
    }

    /// Layouts of `rule`, preferred one first.
    pub fn all(rule: &Rule, captures: &Captures, base: &str, experts: usize) -> Vec<Self> {
        rule.layouts()
            .iter()
            .map(|layout| Self::new(rule, layout, captures, base, experts))
            .collect()
    }

    /// The format in which weights are packed; None: plain numbers.
    pub fn format(&self) -> Option<QuantFormat> {
        quantised(&self.steps)
    }

    /// Number of source tensors per item.
    pub fn arity(&self) -> usize {
        self.patterns.len()
    }

    /// Items the parameter is assembled from, one after the other: its experts, or itself.
    pub fn items(&self) -> usize {
        self.experts.unwrap_or(1)
    }

    /// The sources of item `item`, in step order.
    pub fn pieces(&self, item: usize) -> Vec<Piece> {
        (0..self.arity()).map(|index| self.piece(item, index)).collect()
    }

    /// Source `index` of item `item`.
    pub fn piece(&self, item: usize, index: usize) -> Piece {
        let pattern = &self.patterns[index];
        Piece {
            name: pattern.fill(&self.captures, &self.base, Some(item)),
            slab: (self.experts.is_some() && !pattern.has(EXPERT)).then_some(item),
        }
    }

    /// Names of all stored tensors, each once.
    pub fn names(&self) -> Vec<String> {
        let mut names = Vec::new();
        for pattern in &self.patterns {
            let per_expert = self.experts.filter(|_| pattern.has(EXPERT));
            match per_expert {
                Some(experts) => names.extend((0..experts).map(|e| pattern.fill(&self.captures, &self.base, Some(e)))),
                None => names.push(pattern.fill(&self.captures, &self.base, None)),
            }
        }
        names
    }

    /// Names of the sources of one item, with `{expert}` where experts are numbered.
    pub fn templates(&self) -> Vec<String> {
        self.patterns
            .iter()
            .map(|pattern| pattern.fill(&self.captures, &self.base, None))
            .collect()
    }

    /// Whether anything of this layout that is not also named by `others` is in the file, be it of any expert.
    fn is_present(&self, source: &CheckpointSource, others: &[&Self]) -> bool {
        self.patterns
            .iter()
            .filter(|pattern| !others.iter().any(|other| other.patterns.contains(pattern)))
            .any(|pattern| match self.experts.filter(|_| pattern.has(EXPERT)) {
                Some(experts) => (0..experts).any(|e| source.contains(&pattern.fill(&self.captures, &self.base, Some(e)))),
                None => source.contains(&pattern.fill(&self.captures, &self.base, None)),
            })
    }
}

/// The layout of a file: the first that is present. A quantised one may share the name of its weights with a plain one, so it
/// is told by the names it has for itself, and looked for first.
pub(crate) fn detect(layouts: &[Binding], source: &CheckpointSource) -> Option<Binding> {
    let (plain, packed): (Vec<&Binding>, Vec<&Binding>) = layouts.iter().partition(|b| b.format().is_none());
    let found = packed.iter().find(|b| b.is_present(source, &plain));
    found
        .or_else(|| plain.iter().find(|b| b.is_present(source, &[])))
        .map(|b| (*b).clone())
}

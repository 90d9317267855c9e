//! Weight names as a table that runs both ways.
//!
//! A [`Rule`] says how one kind of parameter (its *target*, a module path) is stored: as one or several source tensors and
//! the [`Step`]s between them. A rule may list several layouts; loading picks the one whose names are in the file and saving
//! uses that one again, or the first for a model that was built from a config.
//!
//! ```
//! use burn_moe::checkpoint::{Rule, Step, WeightMap};
//!
//! let map = WeightMap::new(["model."])
//!     .rule(
//!         Rule::experts("layers.{layer}.mlp.experts.gate_up_proj")
//!             .stored_as(
//!                 [
//!                     "{base}layers.{layer}.mlp.experts.{expert}.gate_proj.weight",
//!                     "{base}layers.{layer}.mlp.experts.{expert}.up_proj.weight",
//!                 ],
//!                 [Step::Concat { axis: 1 }],
//!             )
//!             .stored_as(["{base}layers.{layer}.mlp.experts.gate_up_proj"], []),
//!     )
//!     .rule(Rule::tensor("lm_head.weight").stored_as(["lm_head.weight"], []))
//!     .rule(Rule::tensor("{path}").stored_as(["{base}{path}"], []))
//!     .tie("embed_tokens.weight", "lm_head.weight");
//! assert!(map.validate().is_ok());
//! ```

use serde_json::Value;

use super::pattern::{BASE, Captures, EXPERT, Pattern};
use super::quantise::QuantFormat;
use super::transform::{Step, quantised};
use crate::error::{Error, Result};

/// One way in which the tensors of a rule are stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    sources: Vec<Pattern>,
    steps: Vec<Step>,
}

impl Layout {
    /// Name patterns of the source tensors, in the order in which the steps take them.
    pub fn sources(&self) -> &[Pattern] {
        &self.sources
    }

    /// Steps from the sources to the target, in order.
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// The format in which its weights are packed; None: plain numbers.
    pub fn format(&self) -> Option<QuantFormat> {
        quantised(&self.steps)
    }
}

/// How one kind of parameter is stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    target: Pattern,
    experts: bool,
    layouts: Vec<Layout>,
}

impl Rule {
    /// Rule for the parameters whose module path fits `target`.
    pub fn tensor(target: &str) -> Self {
        Self {
            target: Pattern::new(target),
            experts: false,
            layouts: Vec::new(),
        }
    }

    /// Rule for stacked expert parameters: axis 0 of the target counts the experts, and is the axis that expert parallelism
    /// shards. Sources with `{expert}` in their name hold one expert each and are stacked; sources without it are stacked in
    /// the file as well. The steps run on one expert at a time, with axes counted in the target, so axis 0 is out of reach.
    pub fn experts(target: &str) -> Self {
        Self {
            experts: true,
            ..Self::tensor(target)
        }
    }

    /// Add a layout: the source names and the steps that turn them into the target. The first one added is the one written
    /// for models built from a config.
    ///
    /// A layout that begins with [`Step::Dequantise`] takes pairs of sources, weights and scales. A file has it when a name is
    /// there that only such layouts have, whatever the order; it is written only on request (`SaveOptions::quantised`).
    pub fn stored_as<'a>(mut self, sources: impl IntoIterator<Item = &'a str>, steps: impl IntoIterator<Item = Step>) -> Self {
        self.layouts.push(Layout {
            sources: sources.into_iter().map(Pattern::new).collect(),
            steps: steps.into_iter().collect(),
        });
        self
    }

    /// Pattern of the module paths.
    pub fn target(&self) -> &Pattern {
        &self.target
    }

    /// Whether axis 0 of the target counts experts.
    pub fn is_experts(&self) -> bool {
        self.experts
    }

    /// The layouts, preferred one first.
    pub fn layouts(&self) -> &[Layout] {
        &self.layouts
    }

    fn problem(&self) -> Option<String> {
        if let Some(lacks) = self.target.problem() {
            return Some(format!("the target needs {lacks}"));
        }
        if self.target.has(BASE) || self.target.has(EXPERT) {
            return Some("{base} and {expert} belong into source names".into());
        }
        if self.layouts.is_empty() {
            return Some("at least one layout (stored_as)".into());
        }
        if self.layouts.iter().all(|layout| layout.format().is_some()) {
            return Some("a layout that is not quantised".into());
        }
        for layout in &self.layouts {
            if layout.sources.is_empty() {
                return Some("at least one source name in every layout".into());
            }
            for source in &layout.sources {
                if let Some(lacks) = source.problem() {
                    return Some(format!("the source `{source}` needs {lacks}"));
                }
                if source.has(EXPERT) && !self.experts {
                    return Some(format!("the source `{source}` has {{expert}}, which needs Rule::experts"));
                }
                if let Some(unknown) = source.placeholders().find(|p| ![BASE, EXPERT].contains(p) && !self.target.has(p)) {
                    return Some(format!("`{{{unknown}}}` of the source `{source}` is not in the target"));
                }
            }
            if layout.steps.iter().skip(1).any(|step| step.format().is_some()) {
                return Some("Dequantise as the first step, or not at all".into());
            }
            let tensors = match layout.format() {
                Some(_) if !layout.sources.len().is_multiple_of(2) => {
                    return Some("a name of scales after every name of packed weights".into());
                }
                Some(_) => layout.sources.len() / 2,
                None => layout.sources.len(),
            };
            if tensors > 1 && !layout.steps.iter().any(Step::merges) {
                return Some("a step that merges several sources into one".into());
            }
            if self.experts && layout.steps.iter().any(|step| step.touches_axis(0)) {
                return Some("steps beyond axis 0, which counts experts".into());
            }
        }
        None
    }
}

/// Names, layouts and policies of one model family.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WeightMap {
    bases: Vec<String>,
    rules: Vec<Rule>,
    carried: Vec<Pattern>,
    carried_from: Vec<(Pattern, String, u64)>,
    carried_pairs: Vec<(Pattern, Pattern, QuantFormat)>,
    keep_fp32: Vec<Pattern>,
    tie: Option<(String, String)>,
    quantization_config: Option<Value>,
}

impl WeightMap {
    /// Empty table. `bases` are the prefixes `{base}` may stand for; the first is written for models built from a config.
    pub fn new<'a>(bases: impl IntoIterator<Item = &'a str>) -> Self {
        Self {
            bases: bases.into_iter().map(str::to_string).collect(),
            rules: Vec::new(),
            carried: Vec::new(),
            carried_from: Vec::new(),
            carried_pairs: Vec::new(),
            keep_fp32: Vec::new(),
            tie: None,
            quantization_config: None,
        }
    }

    /// Add a rule. The first rule whose target fits a module path is used.
    pub fn rule(mut self, rule: Rule) -> Self {
        self.rules.push(rule);
        self
    }

    /// Source names that the model does not use by design (`mtp.{path}`): not reported as unused, written back on saving.
    pub fn carry(mut self, source: &str) -> Self {
        self.carried.push(Pattern::new(source));
        self
    }

    /// As [`WeightMap::carry`], but only names in which the number `placeholder` stands for is at least `first`:
    /// `carry_from("model.layers.{layer}.{path}", "layer", 61)` for the prediction layers behind a model of 61 layers.
    pub fn carry_from(mut self, source: &str, placeholder: &str, first: usize) -> Self {
        self.carried_from
            .push((Pattern::new(source), placeholder.to_string(), first as u64));
        self
    }

    /// Carried tensors with these names are the weights and scales of quantised matrices (`{path}.weight` and
    /// `{path}.weight_scale_inv`): a plain save decodes them as it does the parameters.
    pub fn carry_quantised(mut self, weights: &str, scales: &str, format: QuantFormat) -> Self {
        self.carried_pairs.push((Pattern::new(weights), Pattern::new(scales), format));
        self
    }

    /// Module paths that stay fp32 whatever dtype is asked for. Files get their stored dtype back.
    pub fn keep_fp32(mut self, target: &str) -> Self {
        self.keep_fp32.push(Pattern::new(target));
        self
    }

    /// Module path `other` (the output head) may share the tensor of `kept` (the embedding). A module without a parameter at
    /// `other` takes `kept` from whichever of the two is in the file.
    pub fn tie(mut self, kept: &str, other: &str) -> Self {
        self.tie = Some((kept.to_string(), other.to_string()));
        self
    }

    /// `quantization_config` of files that hold quantised layouts, for a save that turns a plain model into one. A checkpoint
    /// that has the field keeps its own.
    pub fn quantization_config(mut self, value: Value) -> Self {
        self.quantization_config = Some(value);
        self
    }

    /// What [`WeightMap::quantization_config`] set.
    pub(crate) fn quantised_config(&self) -> Option<&Value> {
        self.quantization_config.as_ref()
    }

    /// Prefixes `{base}` may stand for.
    pub fn bases(&self) -> &[String] {
        &self.bases
    }

    /// The rules, in order of precedence.
    pub fn rules(&self) -> &[Rule] {
        &self.rules
    }

    /// The tied pair `(kept, other)`.
    pub fn tied(&self) -> Option<(&str, &str)> {
        self.tie.as_ref().map(|(kept, other)| (kept.as_str(), other.as_str()))
    }

    /// First rule that fits a module path, with its index and what the placeholders stand for.
    pub fn find(&self, path: &str) -> Option<(usize, &Rule, Captures)> {
        self.rules
            .iter()
            .enumerate()
            .find_map(|(index, rule)| rule.target.captures(path).map(|captures| (index, rule, captures)))
    }

    /// Whether a source name is carried through by design.
    pub fn is_carried(&self, source: &str) -> bool {
        let far_enough = |(pattern, placeholder, first): &(Pattern, String, u64)| {
            let captures = pattern.captures(source).unwrap_or_default();
            captures
                .iter()
                .any(|(key, value)| key == placeholder && value.parse::<u64>().is_ok_and(|n| n >= *first))
        };
        self.carried.iter().any(|p| p.is_match(source)) || self.carried_from.iter().any(far_enough)
    }

    /// Names of the weights and scales that a carried name belongs to, and their format.
    pub(crate) fn carried_pair(&self, source: &str) -> Option<([String; 2], QuantFormat)> {
        self.carried_pairs.iter().find_map(|(weights, scales, format)| {
            let captures = scales.captures(source).or_else(|| weights.captures(source))?;
            let names = [weights, scales].map(|pattern| pattern.fill(&captures, "", None));
            Some((names, *format))
        })
    }

    /// Whether a module path stays fp32.
    pub fn is_kept_fp32(&self, path: &str) -> bool {
        self.keep_fp32.iter().any(|p| p.is_match(path))
    }

    /// Checks the table itself: [`Error::Config`] names the rule and what it lacks.
    pub fn validate(&self) -> Result<()> {
        let bad = |field: String, found: &str, expected: String| Err(Error::config(field, format!("`{found}`"), expected));
        for rule in &self.rules {
            if let Some(expected) = rule.problem() {
                return bad("weight map rule".into(), rule.target.as_str(), expected);
            }
            let uses_base = rule.layouts.iter().flat_map(|l| &l.sources).any(|s| s.has(BASE));
            if uses_base && self.bases.is_empty() {
                return bad(
                    "weight map rule".into(),
                    rule.target.as_str(),
                    "at least one base for {base}".into(),
                );
            }
        }
        let from = self.carried_from.iter().map(|(pattern, ..)| pattern);
        let pairs = self.carried_pairs.iter().flat_map(|(weights, scales, _)| [weights, scales]);
        for pattern in self.carried.iter().chain(from).chain(pairs).chain(&self.keep_fp32) {
            if let Some(lacks) = pattern.problem() {
                return bad("weight map pattern".into(), pattern.as_str(), lacks.into());
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> WeightMap {
        WeightMap::new(["backbone.", "model."])
            .rule(
                Rule::experts("layers.{layer}.mixer.experts.up_proj")
                    .stored_as(["{base}layers.{layer}.mixer.experts.{expert}.up_proj.weight"], [])
                    .stored_as(["{base}layers.{layer}.mixer.experts.up_proj"], []),
            )
            .rule(Rule::tensor("{path}").stored_as(["{base}{path}"], []))
            .carry("mtp.{path}")
            .keep_fp32("{path}.A_log")
    }

    #[test]
    fn first_fitting_rule_wins() {
        let map = table();
        map.validate().unwrap();
        let (index, rule, captures) = map.find("layers.3.mixer.experts.up_proj").unwrap();
        assert_eq!((index, rule.is_experts()), (0, true));
        let name = rule.layouts()[0].sources()[0].fill(&captures, "backbone.", Some(11));
        assert_eq!(name, "backbone.layers.3.mixer.experts.11.up_proj.weight");
        assert_eq!(map.find("layers.3.mixer.experts.down_proj").unwrap().0, 1);
        assert!(map.is_carried("mtp.layers.0.weight") && !map.is_carried("backbone.mtp"));
        assert!(map.is_kept_fp32("layers.0.mixer.A_log") && !map.is_kept_fp32("layers.0.mixer.D"));
    }

    #[test]
    fn layers_behind_the_last_are_carried() {
        let map = table().carry_from("model.layers.{layer}.{path}", "layer", 3);
        map.validate().unwrap();
        assert!(map.is_carried("model.layers.3.eh_proj.weight") && map.is_carried("model.layers.12.mlp.gate.weight"));
        assert!(!map.is_carried("model.layers.2.eh_proj.weight") && !map.is_carried("model.layers.03.eh_proj.weight"));
        assert!(!map.is_carried("layers.3.eh_proj.weight") && map.is_carried("mtp.x"));
    }

    #[test]
    fn malformed_rules_are_named() {
        let plain = || Rule::tensor("a").stored_as(["a"], []);
        let cases = [
            (Rule::tensor("a"), "at least one layout"),
            (Rule::tensor("a").stored_as([], []), "at least one source name"),
            (Rule::tensor("a").stored_as(["b.{expert}"], []), "Rule::experts"),
            (Rule::tensor("a.{layer}").stored_as(["b.{block}"], []), "`{block}`"),
            (Rule::tensor("a").stored_as(["b", "c"], []), "merges several sources"),
            (
                Rule::experts("a").stored_as(["b.{expert}"], [Step::Transpose { axes: (0, 1) }]),
                "beyond axis 0",
            ),
            (Rule::tensor("{base}a").stored_as(["b"], []), "source names"),
            (
                Rule::tensor("a").stored_as(["b", "s"], [Step::Dequantise(QuantFormat::Mxfp4)]),
                "not quantised",
            ),
            (plain().stored_as(["b"], [Step::Dequantise(QuantFormat::Mxfp4)]), "name of scales"),
            (
                plain().stored_as(["b", "s"], [Step::Transpose { axes: (0, 1) }, Step::Dequantise(QuantFormat::Mxfp4)]),
                "first step",
            ),
            (
                plain().stored_as(["b", "s", "c", "t"], [Step::Dequantise(QuantFormat::Mxfp4)]),
                "merges several sources",
            ),
        ];
        for (rule, why) in cases {
            let text = WeightMap::new(["model."]).rule(rule).validate().unwrap_err().to_string();
            assert!(text.contains(why), "{text}");
        }
        let no_base = WeightMap::new([]).rule(Rule::tensor("a").stored_as(["{base}a"], []));
        assert!(no_base.validate().unwrap_err().to_string().contains("at least one base"));
    }
}

//! Weight names with placeholders: `layers.{layer}.mlp.experts.{expert}.up_proj.weight`.
//!
//! `{path}` stands for any non-empty text, `{base}` for the base prefix of the checkpoint (`model.`, `backbone.`), every other
//! placeholder for a decimal number without leading zeros.

use std::fmt;

/// Placeholder that numbers the experts of a layer.
pub(crate) const EXPERT: &str = "expert";
/// Placeholder for the base prefix of a checkpoint.
pub(crate) const BASE: &str = "base";
const PATH: &str = "path";

#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    Literal(String),
    Number(String),
    Text(String),
}

/// A name with placeholders.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pattern {
    text: String,
    parts: Vec<Part>,
    problem: Option<&'static str>,
}

/// What the placeholders of a pattern stand for in one name.
pub type Captures = Vec<(String, String)>;

impl Pattern {
    /// Parse a pattern. A malformed one is reported when its table is used ([`Pattern::problem`]).
    pub fn new(text: impl Into<String>) -> Self {
        let text = text.into();
        let mut parts = Vec::new();
        let mut problem = None;
        let mut rest = text.as_str();
        while let Some(open) = rest.find('{') {
            let Some(len) = rest[open..].find('}') else {
                problem = Some("a closing brace for every opening one");
                break;
            };
            if open > 0 {
                parts.push(Part::Literal(rest[..open].to_string()));
            }
            let name = &rest[open + 1..open + len];
            parts.push(match name {
                "" => {
                    problem = Some("a name between the braces");
                    Part::Literal(String::new())
                }
                PATH => Part::Text(name.to_string()),
                _ => Part::Number(name.to_string()),
            });
            rest = &rest[open + len + 1..];
        }
        if !rest.is_empty() {
            parts.push(Part::Literal(rest.to_string()));
        }
        if text.is_empty() {
            problem = Some("a non-empty name");
        }
        Self { text, parts, problem }
    }

    /// The pattern as written.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// What a malformed pattern lacks.
    pub fn problem(&self) -> Option<&'static str> {
        self.problem
    }

    /// Whether the pattern holds the placeholder `name`.
    pub fn has(&self, name: &str) -> bool {
        self.placeholders().any(|p| p == name)
    }

    /// Names of the placeholders, in order.
    pub fn placeholders(&self) -> impl Iterator<Item = &str> {
        self.parts.iter().filter_map(|part| match part {
            Part::Literal(_) => None,
            Part::Number(name) | Part::Text(name) => Some(name.as_str()),
        })
    }

    /// What the placeholders stand for if the whole of `name` fits. `{base}` never fits: see [`Pattern::with_base`].
    pub fn captures(&self, name: &str) -> Option<Captures> {
        let mut captures = Captures::new();
        fits(&self.parts, name, &mut captures).then_some(captures)
    }

    /// Whether the whole of `name` fits.
    pub fn is_match(&self, name: &str) -> bool {
        self.captures(name).is_some()
    }

    /// The same pattern with `{base}` replaced.
    pub fn with_base(&self, base: &str) -> Self {
        Self::new(self.text.replace("{base}", base))
    }

    /// The name in which the placeholders stand for `captures`, `base` and `expert`; a placeholder without a value stays.
    pub fn fill(&self, captures: &Captures, base: &str, expert: Option<usize>) -> String {
        let mut name = String::with_capacity(self.text.len() + 8);
        for part in &self.parts {
            match part {
                Part::Literal(text) => name.push_str(text),
                Part::Number(key) | Part::Text(key) => match (key.as_str(), expert) {
                    (BASE, _) => name.push_str(base),
                    (EXPERT, Some(expert)) => name.push_str(&expert.to_string()),
                    _ => match captures.iter().find(|(k, _)| k == key) {
                        Some((_, value)) => name.push_str(value),
                        None => name.push_str(&format!("{{{key}}}")),
                    },
                },
            }
        }
        name
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

fn fits(parts: &[Part], name: &str, captures: &mut Captures) -> bool {
    let Some((first, rest)) = parts.split_first() else {
        return name.is_empty();
    };
    match first {
        Part::Literal(text) => name.strip_prefix(text.as_str()).is_some_and(|tail| fits(rest, tail, captures)),
        Part::Number(key) => {
            let digits = name.bytes().take_while(u8::is_ascii_digit).count();
            let number = &name[..digits];
            // `01` and `1` would be two names for one expert, and only the second can be written back.
            if digits == 0 || digits > 9 || (digits > 1 && number.starts_with('0')) {
                return false;
            }
            captures.push((key.clone(), number.to_string()));
            fits(rest, &name[digits..], captures) || {
                captures.pop();
                false
            }
        }
        Part::Text(key) => {
            for end in (1..=name.len()).rev().filter(|&end| name.is_char_boundary(end)) {
                captures.push((key.clone(), name[..end].to_string()));
                if fits(rest, &name[end..], captures) {
                    return true;
                }
                captures.pop();
            }
            false
        }
    }
}

/// Order in which expert 2 precedes expert 10: dot-separated parts, numbers compared by value.
pub(crate) fn natural_order(a: &str, b: &str) -> std::cmp::Ordering {
    let key = |part: &str| part.parse::<u64>().ok();
    let mut left = a.split('.');
    let mut right = b.split('.');
    loop {
        let order = match (left.next(), right.next()) {
            (None, None) => return a.cmp(b),
            (None, Some(_)) => return std::cmp::Ordering::Less,
            (Some(_), None) => return std::cmp::Ordering::Greater,
            (Some(l), Some(r)) => match (key(l), key(r)) {
                (Some(l), Some(r)) => l.cmp(&r),
                _ => l.cmp(r),
            },
        };
        if order.is_ne() {
            return order;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_text_are_captured_and_filled_back() {
        let pattern = Pattern::new("layers.{layer}.experts.{expert}.up_proj.weight");
        let name = "layers.12.experts.3.up_proj.weight";
        let captures = pattern.captures(name).unwrap();
        assert_eq!(captures, [("layer".into(), "12".into()), ("expert".into(), "3".into())]);
        assert_eq!(pattern.fill(&captures, "", None), name);
        assert_eq!(pattern.fill(&captures, "", Some(7)), "layers.12.experts.7.up_proj.weight");
        let layer = captures[..1].to_vec();
        assert_eq!(pattern.fill(&layer, "", None), "layers.12.experts.{expert}.up_proj.weight");
        assert!(!pattern.is_match("layers.x.experts.3.up_proj.weight"));
        assert!(!pattern.is_match("layers.12.experts.03.up_proj.weight"));
        assert!(!pattern.is_match("layers.12.experts.3.up_proj.weights"));
    }

    #[test]
    fn path_takes_as_much_as_the_rest_allows() {
        let pattern = Pattern::new("{path}.A_log");
        assert_eq!(pattern.captures("layers.0.A_log.A_log").unwrap()[0].1, "layers.0.A_log");
        assert!(!pattern.is_match(".A_log"));
        assert!(Pattern::new("mtp.{path}").is_match("mtp.é.ü"));
        assert_eq!(
            Pattern::new("{base}{path}").fill(&vec![("path".into(), "norm".into())], "model.", None),
            "model.norm"
        );
    }

    #[test]
    fn malformed_patterns_say_what_is_missing() {
        for text in ["a.{b", "a.{}.c", ""] {
            assert!(Pattern::new(text).problem().is_some(), "{text}");
        }
        assert!(Pattern::new("a.{b}.c").problem().is_none());
    }

    #[test]
    fn natural_order_compares_numbers_by_value() {
        let mut names = ["l.10.a", "l.2.b", "l.2.a", "l", "l.x"];
        names.sort_by(|a, b| natural_order(a, b));
        assert_eq!(names, ["l", "l.2.a", "l.2.b", "l.10.a", "l.x"]);
    }
}

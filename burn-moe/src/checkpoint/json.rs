//! `config.json`, written back as it came: unknown keys, their order, the indentation and the way non-finite numbers are
//! spelled survive a round trip, and an unchanged file keeps its bytes.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::error::{Error, Result};

/// Larger files are refused before they are read.
const MAX_CONFIG_BYTES: u64 = 16 << 20;
const FLOAT_KEY: &str = "__float__";

/// A JSON object with its spelling.
///
/// Non-finite numbers appear as `{"__float__": "Infinity"}` in the values, however the file spells them; see [`as_f64`].
#[derive(Debug, Clone, PartialEq)]
pub struct ConfigJson {
    path: PathBuf,
    text: String,
    original: Map<String, Value>,
    fields: Map<String, Value>,
    bare_nonfinite: bool,
    indent: usize,
}

impl ConfigJson {
    /// Read a file. Errors are [`Error::Io`] and [`Error::Checkpoint`].
    pub fn read(path: &Path) -> Result<Self> {
        let text = read_text(path, MAX_CONFIG_BYTES)?;
        Self::parse(path, text)
    }

    /// Parse a text; `path` only names it in errors.
    pub fn parse(path: impl Into<PathBuf>, text: String) -> Result<Self> {
        let path = path.into();
        let (json, bare_nonfinite) = quote_nonfinite(&text);
        let value: Value =
            serde_json::from_str(&json).map_err(|e| Error::checkpoint(&path, "JSON", format!("a syntax error ({e})"), "a JSON object"))?;
        let Value::Object(fields) = value else {
            return Err(Error::checkpoint(&path, "JSON", kind(&value), "a JSON object"));
        };
        let indent = text
            .lines()
            .nth(1)
            .map(|line| line.len() - line.trim_start_matches(' ').len())
            .filter(|&n| n > 0)
            .unwrap_or(2);
        Ok(Self {
            path,
            text,
            original: fields.clone(),
            fields,
            bare_nonfinite,
            indent,
        })
    }

    /// A config that comes from no file.
    pub fn from_fields(fields: Map<String, Value>) -> Self {
        Self {
            path: PathBuf::from("config.json"),
            text: String::new(),
            original: Map::new(),
            fields,
            bare_nonfinite: false,
            indent: 2,
        }
    }

    /// File it was read from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All fields, in file order.
    pub fn fields(&self) -> &Map<String, Value> {
        &self.fields
    }

    /// All fields as one value, e.g. for `serde_json::from_value`.
    pub fn to_value(&self) -> Value {
        Value::Object(self.fields.clone())
    }

    /// One field.
    pub fn get(&self, field: &str) -> Option<&Value> {
        self.fields.get(field)
    }

    /// Set a field; a new one goes to the end.
    pub fn set(&mut self, field: impl Into<String>, value: impl Into<Value>) {
        self.fields.insert(field.into(), value.into());
    }

    /// Remove a field, keeping the order of the others.
    pub fn remove(&mut self, field: &str) -> Option<Value> {
        self.fields.shift_remove(field)
    }

    /// `model_type`, the name of the family.
    pub fn model_type(&self) -> Result<&str> {
        self.string("model_type")
    }

    /// A field that must be a string.
    pub fn string(&self, field: &str) -> Result<&str> {
        match self.get(field) {
            Some(Value::String(text)) => Ok(text),
            Some(other) => Err(Error::checkpoint(&self.path, format!("field `{field}`"), other, "a string")),
            None => Err(Error::checkpoint(&self.path, format!("field `{field}`"), "nothing", "a string")),
        }
    }

    /// Text to write: the original bytes if nothing changed, else the fields in the style of the original.
    pub fn to_text(&self) -> String {
        if !self.text.is_empty() && self.fields == self.original {
            return self.text.clone();
        }
        let mut out = Vec::new();
        let indent = " ".repeat(self.indent);
        let formatter = serde_json::ser::PrettyFormatter::with_indent(indent.as_bytes());
        let mut serializer = serde_json::Serializer::with_formatter(&mut out, formatter);
        // Writing a `Value` into a `Vec` cannot fail: its keys are strings and the writer never errs.
        serde::Serialize::serialize(&self.fields, &mut serializer).expect("a JSON value is writable");
        let mut text = String::from_utf8(out).expect("JSON is UTF-8");
        if self.bare_nonfinite {
            text = unquote_nonfinite(&text);
        }
        text.push('\n');
        text
    }
}

/// A number that may be non-finite: JSON numbers and `{"__float__": "Infinity" | "-Infinity" | "NaN"}`.
pub fn as_f64(value: &Value) -> Option<f64> {
    match value {
        Value::Number(number) => number.as_f64(),
        Value::Object(fields) if fields.len() == 1 => match fields.get(FLOAT_KEY)?.as_str()? {
            "Infinity" => Some(f64::INFINITY),
            "-Infinity" => Some(f64::NEG_INFINITY),
            "NaN" => Some(f64::NAN),
            _ => None,
        },
        _ => None,
    }
}

/// The inverse of [`as_f64`].
pub fn from_f64(value: f64) -> Value {
    match serde_json::Number::from_f64(value) {
        Some(number) => Value::Number(number),
        None => {
            let name = match value {
                v if v.is_nan() => "NaN",
                v if v > 0.0 => "Infinity",
                _ => "-Infinity",
            };
            Value::Object(Map::from_iter([(FLOAT_KEY.to_string(), Value::String(name.into()))]))
        }
    }
}

/// Whole text of a file of at most `limit` bytes.
pub(crate) fn read_text(path: &Path, limit: u64) -> Result<String> {
    let size = std::fs::metadata(path).map_err(|e| Error::io(path, "read", e))?.len();
    if size > limit {
        return Err(Error::checkpoint(
            path,
            "file size",
            format!("{size} bytes"),
            format!("at most {limit}"),
        ));
    }
    let bytes = std::fs::read(path).map_err(|e| Error::io(path, "read", e))?;
    String::from_utf8(bytes).map_err(|e| Error::checkpoint(path, "text", format!("a byte that is not UTF-8 ({e})"), "UTF-8"))
}

/// What a JSON value is, for error messages.
pub(crate) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// Replaces the bare tokens `Infinity`, `-Infinity` and `NaN` outside strings by their quoted form; tells whether there were any.
fn quote_nonfinite(text: &str) -> (String, bool) {
    let mut out = String::with_capacity(text.len());
    let mut found = false;
    let mut rest = text;
    let mut in_string = false;
    while let Some(c) = rest.chars().next() {
        if in_string {
            let taken = if c == '\\' {
                1 + rest[1..].chars().next().map_or(0, char::len_utf8)
            } else {
                in_string = c != '"';
                c.len_utf8()
            };
            out.push_str(&rest[..taken]);
            rest = &rest[taken..];
            continue;
        }
        if let Some(token) = ["-Infinity", "Infinity", "NaN"].into_iter().find(|t| rest.starts_with(t)) {
            out.push_str(&format!("{{\"{FLOAT_KEY}\": \"{token}\"}}"));
            found = true;
            rest = &rest[token.len()..];
            continue;
        }
        in_string = c == '"';
        out.push(c);
        rest = &rest[c.len_utf8()..];
    }
    (out, found)
}

/// The inverse of [`quote_nonfinite`] on pretty-printed text.
fn unquote_nonfinite(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    let open = format!("\"{FLOAT_KEY}\": \"");
    while let Some(at) = rest.find(&open) {
        let tail = &rest[at + open.len()..];
        let token = ["-Infinity", "Infinity", "NaN"]
            .into_iter()
            .find(|t| tail.starts_with(&format!("{t}\"")));
        let brace = rest[..at].trim_end().strip_suffix('{');
        match (token, brace) {
            (Some(token), Some(before)) if tail[token.len() + 1..].trim_start().starts_with('}') => {
                out.push_str(before);
                out.push_str(token);
                let closed = tail[token.len() + 1..].trim_start();
                rest = &closed[1..];
            }
            _ => {
                out.push_str(&rest[..at + open.len()]);
                rest = tail;
            }
        }
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> ConfigJson {
        ConfigJson::parse("config.json", text.to_string()).unwrap()
    }

    #[test]
    fn unchanged_text_keeps_its_bytes() {
        let text = "{\n    \"b\": 1e-05,\n  \"a\" : [0.0, Infinity],\n\"odd\": \"NaN, \\\"-Infinity\\\"\"}";
        let config = parse(text);
        assert_eq!(config.to_text(), text);
        assert_eq!(as_f64(&config.get("a").unwrap()[1]), Some(f64::INFINITY));
        assert_eq!(config.string("odd").unwrap(), "NaN, \"-Infinity\"");
    }

    #[test]
    fn changes_keep_order_unknown_keys_and_spelling() {
        let mut config = parse("{\n  \"z\": 1,\n  \"limit\": [0.0, Infinity],\n  \"low\": -Infinity,\n  \"x\": {\"unknown\": null}\n}\n");
        config.set("dtype", "bfloat16");
        config.set("z", 2);
        let text = config.to_text();
        let expected = "{\n  \"z\": 2,\n  \"limit\": [\n    0.0,\n    Infinity\n  ],\n  \"low\": -Infinity,\n  \"x\": {\n    \"unknown\": null\n  },\n  \"dtype\": \"bfloat16\"\n}\n";
        assert_eq!(text, expected);
        let mut quoted = parse("{\n  \"low\": {\"__float__\": \"-Infinity\"}\n}");
        assert_eq!(as_f64(quoted.get("low").unwrap()), Some(f64::NEG_INFINITY));
        quoted.set("a", from_f64(f64::NAN));
        assert!(quoted.to_text().contains("\"__float__\": \"NaN\""));
    }

    #[test]
    fn floats_convert_both_ways() {
        for value in [0.5, -3.0, f64::INFINITY, f64::NEG_INFINITY] {
            assert_eq!(as_f64(&from_f64(value)), Some(value));
        }
        assert!(as_f64(&from_f64(f64::NAN)).unwrap().is_nan());
        assert_eq!(as_f64(&Value::from("Infinity")), None);
    }

    #[test]
    fn bad_text_is_a_typed_error() {
        let deep = "[".repeat(100_000);
        for text in ["", "{", "[1]", "{\"a\": Inf}", "{\"a\": \"\\", deep.as_str()] {
            let error = ConfigJson::parse("dir/config.json", text.to_string()).unwrap_err();
            assert!(
                matches!(error, Error::Checkpoint { .. }) && error.to_string().contains("dir/config.json"),
                "{error}"
            );
        }
        let config = parse("{\"model_type\": 3}");
        assert!(config.model_type().unwrap_err().to_string().contains("found 3, expected a string"));
    }
}

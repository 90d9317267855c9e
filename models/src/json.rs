//! Typed, checked access to the fields of a `config.json`, under all names that published files use.

use burn::tensor::FloatDType;
use burn_moe::checkpoint::as_f64;
use burn_moe::{Error, Result};
use serde_json::{Map, Value};

/// Largest width, count or size a config may ask for. Far above any published model; products are checked as well, see
/// `ParamCount`.
pub const MAX_SIZE: usize = 1 << 24;
/// Most layers a config may ask for.
pub const MAX_LAYERS: usize = 1 << 12;

fn kind(value: &Value) -> String {
    match value {
        Value::Null => "null".into(),
        Value::Array(items) => format!("a list of {} entries", items.len()),
        Value::Object(_) => "an object".into(),
        other => other.to_string(),
    }
}

/// Typed access to a config. Every method takes all names under which the field is known, the current one first; a
/// missing field and (unless said otherwise) `null` give the default.
#[derive(Debug, Clone, Copy)]
pub struct Fields<'a> {
    map: &'a Map<String, Value>,
    /// Prefix of field names in errors, e.g. `rope_scaling.`.
    prefix: &'a str,
}

impl<'a> Fields<'a> {
    /// Fields of the top-level object.
    pub fn new(map: &'a Map<String, Value>) -> Self {
        Self { map, prefix: "" }
    }

    /// Fields of an inner object, with the name it has in errors, a dot included.
    pub fn inner(map: &'a Map<String, Value>, prefix: &'a str) -> Self {
        Self { map, prefix }
    }

    /// Name of a field in errors.
    pub fn name(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// Whether the field is written at all, `null` included.
    pub fn contains(&self, name: &str) -> bool {
        self.map.contains_key(name)
    }

    /// The value under any of `names` and the name it has there; `null` counts as absent.
    ///
    /// # Errors
    /// When two names are present with different values.
    pub fn get<'n>(&self, names: &[&'n str]) -> Result<Option<(&'n str, &'a Value)>> {
        let mut found: Option<(&'n str, &'a Value)> = None;
        for &name in names {
            match (self.map.get(name), found) {
                (None | Some(Value::Null), _) => {}
                (Some(value), None) => found = Some((name, value)),
                (Some(value), Some((_, first))) if value == first => {}
                (Some(value), Some((first_name, first))) => {
                    return Err(Error::config(
                        self.name(first_name),
                        format!("{} and, under its other name `{name}`, {}", kind(first), kind(value)),
                        "one value: remove one of the two fields",
                    ));
                }
            }
        }
        Ok(found)
    }

    /// A whole number from 0 to [`MAX_SIZE`]. Floats with a whole value are accepted (`4096.0`).
    pub fn count_or_none(&self, names: &[&str]) -> Result<Option<usize>> {
        let Some((name, value)) = self.get(names)? else {
            return Ok(None);
        };
        let whole = value.as_u64().or_else(|| {
            let x = value.as_f64()?;
            (x.fract() == 0.0 && (0.0..=MAX_SIZE as f64).contains(&x)).then_some(x as u64)
        });
        match whole.and_then(|n| usize::try_from(n).ok()) {
            Some(n) if n <= MAX_SIZE => Ok(Some(n)),
            _ => Err(Error::config(
                self.name(name),
                kind(value),
                format!("a whole number from 0 to {MAX_SIZE}"),
            )),
        }
    }

    /// [`Fields::count_or_none`] with a default.
    pub fn count(&self, names: &[&str], default: usize) -> Result<usize> {
        Ok(self.count_or_none(names)?.unwrap_or(default))
    }

    /// A whole number of at least 1, with a default.
    pub fn size(&self, names: &[&str], default: usize) -> Result<usize> {
        match self.count(names, default)? {
            0 => Err(Error::config(self.name(names[0]), 0, "at least 1")),
            n => Ok(n),
        }
    }

    /// `num_hidden_layers`, 1 to [`MAX_LAYERS`].
    pub fn num_hidden_layers(&self, default: usize) -> Result<usize> {
        let layers = self.size(&["num_hidden_layers"], default)?;
        if layers > MAX_LAYERS {
            return Err(Error::config("num_hidden_layers", layers, format!("at most {MAX_LAYERS}")));
        }
        Ok(layers)
    }

    /// A number; `{"__float__": "Infinity"}` and its siblings count as numbers.
    pub fn float_or_none(&self, names: &[&str]) -> Result<Option<f64>> {
        let Some((name, value)) = self.get(names)? else {
            return Ok(None);
        };
        match as_f64(value) {
            Some(x) => Ok(Some(x)),
            None => Err(Error::config(self.name(name), kind(value), "a number")),
        }
    }

    /// A finite number with a default.
    pub fn finite(&self, names: &[&str], default: f64) -> Result<f64> {
        match self.float_or_none(names)? {
            Some(x) if !x.is_finite() => Err(Error::config(self.name(names[0]), x, "a finite number")),
            x => Ok(x.unwrap_or(default)),
        }
    }

    /// A finite number above zero, with a default.
    pub fn positive(&self, names: &[&str], default: f64) -> Result<f64> {
        match self.finite(names, default)? {
            x if x > 0.0 => Ok(x),
            x => Err(Error::config(self.name(names[0]), x, "more than 0")),
        }
    }

    /// A truth value with a default.
    pub fn flag(&self, names: &[&str], default: bool) -> Result<bool> {
        match self.get(names)? {
            None => Ok(default),
            Some((_, Value::Bool(b))) => Ok(*b),
            Some((name, value)) => Err(Error::config(self.name(name), kind(value), "true or false")),
        }
    }

    /// A string.
    pub fn text(&self, names: &[&str]) -> Result<Option<&'a str>> {
        match self.get(names)? {
            None => Ok(None),
            Some((_, Value::String(s))) => Ok(Some(s)),
            Some((name, value)) => Err(Error::config(self.name(name), kind(value), "a string")),
        }
    }

    /// A list.
    pub fn list(&self, names: &[&str]) -> Result<Option<&'a [Value]>> {
        match self.get(names)? {
            None => Ok(None),
            Some((_, Value::Array(items))) => Ok(Some(items)),
            Some((name, value)) => Err(Error::config(self.name(name), kind(value), "a list")),
        }
    }

    /// An object.
    pub fn object(&self, names: &[&str]) -> Result<Option<&'a Map<String, Value>>> {
        match self.get(names)? {
            None => Ok(None),
            Some((_, Value::Object(map))) => Ok(Some(map)),
            Some((name, value)) => Err(Error::config(self.name(name), kind(value), "an object")),
        }
    }

    /// A field of which this library supports only some values. `spellings` maps each accepted text to its meaning.
    pub fn choice<T: Copy>(&self, names: &[&str], default: T, spellings: &[(&str, T)]) -> Result<T> {
        let Some(text) = self.text(names)? else {
            return Ok(default);
        };
        match spellings.iter().find(|(spelling, _)| *spelling == text) {
            Some((_, meaning)) => Ok(*meaning),
            None => {
                let known: Vec<_> = spellings.iter().map(|(s, _)| format!("\"{s}\"")).collect();
                Err(Error::config(
                    self.name(names[0]),
                    format!("\"{text}\""),
                    format!("{} (other values are not supported)", known.join(" or ")),
                ))
            }
        }
    }

    /// Refuses a dropout that is switched on: this library trains without dropout.
    pub fn no_dropout(&self, name: &str) -> Result<()> {
        match self.finite(&[name], 0.0)? {
            0.0 => Ok(()),
            x => Err(Error::config(self.name(name), x, "0: dropout is not supported, set the field to 0")),
        }
    }

    /// Token ids: an integer, a list of integers, or nothing. They may lie outside the vocabulary (they then never occur).
    pub fn token_ids(&self, name: &str) -> Result<Vec<i32>> {
        let Some((_, value)) = self.get(&[name])? else {
            return Ok(Vec::new());
        };
        let items = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
        items
            .iter()
            .map(|item| {
                item.as_i64()
                    .and_then(|id| i32::try_from(id).ok())
                    .filter(|id| *id >= 0)
                    .ok_or_else(|| Error::config(self.name(name), kind(item), "a token id (0 or more), or a list of them"))
            })
            .collect()
    }
}

/// A pair of numbers such as `time_step_limit`.
pub fn float_pair(fields: &Fields<'_>, names: &[&str], default: (f64, f64)) -> Result<(f64, f64)> {
    let Some((name, value)) = fields.get(names)? else {
        return Ok(default);
    };
    match value.as_array().map(Vec::as_slice) {
        Some([a, b]) if as_f64(a).is_some() && as_f64(b).is_some() => Ok((as_f64(a).unwrap_or_default(), as_f64(b).unwrap_or_default())),
        _ => Err(Error::config(fields.name(name), kind(value), "a list of two numbers")),
    }
}

/// Fails unless every key head serves the same number of query heads.
pub(crate) fn check_key_value_heads(heads: usize, key_value_heads: usize) -> Result<()> {
    if heads.is_multiple_of(key_value_heads) {
        return Ok(());
    }
    Err(Error::config(
        "num_key_value_heads",
        key_value_heads,
        format!("a divisor of num_attention_heads = {heads}"),
    ))
}

/// What every family shares: token ids and dtype.
#[derive(Debug, Clone, PartialEq)]
pub struct CommonConfig {
    /// Dtype of the weights (`dtype`, formerly `torch_dtype`); None when the file names none.
    pub dtype: Option<FloatDType>,
    pub bos_token_id: Option<i32>,
    /// Generation ends at any of these.
    pub eos_token_ids: Vec<i32>,
    pub pad_token_id: Option<i32>,
}

impl CommonConfig {
    /// Reads the shared fields and refuses quantised checkpoints.
    pub fn parse(fields: &Fields<'_>) -> Result<Self> {
        if let Some(quantization) = fields.object(&["quantization_config"])? {
            let method = quantization.get("quant_method").or_else(|| quantization.get("quant_algo"));
            return Err(Error::config(
                "quantization_config",
                method.map_or_else(|| "an object".to_string(), kind),
                "no quantisation: use the bf16 release of the checkpoint",
            ));
        }
        Self::parse_quantised(fields)
    }

    /// Fails when `pad_token_id` is no row of the embedding.
    pub(crate) fn check_padding(&self, vocab_size: usize) -> Result<()> {
        match self.pad_token_id.filter(|&id| id as usize >= vocab_size) {
            Some(pad) => Err(Error::config(
                "pad_token_id",
                pad,
                format!("below vocab_size = {vocab_size}, or null"),
            )),
            None => Ok(()),
        }
    }

    /// Reads the shared fields; the family checks `quantization_config`.
    pub(crate) fn parse_quantised(fields: &Fields<'_>) -> Result<Self> {
        let single = |name: &str| -> Result<Option<i32>> {
            match fields.token_ids(name)?.as_slice() {
                [] => Ok(None),
                [id] => Ok(Some(*id)),
                ids => Err(Error::config(name, format!("{ids:?}"), "one token id")),
            }
        };
        // `dtype` wins over its old name without the two having to agree.
        let name = if fields.get(&["dtype"])?.is_some() {
            "dtype"
        } else {
            "torch_dtype"
        };
        let spellings = [
            ("bfloat16", Some(FloatDType::BF16)),
            ("float32", Some(FloatDType::F32)),
            ("float16", Some(FloatDType::F16)),
        ];
        Ok(Self {
            dtype: fields.choice(&[name], None, &spellings)?,
            bos_token_id: single("bos_token_id")?,
            eos_token_ids: fields.token_ids("eos_token_id")?,
            pad_token_id: single("pad_token_id")?,
        })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use burn_moe::checkpoint::ConfigJson;

    use super::*;

    pub(crate) fn map(text: &str) -> Map<String, Value> {
        ConfigJson::parse("config.json", text.into()).unwrap().fields().clone()
    }

    #[test]
    fn infinities_in_either_spelling() {
        let m = map(r#"{"a": [0.0, Infinity], "b": {"__float__": "-Infinity"}, "c": [1]}"#);
        let f = Fields::new(&m);
        assert_eq!(float_pair(&f, &["a"], (1.0, 1.0)).unwrap(), (0.0, f64::INFINITY));
        assert_eq!(f.float_or_none(&["b"]).unwrap(), Some(f64::NEG_INFINITY));
        assert!(f.finite(&["b"], 0.0).unwrap_err().to_string().contains("finite"));
        assert!(float_pair(&f, &["c"], (1.0, 1.0)).unwrap_err().to_string().contains("two numbers"));
    }

    #[test]
    fn aliases_agree_or_are_refused() {
        let m = map(r#"{"n": 8, "alias": 8, "x": 1, "y": 2, "z": null}"#);
        let f = Fields::new(&m);
        assert_eq!(f.count(&["n", "alias"], 0).unwrap(), 8);
        let error = f.count(&["x", "y"], 0).unwrap_err().to_string();
        assert!(error.contains("`x`") && error.contains("`y`"), "{error}");
        assert_eq!(f.count(&["z", "n"], 0).unwrap(), 8);
    }

    #[test]
    fn wrong_types_name_field_and_value() {
        let m = map(r#"{"a": "eight", "b": -1, "c": 1e300, "d": 2.5, "e": 4096.0, "f": 0}"#);
        let f = Fields::new(&m);
        for name in ["a", "b", "c", "d"] {
            let error = f.count(&[name], 0).unwrap_err().to_string();
            assert!(error.contains(&format!("`{name}`")), "{error}");
        }
        assert_eq!(f.count(&["e"], 0).unwrap(), 4096);
        assert!(f.size(&["f"], 1).is_err());
        assert!(f.flag(&["a"], true).is_err());
    }

    #[test]
    fn common_fields() {
        let m = map(r#"{"torch_dtype": "bfloat16", "eos_token_id": [2, 11], "bos_token_id": 1, "pad_token_id": null}"#);
        let common = CommonConfig::parse(&Fields::new(&m)).unwrap();
        assert_eq!(common.dtype, Some(FloatDType::BF16));
        assert_eq!(common.eos_token_ids, [2, 11]);
        assert_eq!((common.bos_token_id, common.pad_token_id), (Some(1), None));

        let both = map(r#"{"torch_dtype": "bfloat16", "dtype": "float32"}"#);
        assert_eq!(CommonConfig::parse(&Fields::new(&both)).unwrap().dtype, Some(FloatDType::F32));
        let odd = map(r#"{"dtype": "int8"}"#);
        let error = CommonConfig::parse(&Fields::new(&odd)).unwrap_err().to_string();
        assert!(
            error.contains("`dtype`") && error.contains("int8") && error.contains("bfloat16"),
            "{error}"
        );
        let fp8 = map(r#"{"quantization_config": {"quant_method": "fp8"}}"#);
        let negative = map(r#"{"eos_token_id": [2, -1]}"#);
        assert!(CommonConfig::parse(&Fields::new(&negative)).unwrap_err().to_string().contains("-1"));
        assert!(CommonConfig::parse(&Fields::new(&fp8)).unwrap_err().to_string().contains("fp8"));
    }
}

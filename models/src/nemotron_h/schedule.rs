//! Which mixer each block has.

use burn_moe::{Error, Result};
use serde_json::{Map, Value};

use crate::json::{Fields, MAX_LAYERS};

/// Mixer of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerKind {
    /// `M` in pattern strings, `linear_attention` (formerly `mamba`) in lists.
    Mamba,
    /// `*`, `full_attention` (formerly `attention`).
    Attention,
    /// `E`, `moe`.
    Moe,
    /// `-`, `mlp`.
    Mlp,
}

/// Reads `layers_block_type` (a list) or `hybrid_override_pattern` (a string). The list wins when both are there;
/// without either the family's default of four layers applies. `num_hidden_layers` is only compared.
pub fn parse_schedule(config: &Map<String, Value>) -> Result<Vec<LayerKind>> {
    let fields = Fields::new(config);
    let layers = match (fields.list(&["layers_block_type"])?, fields.text(&["hybrid_override_pattern"])?) {
        (Some(names), _) => names.iter().enumerate().map(by_name).collect::<Result<Vec<_>>>()?,
        (None, Some(pattern)) => pattern.chars().enumerate().map(by_letter).collect::<Result<Vec<_>>>()?,
        (None, None) => vec![LayerKind::Mamba, LayerKind::Moe, LayerKind::Attention, LayerKind::Mlp],
    };
    if layers.is_empty() || layers.len() > MAX_LAYERS {
        return Err(Error::config(
            "layers_block_type",
            format!("{} layers", layers.len()),
            format!("1 to {MAX_LAYERS} layers"),
        ));
    }
    if let Some(n) = fields.count_or_none(&["num_hidden_layers"])?
        && n != layers.len()
    {
        tracing::warn!(
            "config field `num_hidden_layers` is {n}, but the layer pattern has {} layers; the pattern counts",
            layers.len()
        );
    }
    Ok(layers)
}

fn by_name((index, name): (usize, &Value)) -> Result<LayerKind> {
    match name.as_str() {
        Some("linear_attention" | "mamba") => Ok(LayerKind::Mamba),
        Some("full_attention" | "attention") => Ok(LayerKind::Attention),
        Some("moe") => Ok(LayerKind::Moe),
        Some("mlp") => Ok(LayerKind::Mlp),
        _ => Err(Error::config(
            format!("layers_block_type[{index}]"),
            name,
            "\"linear_attention\", \"full_attention\", \"moe\" or \"mlp\"",
        )),
    }
}

fn by_letter((index, letter): (usize, char)) -> Result<LayerKind> {
    match letter {
        'M' => Ok(LayerKind::Mamba),
        '*' => Ok(LayerKind::Attention),
        'E' => Ok(LayerKind::Moe),
        '-' => Ok(LayerKind::Mlp),
        other => Err(Error::config(
            format!("hybrid_override_pattern[{index}]"),
            format!("'{other}'"),
            "'M', '*', 'E' or '-'",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::json::tests::map;

    fn parse(text: &str) -> Result<Vec<LayerKind>> {
        parse_schedule(&map(text))
    }

    #[test]
    fn strings_lists_and_legacy_names_mean_the_same() {
        use LayerKind::*;
        let expected = vec![Mamba, Moe, Mlp, Attention];
        for text in [
            r#"{"hybrid_override_pattern": "ME-*"}"#,
            r#"{"layers_block_type": ["mamba", "moe", "mlp", "attention"]}"#,
            r#"{"layers_block_type": ["linear_attention", "moe", "mlp", "full_attention"]}"#,
            r#"{"layers_block_type": ["mamba", "moe", "mlp", "attention"], "hybrid_override_pattern": "MM"}"#,
            r#"{"hybrid_override_pattern": "ME-*", "num_hidden_layers": 52}"#,
        ] {
            assert_eq!(parse(text).unwrap(), expected, "{text}");
        }
        assert_eq!(parse("{}").unwrap(), [Mamba, Moe, Attention, Mlp]);
    }

    #[test]
    fn unknown_layers_are_named_with_their_place() {
        for (text, parts) in [
            (r#"{"hybrid_override_pattern": "MEX"}"#, ["hybrid_override_pattern[2]", "'X'"]),
            (r#"{"layers_block_type": ["moe", "rnn"]}"#, ["layers_block_type[1]", "rnn"]),
            (r#"{"layers_block_type": [3]}"#, ["layers_block_type[0]", "3"]),
            (r#"{"layers_block_type": []}"#, ["layers_block_type", "0 layers"]),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(parts.iter().all(|p| error.contains(p)), "{text}: {error}");
        }
    }
}

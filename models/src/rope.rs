//! Rotary settings of a `config.json`, in the current form (`rope_parameters`) and the legacy one (`rope_theta` plus
//! `rope_scaling`).

use burn_moe::checkpoint::as_f64;
use burn_moe::layers::{RopeConfig, RopeKind};
use burn_moe::{Error, Result};
use serde_json::{Map, Value};

use crate::json::Fields;

/// Reads the rotary settings of a model whose heads rotate the first `partial_rotary_factor` of their `head_dim` channels.
/// The factor is that of the dict, then of the top level, then `default_factor`.
pub fn parse_partial_rope(
    config: &Map<String, Value>,
    head_dim: usize,
    default_factor: f64,
    max_positions: usize,
    default_theta: f64,
) -> Result<RopeConfig> {
    let empty = Map::new();
    let top = Fields::new(config);
    let factor = partial_rotary_factor(&top, &scaling(&top, &empty)?, default_factor)?;
    let dim = (head_dim as f64 * factor) as usize;
    if factor > 1.0 || dim < 2 || !dim.is_multiple_of(2) {
        return Err(Error::config(
            "partial_rotary_factor",
            factor,
            format!("at most 1, and an even number of the {head_dim} channels of a head"),
        ));
    }
    parse_kind(config, dim, max_positions, default_theta)
}

/// Reads the rotary settings of a model whose heads rotate all `head_dim` channels.
///
/// `rope_scaling` wins over `rope_parameters`; a missing theta comes from the top level, then from `default_theta`.
pub fn parse_rope(config: &Map<String, Value>, head_dim: usize, max_positions: usize, default_theta: f64) -> Result<RopeConfig> {
    let top = Fields::new(config);
    if !head_dim.is_multiple_of(2) {
        return Err(Error::config(
            "head_dim",
            head_dim,
            "an even number: rotary embedding turns pairs of channels",
        ));
    }
    let rope = parse_kind(config, head_dim, max_positions, default_theta)?;
    // The plain kind of these families ignores the factor; a scaled kind would rotate too few channels.
    let empty = Map::new();
    let partial = partial_rotary_factor(&top, &scaling(&top, &empty)?, 1.0)?;
    if rope.kind != RopeKind::Default && partial != 1.0 {
        return Err(Error::config(
            "partial_rotary_factor",
            partial,
            "1: this family rotates whole heads when its frequencies are scaled",
        ));
    }
    Ok(rope)
}

fn partial_rotary_factor(top: &Fields<'_>, inner: &Fields<'_>, default: f64) -> Result<f64> {
    let top = top.positive(&["partial_rotary_factor"], default)?;
    inner.positive(&["partial_rotary_factor"], top)
}

/// Frequencies of `dim` rotated channels.
fn parse_kind(config: &Map<String, Value>, dim: usize, max_positions: usize, default_theta: f64) -> Result<RopeConfig> {
    let top = Fields::new(config);
    let empty = Map::new();
    let inner = scaling(&top, &empty)?;
    let top_theta = top.positive(&["rope_theta"], default_theta)?;
    let theta = inner.positive(&["rope_theta"], top_theta)?;
    let kind_name = match inner.text(&["rope_type"])? {
        Some(name) => Some(name),
        None => inner.text(&["type"])?,
    };
    let kind = match kind_name.unwrap_or("default") {
        "default" => RopeKind::Default,
        "linear" => RopeKind::Linear {
            factor: required(&inner, "factor")?,
        },
        "dynamic" => RopeKind::Dynamic {
            factor: required(&inner, "factor")?,
            max_positions,
        },
        "yarn" => yarn(&top, &inner, max_positions)?,
        "llama3" => {
            let (low, high) = (required(&inner, "low_freq_factor")?, required(&inner, "high_freq_factor")?);
            if low >= high {
                return Err(Error::config(
                    inner.name("low_freq_factor"),
                    low,
                    format!("less than high_freq_factor = {high}"),
                ));
            }
            RopeKind::Llama3 {
                factor: required(&inner, "factor")?,
                low_freq_factor: low,
                high_freq_factor: high,
                original_positions: original_positions(&top, &inner, max_positions)?,
            }
        }
        "longrope" => longrope(&top, &inner, max_positions, dim / 2)?,
        other => {
            return Err(Error::config(
                inner.name("rope_type"),
                format!("\"{other}\""),
                "\"default\", \"linear\", \"dynamic\", \"yarn\", \"llama3\" or \"longrope\" (other kinds are not supported)",
            ));
        }
    };
    if matches!(kind, RopeKind::Dynamic { .. }) && dim <= 2 {
        return Err(Error::config(
            "head_dim",
            dim,
            "more than 2 rotated channels with dynamic rotary scaling",
        ));
    }
    Ok(RopeConfig { dim, theta, kind })
}

/// Factor on the scale of the scores in DeepSeek's attention, beside the factor on cos and sin: `m^2` with
/// `m = 0.1 mscale_all_dim ln(factor) + 1` for a scaled kind whose `mscale_all_dim` is not 0; otherwise 1.
pub fn score_factor(config: &Map<String, Value>, rope: &RopeConfig) -> Result<f64> {
    let empty = Map::new();
    let inner = scaling(&Fields::new(config), &empty)?;
    let mscale = inner.finite(&["mscale_all_dim"], 0.0)?;
    if mscale == 0.0 {
        return Ok(1.0);
    }
    let factor = match rope.kind {
        RopeKind::Default => return Ok(1.0),
        RopeKind::LongRope { .. } => required(&inner, "factor")?,
        RopeKind::Linear { factor }
        | RopeKind::Dynamic { factor, .. }
        | RopeKind::Yarn { factor, .. }
        | RopeKind::Llama3 { factor, .. } => factor,
    };
    let m = if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 };
    Ok(m * m)
}

/// The dict of the scaled kinds, empty when there is none.
fn scaling<'a>(top: &Fields<'a>, empty: &'a Map<String, Value>) -> Result<Fields<'a>> {
    Ok(match (top.object(&["rope_scaling"])?, top.object(&["rope_parameters"])?) {
        (Some(map), _) => Fields::inner(map, "rope_scaling."),
        (None, Some(map)) => Fields::inner(map, "rope_parameters."),
        (None, None) => Fields::new(empty),
    })
}

fn required(inner: &Fields<'_>, name: &str) -> Result<f64> {
    match inner.get(&[name])? {
        Some(_) => inner.positive(&[name], 1.0),
        None => Err(Error::config(inner.name(name), "nothing", "a number: this rotary kind needs it")),
    }
}

/// A top-level value overrides the one inside; without any it is the model's own length.
fn original_positions(top: &Fields<'_>, inner: &Fields<'_>, max_positions: usize) -> Result<f64> {
    let name = ["original_max_position_embeddings"];
    let inside = inner.positive(&name, max_positions as f64)?;
    top.positive(&name, inside)
}

fn yarn(top: &Fields<'_>, inner: &Fields<'_>, max_positions: usize) -> Result<RopeKind> {
    let original = original_positions(top, inner, max_positions)?;
    if !inner.contains("factor") {
        return Err(Error::config(
            inner.name("factor"),
            "nothing",
            "a number, or null for max_position_embeddings / original_max_position_embeddings",
        ));
    }
    let factor = inner.positive(&["factor"], max_positions as f64 / original)?;
    let or_default = |name: &str, default: f64| -> Result<f64> {
        match inner.finite(&[name], default)? {
            0.0 => Ok(default),
            x if x > 0.0 => Ok(x),
            x => Err(Error::config(inner.name(name), x, "more than 0")),
        }
    };
    let attention_factor = match inner.float_or_none(&["attention_factor"])? {
        Some(_) => inner.positive(&["attention_factor"], 1.0)?,
        None => RopeKind::yarn_attention_factor(factor, inner.float_or_none(&["mscale"])?, inner.float_or_none(&["mscale_all_dim"])?),
    };
    Ok(RopeKind::Yarn {
        factor,
        original_positions: original,
        beta_fast: or_default("beta_fast", 32.0)?,
        beta_slow: or_default("beta_slow", 1.0)?,
        truncate: inner.flag(&["truncate"], true)?,
        attention_factor,
    })
}

fn longrope(top: &Fields<'_>, inner: &Fields<'_>, max_positions: usize, half: usize) -> Result<RopeKind> {
    let original = original_positions(top, inner, max_positions)?;
    let factor = inner.positive(&["factor"], max_positions as f64 / original)?;
    let divisors = |name: &str| -> Result<Vec<f64>> {
        let items = inner.list(&[name])?.unwrap_or_default();
        let values: Vec<f64> = items.iter().filter_map(as_f64).filter(|x| x.is_finite() && *x > 0.0).collect();
        if values.len() == half && items.len() == half {
            return Ok(values);
        }
        Err(Error::config(
            inner.name(name),
            format!("{} entries, {} of them positive numbers", items.len(), values.len()),
            format!("{half} positive numbers, one per rotated pair of channels"),
        ))
    };
    let attention_factor = match inner.float_or_none(&["attention_factor"])? {
        Some(_) => inner.positive(&["attention_factor"], 1.0)?,
        None => RopeKind::longrope_attention_factor(factor, original),
    };
    Ok(RopeKind::LongRope {
        short_factor: divisors("short_factor")?,
        long_factor: divisors("long_factor")?,
        original_positions: original,
        attention_factor,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::json::tests::map;

    fn parse(text: &str) -> Result<RopeConfig> {
        parse_rope(&map(text), 8, 4096, 10000.0)
    }

    #[test]
    fn theta_comes_from_the_dict_then_the_top_then_the_family() {
        for (text, theta) in [
            ("{}", 10000.0),
            (r#"{"rope_theta": 5}"#, 5.0),
            (r#"{"rope_theta": 5, "rope_scaling": null}"#, 5.0),
            (
                r#"{"rope_theta": 5, "rope_parameters": {"rope_theta": 7, "rope_type": "default"}}"#,
                7.0,
            ),
            (r#"{"rope_theta": 5, "rope_scaling": {"type": "linear", "factor": 2}}"#, 5.0),
        ] {
            assert_eq!(parse(text).unwrap().theta, theta, "{text}");
        }
    }

    #[test]
    fn legacy_scaling_wins_and_type_is_an_alias() {
        let rope = parse(
            r#"{"rope_scaling": {"type": "linear", "factor": 4.0},
                "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}"#,
        )
        .unwrap();
        assert_eq!(rope.kind, RopeKind::Linear { factor: 4.0 });
        let dynamic = parse(r#"{"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}"#).unwrap();
        assert_eq!(
            dynamic.kind,
            RopeKind::Dynamic {
                factor: 2.0,
                max_positions: 4096
            }
        );
    }

    #[test]
    fn yarn_fills_what_is_missing() {
        let rope = parse(r#"{"rope_scaling": {"type": "yarn", "factor": null}, "original_max_position_embeddings": 1024}"#).unwrap();
        let RopeKind::Yarn {
            factor,
            original_positions,
            beta_fast,
            beta_slow,
            truncate,
            attention_factor,
        } = rope.kind
        else {
            panic!("{rope:?}")
        };
        assert_eq!((factor, original_positions, beta_fast, beta_slow), (4.0, 1024.0, 32.0, 1.0));
        assert!(truncate);
        assert!((attention_factor - (0.1 * 4f64.ln() + 1.0)).abs() < 1e-12);
        // The top level overrides the dict.
        let rope = parse(
            r#"{"rope_scaling": {"type": "yarn", "factor": 2, "original_max_position_embeddings": 7, "beta_fast": 0,
                "mscale": 2.0, "mscale_all_dim": 1.0}, "original_max_position_embeddings": 9}"#,
        )
        .unwrap();
        let RopeKind::Yarn {
            original_positions,
            beta_fast,
            attention_factor,
            ..
        } = rope.kind
        else {
            panic!("{rope:?}")
        };
        assert_eq!((original_positions, beta_fast), (9.0, 32.0));
        let g = |m: f64| 0.1 * m * 2f64.ln() + 1.0;
        assert!((attention_factor - g(2.0) / g(1.0)).abs() < 1e-12);
    }

    #[test]
    fn partial_rotation_takes_the_first_channels() {
        let dim = |text: &str| parse_partial_rope(&map(text), 12, 0.5, 4096, 10000.0).map(|rope| rope.dim);
        assert_eq!(dim("{}").unwrap(), 6);
        assert_eq!(dim(r#"{"partial_rotary_factor": 0.4}"#).unwrap(), 4);
        assert_eq!(
            dim(r#"{"partial_rotary_factor": 0.4, "rope_parameters": {"rope_type": "linear", "factor": 2, "partial_rotary_factor": 1}}"#)
                .unwrap(),
            12
        );
        for text in [r#"{"partial_rotary_factor": 0.3}"#, r#"{"partial_rotary_factor": 2}"#] {
            assert!(dim(text).unwrap_err().to_string().contains("`partial_rotary_factor`"), "{text}");
        }
    }

    /// The published value of DeepSeek-V3, and when nothing changes.
    #[test]
    fn score_factors() {
        let factor = |text: &str| score_factor(&map(text), &parse(text).unwrap()).unwrap();
        let v3 = r#"{"rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}}"#;
        assert!((factor(v3).sqrt() - 1.3688879).abs() < 1e-7);
        assert_eq!(parse(v3).unwrap().attention_factor(), 1.0);
        for text in [
            r#"{"rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1.0}}"#,
            r#"{"rope_scaling": {"type": "yarn", "factor": 1.0, "mscale_all_dim": 1.0}}"#,
            r#"{"rope_parameters": {"rope_type": "default", "mscale_all_dim": 1.0}}"#,
            r#"{"rope_parameters": null}"#,
        ] {
            assert_eq!(factor(text), 1.0, "{text}");
        }
        let linear = factor(r#"{"rope_parameters": {"rope_type": "linear", "factor": 4.0, "mscale_all_dim": 0.5}}"#);
        assert!((linear - (0.05 * 4f64.ln() + 1.0).powi(2)).abs() < 1e-12);
    }

    #[test]
    fn longrope_reads_its_divisors() {
        let rope = parse(
            r#"{"original_max_position_embeddings": 1024, "rope_scaling":
                {"type": "longrope", "short_factor": [1, 1, 1, 1.5], "long_factor": [1, 2, 3, 4]}}"#,
        )
        .unwrap();
        let RopeKind::LongRope {
            long_factor,
            original_positions,
            attention_factor,
            ..
        } = rope.kind
        else {
            panic!("{rope:?}")
        };
        assert_eq!((long_factor, original_positions), (vec![1.0, 2.0, 3.0, 4.0], 1024.0));
        assert!((attention_factor - (1.0 + 4f64.ln() / 1024f64.ln()).sqrt()).abs() < 1e-12);
    }

    #[test]
    fn what_cannot_be_honoured_is_refused_by_name() {
        for (text, field) in [
            (r#"{"rope_scaling": {"type": "su", "factor": 4}}"#, "rope_scaling.rope_type"),
            (
                r#"{"rope_scaling": {"type": "longrope", "short_factor": [1, 1, 1], "long_factor": [1, 1, 1, 1]}}"#,
                "rope_scaling.short_factor",
            ),
            (r#"{"rope_scaling": {"type": "yarn"}}"#, "rope_scaling.factor"),
            (
                r#"{"rope_scaling": {"rope_type": "llama3", "factor": 8}}"#,
                "rope_scaling.low_freq_factor",
            ),
            (
                r#"{"partial_rotary_factor": 0.5, "rope_scaling": {"type": "linear", "factor": 2}}"#,
                "partial_rotary_factor",
            ),
            (r#"{"rope_scaling": {"type": "linear", "factor": -1}}"#, "rope_scaling.factor"),
            (r#"{"rope_theta": 0}"#, "rope_theta"),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(&format!("`{field}`")), "{text}: {error}");
        }
        // The plain kind ignores it.
        assert_eq!(parse(r#"{"partial_rotary_factor": 0.5}"#).unwrap().kind, RopeKind::Default);
    }
}

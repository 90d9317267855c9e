//! The header of a safetensors file, checked before anything is believed.
//!
//! Stricter than the `safetensors` crate, and every error names the file and the tensor: sizes are checked without overflow,
//! names are unique, and the data is covered without gaps or overlaps.

use std::collections::HashSet;
use std::fmt;
use std::ops::Range;
use std::path::Path;

use safetensors::Dtype;
use serde::de::{DeserializeSeed, Error as _, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use crate::error::{Error, Result};

/// Largest header accepted, as in the reference implementation.
const MAX_HEADER_BYTES: u64 = 100_000_000;
const LENGTH_BYTES: usize = 8;
const METADATA: &str = "__metadata__";

/// Where one tensor lies in its file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    /// Bytes of the file.
    pub range: Range<usize>,
}

/// Tensors of a file, in header order.
pub(crate) fn parse(path: &Path, file: &[u8]) -> Result<Vec<(String, Entry)>> {
    let bad = |what: &str, found: String, expected: String| Error::checkpoint(path, what, found, expected);
    let Some(length) = file.first_chunk::<LENGTH_BYTES>() else {
        return Err(bad(
            "file size",
            format!("{} bytes", file.len()),
            "a safetensors file (8 bytes or more)".into(),
        ));
    };
    let length = u64::from_le_bytes(*length);
    let available = (file.len() - LENGTH_BYTES) as u64;
    if length > MAX_HEADER_BYTES.min(available) {
        return Err(bad(
            "header length",
            format!("{length} bytes"),
            format!("at most {MAX_HEADER_BYTES} and the {available} bytes that follow it"),
        ));
    }
    // Fits: the header lies inside the mapped file.
    let data_start = LENGTH_BYTES + length as usize;
    let text = std::str::from_utf8(&file[LENGTH_BYTES..data_start]).map_err(|e| bad("header", e.to_string(), "UTF-8".into()))?;
    let mut json = serde_json::Deserializer::from_str(text);
    let raw = RawHeader::deserialize(&mut json)
        .and_then(|raw| json.end().map(|()| raw))
        .map_err(|e| {
            bad(
                "header",
                format!("an error ({e})"),
                "tensor names with dtype, shape and data_offsets".into(),
            )
        })?;
    entries(path, raw, data_start, file.len())
}

fn entries(path: &Path, raw: RawHeader, data_start: usize, file_len: usize) -> Result<Vec<(String, Entry)>> {
    let data_len = file_len - data_start;
    let mut names = HashSet::with_capacity(raw.0.len());
    let mut tensors = Vec::with_capacity(raw.0.len());
    for (name, entry) in raw.0 {
        let bad =
            |field: &str, found: String, expected: String| Error::checkpoint(path, format!("tensor `{name}`, {field}"), found, expected);
        if !names.insert(name.clone()) {
            return Err(bad("name", "a second entry".into(), "unique names".into()));
        }
        let dtype = parse_dtype(&entry.dtype).ok_or_else(|| {
            bad(
                "dtype",
                format!("`{}`", entry.dtype),
                "a safetensors dtype such as F32, F16 or BF16".into(),
            )
        })?;
        let [begin, end] = entry.data_offsets;
        if begin > end || end > data_len as u64 {
            return Err(bad(
                "data_offsets",
                format!("[{begin}, {end}]"),
                format!("a range inside the {data_len} data bytes"),
            ));
        }
        let Some(bytes) = byte_size(dtype, &entry.shape) else {
            return Err(bad(
                "shape",
                format!("{:?}", entry.shape),
                format!("whole bytes of {dtype} in the address space"),
            ));
        };
        if bytes != end - begin {
            return Err(bad(
                "data_offsets",
                format!("{} bytes", end - begin),
                format!("{bytes} bytes for shape {:?} of {dtype}", entry.shape),
            ));
        }
        let entry = Entry {
            dtype,
            // Fits: the product was checked above, and a zero elsewhere still bounds nothing, so convert with care.
            shape: entry
                .shape
                .iter()
                .map(|&n| usize::try_from(n))
                .collect::<Result<_, _>>()
                .map_err(|_| bad("shape", format!("{:?}", entry.shape), "sizes in the address space".into()))?,
            range: data_start + begin as usize..data_start + end as usize,
        };
        tensors.push((name, entry));
    }
    let mut order: Vec<&(String, Entry)> = tensors.iter().collect();
    order.sort_by_key(|(_, entry)| (entry.range.start, entry.range.end));
    let mut covered = data_start;
    for (name, entry) in order {
        if entry.range.start != covered {
            return Err(Error::checkpoint(
                path,
                format!("tensor `{name}`, data_offsets"),
                format!("a start at data byte {}", entry.range.start - data_start),
                format!("{} (data without gaps or overlaps)", covered - data_start),
            ));
        }
        covered = entry.range.end;
    }
    if covered != file_len {
        return Err(Error::checkpoint(
            path,
            "file size",
            format!("{data_len} data bytes"),
            format!("{} (the end of the last tensor)", covered - data_start),
        ));
    }
    Ok(tensors)
}

/// Bytes of a tensor; None on overflow, or for sub-byte types that do not fill whole bytes.
pub(crate) fn byte_size(dtype: Dtype, shape: &[u64]) -> Option<u64> {
    let elements = shape.iter().try_fold(1u64, |n, &size| n.checked_mul(size))?;
    let bits = elements.checked_mul(dtype.bitsize() as u64)?;
    bits.is_multiple_of(8).then_some(bits / 8)
}

fn parse_dtype(name: &str) -> Option<Dtype> {
    serde_json::from_value(serde_json::Value::String(name.to_string())).ok()
}

#[derive(Deserialize)]
struct RawEntry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

/// Entries in file order. A plain map would silently keep the last of two entries with one name.
struct RawHeader(Vec<(String, RawEntry)>);

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Header;
        impl<'de> Visitor<'de> for Header {
            type Value = RawHeader;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let mut entries = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == METADATA {
                        map.next_value::<IgnoredAny>()?;
                        continue;
                    }
                    let entry = map.next_value_seed(Named(&name))?;
                    entries.push((name, entry));
                }
                Ok(RawHeader(entries))
            }
        }
        deserializer.deserialize_map(Header)
    }
}

/// Puts the tensor's name into errors about its entry.
struct Named<'a>(&'a str);

impl<'de> DeserializeSeed<'de> for Named<'_> {
    type Value = RawEntry;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<RawEntry, D::Error> {
        RawEntry::deserialize(deserializer).map_err(|e| D::Error::custom(format!("tensor `{}`: {e}", self.0)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(header: &str, data: usize) -> Vec<u8> {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(header.as_bytes());
        bytes.resize(bytes.len() + data, 0);
        bytes
    }

    fn error(header: &str, data: usize) -> String {
        parse(Path::new("m.safetensors"), &file(header, data)).unwrap_err().to_string()
    }

    #[test]
    fn agrees_with_the_safetensors_crate() {
        let weights = [1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0];
        let view = safetensors::tensor::TensorView::new(Dtype::F32, vec![2, 3], bytemuck::cast_slice(&weights)).unwrap();
        let bytes = safetensors::serialize([("w", view)], None).unwrap();
        let tensors = parse(Path::new("m"), &bytes).unwrap();
        assert_eq!(tensors.len(), 1);
        assert_eq!((tensors[0].0.as_str(), &tensors[0].1.shape), ("w", &vec![2, 3]));
        assert_eq!(&bytes[tensors[0].1.range.clone()], bytemuck::cast_slice::<f32, u8>(&weights));
    }

    #[test]
    fn every_defect_is_named() {
        let entry = |dtype: &str, shape: &str, offsets: &str| format!("\"dtype\":\"{dtype}\",\"shape\":{shape},\"data_offsets\":{offsets}");
        let one = |dtype: &str, shape: &str, offsets: &str| format!("{{\"a.b\":{{{}}}}}", entry(dtype, shape, offsets));
        let cases = [
            (one("F7", "[1]", "[0,4]"), 4, "`F7`"),
            (one("F32", "[2]", "[0,4]"), 4, "8 bytes for shape [2]"),
            (one("F32", "[1]", "[0,4]"), 3, "inside the 3 data bytes"),
            (one("F32", "[1]", "[0,4]"), 9, "found 9 data bytes"),
            (one("F32", "[1]", "[4,8]"), 8, "gaps or overlaps"),
            (one("F32", "[1]", "[4,0]"), 8, "[4, 0]"),
            (one("F32", "[4294967296, 4294967296, 4]", "[0,0]"), 0, "address space"),
            (one("F32", "[-1]", "[0,4]"), 4, "tensor `a.b`"),
            (one("F4", "[3]", "[0,2]"), 2, "whole bytes"),
            ("[]".into(), 0, "an object of tensors"),
            ("{} {}".into(), 0, "trailing"),
        ];
        for (header, data, expected) in cases {
            let text = error(&header, data);
            assert!(text.contains(expected) && text.contains("m.safetensors"), "{header}: {text}");
        }
        let twice = format!("{{\"a\":{{{0}}},\"a\":{{{0}}}}}", entry("U8", "[1]", "[0,1]"));
        assert!(error(&twice, 1).contains("a second entry"));
        let overlap = format!(
            "{{\"a\":{{{}}},\"b\":{{{}}}}}",
            entry("U8", "[2]", "[0,2]"),
            entry("U8", "[2]", "[1,3]")
        );
        assert!(error(&overlap, 3).contains("tensor `b`"));
        let huge = u64::MAX.to_le_bytes();
        assert!(parse(Path::new("m"), &huge).unwrap_err().to_string().contains("header length"));
        assert!(parse(Path::new("m"), &[0; 7]).unwrap_err().to_string().contains("7 bytes"));
    }
}

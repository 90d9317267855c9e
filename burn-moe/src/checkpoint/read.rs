//! The bytes of one parameter, any part of them on any thread.
//!
//! What a step does to a stored matrix decides how a part of the target is found: as a run of a stored tensor, as rows that
//! are decoded, or as columns of the stored matrix. So the largest parameter takes no more memory than its target. Chains
//! that none of these covers are assembled item by item (an item is one expert, or the whole parameter).

use std::borrow::Cow;
use std::ops::Range;

use safetensors::Dtype;

use super::binding::Piece;
use super::cast::{cast, cast_into, first_nonfinite};
use super::plan::ParamPlan;
use super::quantise::{QuantFormat, dequantise_rows};
use super::source::CheckpointSource;
use super::transform::{HostTensor, Step, dequantise, forward, transpose_columns};
use crate::error::{Error, Result};

/// Reads one parameter.
pub(crate) struct Reader<'a> {
    plan: &'a ParamPlan,
    source: &'a CheckpointSource,
    allow_nonfinite: bool,
    /// Experts of this rank, or the one item.
    items: Range<usize>,
    item_bytes: usize,
    way: Way,
}

/// How bytes of an item are found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// Stored tensors one after the other, `part` bytes of the target each.
    Runs { part: usize },
    /// Decoded matrices one after the other, of so many rows each.
    Rows { format: QuantFormat, rows: usize, columns: usize },
    /// A stored matrix `[rows, columns]`, transposed.
    Columns { rows: usize, columns: usize },
    /// Any other chain of steps: the whole item at once.
    Items,
}

impl<'a> Reader<'a> {
    pub fn new(plan: &'a ParamPlan, source: &'a CheckpointSource, allow_nonfinite: bool) -> Self {
        let items = plan.share.as_ref().map_or(0..1, |share| share.local.clone());
        let elements: usize = plan.shape.iter().product();
        let item_bytes = elements * element(plan.dtype) / items.len().max(1);
        Self {
            plan,
            source,
            allow_nonfinite,
            items,
            item_bytes,
            way: way(plan, item_bytes),
        }
    }

    /// Offsets and lengths of [`Reader::fill`] are multiples of this.
    pub fn unit(&self) -> usize {
        let element = element(self.plan.dtype);
        match self.way {
            Way::Runs { .. } => element,
            Way::Rows { columns, .. } => columns * element,
            Way::Columns { rows, .. } => rows * element,
            Way::Items => self.item_bytes,
        }
    }

    /// Writes the bytes of the parameter from `offset` on.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] naming file and tensor for weights that are not finite, [`Error::Io`] when a file cannot be read.
    pub fn fill(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        for (item, inside, out) in pieces_of(offset, self.item_bytes, out) {
            let item = self.items.start + item;
            match self.way {
                Way::Runs { part } => self.runs(item, part, inside, out)?,
                Way::Rows { format, rows, columns } => self.rows(item, (format, rows, columns), inside, out)?,
                Way::Columns { rows, columns } => self.columns(item, (rows, columns), inside, out)?,
                Way::Items => out.copy_from_slice(&self.item(item)?.data),
            }
            // Whatever is not finite in a file is not finite here, so one look suffices; the tensor is only then searched.
            if !self.allow_nonfinite && first_nonfinite(self.plan.dtype, out).is_some() {
                self.item(item)?;
                let name = &self.plan.binding.pieces(item)[0].name;
                return Err(Error::Mismatch(format!("{name}: weights that are not finite")));
            }
        }
        Ok(())
    }

    /// Stored elements, cast where the dtypes differ.
    fn runs(&self, item: usize, part: usize, offset: usize, out: &mut [u8]) -> Result<()> {
        for (index, inside, out) in pieces_of(offset, part, out) {
            let piece = self.plan.binding.piece(item, index);
            let stored = self.dtype(&piece)?;
            if stored == self.plan.dtype {
                self.source.read(&piece.name, piece.slab, inside, out)?;
                continue;
            }
            let from = inside / element(self.plan.dtype) * element(stored);
            let bytes = self.bytes(&piece, from, out.len() / element(self.plan.dtype) * element(stored))?;
            cast_into(bytes, stored, self.plan.dtype, out);
        }
        Ok(())
    }

    fn rows(&self, item: usize, (format, rows, columns): (QuantFormat, usize, usize), offset: usize, out: &mut [u8]) -> Result<()> {
        let row_bytes = columns * element(self.plan.dtype);
        for (index, inside, out) in pieces_of(offset, rows * row_bytes, out) {
            let [weights, scales] = [0, 1].map(|i| read_piece(&self.plan.binding.piece(item, 2 * index + i), self.source));
            let (weights, scales) = (weights?, scales?);
            dequantise_rows(format, &weights, &scales, self.plan.dtype, inside / row_bytes, out).map_err(|why| self.unfit(item, &why))?;
        }
        Ok(())
    }

    fn columns(&self, item: usize, (rows, columns): (usize, usize), offset: usize, out: &mut [u8]) -> Result<()> {
        let piece = self.plan.binding.piece(item, 0);
        let stored = self.dtype(&piece)?;
        let matrix = self.bytes(&piece, 0, rows * columns * element(stored))?;
        let first = offset / (rows * element(self.plan.dtype));
        if stored == self.plan.dtype {
            transpose_columns(matrix, (rows, columns), element(stored), first, out);
            return Ok(());
        }
        let mut moved = vec![0; out.len() / element(self.plan.dtype) * element(stored)];
        transpose_columns(matrix, (rows, columns), element(stored), first, &mut moved);
        cast_into(&moved, stored, self.plan.dtype, out);
        Ok(())
    }

    /// One item by the steps of its layout, with every check on the way: what [`Reader::fill`] is a shorter way to.
    fn item(&self, item: usize) -> Result<HostTensor<'a>> {
        let (plan, source) = (self.plan, self.source);
        let binding = &plan.binding;
        let pieces = binding.pieces(item);
        let check = |piece: &Piece, tensor: &HostTensor<'_>, expected: &str| match self.allow_nonfinite {
            true => Ok(()),
            false => finite(piece, source, tensor.dtype, &tensor.data, expected),
        };
        let mut tensors = Vec::with_capacity(pieces.len());
        for piece in &pieces {
            let tensor = read_piece(piece, source)?;
            check(piece, &tensor, "finite weights (or set `allow_nonfinite`)")?;
            tensors.push(tensor);
        }
        let in_range = "a value in the range of the dtype asked for";
        let steps = match binding.format() {
            None => {
                for (piece, tensor) in pieces.iter().zip(&mut tensors) {
                    if tensor.dtype != plan.dtype {
                        tensor.data = cast(std::mem::take(&mut tensor.data), tensor.dtype, plan.dtype);
                        tensor.dtype = plan.dtype;
                        check(piece, tensor, in_range)?;
                    }
                }
                &binding.steps[..]
            }
            Some(format) => {
                tensors = dequantise(format, &tensors, plan.dtype).map_err(|why| self.unfit(item, &why))?;
                for (pair, tensor) in pieces.chunks(2).zip(&tensors) {
                    check(&pair[0], tensor, in_range)?;
                }
                &binding.steps[1..]
            }
        };
        let whole = forward(steps, tensors).map_err(|why| self.unfit(item, &why))?;
        if whole.data.len() != self.item_bytes {
            let why = format!("{} bytes where {} fit", whole.data.len(), self.item_bytes);
            return Err(self.unfit(item, &why));
        }
        Ok(whole)
    }

    fn unfit(&self, item: usize, why: &str) -> Error {
        Error::Mismatch(format!("{}: {why}", self.plan.binding.piece(item, 0).name))
    }

    fn dtype(&self, piece: &Piece) -> Result<Dtype> {
        let info = self.source.info(&piece.name).ok_or_else(|| absent(piece, self.source))?;
        Ok(info.dtype)
    }

    /// Mapped bytes of a piece.
    fn bytes(&self, piece: &Piece, offset: usize, length: usize) -> Result<&'a [u8]> {
        let whole = match piece.slab {
            None => self.source.bytes(&piece.name),
            Some(index) => self.source.slab(&piece.name, index),
        };
        whole
            .and_then(|bytes| bytes.get(offset..offset + length))
            .ok_or_else(|| absent(piece, self.source))
    }
}

fn way(plan: &ParamPlan, item_bytes: usize) -> Way {
    let binding = &plan.binding;
    let item_shape = &plan.shape[usize::from(plan.share.is_some())..];
    let joined = |steps: &[Step]| matches!(steps, [] | [Step::Concat { axis: 0 }]);
    match (binding.format(), &binding.steps[..], item_shape) {
        (None, steps, _) if joined(steps) => Way::Runs {
            part: item_bytes / binding.arity(),
        },
        (None, [Step::Transpose { axes: (0, 1) | (1, 0) }], &[columns, rows]) => Way::Columns { rows, columns },
        (Some(format), [_, steps @ ..], &[rows, columns]) if joined(steps) => Way::Rows {
            format,
            rows: rows / (binding.arity() / 2),
            columns,
        },
        _ => Way::Items,
    }
}

/// Cuts `out`, which begins at byte `offset` of equal parts in a row: (part, offset in it, bytes to fill).
fn pieces_of(offset: usize, part: usize, mut out: &mut [u8]) -> impl Iterator<Item = (usize, usize, &mut [u8])> {
    let mut at = offset;
    std::iter::from_fn(move || {
        if out.is_empty() {
            return None;
        }
        let (index, inside) = (at / part, at % part);
        let length = (part - inside).min(out.len());
        let (now, later) = std::mem::take(&mut out).split_at_mut(length);
        at += now.len();
        out = later;
        Some((index, inside, now))
    })
}

fn element(dtype: Dtype) -> usize {
    dtype.bitsize() / 8
}

fn absent(piece: &Piece, source: &CheckpointSource) -> Error {
    Error::checkpoint(source.dir(), format!("tensor `{}`", piece.name), "nothing", "data")
}

/// A stored tensor, or one expert of it, from the mapped file.
pub(crate) fn read_piece<'a>(piece: &Piece, source: &'a CheckpointSource) -> Result<HostTensor<'a>> {
    let whole = source.info(&piece.name).zip(source.bytes(&piece.name));
    let found = whole.and_then(|(info, bytes)| match piece.slab {
        None => Some((info.dtype, info.shape, bytes)),
        Some(index) => Some((info.dtype, info.shape.get(1..)?, source.slab(&piece.name, index)?)),
    });
    let (dtype, shape, data) = found.ok_or_else(|| absent(piece, source))?;
    Ok(HostTensor {
        dtype,
        shape: shape.to_vec(),
        data: Cow::Borrowed(data),
    })
}

fn finite(piece: &Piece, source: &CheckpointSource, dtype: Dtype, bytes: &[u8], expected: &str) -> Result<()> {
    let Some((index, value)) = first_nonfinite(dtype, bytes) else {
        return Ok(());
    };
    let file = source.info(&piece.name).map_or(source.dir(), |info| info.file);
    let place = match piece.slab {
        Some(expert) => format!("{value} ({dtype}) at element {index} of expert {expert}"),
        None => format!("{value} ({dtype}) at element {index}"),
    };
    Err(Error::checkpoint(file, format!("tensor `{}`", piece.name), place, expected))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::plan::plan;
    use crate::checkpoint::plan::{Kind, ParamSpec};
    use crate::checkpoint::{LoadOptions, Rule, WeightMap};
    use safetensors::tensor::{TensorView, serialize_to_file};

    const EXPERTS: usize = 3;
    const FP8: QuantFormat = QuantFormat::Fp8 { rows: 4, columns: 3 };

    /// Values in [-2, 2) that are exact in bf16; never NaN in any of the types.
    fn numbers(n: usize, seed: usize) -> Vec<u8> {
        (0..n)
            .flat_map(|i| half::bf16::from_f32(((i * 37 + seed * 11) % 256) as f32 / 64.0 - 2.0).to_le_bytes())
            .collect()
    }

    /// Two matrices `[rows, columns]` for every expert, plain and packed, in files of their own and stacked.
    fn folder(rows: usize, columns: usize) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.json"), "{}").unwrap();
        let mut tensors: Vec<(String, Dtype, Vec<usize>, Vec<u8>)> = Vec::new();
        for e in 0..EXPERTS {
            for (p, projection) in ["gate", "up"].into_iter().enumerate() {
                let seed = 2 * e + p;
                tensors.push((
                    format!("{e}.{projection}"),
                    Dtype::BF16,
                    vec![rows, columns],
                    numbers(rows * columns, seed),
                ));
                let codes = (0..rows * columns).map(|i| ((i * 7 + seed) % 120) as u8).collect();
                tensors.push((format!("{e}.{projection}.fp8"), Dtype::F8_E4M3, vec![rows, columns], codes));
                let grid = vec![rows.div_ceil(4), columns.div_ceil(3)];
                let scales = (0..grid[0] * grid[1]).flat_map(|i| (0.5 + i as f32).to_le_bytes()).collect();
                tensors.push((format!("{e}.{projection}.scale"), Dtype::F32, grid, scales));
            }
        }
        tensors.push((
            "flipped".into(),
            Dtype::BF16,
            vec![EXPERTS, columns, 2 * rows],
            numbers(EXPERTS * columns * 2 * rows, 9),
        ));
        let views = tensors
            .iter()
            .map(|(name, dtype, shape, data)| (name.as_str(), TensorView::new(*dtype, shape.clone(), data).unwrap()));
        serialize_to_file(views, None, &dir.path().join("model.safetensors")).unwrap();
        dir
    }

    /// Every part of every parameter, against the whole made by the steps themselves.
    #[test]
    fn any_part_is_a_part_of_the_whole() {
        for (rows, columns) in [(6, 7), (9, 4), (1, 3)] {
            let dir = folder(rows, columns);
            let source = CheckpointSource::open(dir.path()).unwrap();
            let spec = ParamSpec {
                path: "w".into(),
                shape: vec![EXPERTS, 2 * rows, columns],
                kind: Kind::Float,
            };
            let join = Step::Concat { axis: 1 };
            let across = Step::Transpose { axes: (1, 2) };
            let layouts: [(&[&str], Vec<Step>, bool); 5] = [
                (&["{expert}.gate", "{expert}.up"], vec![join], true),
                (
                    &["{expert}.gate.fp8", "{expert}.gate.scale", "{expert}.up.fp8", "{expert}.up.scale"],
                    vec![Step::Dequantise(FP8), join],
                    true,
                ),
                (&["flipped"], vec![across], true),
                // No short way.
                (&["flipped"], vec![across, Step::Deinterleave { axis: 1 }], false),
                (&["{expert}.gate", "{expert}.up"], vec![join, Step::Interleave { axis: 1 }], false),
            ];
            for (sources, steps, short) in layouts {
                // Every rule needs a plain layout; this one is not in the file.
                let rule = Rule::experts("w").stored_as(["plain"], []);
                let map = WeightMap::new([""]).rule(rule.stored_as(sources.iter().copied(), steps.clone()));
                for dtype in [None, Some(burn::tensor::DType::F32), Some(burn::tensor::DType::F64)] {
                    let options = LoadOptions {
                        dtype,
                        strict: false,
                        ..LoadOptions::default()
                    };
                    let plan = plan(std::slice::from_ref(&spec), &source, &map, &options).unwrap();
                    assert!(plan.report.mismatched.is_empty(), "{}", plan.report);
                    let reader = Reader::new(&plan.params["w"], &source, false);
                    assert_eq!(reader.way != Way::Items, short, "{steps:?}");
                    let whole: Vec<u8> = (0..EXPERTS).flat_map(|e| reader.item(e).unwrap().data.into_owned()).collect();
                    let unit = reader.unit();
                    for length in (1..=whole.len() / unit).map(|n| n * unit) {
                        for from in (0..=whole.len() - length).step_by(unit) {
                            let mut part = vec![0xaa; length];
                            reader.fill(from, &mut part).unwrap();
                            assert_eq!(part, whole[from..from + length], "{steps:?} {dtype:?} {from} + {length}");
                        }
                    }
                }
            }
        }
    }
}

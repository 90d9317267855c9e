//! Steps between the tensors of a file and a parameter, each with its inverse.
//!
//! Stacking over experts is not a step: it follows from `{expert}` in a source name (see `mapping.rs`), and its inverse is
//! taking one expert's slab.

use std::borrow::Cow;

use safetensors::Dtype;

use super::quantise::{self, QuantFormat};

/// One step. Axes are counted in the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// All sources, in order, joined along `axis`; they must have equal sizes, so that the inverse can cut them apart.
    Concat { axis: usize },
    /// Swap two axes.
    Transpose { axes: (usize, usize) },
    /// Rows `a0 b0 a1 b1 ..` of the file become `a0 a1 .. b0 b1 ..`.
    Deinterleave { axis: usize },
    /// Rows `a0 a1 .. b0 b1 ..` of the file become `a0 b0 a1 b1 ..`.
    Interleave { axis: usize },
    /// Sources come in pairs, packed weights and their scales: each pair becomes one matrix. Always the first step.
    Dequantise(QuantFormat),
}

/// A tensor on the host, row-major.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostTensor<'a> {
    /// Element type.
    pub dtype: Dtype,
    /// Sizes.
    pub shape: Vec<usize>,
    /// Little-endian elements.
    pub data: Cow<'a, [u8]>,
}

type Shapes = Vec<Vec<usize>>;

impl Step {
    /// Whether the step makes one tensor of several.
    pub fn merges(&self) -> bool {
        matches!(self, Self::Concat { .. })
    }

    /// The format that the step decodes.
    pub fn format(&self) -> Option<QuantFormat> {
        match *self {
            Self::Dequantise(format) => Some(format),
            _ => None,
        }
    }

    /// Whether the step moves elements along `axis`.
    pub fn touches_axis(&self, axis: usize) -> bool {
        match *self {
            Self::Concat { axis: a } | Self::Deinterleave { axis: a } | Self::Interleave { axis: a } => a == axis,
            Self::Transpose { axes: (a, b) } => a == axis || b == axis,
            // Of a matrix, which is one expert where axis 0 counts experts.
            Self::Dequantise(_) => false,
        }
    }

    /// The same step on a slab without axis 0.
    pub(crate) fn within_slab(self) -> Self {
        match self {
            Self::Concat { axis } => Self::Concat { axis: axis - 1 },
            Self::Transpose { axes: (a, b) } => Self::Transpose { axes: (a - 1, b - 1) },
            Self::Deinterleave { axis } => Self::Deinterleave { axis: axis - 1 },
            Self::Interleave { axis } => Self::Interleave { axis: axis - 1 },
            Self::Dequantise(format) => Self::Dequantise(format),
        }
    }

    fn shapes(&self, mut inputs: Shapes) -> Result<Shapes, String> {
        match *self {
            Self::Concat { axis } => {
                let mut merged = inputs.first().cloned().ok_or("no tensor to concatenate")?;
                if axis >= merged.len() {
                    return Err(format!("axis {axis} of shape {merged:?}"));
                }
                if let Some(other) = inputs.iter().find(|shape| **shape != merged) {
                    return Err(format!("shapes {merged:?} and {other:?} to join along axis {axis}"));
                }
                merged[axis] = merged[axis].checked_mul(inputs.len()).ok_or("a size beyond the address space")?;
                Ok(vec![merged])
            }
            Self::Transpose { axes: (a, b) } => {
                for shape in &mut inputs {
                    if a.max(b) >= shape.len() {
                        return Err(format!("axes {a} and {b} of shape {shape:?}"));
                    }
                    shape.swap(a, b);
                }
                Ok(inputs)
            }
            Self::Deinterleave { axis } | Self::Interleave { axis } => {
                match inputs.iter().find(|s| axis >= s.len() || !s[axis].is_multiple_of(2)) {
                    Some(shape) => Err(format!("shape {shape:?}, whose axis {axis} does not hold pairs")),
                    None => Ok(inputs),
                }
            }
            Self::Dequantise(format) => inputs
                .chunks(2)
                .map(|pair| match pair {
                    [weights, scales] => format.shape(weights, scales),
                    _ => Err(format!("{} tensors where {format} needs pairs of weights and scales", inputs.len())),
                })
                .collect(),
        }
    }

    fn inverse_shapes(&self, outputs: Shapes, arity: usize) -> Result<Shapes, String> {
        let axis = match *self {
            Self::Concat { axis } => axis,
            Self::Dequantise(format) => {
                let pairs = outputs.iter().map(|shape| format.stored_shapes(shape));
                return Ok(pairs.collect::<Result<Vec<_>, _>>()?.into_iter().flatten().collect());
            }
            _ => return self.shapes(outputs),
        };
        let [merged] = outputs.as_slice() else {
            return Err(format!("{} tensors where one was joined", outputs.len()));
        };
        if axis >= merged.len() || arity == 0 || !merged[axis].is_multiple_of(arity) {
            return Err(format!("shape {merged:?}, whose axis {axis} does not cut into {arity} equal parts"));
        }
        let mut part = merged.clone();
        part[axis] /= arity;
        Ok(vec![part; arity])
    }

    fn apply<'a>(&self, inputs: Vec<HostTensor<'a>>) -> Result<Vec<HostTensor<'a>>, String> {
        Ok(match *self {
            Self::Concat { axis } => vec![concat(inputs, axis)],
            Self::Dequantise(format) => return dequantise(format, &inputs, format.plain_type()),
            Self::Transpose { axes } => inputs.into_iter().map(|t| transpose(t, axes)).collect(),
            Self::Deinterleave { axis } => inputs
                .into_iter()
                .map(|t| gather_rows(t, axis, |n, row| if row < n / 2 { 2 * row } else { 2 * (row - n / 2) + 1 }))
                .collect(),
            Self::Interleave { axis } => inputs
                .into_iter()
                .map(|t| gather_rows(t, axis, |n, row| if row % 2 == 0 { row / 2 } else { n / 2 + row / 2 }))
                .collect(),
        })
    }

    fn invert<'a>(&self, outputs: Vec<HostTensor<'a>>, arity: usize) -> Result<Vec<HostTensor<'a>>, String> {
        match *self {
            Self::Concat { axis } => Ok(outputs.into_iter().flat_map(|t| cut(t, axis, arity)).collect()),
            Self::Transpose { .. } => self.apply(outputs),
            Self::Deinterleave { axis } => Self::Interleave { axis }.apply(outputs),
            Self::Interleave { axis } => Self::Deinterleave { axis }.apply(outputs),
            Self::Dequantise(format) => {
                let pairs = outputs.iter().map(|matrix| quantise::quantise(format, matrix, None));
                Ok(pairs.collect::<Result<Vec<_>, _>>()?.into_iter().flatten().collect())
            }
        }
    }
}

/// The format of a chain that begins with quantised sources.
pub(crate) fn quantised(steps: &[Step]) -> Option<QuantFormat> {
    steps.first().and_then(Step::format)
}

/// Tensors that the steps after [`Step::Dequantise`] see, for `arity` sources.
fn parts(steps: &[Step], arity: usize) -> usize {
    match quantised(steps) {
        Some(_) => arity / 2,
        None => arity,
    }
}

/// One matrix in `dtype` for every pair (weights, scales).
pub(crate) fn dequantise(format: QuantFormat, sources: &[HostTensor<'_>], dtype: Dtype) -> Result<Vec<HostTensor<'static>>, String> {
    sources
        .chunks(2)
        .map(|pair| match pair {
            [weights, scales] => quantise::dequantise(format, weights, scales, dtype),
            _ => Err(format!(
                "{} tensors where {format} needs pairs of weights and scales",
                sources.len()
            )),
        })
        .collect()
}

/// Shape that `steps` make of the source shapes, or what does not fit.
pub fn forward_shape(steps: &[Step], sources: Vec<Vec<usize>>) -> Result<Vec<usize>, String> {
    let mut shapes = steps.iter().try_fold(sources, |shapes, step| step.shapes(shapes))?;
    match (shapes.pop(), shapes.len()) {
        (Some(shape), 0) => Ok(shape),
        (_, more) => Err(format!("{} tensors where one is needed", more + 1)),
    }
}

/// Shapes of the `arity` sources of a target of shape `target`.
pub fn backward_shapes(steps: &[Step], target: Vec<usize>, arity: usize) -> Result<Vec<Vec<usize>>, String> {
    let parts = parts(steps, arity);
    let shapes = steps
        .iter()
        .rev()
        .try_fold(vec![target], |shapes, step| step.inverse_shapes(shapes, parts))?;
    if shapes.len() == arity {
        Ok(shapes)
    } else {
        Err(format!("{} tensors where {arity} are stored", shapes.len()))
    }
}

/// The target that `steps` make of the sources; all sources have one dtype, except pairs of weights and scales.
pub fn forward<'a>(steps: &[Step], sources: Vec<HostTensor<'a>>) -> Result<HostTensor<'a>, String> {
    forward_shape(steps, sources.iter().map(|t| t.shape.clone()).collect())?;
    let mut tensors = steps.iter().try_fold(sources, |tensors, step| step.apply(tensors))?;
    tensors.pop().ok_or_else(|| "no tensor".to_string())
}

/// The sources of a target: the inverse of [`forward`].
pub fn backward<'a>(steps: &[Step], target: HostTensor<'a>, arity: usize) -> Result<Vec<HostTensor<'a>>, String> {
    backward_shapes(steps, target.shape.clone(), arity)?;
    let parts = parts(steps, arity);
    steps
        .iter()
        .rev()
        .try_fold(vec![target], |tensors, step| step.invert(tensors, parts))
}

/// Bytes of one element; sub-byte types never reach a step.
fn element_bytes(dtype: Dtype) -> usize {
    dtype.bitsize().div_ceil(8)
}

fn concat<'a>(inputs: Vec<HostTensor<'a>>, axis: usize) -> HostTensor<'a> {
    if inputs.len() == 1 {
        return inputs.into_iter().next().expect("one tensor");
    }
    let mut shape = inputs[0].shape.clone();
    shape[axis] *= inputs.len();
    let dtype = inputs[0].dtype;
    let block = inputs[0].shape[axis..].iter().product::<usize>() * element_bytes(dtype);
    let total = inputs.iter().map(|t| t.data.len()).sum();
    let mut data = Vec::with_capacity(total);
    for outer in 0..inputs[0].data.len().checked_div(block).unwrap_or(0) {
        for input in &inputs {
            data.extend_from_slice(&input.data[outer * block..(outer + 1) * block]);
        }
    }
    HostTensor {
        dtype,
        shape,
        data: data.into(),
    }
}

fn cut(input: HostTensor<'_>, axis: usize, arity: usize) -> Vec<HostTensor<'_>> {
    if arity == 1 {
        return vec![input];
    }
    let mut shape = input.shape.clone();
    shape[axis] /= arity;
    let block = shape[axis..].iter().product::<usize>() * element_bytes(input.dtype);
    (0..arity)
        .map(|part| {
            let mut data = Vec::with_capacity(input.data.len() / arity);
            if block > 0 {
                for outer in input.data.chunks_exact(block * arity) {
                    data.extend_from_slice(&outer[part * block..(part + 1) * block]);
                }
            }
            HostTensor {
                dtype: input.dtype,
                shape: shape.clone(),
                data: data.into(),
            }
        })
        .collect()
}

fn gather_rows<'a>(input: HostTensor<'a>, axis: usize, source_row: impl Fn(usize, usize) -> usize) -> HostTensor<'a> {
    let rows = input.shape[axis];
    let row_bytes = input.shape[axis + 1..].iter().product::<usize>() * element_bytes(input.dtype);
    let mut data = Vec::with_capacity(input.data.len());
    if row_bytes > 0 && rows > 0 {
        for outer in input.data.chunks_exact(rows * row_bytes) {
            for row in 0..rows {
                let from = source_row(rows, row) * row_bytes;
                data.extend_from_slice(&outer[from..from + row_bytes]);
            }
        }
    }
    HostTensor {
        data: data.into(),
        ..input
    }
}

fn transpose<'a>(input: HostTensor<'a>, (a, b): (usize, usize)) -> HostTensor<'a> {
    if a == b {
        return input;
    }
    let (low, high) = (a.min(b), a.max(b));
    let mut shape = input.shape.clone();
    shape.swap(low, high);
    // [outer, rows, middle, columns, inner] -> [outer, columns, middle, rows, inner]
    let (rows, columns) = (input.shape[low], input.shape[high]);
    let middle: usize = input.shape[low + 1..high].iter().product();
    let inner = input.shape[high + 1..].iter().product::<usize>() * element_bytes(input.dtype);
    let block = rows * middle * columns * inner;
    let mut data: Vec<u8> = Vec::with_capacity(input.data.len());
    let element = element_bytes(input.dtype);
    if block > 0 && middle == 1 && inner == element {
        data.resize(input.data.len(), 0);
        for (from, to) in input.data.chunks_exact(block).zip(data.chunks_exact_mut(block)) {
            transpose_columns(from, (rows, columns), element, 0, to);
        }
    } else if block > 0 {
        for outer in input.data.chunks_exact(block) {
            for column in 0..columns {
                for mid in 0..middle {
                    for row in 0..rows {
                        let from = ((row * middle + mid) * columns + column) * inner;
                        data.extend_from_slice(&outer[from..from + inner]);
                    }
                }
            }
        }
    }
    HostTensor {
        dtype: input.dtype,
        shape,
        data: data.into(),
    }
}

/// Columns of a matrix `[rows, columns]` from `first` on as rows, as many as `out` holds.
pub(crate) fn transpose_columns(matrix: &[u8], (rows, columns): (usize, usize), element: usize, first: usize, out: &mut [u8]) {
    match element {
        1 => columns_as_rows::<1>(matrix, rows, columns, first, out),
        2 => columns_as_rows::<2>(matrix, rows, columns, first, out),
        4 => columns_as_rows::<4>(matrix, rows, columns, first, out),
        _ => columns_as_rows::<8>(matrix, rows, columns, first, out),
    }
}

fn columns_as_rows<const N: usize>(matrix: &[u8], rows: usize, columns: usize, first: usize, out: &mut [u8]) {
    /// Side of a block that stays in the cache: its lines are read and written whole.
    const SIDE: usize = 32;
    let (from, to) = (matrix.as_chunks::<N>().0, out.as_chunks_mut::<N>().0);
    let count = to.len().checked_div(rows).unwrap_or(0);
    for column in (0..count).step_by(SIDE) {
        for row in (0..rows).step_by(SIDE) {
            for c in column..count.min(column + SIDE) {
                for r in row..rows.min(row + SIDE) {
                    to[c * rows + r] = from[r * columns + first + c];
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(shape: &[usize], values: &[u8]) -> HostTensor<'static> {
        assert_eq!(shape.iter().product::<usize>(), values.len());
        HostTensor {
            dtype: Dtype::U8,
            shape: shape.to_vec(),
            data: values.to_vec().into(),
        }
    }

    fn iota(shape: &[usize]) -> HostTensor<'static> {
        let n: usize = shape.iter().product();
        tensor(shape, &(0..n as u8).collect::<Vec<_>>())
    }

    #[test]
    fn concat_puts_gate_rows_before_up_rows() {
        let (gate, up) = (tensor(&[1, 2], &[1, 2]), tensor(&[1, 2], &[3, 4]));
        let rows = forward(&[Step::Concat { axis: 0 }], vec![gate.clone(), up.clone()]).unwrap();
        assert_eq!(rows, tensor(&[2, 2], &[1, 2, 3, 4]));
        let columns = forward(
            &[Step::Concat { axis: 1 }],
            vec![tensor(&[2, 1], &[1, 2]), tensor(&[2, 1], &[3, 4])],
        )
        .unwrap();
        assert_eq!(columns, tensor(&[2, 2], &[1, 3, 2, 4]));
        assert_eq!(backward(&[Step::Concat { axis: 0 }], rows, 2).unwrap(), [gate, up]);
    }

    #[test]
    fn deinterleave_takes_even_rows_first() {
        let file = tensor(&[4, 1], &[10, 20, 11, 21]);
        let target = forward(&[Step::Deinterleave { axis: 0 }], vec![file.clone()]).unwrap();
        assert_eq!(target, tensor(&[4, 1], &[10, 11, 20, 21]));
        assert_eq!(forward(&[Step::Interleave { axis: 0 }], vec![target]).unwrap(), file);
    }

    #[test]
    fn transpose_swaps_any_two_axes() {
        let swapped = forward(&[Step::Transpose { axes: (0, 1) }], vec![iota(&[2, 3])]).unwrap();
        assert_eq!(swapped, tensor(&[3, 2], &[0, 3, 1, 4, 2, 5]));
        let far = forward(&[Step::Transpose { axes: (2, 0) }], vec![iota(&[2, 2, 3])]).unwrap();
        assert_eq!(far, tensor(&[3, 2, 2], &[0, 6, 3, 9, 1, 7, 4, 10, 2, 8, 5, 11]));
    }

    #[test]
    fn every_chain_is_undone_exactly() {
        let steps = [
            Step::Concat { axis: 0 },
            Step::Transpose { axes: (0, 2) },
            Step::Interleave { axis: 1 },
            Step::Deinterleave { axis: 2 },
        ];
        let chains: Vec<Vec<Step>> = (1..=steps.len()).map(|n| steps[..n].to_vec()).collect();
        for chain in chains {
            let sources = vec![iota(&[2, 4, 3]), tensor(&[2, 4, 3], &[7; 24])];
            let shapes: Vec<_> = sources.iter().map(|t| t.shape.clone()).collect();
            let target = forward(&chain, sources.clone()).unwrap();
            assert_eq!(target.shape, forward_shape(&chain, shapes.clone()).unwrap());
            assert_eq!(backward_shapes(&chain, target.shape.clone(), 2).unwrap(), shapes);
            assert_eq!(backward(&chain, target, 2).unwrap(), sources);
        }
    }

    /// Two quantised matrices, decoded and joined: gate and up of one expert.
    #[test]
    fn pairs_of_weights_and_scales_become_matrices() {
        let pair = |code: u8, scale: u8| [tensor(&[1, 1, 16], &[code; 16]), tensor(&[1, 1], &[scale])];
        let sources: Vec<_> = pair(0x21, 127).into_iter().chain(pair(0x43, 128)).collect();
        let steps = [Step::Dequantise(QuantFormat::Mxfp4), Step::Concat { axis: 0 }];
        let target = forward(&steps, sources.clone()).unwrap();
        assert_eq!((target.dtype, &target.shape[..]), (Dtype::BF16, &[2, 32][..]));
        let first = |row: usize| -> Vec<u8> { target.data[row * 64..row * 64 + 4].to_vec() };
        let bf16 = |values: [f32; 2]| -> Vec<u8> { values.iter().flat_map(|v| half::bf16::from_f32(*v).to_le_bytes()).collect() };
        assert_eq!((first(0), first(1)), (bf16([0.5, 1.0]), bf16([3.0, 4.0])));
        let shapes: Vec<_> = sources.iter().map(|t| t.shape.clone()).collect();
        assert_eq!(backward_shapes(&steps, vec![2, 32], 4).unwrap(), shapes);
        let stored = backward(&steps, target.clone(), 4).unwrap();
        assert_eq!(forward(&steps, stored).unwrap(), target);
        assert!(forward(&steps[..1], sources[..1].to_vec()).unwrap_err().contains("pairs"));
    }

    #[test]
    fn wide_elements_move_as_a_whole() {
        let values: Vec<u8> = [1u16, 2, 3, 4].iter().flat_map(|v| v.to_le_bytes()).collect();
        let file = HostTensor {
            dtype: Dtype::BF16,
            shape: vec![2, 2],
            data: values.into(),
        };
        let swapped = forward(&[Step::Transpose { axes: (0, 1) }], vec![file]).unwrap();
        let expected: Vec<u8> = [1u16, 3, 2, 4].iter().flat_map(|v| v.to_le_bytes()).collect();
        assert_eq!(swapped.data, expected);
    }

    #[test]
    fn what_does_not_fit_is_an_error() {
        let concat = [Step::Concat { axis: 0 }];
        assert!(forward(&concat, vec![iota(&[1, 2]), iota(&[2, 2])]).unwrap_err().contains("[2, 2]"));
        assert!(backward(&concat, iota(&[3, 2]), 2).unwrap_err().contains("2 equal parts"));
        assert!(
            forward(&[Step::Deinterleave { axis: 0 }], vec![iota(&[3])])
                .unwrap_err()
                .contains("pairs")
        );
        assert!(forward(&[Step::Transpose { axes: (0, 2) }], vec![iota(&[2, 2])]).is_err());
        assert!(forward(&[], vec![iota(&[1]), iota(&[1])]).is_err());
        assert_eq!(forward(&concat, vec![iota(&[0, 2]), iota(&[0, 2])]).unwrap().shape, [0, 2]);
    }
}

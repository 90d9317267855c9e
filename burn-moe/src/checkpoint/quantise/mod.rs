//! Quantised weights: a packed matrix and the scales of its blocks.
//!
//! In the table of `mapping.rs` such a pair is two sources of one layout and [`Step::Dequantise`](super::Step) its first
//! step. It turns every pair (weights, scales) into one matrix; the steps after it see ordinary values.
//!
//! Matrices are converted in *bands*, the rows that share one row of scales, or in parts of them, so that no more than a band
//! per thread is held in fp32.
//!
//! # Adding a format
//! 1. a file of its own with the numbers of the format: `decode` and `encode` of one band, tested against the published rule;
//! 2. a variant of [`QuantFormat`], with its block sizes as fields when the config chooses them;
//! 3. an arm in every `match` below (the compiler names them). Nothing else knows formats: loading, saving, reports and expert
//!    parallelism go through [`dequantise`] and [`quantise`];
//! 4. in the family's `weights.rs`, a layout `stored_as([weights, scales], [Step::Dequantise(format), ..])` after the plain
//!    one, for every parameter that is to be quantised on request.

mod fp8;
mod mxfp4;

use std::borrow::Cow;
use std::fmt;

use rayon::prelude::*;
use safetensors::Dtype;

use super::cast::{cast, cast_into};
use super::transform::HostTensor;

/// How packed weights and scales represent a matrix `[rows, columns]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QuantFormat {
    /// OCP Microscaling FP4: weights U8 `[rows, columns / 32, 16]`, two E2M1 values a byte, low half first; scales U8
    /// `[rows, columns / 32]`, powers of two with bias 127.
    Mxfp4,
    /// Weights F8_E4M3 in the shape of the matrix, scales in a grid of one number per block of `rows x columns`; blocks at the
    /// edges are smaller. Scales are written as F32 and read as F32, BF16 or powers of two (U8, F8_E8M0).
    Fp8 { rows: usize, columns: usize },
}

impl fmt::Display for QuantFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mxfp4 => f.write_str("MXFP4"),
            Self::Fp8 { rows, columns } => write!(f, "FP8 in blocks of {rows} x {columns}"),
        }
    }
}

/// A band that is quantised again: what the file held before, so that untouched blocks keep their bytes.
pub(crate) struct Before<'a> {
    /// The stored band, decoded and rounded to the dtype of the parameter.
    pub values: &'a [f32],
    pub packed: &'a [u8],
    pub scales: &'a [u8],
}

impl QuantFormat {
    /// Element types of weights and scales, as written.
    pub(crate) fn stored_types(self) -> [Dtype; 2] {
        match self {
            Self::Mxfp4 => [Dtype::U8, Dtype::U8],
            Self::Fp8 { .. } => [Dtype::F8_E4M3, Dtype::F32],
        }
    }

    /// Element type of the values where nothing else is asked for, in memory as well as in a plain export.
    pub(crate) fn plain_type(self) -> Dtype {
        match self {
            Self::Mxfp4 | Self::Fp8 { .. } => Dtype::BF16,
        }
    }

    /// Checks stored element types; the error is (which of the two, what it should be).
    pub(crate) fn check_types(self, weights: Dtype, scales: Dtype) -> Result<(), (usize, String)> {
        let fits = match self {
            Self::Mxfp4 => [weights == Dtype::U8, scales == Dtype::U8],
            Self::Fp8 { .. } => [weights == Dtype::F8_E4M3, fp8::is_scale_type(scales)],
        };
        match fits.iter().position(|fit| !fit) {
            None => Ok(()),
            Some(part) => Err((part, format!("dtype {} ({self})", self.stored_types()[part]))),
        }
    }

    /// Rows that share one row of scales.
    fn band_rows(self) -> usize {
        match self {
            Self::Mxfp4 => 1,
            Self::Fp8 { rows, .. } => rows,
        }
    }

    /// Shape of the matrix that is stored in these two shapes.
    pub(crate) fn shape(self, weights: &[usize], scales: &[usize]) -> Result<Vec<usize>, String> {
        let shape = match self {
            Self::Mxfp4 => mxfp4::matrix(weights)?,
            Self::Fp8 { .. } => weights.to_vec(),
        };
        let [_, expected] = self.stored_shapes(&shape)?;
        match scales == expected {
            true => Ok(shape),
            false => Err(format!(
                "{self} weights {weights:?} with scales {scales:?}, which should be {expected:?}"
            )),
        }
    }

    /// Shapes in which a matrix is stored.
    pub(crate) fn stored_shapes(self, matrix: &[usize]) -> Result<[Vec<usize>; 2], String> {
        let &[rows, columns] = matrix else {
            return Err(format!("shape {matrix:?}, where {self} stores matrices"));
        };
        match self {
            Self::Mxfp4 => mxfp4::stored_shapes(rows, columns),
            Self::Fp8 { rows: high, columns: wide } => Ok(fp8::stored_shapes(rows, columns, (high, wide))),
        }
    }

    /// Values of one band of `columns` columns.
    fn decode(self, columns: usize, packed: &[u8], scales: (&[u8], Dtype), out: &mut [f32]) {
        debug_assert_eq!(out.len() % columns.max(1), 0);
        match self {
            Self::Mxfp4 => mxfp4::decode(packed, scales.0, out),
            Self::Fp8 { columns: width, .. } => fp8::decode(columns, width, packed, scales, out),
        }
    }

    /// The inverse of [`QuantFormat::decode`], in the types of [`QuantFormat::stored_types`].
    fn encode(self, columns: usize, values: &[f32], before: Option<&Before<'_>>, packed: &mut [u8], scales: &mut [u8]) {
        debug_assert_eq!(values.len() % columns.max(1), 0);
        match self {
            Self::Mxfp4 => mxfp4::encode(values, before, packed, scales),
            Self::Fp8 { columns: width, .. } => fp8::encode(columns, width, values, before, packed, scales),
        }
    }
}

/// Bytes of a row of weights, and of a row of scales.
fn row_bytes_of(shapes: &[Vec<usize>; 2], types: [Dtype; 2]) -> [usize; 2] {
    std::array::from_fn(|i| shapes[i][1..].iter().product::<usize>() * types[i].bitsize() / 8)
}

/// Values of a stored matrix in `dtype`.
pub(crate) fn dequantise(
    format: QuantFormat,
    weights: &HostTensor<'_>,
    scales: &HostTensor<'_>,
    dtype: Dtype,
) -> Result<HostTensor<'static>, String> {
    let shape = format.shape(&weights.shape, &scales.shape)?;
    let mut data = vec![0; shape.iter().product::<usize>() * dtype.bitsize() / 8];
    dequantise_rows(format, weights, scales, dtype, 0, &mut data)?;
    Ok(HostTensor {
        dtype,
        shape,
        data: data.into(),
    })
}

/// Some rows of [`dequantise`], from `first` on, into `out`.
pub(crate) fn dequantise_rows(
    format: QuantFormat,
    weights: &HostTensor<'_>,
    scales: &HostTensor<'_>,
    dtype: Dtype,
    first: usize,
    out: &mut [u8],
) -> Result<(), String> {
    /// Rows held in fp32.
    const ROWS: usize = 8;
    let shape = format.shape(&weights.shape, &scales.shape)?;
    let (columns, band) = (shape[1], format.band_rows());
    let row_bytes = columns * dtype.bitsize() / 8;
    if row_bytes == 0 {
        return Ok(());
    }
    let [packed_row, scale_row] = row_bytes_of(&[weights.shape.clone(), scales.shape.clone()], [weights.dtype, scales.dtype]);
    let mut values = vec![0.0f32; ROWS.min(shape[0]) * columns];
    let (mut row, end) = (first, first + out.len() / row_bytes);
    while row < end {
        let stop = end.min(row + ROWS).min((row / band + 1) * band);
        let packed = &weights.data[row * packed_row..stop * packed_row];
        let scale = &scales.data[row / band * scale_row..][..scale_row];
        let values = &mut values[..(stop - row) * columns];
        format.decode(columns, packed, (scale, scales.dtype), values);
        let out = &mut out[(row - first) * row_bytes..(stop - first) * row_bytes];
        cast_into(bytemuck::cast_slice(values), Dtype::F32, dtype, out);
        row = stop;
    }
    Ok(())
}

/// Weights and scales of a matrix. Blocks whose values are those of `before` keep its bytes.
pub(crate) fn quantise(
    format: QuantFormat,
    matrix: &HostTensor<'_>,
    before: Option<[HostTensor<'_>; 2]>,
) -> Result<[HostTensor<'static>; 2], String> {
    let shapes = format.stored_shapes(&matrix.shape)?;
    let types = format.stored_types();
    let [packed_row, scale_row] = row_bytes_of(&shapes, types);
    let (rows, columns, element) = (matrix.shape[0], matrix.shape[1], matrix.dtype.bitsize() / 8);
    let mut packed = vec![0u8; rows * packed_row];
    let mut scales = vec![0u8; shapes[1][0] * scale_row];
    let before = before.filter(|parts| (0..2).all(|i| parts[i].shape == shapes[i] && parts[i].dtype == types[i]));
    let band_bytes = format.band_rows() * columns * element;
    if band_bytes > 0 {
        let bands = matrix.data.par_chunks(band_bytes).enumerate();
        let out = packed
            .par_chunks_mut(format.band_rows() * packed_row)
            .zip(scales.par_chunks_mut(scale_row));
        bands.zip(out).for_each(|((band, bytes), (packed, scales))| {
            let widened = |bytes: &[u8], dtype: Dtype| -> Vec<f32> {
                let wide = cast(Cow::Borrowed(bytes), dtype, Dtype::F32);
                wide.as_chunks::<4>().0.iter().map(|v| f32::from_le_bytes(*v)).collect()
            };
            let values = widened(bytes, matrix.dtype);
            let stored = before.as_ref().map(|[weights, scale]| {
                let first = band * format.band_rows() * packed_row;
                let (weights, scale) = (
                    &weights.data[first..first + packed.len()],
                    &scale.data[band * scale_row..][..scale_row],
                );
                let mut decoded = vec![0.0f32; values.len()];
                format.decode(columns, weights, (scale, types[1]), &mut decoded);
                let rounded = cast(Cow::Borrowed(bytemuck::cast_slice(&decoded)), Dtype::F32, matrix.dtype);
                (widened(&rounded, matrix.dtype), weights, scale)
            });
            let before = stored.as_ref().map(|(values, packed, scales)| Before { values, packed, scales });
            format.encode(columns, &values, before.as_ref(), packed, scales);
        });
    }
    let [weights_shape, scales_shape] = shapes;
    let tensor = |dtype, shape, data: Vec<u8>| HostTensor {
        dtype,
        shape,
        data: data.into(),
    };
    Ok([tensor(types[0], weights_shape, packed), tensor(types[1], scales_shape, scales)])
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    fn bytes(shape: &[usize], data: Vec<u8>) -> HostTensor<'static> {
        HostTensor {
            dtype: Dtype::U8,
            shape: shape.to_vec(),
            data: data.into(),
        }
    }

    /// Two rows of two blocks with every nibble, in scales at which values are ordinary.
    fn stored() -> [HostTensor<'static>; 2] {
        let weights = (0..2 * 2 * 16).map(|i| (i * 37 + 11) as u8).collect();
        [bytes(&[2, 2, 16], weights), bytes(&[2, 2], vec![127, 120, 130, 125])]
    }

    #[test]
    fn shapes_that_do_not_belong_together_are_refused() {
        let format = QuantFormat::Mxfp4;
        assert_eq!(format.shape(&[3, 2, 16], &[3, 2]).unwrap(), [3, 64]);
        assert_eq!(format.stored_shapes(&[3, 64]).unwrap(), [vec![3, 2, 16], vec![3, 2]]);
        for (weights, scales, why) in [
            (&[3, 2, 16][..], &[3, 3][..], "should be [3, 2]"),
            (&[3, 2, 15], &[3, 2], "16"),
            (&[3, 32], &[3, 1], "16"),
        ] {
            let error = format.shape(weights, scales).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
        assert!(format.stored_shapes(&[3, 40]).unwrap_err().contains("32"));
        assert!(format.stored_shapes(&[1, 3, 32]).unwrap_err().contains("matrices"));
        assert_eq!(format.check_types(Dtype::U8, Dtype::F32).unwrap_err().0, 1);
    }

    /// Values do not depend on the dtype asked for, and come back in the bytes they had.
    #[test]
    fn untouched_matrices_keep_their_bytes_in_every_dtype() {
        let [weights, scales] = stored();
        let wide = dequantise(QuantFormat::Mxfp4, &weights, &scales, Dtype::F32).unwrap();
        for dtype in [Dtype::BF16, Dtype::F16, Dtype::F32, Dtype::F64] {
            let values = dequantise(QuantFormat::Mxfp4, &weights, &scales, dtype).unwrap();
            assert_eq!((&values.shape[..], values.dtype), (&[2, 64][..], dtype));
            assert_eq!(cast(values.data.clone(), dtype, Dtype::F32), wide.data);
            let again = quantise(QuantFormat::Mxfp4, &values, Some(stored())).unwrap();
            assert_eq!(again, [weights.clone(), scales.clone()], "{dtype}");
        }
    }

    /// A block that changed is quantised anew; its neighbours are not.
    #[test]
    fn only_changed_blocks_are_quantised_again() {
        let [weights, _] = stored();
        // Codes up to 3 only: the published rule would choose a smaller scale for the same values.
        let small = bytes(&[2, 2, 16], weights.data.iter().map(|b| b & 0x33).collect());
        let scales = bytes(&[2, 2], vec![127, 120, 130, 125]);
        let mut values = dequantise(QuantFormat::Mxfp4, &small, &scales, Dtype::BF16).unwrap();
        let fresh = quantise(QuantFormat::Mxfp4, &values, None).unwrap();
        assert_ne!(fresh[1], scales, "the rule alone does not give the stored scales");

        let changed = 2 * (64 + 32 + 5);
        values.data.to_mut()[changed..changed + 2].copy_from_slice(&bf16::from_f32(1.5).to_le_bytes());
        let again = quantise(QuantFormat::Mxfp4, &values, Some([small.clone(), scales.clone()])).unwrap();
        assert_eq!(again[0].data[..48], small.data[..48]);
        assert_eq!(again[1].data[..3], scales.data[..3]);
        let back = dequantise(QuantFormat::Mxfp4, &again[0], &again[1], Dtype::F32).unwrap();
        let value = f32::from_le_bytes(back.data[2 * changed..2 * changed + 4].try_into().unwrap());
        assert_eq!(value, 1.5);
    }
}

//! FP8 in blocks, as DeepSeek-V3 is published: E4M3 values (the finite variant: largest 448, one NaN per sign, no infinities)
//! with one multiplier per block of the matrix. The stored name of the multiplier, `weight_scale_inv`, says the opposite.

use half::bf16;
use safetensors::Dtype;

use super::Before;

/// Largest E4M3 value.
const MAX: f32 = 448.0;
/// Code of the largest value; the next one is NaN.
const MAX_CODE: u8 = 0x7e;
const NAN_CODE: u8 = 0x7f;
const EXPONENT_BIAS: i32 = 7;
const FRACTION_BITS: u32 = 3;

/// Shapes of weights and scales.
pub(super) fn stored_shapes(rows: usize, columns: usize, block: (usize, usize)) -> [Vec<usize>; 2] {
    [vec![rows, columns], vec![rows.div_ceil(block.0), columns.div_ceil(block.1)]]
}

/// Whether multipliers may be stored in this type: plain numbers, or E8M0 powers of two (bias 127), under either name.
pub(super) fn is_scale_type(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F32 | Dtype::BF16 | Dtype::F8_E8M0 | Dtype::U8)
}

fn scale(bytes: &[u8], dtype: Dtype, index: usize) -> f32 {
    match dtype {
        Dtype::F32 => f32::from_le_bytes(bytes.as_chunks::<4>().0[index]),
        Dtype::BF16 => bf16::from_le_bytes(bytes.as_chunks::<2>().0[index]).to_f32(),
        _ => match bytes[index] {
            u8::MAX => f32::NAN,
            // 2^-127 is subnormal: the top bit of the fraction.
            0 => f32::from_bits(1 << 22),
            code => f32::from_bits(u32::from(code) << 23),
        },
    }
}

/// `value(code) * scale` of a band of rows that share one row of scales; the last block of a row may be narrower.
pub(super) fn decode(columns: usize, width: usize, packed: &[u8], scales: (&[u8], Dtype), out: &mut [f32]) {
    let values: [f32; 256] = std::array::from_fn(|code| value(code as u8));
    for (codes, out) in packed.chunks_exact(columns).zip(out.chunks_exact_mut(columns)) {
        for (block, (codes, out)) in codes.chunks(width).zip(out.chunks_mut(width)).enumerate() {
            let scale = scale(scales.0, scales.1, block);
            for (&code, out) in codes.iter().zip(out) {
                *out = values[usize::from(code)] * scale;
            }
        }
    }
}

/// Per block `scale = max |W| / 448` (1 for a block of zeros) and `code = round(W / scale)`. A block that holds what it held
/// before keeps its bytes.
pub(super) fn encode(columns: usize, width: usize, values: &[f32], before: Option<&Before<'_>>, packed: &mut [u8], scales: &mut [u8]) {
    for (block, out) in scales.as_chunks_mut::<4>().0.iter_mut().enumerate() {
        let range = block * width..columns.min((block + 1) * width);
        let rows = |all: &[f32]| -> Vec<f32> {
            let part = all.chunks_exact(columns).flat_map(|row| row[range.clone()].iter().copied());
            part.collect()
        };
        let new = rows(values);
        if let Some(before) = before
            && new.iter().zip(rows(before.values)).all(|(a, b)| a.to_bits() == b.to_bits())
        {
            for (to, from) in packed.chunks_exact_mut(columns).zip(before.packed.chunks_exact(columns)) {
                to[range.clone()].copy_from_slice(&from[range.clone()]);
            }
            *out = before.scales.as_chunks::<4>().0[block];
            continue;
        }
        let largest = new.iter().fold(0.0f32, |max, v| max.max(v.abs()));
        // The quotient of a subnormal number may be zero.
        let scale = match largest / MAX {
            s if s > 0.0 => s,
            _ => 1.0,
        };
        *out = scale.to_le_bytes();
        for (to, from) in packed.chunks_exact_mut(columns).zip(values.chunks_exact(columns)) {
            for (to, from) in to[range.clone()].iter_mut().zip(&from[range.clone()]) {
                *to = code(from / scale);
            }
        }
    }
}

fn value(code: u8) -> f32 {
    let (exponent, fraction) = (i32::from(code >> FRACTION_BITS & 15), f32::from(code & 7) / 8.0);
    let magnitude = match (code & NAN_CODE, exponent) {
        (NAN_CODE, _) => f32::NAN,
        (_, 0) => fraction * 2f32.powi(1 - EXPONENT_BIAS),
        _ => (1.0 + fraction) * 2f32.powi(exponent - EXPONENT_BIAS),
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

/// Nearest E4M3 code, ties to even; values beyond the largest saturate.
fn code(value: f32) -> u8 {
    let sign = if value.is_sign_negative() { 0x80 } else { 0 };
    if value.is_nan() {
        return sign | NAN_CODE;
    }
    let magnitude = value.abs();
    if magnitude >= MAX {
        return sign | MAX_CODE;
    }
    let smallest_normal = 2f32.powi(1 - EXPONENT_BIAS);
    let code = if magnitude < smallest_normal {
        // Multiples of 2^-9; eight of them make the first normal number, whose code follows.
        (magnitude / (smallest_normal / 8.0)).round_ties_even() as u8
    } else {
        // Drop the fraction bits that E4M3 lacks, rounding to even; a carry moves into the exponent as it should.
        let bits = magnitude.to_bits();
        let dropped = f32::MANTISSA_DIGITS - 1 - FRACTION_BITS;
        let odd = bits >> dropped & 1;
        let rounded = (bits + (1 << (dropped - 1)) - 1 + odd) >> dropped;
        (rounded - ((127 - EXPONENT_BIAS as u32) << FRACTION_BITS)) as u8
    };
    sign | code
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_have_their_published_values() {
        for (code, expected) in [
            (0x00, 0.0),
            (0x01, 2f32.powi(-9)),
            (0x07, 7.0 * 2f32.powi(-9)),
            (0x08, 2f32.powi(-6)),
            (0x38, 1.0),
            (0x3c, 1.5),
            (0x40, 2.0),
            (0x7e, 448.0),
            (0xb8, -1.0),
            (0xfe, -448.0),
        ] {
            assert_eq!(value(code), expected, "{code:#x}");
        }
        assert!(value(0x7f).is_nan() && value(0xff).is_nan());
        assert!(value(0x80).is_sign_negative() && value(0x80) == 0.0);
    }

    #[test]
    fn every_code_is_found_again() {
        for c in 0..=u8::MAX {
            assert_eq!(code(value(c)), c, "{c:#x}");
            // Values are exact in bf16, which is what a model holds.
            let v = value(c);
            assert!(v.is_nan() || bf16::from_f32(v).to_f32() == v, "{c:#x}");
        }
    }

    /// Against a search through all codes.
    #[test]
    fn rounding_takes_the_nearest_code_and_ties_to_even() {
        let nearest = |v: f32| -> u8 {
            let distance = |c: &u8| f64::from(value(*c) - v).abs();
            // The lower bit decides between two that are equally near.
            (0..=MAX_CODE)
                .min_by(|a, b| distance(a).total_cmp(&distance(b)).then((a & 1).cmp(&(b & 1))))
                .unwrap()
        };
        for c in 0..MAX_CODE {
            let (low, high) = (value(c), value(c + 1));
            for v in [low, low + (high - low) * 0.25, (low + high) / 2.0, low + (high - low) * 0.75] {
                assert_eq!(code(v), nearest(v), "{v}");
                assert_eq!(code(-v), nearest(v) | 0x80, "{v}");
            }
        }
        for v in [448.0, 460.0, 1e30, f32::INFINITY] {
            assert_eq!((code(v), code(-v)), (0x7e, 0xfe));
        }
        assert_eq!(code(f32::from_bits(1)), 0);
    }

    #[test]
    fn scales_in_every_type() {
        assert_eq!(scale(&0.3f32.to_le_bytes(), Dtype::F32, 0), 0.3);
        assert_eq!(scale(&[0, 0, 0x80, 0x3f], Dtype::BF16, 1), 1.0);
        for dtype in [Dtype::U8, Dtype::F8_E8M0] {
            assert_eq!(scale(&[127, 128, 120, 0], dtype, 1), 2.0);
            assert_eq!(scale(&[127, 128, 120, 0], dtype, 2), 2f32.powi(-7));
            assert_eq!(f64::from(scale(&[0], dtype, 0)), 2f64.powi(-127));
            assert!(scale(&[255], dtype, 0).is_nan());
        }
    }

    /// Two rows of three columns in blocks of two: the second block is an edge.
    #[test]
    fn blocks_are_scaled_apart_and_kept_when_nothing_changed() {
        let values = [1.0, -2.0, 0.5, 4.0, 0.0, 0.25];
        let (mut packed, mut scales) = ([0u8; 6], [0u8; 8]);
        encode(3, 2, &values, None, &mut packed, &mut scales);
        let stored: Vec<f32> = scales.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        assert_eq!(stored, [4.0 / 448.0, 0.5 / 448.0]);
        let mut back = [0.0; 6];
        decode(3, 2, &packed, (&scales, Dtype::F32), &mut back);
        for (a, b) in back.iter().zip(values) {
            assert!((a - b).abs() <= b.abs() / 16.0, "{back:?}");
        }

        // Another scale for the same values: the rule would choose 2 / 448 for the first block.
        let (codes, scales) = (
            [0x38, 0x40, 0x38, 0x38, 0x00, 0x38],
            [1f32.to_le_bytes(), 0.5f32.to_le_bytes()].concat(),
        );
        let mut decoded = [0.0; 6];
        decode(3, 2, &codes, (&scales, Dtype::F32), &mut decoded);
        assert_eq!(decoded, [1.0, 2.0, 0.5, 1.0, 0.0, 0.5]);
        let before = Before {
            values: &decoded,
            packed: &codes,
            scales: &scales,
        };
        let (mut packed, mut again) = ([0u8; 6], [0u8; 8]);
        encode(3, 2, &decoded, Some(&before), &mut packed, &mut again);
        assert_eq!((packed, &again[..]), (codes, &scales[..]));
        let mut changed = decoded;
        changed[5] = 0.75;
        encode(3, 2, &changed, Some(&before), &mut packed, &mut again);
        assert_eq!(again[..4], scales[..4]);
        assert_eq!(again[4..], (0.75f32 / 448.0).to_le_bytes());
        assert_eq!((packed[0], packed[1], packed[3], packed[4]), (0x38, 0x40, 0x38, 0x00));
    }

    #[test]
    fn blocks_of_zeros() {
        let (mut packed, mut scales) = ([9u8; 2], [9u8; 4]);
        encode(2, 2, &[0.0, -0.0], None, &mut packed, &mut scales);
        assert_eq!((packed, scales), ([0, 0x80], 1f32.to_le_bytes()));
    }
}

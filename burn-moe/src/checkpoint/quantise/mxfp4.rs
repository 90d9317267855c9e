//! MXFP4 (OCP Microscaling Formats 1.0): blocks of 32 E2M1 values along a row with one power-of-two scale (E8M0).

use super::Before;

/// Values per block.
const BLOCK: usize = 32;
/// Bytes per block, two values each.
const PACKED: usize = BLOCK / 2;
/// Largest exponent of E2M1: 6 = 1.5 * 2^2.
const MAX_EXPONENT: i32 = 2;
const SCALE_BIAS: i32 = 127;
/// E8M0 has this one code that is no number.
const NAN: u8 = 255;

/// Magnitudes of the codes 0 to 7; bit 3 is the sign.
const E2M1: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// `[rows, columns]` of packed weights `[rows, columns / 32, 16]`.
pub(super) fn matrix(weights: &[usize]) -> Result<Vec<usize>, String> {
    match *weights {
        [rows, blocks, PACKED] => match blocks.checked_mul(BLOCK) {
            Some(columns) => Ok(vec![rows, columns]),
            None => Err("a size beyond the address space".into()),
        },
        _ => Err(format!(
            "shape {weights:?}, where MXFP4 packs {BLOCK} values into the last axis of {PACKED} bytes: [rows, blocks, {PACKED}]"
        )),
    }
}

pub(super) fn stored_shapes(rows: usize, columns: usize) -> Result<[Vec<usize>; 2], String> {
    if !columns.is_multiple_of(BLOCK) {
        return Err(format!("{columns} columns, where MXFP4 needs a multiple of {BLOCK}"));
    }
    let blocks = columns / BLOCK;
    Ok([vec![rows, blocks, PACKED], vec![rows, blocks]])
}

/// `value(code) * 2^(scale - 127)`, exact in fp32 and bf16 up to scale 252; larger ones may overflow to infinity. Scale 255 is
/// NaN, as the format defines it.
pub(super) fn decode(packed: &[u8], scales: &[u8], out: &mut [f32]) {
    let blocks = packed.as_chunks::<PACKED>().0.iter().zip(scales);
    for ((bytes, &scale), out) in blocks.zip(out.as_chunks_mut::<BLOCK>().0) {
        let unit = power_of_two(scale);
        for (byte, pair) in bytes.iter().zip(out.as_chunks_mut::<2>().0) {
            *pair = [value(byte & 15) * unit, value(byte >> 4) * unit];
        }
    }
}

fn value(code: u8) -> f32 {
    let magnitude = E2M1[usize::from(code & 7)];
    if code & 8 == 0 { magnitude } else { -magnitude }
}

fn power_of_two(scale: u8) -> f32 {
    match scale {
        NAN => f32::NAN,
        // 2^-127 is subnormal: the top bit of the fraction.
        0 => f32::from_bits(1 << 22),
        _ => f32::from_bits(u32::from(scale) << 23),
    }
}

/// The conversion of the format's specification: the scale is the largest power of two in the block divided by that of E2M1,
/// values round to nearest even and saturate at 6. A block that holds what it held before keeps its bytes.
pub(super) fn encode(values: &[f32], before: Option<&Before<'_>>, packed: &mut [u8], scales: &mut [u8]) {
    let out = packed.as_chunks_mut::<PACKED>().0.iter_mut().zip(scales);
    for (i, (values, (packed, scale))) in values.as_chunks::<BLOCK>().0.iter().zip(out).enumerate() {
        if let Some(before) = before
            && same(values, &before.values[i * BLOCK..][..BLOCK])
        {
            packed.copy_from_slice(&before.packed[i * PACKED..][..PACKED]);
            *scale = before.scales[i];
            continue;
        }
        let largest = values.iter().fold(0.0f32, |max, v| max.max(v.abs()));
        *scale = if largest > 0.0 {
            (exponent(largest) - MAX_EXPONENT + SCALE_BIAS).clamp(0, 2 * SCALE_BIAS) as u8
        } else {
            0
        };
        // A product with a power of two, exact in f64.
        let inverse = f64::from(SCALE_BIAS - i32::from(*scale)).exp2();
        for (byte, pair) in packed.iter_mut().zip(values.as_chunks::<2>().0) {
            let [low, high] = pair.map(|v| code(v, inverse));
            *byte = low | high << 4;
        }
    }
}

fn same(a: &[f32], b: &[f32]) -> bool {
    a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

/// `floor(log2(x))` of a positive finite number, subnormal ones included.
fn exponent(x: f32) -> i32 {
    // Every fp32 number is a normal f64.
    ((f64::from(x).to_bits() >> 52) as i32) - 1023
}

/// Nearest E2M1 code; ties go to the even one, as their midpoints are exact.
fn code(value: f32, inverse: f64) -> u8 {
    let magnitude = f64::from(value.abs()) * inverse;
    let sign = if value.is_sign_negative() { 8 } else { 0 };
    let nearest = match magnitude {
        m if m <= 0.25 => 0,
        m if m < 0.75 => 1,
        m if m <= 1.25 => 2,
        m if m < 1.75 => 3,
        m if m <= 2.5 => 4,
        m if m < 3.5 => 5,
        m if m <= 5.0 => 6,
        _ => 7,
    };
    sign | nearest
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decoded(packed: &[u8; PACKED], scale: u8) -> [f32; BLOCK] {
        let mut out = [0.0; BLOCK];
        decode(packed, &[scale], &mut out);
        out
    }

    fn encoded(values: &[f32; BLOCK]) -> ([u8; PACKED], u8) {
        let (mut packed, mut scale) = ([0; PACKED], [0]);
        encode(values, None, &mut packed, &mut scale);
        (packed, scale[0])
    }

    fn block(first: &[f32]) -> [f32; BLOCK] {
        let mut values = [0.0; BLOCK];
        values[..first.len()].copy_from_slice(first);
        values
    }

    #[test]
    fn all_codes_have_their_published_values() {
        let packed: [u8; PACKED] = std::array::from_fn(|i| if i < 8 { (2 * i + 1) as u8 * 16 + 2 * i as u8 } else { 0 });
        let values = [
            0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0,
        ];
        let found = decoded(&packed, 127);
        for (i, (found, expected)) in found.iter().zip(values).enumerate() {
            assert_eq!(found.to_bits(), f32::to_bits(expected), "code {i}");
        }
    }

    #[test]
    fn every_scale_is_its_power_of_two() {
        for scale in 0..=252u8 {
            let found = decoded(&[0x71; PACKED], scale);
            let unit = f64::from(i32::from(scale) - 127).exp2();
            assert_eq!([f64::from(found[0]), f64::from(found[1])], [0.5 * unit, 6.0 * unit], "{scale}");
            // And in bf16, which is what a model holds.
            for value in &found[..2] {
                assert_eq!(half::bf16::from_f32(*value).to_f32(), *value, "{scale}");
            }
        }
        assert_eq!(decoded(&[0x75; PACKED], 253)[..2], [3.0 * 126f32.exp2(), f32::INFINITY]);
        assert!(decoded(&[0; PACKED], 255)[0].is_nan());
    }

    /// Every block that decodes to finite numbers is found again: the same values, though perhaps in another scale.
    #[test]
    fn quantising_what_was_dequantised_is_exact() {
        for scale in 0..=252u8 {
            for largest in 1..8u8 {
                let packed: [u8; PACKED] = std::array::from_fn(|i| {
                    let pick = |n: usize| ((n * 7 + usize::from(scale)) as u8 % (largest + 1)) | ((n as u8 & 1) << 3);
                    pick(2 * i) | pick(2 * i + 1) << 4
                });
                let values = decoded(&packed, scale);
                let (again, shared) = encoded(&values);
                let back = decoded(&again, shared);
                assert!(same(&values, &back), "scale {scale}, codes to {largest}: {values:?} {back:?}");
            }
        }
    }

    #[test]
    fn ties_go_to_even_codes_and_large_values_saturate() {
        // 4 sets the scale to 1.
        let cases = [
            (0.25, 0.0),
            (0.2500001, 0.5),
            (0.75, 1.0),
            (1.25, 1.0),
            (1.75, 2.0),
            (2.5, 2.0),
            (3.5, 4.0),
            (4.9, 4.0),
            (5.0, 4.0),
            (5.1, 6.0),
            (7.9, 6.0),
            (-1.25, -1.0),
            (-7.9, -6.0),
        ];
        for (value, expected) in cases {
            let (packed, scale) = encoded(&block(&[4.0, value]));
            assert_eq!(scale, 127);
            assert_eq!(decoded(&packed, scale)[1], expected, "{value}");
        }
        // The scale is a power of two below the largest value, which may saturate.
        assert_eq!(encoded(&block(&[8.0])).1, 128);
        assert_eq!(encoded(&block(&[0.3])).1, 123);
    }

    #[test]
    fn zeros_and_signs() {
        assert_eq!(encoded(&[0.0; BLOCK]), ([0; PACKED], 0));
        assert_eq!(encoded(&[-0.0; BLOCK]), ([0x88; PACKED], 0));
        // Smaller than half a step of the smallest scale.
        assert_eq!(encoded(&block(&[f32::from_bits(1)])), ([0; PACKED], 0));
        assert_eq!(encoded(&block(&[f32::MAX])).1, 252);
    }
}

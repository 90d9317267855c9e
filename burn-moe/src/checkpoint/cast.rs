//! Element types of files and of tensors, and conversion between them.

use std::borrow::Cow;

use burn::tensor::DType;
use half::{bf16, f16};
use safetensors::Dtype;

/// The tensor type of a stored type; None for types that no parameter can have (packed and 8-bit floats, complex).
pub(crate) fn to_burn(dtype: Dtype) -> Option<DType> {
    Some(match dtype {
        Dtype::F64 => DType::F64,
        Dtype::F32 => DType::F32,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
        Dtype::I64 => DType::I64,
        Dtype::I32 => DType::I32,
        Dtype::I16 => DType::I16,
        Dtype::I8 => DType::I8,
        Dtype::U64 => DType::U64,
        Dtype::U32 => DType::U32,
        Dtype::U16 => DType::U16,
        Dtype::U8 => DType::U8,
        Dtype::BOOL => DType::Bool(burn::tensor::BoolStore::Native),
        _ => return None,
    })
}

/// The stored type of a tensor type; None for quantised tensors.
pub(crate) fn from_burn(dtype: DType) -> Option<Dtype> {
    Some(match dtype {
        DType::F64 => Dtype::F64,
        DType::F32 | DType::Flex32 => Dtype::F32,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        DType::I64 => Dtype::I64,
        DType::I32 => Dtype::I32,
        DType::I16 => Dtype::I16,
        DType::I8 => Dtype::I8,
        DType::U64 => Dtype::U64,
        DType::U32 => Dtype::U32,
        DType::U16 => Dtype::U16,
        DType::U8 => Dtype::U8,
        DType::Bool(_) => Dtype::BOOL,
        DType::QFloat(_) => return None,
    })
}

pub(crate) fn is_float(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::BF16)
}

pub(crate) fn is_int(dtype: Dtype) -> bool {
    matches!(
        dtype,
        Dtype::I64 | Dtype::I32 | Dtype::I16 | Dtype::I8 | Dtype::U64 | Dtype::U32 | Dtype::U16 | Dtype::U8
    )
}

/// Whether [`cast`] can convert.
pub(crate) fn can_cast(from: Dtype, to: Dtype) -> bool {
    from == to || (is_float(from) && is_float(to)) || (is_int(from) && is_int(to))
}

/// Converts elements, rounding to nearest even. The caller has asked [`can_cast`].
pub(crate) fn cast<'a>(bytes: Cow<'a, [u8]>, from: Dtype, to: Dtype) -> Cow<'a, [u8]> {
    use Dtype::{BF16, F16, F32, F64};
    let b: &[u8] = &bytes;
    let out = match (from, to) {
        _ if from == to => return bytes,
        (BF16 | F16, F32) | (F32, BF16 | F16) => {
            let mut out = vec![0; b.len() / (from.bitsize() / 8) * (to.bitsize() / 8)];
            cast_into(b, from, to, &mut out);
            out
        }
        // Rare pairs go through f64, which holds every value of the narrower types.
        (F64, _) => from_f64(to, convert_values(b, f64::from_le_bytes)),
        (F32, _) => from_f64(to, convert_values(b, |v| f64::from(f32::from_le_bytes(v)))),
        (F16, _) => from_f64(to, convert_values(b, |v| f16::from_le_bytes(v).to_f64())),
        (BF16, _) => from_f64(to, convert_values(b, |v| bf16::from_le_bytes(v).to_f64())),
        _ => from_i128(to, ints(from, b)),
    };
    Cow::Owned(out)
}

/// [`cast`] into memory of the right size.
pub(crate) fn cast_into(bytes: &[u8], from: Dtype, to: Dtype, out: &mut [u8]) {
    use Dtype::{BF16, F16, F32};
    match (from, to) {
        _ if from == to => out.copy_from_slice(bytes),
        (BF16, F32) => convert(bytes, out, |v| f32::from_bits(u32::from(u16::from_le_bytes(v)) << 16).to_le_bytes()),
        (F32, BF16) => convert(bytes, out, |v| bf16::from_f32(f32::from_le_bytes(v)).to_le_bytes()),
        (F16, F32) => convert(bytes, out, |v| f16::from_le_bytes(v).to_f32().to_le_bytes()),
        (F32, F16) => convert(bytes, out, |v| f16::from_f32(f32::from_le_bytes(v)).to_le_bytes()),
        _ => out.copy_from_slice(&cast(Cow::Borrowed(bytes), from, to)),
    }
}

fn convert<const N: usize, const M: usize>(bytes: &[u8], out: &mut [u8], f: impl Fn([u8; N]) -> [u8; M]) {
    for (to, from) in out.as_chunks_mut::<M>().0.iter_mut().zip(bytes.as_chunks::<N>().0) {
        *to = f(*from);
    }
}

fn convert_values<const N: usize, T>(bytes: &[u8], f: impl Fn([u8; N]) -> T) -> Vec<T> {
    bytes.as_chunks::<N>().0.iter().map(|v| f(*v)).collect()
}

fn from_f64(to: Dtype, values: Vec<f64>) -> Vec<u8> {
    values
        .iter()
        .flat_map(|&v| match to {
            Dtype::F64 => v.to_le_bytes().to_vec(),
            Dtype::F32 => (v as f32).to_le_bytes().to_vec(),
            Dtype::F16 => f16::from_f64(v).to_le_bytes().to_vec(),
            _ => bf16::from_f64(v).to_le_bytes().to_vec(),
        })
        .collect()
}

fn ints(from: Dtype, b: &[u8]) -> Vec<i128> {
    match from {
        Dtype::I64 => convert_values(b, |v| i64::from_le_bytes(v).into()),
        Dtype::I32 => convert_values(b, |v| i32::from_le_bytes(v).into()),
        Dtype::I16 => convert_values(b, |v| i16::from_le_bytes(v).into()),
        Dtype::I8 => convert_values(b, |v| i8::from_le_bytes(v).into()),
        Dtype::U64 => convert_values(b, |v| u64::from_le_bytes(v).into()),
        Dtype::U32 => convert_values(b, |v| u32::from_le_bytes(v).into()),
        Dtype::U16 => convert_values(b, |v| u16::from_le_bytes(v).into()),
        _ => convert_values(b, |v| u8::from_le_bytes(v).into()),
    }
}

/// Values outside the target's range saturate.
fn from_i128(to: Dtype, values: Vec<i128>) -> Vec<u8> {
    let clamp = |v: i128, low: i128, high: i128| v.clamp(low, high).to_le_bytes();
    values
        .iter()
        .flat_map(|&v| match to {
            Dtype::I64 => clamp(v, i64::MIN.into(), i64::MAX.into())[..8].to_vec(),
            Dtype::I32 => clamp(v, i32::MIN.into(), i32::MAX.into())[..4].to_vec(),
            Dtype::I16 => clamp(v, i16::MIN.into(), i16::MAX.into())[..2].to_vec(),
            Dtype::I8 => clamp(v, i8::MIN.into(), i8::MAX.into())[..1].to_vec(),
            Dtype::U64 => clamp(v, 0, u64::MAX.into())[..8].to_vec(),
            Dtype::U32 => clamp(v, 0, u32::MAX.into())[..4].to_vec(),
            Dtype::U16 => clamp(v, 0, u16::MAX.into())[..2].to_vec(),
            _ => clamp(v, 0, u8::MAX.into())[..1].to_vec(),
        })
        .collect()
}

/// Index and value of the first NaN or infinity.
pub(crate) fn first_nonfinite(dtype: Dtype, bytes: &[u8]) -> Option<(usize, f64)> {
    /// Block by block without an early exit, which the compiler turns into vector code.
    fn find<const N: usize>(bytes: &[u8], is_bad: impl Fn([u8; N]) -> bool) -> Option<usize> {
        const BLOCK: usize = 1024;
        let values = bytes.as_chunks::<N>().0;
        let mut blocks = values.chunks(BLOCK);
        let block = blocks.position(|block| block.iter().fold(false, |bad, v| bad | is_bad(*v)))?;
        let inside = values[block * BLOCK..].iter().position(|v| is_bad(*v))?;
        Some(block * BLOCK + inside)
    }
    let index = match dtype {
        Dtype::BF16 => find(bytes, |v| u16::from_le_bytes(v) & 0x7f80 == 0x7f80),
        Dtype::F16 => find(bytes, |v| u16::from_le_bytes(v) & 0x7c00 == 0x7c00),
        Dtype::F32 => find(bytes, |v| !f32::from_le_bytes(v).is_finite()),
        Dtype::F64 => find(bytes, |v| !f64::from_le_bytes(v).is_finite()),
        _ => None,
    }?;
    let size = dtype.bitsize() / 8;
    let element = cast(Cow::Borrowed(&bytes[index * size..(index + 1) * size]), dtype, Dtype::F64);
    Some((index, f64::from_le_bytes(element[..].try_into().ok()?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|v| v.to_le_bytes()).collect()
    }

    #[test]
    fn floats_round_to_nearest_even() {
        // Half a step above 1 lies between two bf16 values: even wins; one step and a half rounds up.
        let ulp = 2f32.powi(-7);
        let source = bytes(&[1.0, 1.0 + 0.5 * ulp, 1.0 + 1.5 * ulp, -0.0]);
        let narrow = cast(source.into(), Dtype::F32, Dtype::BF16);
        let expected: Vec<u8> = [0x3f80u16, 0x3f80, 0x3f82, 0x8000].iter().flat_map(|v| v.to_le_bytes()).collect();
        assert_eq!(narrow, expected);
    }

    #[test]
    fn widening_and_back_is_exact_for_every_bit_pattern() {
        let all: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        for narrow in [Dtype::BF16, Dtype::F16] {
            for wide in [Dtype::F32, Dtype::F64] {
                let there = cast(Cow::Borrowed(&all), narrow, wide);
                let back = cast(there, wide, narrow);
                for (i, (a, b)) in all.as_chunks::<2>().0.iter().zip(back.as_chunks::<2>().0).enumerate() {
                    let nan = first_nonfinite(narrow, a).is_some_and(|(_, v)| v.is_nan());
                    assert!(a == b || nan, "{narrow} {i:#x}");
                }
            }
        }
    }

    #[test]
    fn nonfinite_values_are_found() {
        assert_eq!(
            first_nonfinite(Dtype::F32, &bytes(&[1.0, f32::MAX, f32::NEG_INFINITY])),
            Some((2, f64::NEG_INFINITY))
        );
        assert_eq!(first_nonfinite(Dtype::F32, &bytes(&[1.0, 0.0])), None);
        let nan = bf16::NAN.to_le_bytes();
        assert!(first_nonfinite(Dtype::BF16, &nan).unwrap().1.is_nan());
        assert_eq!(first_nonfinite(Dtype::F16, &f16::INFINITY.to_le_bytes()), Some((0, f64::INFINITY)));
        assert_eq!(first_nonfinite(Dtype::I64, &[255; 8]), None);
    }

    #[test]
    fn integers_saturate() {
        let source: Vec<u8> = [5i64, -7, i64::MAX].iter().flat_map(|v| v.to_le_bytes()).collect();
        let narrow = cast(source.into(), Dtype::I64, Dtype::I32);
        let expected: Vec<u8> = [5i32, -7, i32::MAX].iter().flat_map(|v| v.to_le_bytes()).collect();
        assert_eq!(narrow, expected);
    }
}

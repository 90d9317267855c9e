//! Scalar loops in a form the compiler turns into vector code: sums in fixed lanes and a branch-free exponential.

const LANES: usize = 16;

/// Sum of products in 16 partial sums: faster than one running sum, and more accurate.
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let (a_chunks, b_chunks) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest: f32 = a_chunks.remainder().iter().zip(b_chunks.remainder()).map(|(a, b)| a * b).sum();
    let mut lanes = [0.0_f32; LANES];
    for (a, b) in a_chunks.zip(b_chunks) {
        for ((lane, a), b) in lanes.iter_mut().zip(a).zip(b) {
            *lane += a * b;
        }
    }
    lanes.iter().sum::<f32>() + rest
}

pub(crate) fn sum(a: &[f32]) -> f32 {
    let chunks = a.chunks_exact(LANES);
    let rest: f32 = chunks.remainder().iter().sum();
    let mut lanes = [0.0_f32; LANES];
    for chunk in chunks {
        for (lane, a) in lanes.iter_mut().zip(chunk) {
            *lane += a;
        }
    }
    lanes.iter().sum::<f32>() + rest
}

/// `e^x` within 2 units in the last place. Results below the smallest normal number are zero.
///
/// `e^x = 2^n e^r` with `|r| <= ln 2 / 2`; `e^r` by its Taylor polynomial of degree 7 (remainder below 6e-9), `ln 2` in two parts
/// so that `r` is exact to fp32 (Cody and Waite 1980).
#[inline]
pub(crate) fn exp(x: f32) -> f32 {
    /// Adding it leaves the nearest integer in the low mantissa bits.
    const ROUND: f32 = 12_582_912.0;
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    let shifted = x.clamp(-88.0, 88.8) * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (x - n * LN_2_HIGH) - n * LN_2_LOW;
    let mut poly = 1.0 / 5040.0;
    for coefficient in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        poly = poly * r + coefficient;
    }
    // 2^n in two factors: n = 128 has no fp32 power of its own.
    let exponent = shifted.to_bits().wrapping_sub(ROUND.to_bits()) as i32;
    let half = exponent >> 1;
    let power = |n: i32| f32::from_bits(((n + 127) as u32) << 23);
    let value = poly * power(half) * power(exponent - half);
    let value = if x < -87.336_54 { 0.0 } else { value };
    if x > 88.722_84 { f32::INFINITY } else { value }
}

#[inline]
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

#[inline]
pub(crate) fn silu(x: f32) -> f32 {
    x * sigmoid(x)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_accurate_to_two_ulp() {
        let mut worst = 0.0_f64;
        let mut x = -87.33_f32;
        while x < 88.72 {
            let exact = f64::from(x).exp();
            let found = exp(x);
            let ulp = f64::from(f32::from_bits(found.to_bits() + 1)) - f64::from(found);
            worst = worst.max((f64::from(found) - exact).abs() / ulp);
            x += 0.000_731;
        }
        assert!(worst <= 2.0, "{worst} ulp");
    }

    #[test]
    fn exp_at_the_edges() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-1e9), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp(89.0), f32::INFINITY);
        assert!(exp(88.72).is_finite());
        assert!(exp(f32::NAN).is_nan());
        assert_eq!(sigmoid(-1e4), 0.0);
        assert_eq!(sigmoid(1e4), 1.0);
    }

    #[test]
    fn sums_match_f64() {
        for len in [0, 1, 15, 16, 17, 1000] {
            let a: Vec<f32> = (0..len).map(|i| (i as f32 * 0.7).sin()).collect();
            let b: Vec<f32> = (0..len).map(|i| (i as f32 * 1.3).cos()).collect();
            let exact: f64 = a.iter().zip(&b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
            assert!((f64::from(dot(&a, &b)) - exact).abs() < 1e-4);
            let exact: f64 = a.iter().map(|a| f64::from(*a)).sum();
            assert!((f64::from(sum(&a)) - exact).abs() < 1e-4);
        }
    }
}

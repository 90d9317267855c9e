//! Which implementation computes a dense product: a table of measurements, and its overrides.

use std::cell::Cell;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};

use burn_backend::DType;

use super::layout::Problem;

/// An implementation of dense products on CUDA.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Route {
    /// NVIDIA's library.
    CublasLt,
    /// The kernel of `kernels/hopper/gemm.cu`.
    Hopper,
    /// Burn's own kernel.
    Burn,
}

/// How fp32 products are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fp32Products {
    /// Full fp32.
    Ieee,
    /// Tensor cores, operands rounded to 10 bits of mantissa.
    Tf32,
}

/// What the choice depends on.
#[derive(Debug, Clone, Copy)]
pub struct Candidate<'a> {
    pub dtype: DType,
    pub problem: &'a Problem,
    /// Whether the Hopper kernel can run it.
    pub hopper: bool,
}

/// A row of [`TABLE`]: products of this dtype with at least these sizes go this way.
struct Rule {
    dtype: DType,
    /// Least number of output tiles of 128 x 256.
    tiles: usize,
    /// Least K.
    k: usize,
    route: Route,
}

/// The first row that fits a product and can run it wins, the library runs the rest. `tests/gpu` measures the candidates
/// (`matmul_speed`). The kernel of our own runs on CubeCL's stream and so needs no event around it; it wants two waves of
/// tiles on 132 multiprocessors, because it does not split K.
const TABLE: [Rule; 1] = [Rule {
    dtype: DType::BF16,
    tiles: 264,
    k: 512,
    route: Route::Hopper,
}];

/// Name of the variable that overrides [`TABLE`].
const VARIABLE: &str = "BURN_MOE_MATMUL";
/// Name of the variable that allows TF32.
const TF32_VARIABLE: &str = "BURN_MOE_TF32";

thread_local! {
    static FORCED: Cell<Option<Route>> = const { Cell::new(None) };
}

/// Runs `f` with every product on one route where it can run at all, for tests and comparisons. Other threads keep theirs.
pub fn with_route<R>(route: Route, f: impl FnOnce() -> R) -> R {
    crate::scoped::with(&FORCED, Some(route), f)
}

/// The routes to try, in order. Burn's kernel runs whatever no other route can.
pub fn order(candidate: &Candidate<'_>) -> [Route; 3] {
    let preferred = FORCED.get().or_else(from_environment).unwrap_or_else(|| from_table(candidate));
    match preferred {
        Route::CublasLt => [Route::CublasLt, Route::Hopper, Route::Burn],
        Route::Hopper => [Route::Hopper, Route::CublasLt, Route::Burn],
        Route::Burn => [Route::Burn; 3],
    }
}

fn from_table(candidate: &Candidate<'_>) -> Route {
    let Problem { m, n, k, .. } = *candidate.problem;
    let tiles = m.div_ceil(128) * n.div_ceil(256);
    let fits = |rule: &&Rule| {
        rule.dtype == candidate.dtype && tiles >= rule.tiles && k >= rule.k && (rule.route != Route::Hopper || candidate.hopper)
    };
    TABLE.iter().find(fits).map_or(Route::CublasLt, |rule| rule.route)
}

fn from_environment() -> Option<Route> {
    static CHOICE: OnceLock<Option<Route>> = OnceLock::new();
    *CHOICE.get_or_init(|| {
        let value = std::env::var(VARIABLE).ok()?;
        let choice = parse(&value);
        match choice {
            Some(route) => tracing::info!(?route, "{VARIABLE} chooses the route of dense products"),
            None => tracing::error!("{VARIABLE} is `{value}`, expected burn, cublaslt, hopper or auto; it is ignored"),
        }
        choice.flatten()
    })
}

/// None for a word that is not a choice, Some(None) for the table.
#[allow(clippy::option_option)]
fn parse(value: &str) -> Option<Option<Route>> {
    match value {
        "burn" => Some(Some(Route::Burn)),
        "cublaslt" => Some(Some(Route::CublasLt)),
        "hopper" => Some(Some(Route::Hopper)),
        "auto" | "" => Some(None),
        _ => None,
    }
}

const UNSET: u8 = 0;
const IEEE: u8 = 1;
const TF32: u8 = 2;
static FP32: AtomicU8 = AtomicU8::new(UNSET);

/// Chooses how fp32 products are computed from now on, in the whole process. Only the library's products are meant: those
/// that Burn's own kernel runs follow Burn.
pub fn set_fp32_products(products: Fp32Products) {
    let value = match products {
        Fp32Products::Ieee => IEEE,
        Fp32Products::Tf32 => TF32,
    };
    FP32.store(value, Ordering::Relaxed);
}

/// How fp32 products are computed: [`set_fp32_products`], else `BURN_MOE_TF32=1`, else full fp32.
pub fn fp32_products() -> Fp32Products {
    if FP32.load(Ordering::Relaxed) == UNSET {
        let asked = std::env::var(TF32_VARIABLE).is_ok_and(|value| value == "1");
        set_fp32_products(if asked { Fp32Products::Tf32 } else { Fp32Products::Ieee });
    }
    match FP32.load(Ordering::Relaxed) {
        TF32 => Fp32Products::Tf32,
        _ => Fp32Products::Ieee,
    }
}

#[cfg(test)]
mod tests {
    use super::super::layout::Stored;
    use super::*;

    fn problem(m: usize, n: usize, k: usize) -> Problem {
        let stored = |ld| Stored { ld, transposed: false };
        Problem {
            m,
            n,
            k,
            a: stored(k),
            b: stored(n),
            batches: vec![],
            out_shape: vec![m, n],
        }
    }

    fn first(dtype: DType, problem: &Problem, hopper: bool) -> Route {
        order(&Candidate { dtype, problem, hopper })[0]
    }

    #[test]
    fn the_table_decides_by_dtype_size_and_fit() {
        let (large, small) = (problem(16_384, 2048, 2048), problem(128, 2048, 2048));
        assert_eq!(first(DType::BF16, &large, true), Route::Hopper);
        assert_eq!(first(DType::BF16, &large, false), Route::CublasLt);
        assert_eq!(first(DType::BF16, &small, true), Route::CublasLt);
        assert_eq!(first(DType::F16, &large, true), Route::CublasLt);
        assert_eq!(first(DType::F32, &large, false), Route::CublasLt);
    }

    #[test]
    fn a_forced_route_comes_first_and_ends_with_its_closure() {
        let large = problem(16_384, 2048, 2048);
        assert_eq!(with_route(Route::Burn, || first(DType::BF16, &large, true)), Route::Burn);
        assert_eq!(with_route(Route::CublasLt, || first(DType::BF16, &large, true)), Route::CublasLt);
        assert_eq!(first(DType::BF16, &large, true), Route::Hopper);
    }

    #[test]
    fn words_of_the_variable() {
        assert_eq!(parse("hopper"), Some(Some(Route::Hopper)));
        assert_eq!(parse("auto"), Some(None));
        assert_eq!(parse("cublas"), None);
    }
}

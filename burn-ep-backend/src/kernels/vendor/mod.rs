//! NVIDIA's own libraries, loaded at run time and ordered with CubeCL's work on the device.
//!
//! CubeCL keeps its streams to itself, so the libraries run on a stream of ours ([`side_stream`]) that waits for everything
//! enqueued before and that everything enqueued later waits for. The host never blocks on the device.

use std::fmt;

pub mod cublaslt;
pub(crate) mod side_stream;

/// Half of a product: how a matrix lies in memory. Sizes in elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MatrixLayout {
    /// Elements from one stored row to the next.
    pub ld: usize,
    /// Stored as its transpose.
    pub transposed: bool,
    /// Elements from one matrix of the batch to the next; 0 repeats the same one.
    pub batch_stride: usize,
    /// Largest power of two, at most 16, that divides the byte address.
    pub alignment: usize,
}

/// `C[b] = A[b] · B[b]`, A `[M, K]`, B `[K, N]`, C `[M, N]` row-major, sums in fp32 (f64 for f64). The key of the algorithm cache.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Product {
    /// Of every matrix: bf16, fp16, fp32 or f64.
    pub dtype: burn_backend::DType,
    /// fp32 products on tensor cores with operands rounded to 10 bits of mantissa.
    pub tf32: bool,
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub batch: usize,
    pub a: MatrixLayout,
    pub b: MatrixLayout,
    pub c: MatrixLayout,
    /// `C += ` instead of `C = `, one rounding for both.
    pub accumulate: bool,
    /// Adds a vector `[N]` of the same dtype to every row.
    pub bias: bool,
}

impl fmt::Display for Product {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { m, n, k, batch, .. } = self;
        write!(f, "cuBLASLt {:?} m {m} n {n} k {k} batch {batch}", self.dtype)
    }
}

impl Product {
    /// Bytes of C from its first to behind its last element.
    fn bytes_of_c(&self) -> usize {
        let elements = (self.batch - 1) * self.c.batch_stride + (self.m - 1) * self.c.ld + self.n;
        elements * self.dtype.size()
    }
}

/// Position of an operand: a buffer of the call and an offset in bytes.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    pub buffer: usize,
    pub offset: usize,
}

/// A product and where its operands are.
#[derive(Debug, Clone)]
pub struct Call {
    pub product: Product,
    pub a: Place,
    pub b: Place,
    pub c: Place,
    /// Given if and only if the product has one.
    pub bias: Option<Place>,
}

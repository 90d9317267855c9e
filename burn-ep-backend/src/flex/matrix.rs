//! Strided matrices on slices and their product: the safe face of the `gemm` crate.

use gemm::Parallelism;

use super::numeric::Real;

/// Read-only `[rows, cols]` matrix: element (i, j) is `data[i * row_stride + j * col_stride]`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Matrix<'a, A = f32> {
    data: &'a [A],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a, A: Real> Matrix<'a, A> {
    /// Rows of `cols` adjacent elements, `row_stride` apart.
    pub(crate) fn new(data: &'a [A], rows: usize, cols: usize, row_stride: usize) -> Self {
        check_span(data.len(), rows, cols, row_stride);
        Self {
            data,
            rows,
            cols,
            row_stride,
            col_stride: 1,
        }
    }

    /// The transpose, without a copy.
    pub(crate) fn t(self) -> Self {
        Self {
            data: self.data,
            rows: self.cols,
            cols: self.rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
        }
    }
}

/// Writable counterpart of [`Matrix`] with adjacent columns.
#[derive(Debug)]
pub(crate) struct MatrixMut<'a, A = f32> {
    data: &'a mut [A],
    rows: usize,
    cols: usize,
    row_stride: usize,
}

impl<'a, A: Real> MatrixMut<'a, A> {
    pub(crate) fn new(data: &'a mut [A], rows: usize, cols: usize, row_stride: usize) -> Self {
        check_span(data.len(), rows, cols, row_stride);
        Self {
            data,
            rows,
            cols,
            row_stride,
        }
    }
}

/// What a product does with the old content of its destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Write {
    Replace,
    Add,
}

/// Whether products inside one of `tasks` parallel tasks should use threads of their own.
pub(crate) fn inner_parallelism(tasks: usize) -> Parallelism {
    if tasks < rayon::current_num_threads() {
        Parallelism::Rayon(0)
    } else {
        Parallelism::None
    }
}

/// `out = scale * lhs · rhs`, or `out += ..`.
///
/// # Panics
/// When the sizes do not fit together.
pub(crate) fn matmul<A: Real>(out: MatrixMut<'_, A>, write: Write, scale: A, lhs: Matrix<'_, A>, rhs: Matrix<'_, A>, threads: Parallelism) {
    assert_eq!(lhs.cols, rhs.rows, "inner sizes of a matrix product");
    assert_eq!(
        (out.rows, out.cols),
        (lhs.rows, rhs.cols),
        "size of the destination of a matrix product"
    );
    if out.rows == 0 || out.cols == 0 {
        return;
    }
    if lhs.cols == 0 {
        if write == Write::Replace {
            out.data
                .chunks_mut(out.row_stride)
                .take(out.rows)
                .for_each(|row| row[..out.cols].fill(A::zero()));
        }
        return;
    }
    let add = write == Write::Add;
    // SAFETY: `check_span` ran in the constructors of all three matrices, so every element (i, j) with i < rows and
    // j < cols lies inside its slice, transposed or not. `out` is borrowed mutably, so it overlaps neither input.
    unsafe {
        gemm::gemm(
            out.rows,
            out.cols,
            lhs.cols,
            out.data.as_mut_ptr(),
            1,
            out.row_stride as isize,
            add,
            lhs.data.as_ptr(),
            lhs.col_stride as isize,
            lhs.row_stride as isize,
            rhs.data.as_ptr(),
            rhs.col_stride as isize,
            rhs.row_stride as isize,
            if add { A::one() } else { A::zero() },
            scale,
            false,
            false,
            false,
            threads,
        );
    }
}

/// `out = lhs · rhs` on one thread, `out` dense. For tasks that already run in parallel.
///
/// # Panics
/// When the sizes do not fit together.
pub(crate) fn product<A: Real>(out: &mut [A], lhs: Matrix<'_, A>, rhs: Matrix<'_, A>) {
    let (rows, cols) = (lhs.rows, rhs.cols);
    let out = MatrixMut::new(out, rows, cols, cols);
    matmul(out, Write::Replace, A::one(), lhs, rhs, Parallelism::None);
}

fn check_span(len: usize, rows: usize, cols: usize, row_stride: usize) {
    if rows > 0 && cols > 0 {
        assert!(
            rows == 1 || row_stride >= cols,
            "rows of a matrix overlap: stride {row_stride}, width {cols}"
        );
        let span = (rows - 1) * row_stride + cols;
        assert!(
            span <= len,
            "a {rows} x {cols} matrix with row stride {row_stride} needs {span} elements, the slice has {len}"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_match_loops() {
        for (m, n, k) in [(1, 1, 1), (3, 5, 2), (17, 9, 33), (4, 3, 0)] {
            for (add, transposed) in [(false, false), (true, false), (false, true), (true, true)] {
                let (lhs_stride, out_stride) = (k + 3, n + 2);
                let lhs: Vec<f32> = (0..m * lhs_stride).map(|i| (i as f32 * 0.7).sin()).collect();
                let rhs: Vec<f32> = (0..k * n).map(|i| (i as f32 * 1.3).cos()).collect();
                let mut out = vec![0.5; m * out_stride];
                let rhs_view = if transposed {
                    Matrix::new(&rhs, n, k, k).t()
                } else {
                    Matrix::new(&rhs, k, n, n)
                };
                let write = if add { Write::Add } else { Write::Replace };
                let dst = MatrixMut::new(&mut out, m, n, out_stride);
                matmul(dst, write, 2.0, Matrix::new(&lhs, m, k, lhs_stride), rhs_view, Parallelism::None);
                for i in 0..m {
                    for j in 0..n {
                        let product: f32 = (0..k)
                            .map(|l| lhs[i * lhs_stride + l] * if transposed { rhs[j * k + l] } else { rhs[l * n + j] })
                            .sum();
                        let expected = 2.0 * product + if add { 0.5 } else { 0.0 };
                        assert!((out[i * out_stride + j] - expected).abs() < 1e-5, "{m}x{n}x{k} ({i}, {j})");
                    }
                    assert!(
                        out[i * out_stride + n..(i + 1) * out_stride].iter().all(|&v| v == 0.5),
                        "padding written"
                    );
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "the slice has 5")]
    fn short_slices_are_refused() {
        Matrix::new(&[0.0; 5], 2, 3, 3);
    }
}

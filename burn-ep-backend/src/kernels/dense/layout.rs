//! From shapes and strides to matrices that a library can read: leading dimensions, transposes, batches, folded rows.

/// Shape and strides of a tensor, in elements.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    pub shape: &'a [usize],
    pub strides: &'a [usize],
}

/// A matrix in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stored {
    /// Elements between stored rows.
    pub ld: usize,
    /// The stored rows are the matrix's columns.
    pub transposed: bool,
}

/// An axis of the batch, with the steps of each tensor along it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    pub size: usize,
    pub a: usize,
    pub b: usize,
    pub c: usize,
}

impl Batch {
    /// No batch.
    pub const ONE: Self = Self { size: 1, a: 0, b: 0, c: 0 };
}

/// `C [M, N] = A [M, K] · B [K, N]`, C dense, for every index of the batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub a: Stored,
    pub b: Stored,
    /// Innermost first; axes that all tensors cross evenly are merged.
    pub batches: Vec<Batch>,
    /// Shape of C with the caller's batch axes.
    pub out_shape: Vec<usize>,
}

/// What stands in the way of a [`Problem`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unreadable {
    /// The strides of the left operand are not those of a matrix.
    Lhs,
    /// The strides of the right operand are not those of a matrix.
    Rhs,
    /// The shapes do not multiply, or there is nothing to multiply.
    Shapes,
}

/// How a matrix of this shape and these strides is stored; None if neither its rows nor its columns are contiguous.
pub fn matrix([rows, cols]: [usize; 2], [row_stride, col_stride]: [usize; 2]) -> Option<Stored> {
    let by_rows = (col_stride == 1 || cols == 1) && (row_stride >= cols || rows == 1);
    let by_cols = (row_stride == 1 || rows == 1) && (col_stride >= rows || cols == 1);
    if by_rows {
        let ld = if rows == 1 { cols } else { row_stride };
        Some(Stored { ld, transposed: false })
    } else if by_cols {
        let ld = if cols == 1 { rows } else { col_stride };
        Some(Stored { ld, transposed: true })
    } else {
        None
    }
}

/// The product of two tensors of equal rank with broadcast batches.
pub fn problem(lhs: View<'_>, rhs: View<'_>) -> Result<Problem, Unreadable> {
    let rank = lhs.shape.len();
    if rank < 2 || rhs.shape.len() != rank {
        return Err(Unreadable::Shapes);
    }
    let last = |view: View<'_>| {
        let tail = [rank - 2, rank - 1];
        (tail.map(|axis| view.shape[axis]), tail.map(|axis| view.strides[axis]))
    };
    let ((a_shape, a_strides), (b_shape, b_strides)) = (last(lhs), last(rhs));
    let ([mut m, k], [b_rows, n]) = (a_shape, b_shape);
    let out_batch: Vec<usize> = (0..rank - 2).map(|axis| lhs.shape[axis].max(rhs.shape[axis])).collect();
    let broadcasts = |view: View<'_>| (0..rank - 2).all(|axis| view.shape[axis] == 1 || view.shape[axis] == out_batch[axis]);
    let empty = [m, n, k]
        .into_iter()
        .chain(lhs.shape.iter().copied())
        .chain(rhs.shape.iter().copied())
        .any(|size| size == 0);
    if b_rows != k || empty || !broadcasts(lhs) || !broadcasts(rhs) {
        return Err(Unreadable::Shapes);
    }
    let mut a = matrix(a_shape, a_strides).ok_or(Unreadable::Lhs)?;
    let b = matrix(b_shape, b_strides).ok_or(Unreadable::Rhs)?;
    let out_shape = out_batch.iter().copied().chain([m, n]).collect();

    let mut batches: Vec<Batch> = Vec::new();
    for axis in (0..rank - 2).rev() {
        let size = out_batch[axis];
        if size == 1 {
            continue;
        }
        let step = |view: View<'_>| if view.shape[axis] == 1 { 0 } else { view.strides[axis] };
        let (step_a, step_b) = (step(lhs), step(rhs));
        // With one right operand for all, further batches of A are further rows of it.
        if batches.is_empty() && step_b == 0 && !a.transposed {
            let row = if m == 1 { step_a } else { a.ld };
            if step_a == m * row && row >= k {
                a.ld = row;
                m *= size;
                continue;
            }
        }
        match batches.last_mut() {
            Some(inner) if step_a == inner.size * inner.a && step_b == inner.size * inner.b => inner.size *= size,
            _ => batches.push(Batch {
                size,
                a: step_a,
                b: step_b,
                c: 0,
            }),
        }
    }
    let mut step_c = m * n;
    for batch in &mut batches {
        batch.c = step_c;
        step_c *= batch.size;
    }
    Ok(Problem {
        m,
        n,
        k,
        a,
        b,
        batches,
        out_shape,
    })
}

/// Offsets of the three matrices in elements for every index of the given axes.
pub fn outer_offsets(batches: &[Batch]) -> Vec<[usize; 3]> {
    let mut offsets = vec![[0; 3]];
    for batch in batches {
        let steps = (0..batch.size).flat_map(|i| {
            offsets
                .iter()
                .map(move |[a, b, c]| [a + i * batch.a, b + i * batch.b, c + i * batch.c])
        });
        offsets = steps.collect();
    }
    offsets
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every element of C by the description, against the plain meaning of strides.
    fn check(lhs: View<'_>, rhs: View<'_>) -> Problem {
        let problem = problem(lhs, rhs).expect("a product");
        let rank = lhs.shape.len();
        let Problem { m, n, k, .. } = problem;
        let at = |stored: Stored, row: usize, col: usize| {
            if stored.transposed {
                col * stored.ld + row
            } else {
                row * stored.ld + col
            }
        };
        // per element of C: the positions that it sums over
        let mut found = vec![Vec::new(); problem.out_shape.iter().product()];
        for [a0, b0, c0] in outer_offsets(&problem.batches) {
            for (row, col) in (0..m).flat_map(|row| (0..n).map(move |col| (row, col))) {
                let terms = (0..k).map(|i| (a0 + at(problem.a, row, i), b0 + at(problem.b, i, col)));
                found[c0 + row * n + col] = terms.collect();
            }
        }
        for (index, found) in found.iter().enumerate() {
            let mut rest = index;
            let mut coordinates = vec![0; rank];
            for axis in (0..rank).rev() {
                coordinates[axis] = rest % problem.out_shape[axis];
                rest /= problem.out_shape[axis];
            }
            let base = |view: View<'_>, axes: std::ops::Range<usize>| -> usize {
                axes.map(|axis| {
                    if view.shape[axis] == 1 {
                        0
                    } else {
                        coordinates[axis] * view.strides[axis]
                    }
                })
                .sum()
            };
            let (a, b) = (base(lhs, 0..rank - 1), base(rhs, 0..rank - 2) + base(rhs, rank - 1..rank));
            let expected: Vec<_> = (0..k)
                .map(|i| (a + i * lhs.strides[rank - 1], b + i * rhs.strides[rank - 2]))
                .collect();
            assert_eq!(*found, expected, "element {index} of {lhs:?} x {rhs:?}");
        }
        problem
    }

    fn view<'a>(shape: &'a [usize], strides: &'a [usize]) -> View<'a> {
        View { shape, strides }
    }

    #[test]
    fn transposes_and_padded_rows_are_read_in_place() {
        let problem = check(view(&[3, 4], &[7, 1]), view(&[4, 5], &[1, 6]));
        assert_eq!(
            (problem.a.transposed, problem.a.ld, problem.b.transposed, problem.b.ld),
            (false, 7, true, 6)
        );
        check(view(&[3, 4], &[1, 3]), view(&[4, 5], &[5, 1]));
        check(view(&[1, 4], &[9, 1]), view(&[4, 1], &[1, 8]));
        check(view(&[1, 4], &[1, 1]), view(&[4, 1], &[3, 1]));
        check(view(&[3, 1], &[1, 5]), view(&[1, 5], &[5, 1]));
    }

    #[test]
    fn rows_of_a_batch_are_folded_for_one_right_operand() {
        let problem = check(view(&[2, 3, 5, 4], &[60, 20, 4, 1]), view(&[1, 1, 4, 6], &[0, 0, 6, 1]));
        assert_eq!((problem.m, problem.batches.len()), (30, 0));
        // single rows, as in generation, folded over two axes
        let problem = check(view(&[2, 3, 1, 4], &[24, 8, 8, 1]), view(&[1, 1, 4, 6], &[24, 24, 6, 1]));
        assert_eq!((problem.m, problem.a.ld, problem.batches.len()), (6, 8, 0));
        // heads between: [B, H, S, D] seen from [B, S, H, D] cannot be folded
        let problem = check(view(&[2, 3, 5, 4], &[60, 4, 12, 1]), view(&[1, 1, 4, 6], &[0, 0, 6, 1]));
        assert_eq!((problem.m, problem.batches.len()), (5, 2));
    }

    #[test]
    fn even_batches_merge_and_broadcast_ones_repeat() {
        let problem = check(view(&[2, 3, 5, 4], &[60, 20, 4, 1]), view(&[2, 3, 4, 6], &[72, 24, 6, 1]));
        assert_eq!(
            problem.batches,
            [Batch {
                size: 6,
                a: 20,
                b: 24,
                c: 30
            }]
        );
        check(view(&[2, 3, 5, 4], &[60, 20, 4, 1]), view(&[2, 1, 4, 6], &[24, 24, 6, 1]));
        check(view(&[1, 3, 5, 4], &[60, 20, 4, 1]), view(&[2, 1, 4, 6], &[24, 24, 6, 1]));
        check(view(&[2, 3, 5, 4], &[60, 4, 12, 1]), view(&[2, 3, 4, 5], &[60, 4, 1, 12]));
        check(view(&[1, 5, 4], &[0, 4, 1]), view(&[7, 4, 6], &[24, 1, 4]));
    }

    #[test]
    fn other_strides_name_the_operand_to_copy() {
        let dense = view(&[4, 4], &[4, 1]);
        assert_eq!(problem(view(&[4, 4], &[8, 2]), dense), Err(Unreadable::Lhs));
        assert_eq!(problem(dense, view(&[4, 4], &[0, 0])), Err(Unreadable::Rhs));
        assert_eq!(problem(dense, view(&[3, 4], &[4, 1])), Err(Unreadable::Shapes));
        assert_eq!(problem(view(&[0, 4], &[4, 1]), dense), Err(Unreadable::Shapes));
        assert_eq!(
            problem(view(&[2, 4, 4], &[16, 4, 1]), view(&[3, 4, 4], &[16, 4, 1])),
            Err(Unreadable::Shapes)
        );
    }
}

//! CPU kernels on flat slices, parallel with rayon. One file per op, named like the op.

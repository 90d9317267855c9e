//! Sums over vectors, planes and cubes, and the gate function.

use cubecl::prelude::*;

/// Sum of the elements of a vector.
#[cube]
pub fn vector_sum<N: Size>(vector: Vector<f32, N>) -> f32 {
    let mut sum = f32::new(0.0);
    #[unroll]
    for i in 0..N::value() {
        sum += vector[i];
    }
    sum
}

/// Sum of `value` over the units that share `UNIT_POS_Y`, in each of them. They fill `planes` planes; if that is more than
/// one, they must be all units of the cube.
#[cube]
pub fn team_sum(value: f32, #[comptime] planes: usize) -> f32 {
    let sum = plane_sum(value);
    if comptime!(planes == 1) {
        sum
    } else {
        let mut partial = SharedMemory::<f32>::new(planes);
        if UNIT_POS_PLANE == 0 {
            partial[(UNIT_POS / PLANE_DIM) as usize] = sum;
        }
        sync_cube();
        let mut total = f32::new(0.0);
        #[unroll]
        for plane in 0..planes {
            total += partial[plane];
        }
        // the next sum may overwrite the partial sums only after everyone has read them
        sync_cube();
        total
    }
}

/// `1 / (1 + exp(-z))`.
#[cube]
pub fn sigmoid<N: Size>(z: Vector<f32, N>) -> Vector<f32, N> {
    let one = Vector::<f32, N>::new(1.0);
    // not `-z`: CubeCL 0.10 emits a unary minus on the vector struct, which CUDA C++ does not have
    let minus_z = Vector::<f32, N>::new(0.0) - z;
    one / (one + minus_z.exp())
}

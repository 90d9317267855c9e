//! Sums over the units of a cube.

use cubecl::prelude::*;

/// Sum of `value` over all units of the cube, in every unit. `planes` is the number of planes in the cube.
#[cube]
pub fn cube_sum(value: f32, #[comptime] planes: usize) -> f32 {
    let mut partial = SharedMemory::<f32>::new(planes);
    let sum = plane_sum(value);
    if UNIT_POS_PLANE == 0 {
        partial[(UNIT_POS / PLANE_DIM) as usize] = sum;
    }
    sync_cube();
    let mut total = f32::new(0.0);
    for plane in 0..planes {
        total += partial[plane];
    }
    // the next sum may overwrite the partial sums only after everyone has read them
    sync_cube();
    total
}

//! Stable counting sort of routed slots by expert. One plane works through a chunk of consecutive slots, 32 at a time, and
//! ranks equal ids inside a plane by shuffles, so there are no atomics and the order is the same on every run.

use burn_backend::{DType, TensorMetadata};
use cubecl::prelude::*;

use super::super::raw::{CudaTensor, dense, empty};
use super::launch::{PLANE, addresses};

/// Slots per cube: few, because a cube is one plane that takes them one after the other.
const CHUNK: usize = 256;
/// Counters of all experts lie in shared memory.
const MAX_EXPERTS: usize = 8192;

/// How many units of the plane hold the same id, before and after this one.
#[derive(CubeType)]
struct Peers {
    below: i32,
    above: i32,
}

#[cube]
fn peers(id: i32) -> Peers {
    let mut below = 0i32;
    let mut above = 0i32;
    for unit in 0..PLANE_DIM {
        let same = plane_shuffle(id, unit) == id;
        if same && unit < UNIT_POS_PLANE {
            below += 1;
        }
        if same && unit > UNIT_POS_PLANE {
            above += 1;
        }
    }
    Peers { below, above }
}

/// Id of slot `row`, or `experts` past the end of the chunk. Ids out of range count as the nearest valid one: they break a
/// contract, but must not write out of bounds.
#[cube]
fn id_at(ids: &Tensor<i32>, row: usize, end: usize, #[comptime] experts: usize) -> i32 {
    let mut id = i32::cast_from(experts);
    if row < end {
        id = clamp(ids[row], 0i32, i32::cast_from(experts - 1));
    }
    id
}

/// `counts[e, chunk]`: slots of expert e in each chunk.
#[cube(launch_unchecked, address_type = "dynamic")]
fn count_kernel(ids: &Tensor<i32>, counts: &mut Tensor<i32>, rows: usize, chunks: usize, #[comptime] experts: usize) {
    let mut count = SharedMemory::<i32>::new(experts + 1);
    let mut e = UNIT_POS as usize;
    while e < experts + 1 {
        count[e] = 0;
        e += CUBE_DIM as usize;
    }
    sync_cube();
    let mut at = CUBE_POS * CHUNK;
    let end = min(at + CHUNK, rows);
    while at < end {
        let id = id_at(ids, at + UNIT_POS as usize, end, experts);
        let peers = peers(id);
        if peers.above == 0 {
            count[id as usize] += peers.below + 1;
        }
        sync_cube();
        at += CUBE_DIM as usize;
    }
    let mut e = UNIT_POS as usize;
    while e < experts {
        counts[e * chunks + CUBE_POS] = count[e];
        e += CUBE_DIM as usize;
    }
}

/// One plane per row of `counts [E, chunks]`: the row becomes its exclusive prefix sum, `totals [E]` its sum.
#[cube(launch_unchecked, address_type = "dynamic")]
fn prefix_kernel(counts: &mut Tensor<i32>, totals: &mut Tensor<i32>, chunks: usize) {
    let base = CUBE_POS * chunks;
    let mut carry = 0i32;
    let mut at = 0usize;
    while at < chunks {
        let index = at + UNIT_POS as usize;
        let mut value = 0i32;
        if index < chunks {
            value = counts[base + index];
        }
        let before = plane_exclusive_sum(value);
        if index < chunks {
            counts[base + index] = carry + before;
        }
        carry += plane_sum(value);
        at += CUBE_DIM as usize;
    }
    if UNIT_POS == 0 {
        totals[CUBE_POS] = carry;
    }
}

/// One plane: `offsets [E + 1]` from `totals [E]`.
#[cube(launch_unchecked, address_type = "dynamic")]
fn offsets_kernel(totals: &Tensor<i32>, offsets: &mut Tensor<i32>, experts: usize) {
    let mut carry = 0i32;
    let mut at = 0usize;
    while at < experts {
        let index = at + UNIT_POS as usize;
        let mut value = 0i32;
        if index < experts {
            value = totals[index];
        }
        let before = plane_exclusive_sum(value);
        if index < experts {
            offsets[index] = carry + before;
        }
        carry += plane_sum(value);
        at += CUBE_DIM as usize;
    }
    if UNIT_POS == 0 {
        offsets[experts] = carry;
    }
}

/// Chunks write to disjoint positions: `offsets[e]` plus the expert's slots in earlier chunks plus the rank in this one.
#[cube(launch_unchecked, address_type = "dynamic")]
fn place_kernel(
    ids: &Tensor<i32>,
    counts: &Tensor<i32>,
    offsets: &Tensor<i32>,
    slots: &mut Tensor<i32>,
    positions: &mut Tensor<i32>,
    rows: usize,
    chunks: usize,
    #[comptime] experts: usize,
) {
    let mut next = SharedMemory::<i32>::new(experts + 1);
    let mut e = UNIT_POS as usize;
    while e < experts {
        next[e] = offsets[e] + counts[e * chunks + CUBE_POS];
        e += CUBE_DIM as usize;
    }
    sync_cube();
    let mut at = CUBE_POS * CHUNK;
    let end = min(at + CHUNK, rows);
    while at < end {
        let row = at + UNIT_POS as usize;
        let id = id_at(ids, row, end, experts);
        let peers = peers(id);
        if row < end {
            let position = next[id as usize] + peers.below;
            positions[row] = position;
            slots[position as usize] = i32::cast_from(row);
        }
        sync_cube();
        if row < end && peers.above == 0 {
            next[id as usize] += peers.below + 1;
        }
        sync_cube();
        at += CUBE_DIM as usize;
    }
}

/// Slots and positions `[R]` and offsets `[E + 1]`, all i32.
pub struct Order {
    pub slots: CudaTensor,
    pub positions: CudaTensor,
    pub offsets: CudaTensor,
}

/// Whether [`sort_by_expert`] takes this problem.
pub fn supports(ids: &CudaTensor, experts: usize) -> bool {
    ids.dtype == DType::I32 && ids.shape().num_elements() > 0 && experts <= MAX_EXPERTS
}

/// See [`crate::MoeBackend::moe_sort_by_expert`].
pub fn sort_by_expert(ids: CudaTensor, experts: usize) -> Order {
    let ids = dense(ids);
    let rows = ids.shape().num_elements();
    let chunks = rows.div_ceil(CHUNK);
    let ints = |n: usize| empty(&ids, &[n], DType::I32);
    let (counts, totals) = (ints(experts * chunks), ints(experts));
    let order = Order {
        slots: ints(rows),
        positions: ints(rows),
        offsets: ints(experts + 1),
    };
    let address = addresses(&[&ids, &counts]);
    let client = ids.client.clone();
    let cubes = |n: usize| CubeCount::Static(n as u32, 1, 1);
    let plane = CubeDim::new_1d(PLANE);
    // SAFETY: `counts` has a column per chunk and a row per expert; ids are clamped to the experts, so positions stay
    // below `rows`. All tensors are dense.
    unsafe {
        let arg = |tensor: &CudaTensor| tensor.clone().into_tensor_arg();
        count_kernel::launch_unchecked(
            &client,
            cubes(chunks),
            plane,
            address,
            arg(&ids),
            arg(&counts),
            rows,
            chunks,
            experts,
        );
        prefix_kernel::launch_unchecked(&client, cubes(experts), plane, address, arg(&counts), arg(&totals), chunks);
        offsets_kernel::launch_unchecked(&client, cubes(1), plane, address, arg(&totals), arg(&order.offsets), experts);
        place_kernel::launch_unchecked(
            &client,
            cubes(chunks),
            plane,
            address,
            arg(&ids),
            arg(&counts),
            arg(&order.offsets),
            arg(&order.slots),
            arg(&order.positions),
            rows,
            chunks,
            experts,
        );
    }
    order
}

#[cfg(test)]
mod tests {
    use super::super::compile_check::*;
    use super::*;

    #[test]
    fn sort_kernels_compile_for_sm_90a() {
        compile(PLANE, |b| {
            let (ids, counts, rows, chunks) = (input(b), output(b), scalar::<usize>(b), scalar::<usize>(b));
            count_kernel::expand(&mut b.scope, ids, counts, rows, chunks, 60);
        });
        compile(PLANE, |b| {
            let (counts, totals, chunks) = (output(b), output(b), scalar::<usize>(b));
            prefix_kernel::expand(&mut b.scope, counts, totals, chunks);
        });
        compile(PLANE, |b| {
            let (totals, offsets, experts) = (input(b), output(b), scalar::<usize>(b));
            offsets_kernel::expand(&mut b.scope, totals, offsets, experts);
        });
        compile(PLANE, |b| {
            let (ids, counts, offsets) = (input(b), input(b), input(b));
            let (slots, positions, rows, chunks) = (output(b), output(b), scalar::<usize>(b), scalar::<usize>(b));
            place_kernel::expand(&mut b.scope, ids, counts, offsets, slots, positions, rows, chunks, 60);
        });
    }
}

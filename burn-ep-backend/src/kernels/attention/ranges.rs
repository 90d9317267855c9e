//! Which keys every query sees, as tables on the device: one kernel turns causality, window, documents and padding into them.

use cubecl::server::Handle;

use super::{BLOCK, GROUP, Mask, Shape, TYPES, buffers};
use crate::kernels::raw::{CudaTensor, RawKernel};

const SOURCE: &str = include_str!("../../../kernels/attention/ranges.cu");

/// The tables that `struct Ranges` in `types.cuh` describes.
pub(in crate::kernels) struct Ranges {
    /// `[B, Sq]` i32 (rows padded to groups): first key that a query sees, and the one after the last.
    lo: Handle,
    hi: Handle,
    /// `[B, groups, 4]` i32: least and greatest `lo`, least and greatest `hi` of 64 queries.
    bounds: Handle,
    /// `[B, blocks, 2]` i32: first and last group that sees a block of 128 keys.
    steps: Handle,
    /// `[B, blocks, 4]` u32: a bit per key.
    keys: Handle,
}

impl Ranges {
    pub(in crate::kernels) fn new(like: &CudaTensor, shape: &Shape, mask: &Mask, scalars: &[u64]) -> Self {
        let groups = shape.batch * shape.groups()[0];
        let blocks = shape.batch * shape.skv.div_ceil(BLOCK);
        let [lo, hi, bounds, steps, keys] = buffers(like, [groups * GROUP * 4, groups * GROUP * 4, groups * 16, blocks * 8, blocks * 16]);
        let tables = Self {
            lo,
            hi,
            bounds,
            steps,
            keys,
        };
        // an absent mask is not read: any pointer does
        let handle = |tensor: &Option<CudaTensor>| tensor.as_ref().map_or(&tables.lo, |tensor| &tensor.handle).clone();
        let (doc, visible) = (handle(&mask.doc_start), handle(&mask.key_visible));
        let outputs = [&doc, &visible, &tables.lo, &tables.hi, &tables.bounds, &tables.steps, &tables.keys];
        kernel().launch(&like.client, shape.batch as u32, vec![], &outputs, scalars.to_vec());
        tables
    }

    /// What the kernels that walk the keys of a tile of queries read, in the order of their parameters.
    pub(in crate::kernels) fn of_queries(&self) -> [&Handle; 4] {
        [&self.lo, &self.hi, &self.bounds, &self.keys]
    }

    /// What those that walk the queries of a tile of keys read.
    pub(in crate::kernels) fn all(&self) -> [&Handle; 5] {
        [&self.lo, &self.hi, &self.bounds, &self.steps, &self.keys]
    }
}

pub(super) fn kernel() -> RawKernel {
    RawKernel::new([TYPES, SOURCE].concat(), "attn_ranges", 1024, 0)
}

//! Launches of `kernels/comm/peer.cu`.

use burn_backend::DType;

use crate::kernels::raw::{Client, CudaTensor, RawKernel};

const SOURCE: &str = include_str!("../../../../kernels/comm/peer.cu");
/// Most ranks of a group (`MAX_RANKS` of the source).
pub(super) const MAX_RANKS: usize = 16;
/// Blocks that copy: few enough to leave room for products beside them.
const BLOCKS: u32 = 32;
const THREADS: u32 = 512;

#[derive(Clone, Copy)]
enum Kind {
    Announce,
    Push,
    Collect,
    Sum,
}

fn kernel(kind: Kind, real: &str) -> RawKernel {
    let (number, entry, threads) = match kind {
        Kind::Announce => (0, "peer_announce", MAX_RANKS as u32),
        Kind::Push => (1, "peer_push", THREADS),
        Kind::Collect => (2, "peer_collect", THREADS),
        Kind::Sum => (3, "peer_sum", THREADS),
    };
    let defines = format!("#define KIND {number}\n#define ENTRY {entry}\n#define REAL {real}\n");
    RawKernel::new(defines + SOURCE, entry, threads, 0)
}

/// One operation as the kernels see it; sizes in bytes.
pub(super) struct Exchange<'a> {
    pub sequence: u64,
    pub rank: usize,
    pub arenas: &'a [u64],
    pub capacity: usize,
    pub limit_ns: u64,
    pub control: u64,
    /// What every block is a multiple of.
    pub unit: usize,
    pub bytes: &'a [usize],
    pub offsets: &'a [usize],
    pub dst_stride: usize,
    pub dst_offset: usize,
    pub expected: Option<usize>,
}

impl Exchange<'_> {
    fn scalars(&self) -> Vec<u64> {
        let world = self.arenas.len();
        let mut scalars = vec![
            self.sequence,
            self.rank as u64,
            world as u64,
            self.capacity as u64,
            self.limit_ns,
            self.control,
            unit(self.unit) as u64,
            self.dst_stride as u64,
            self.dst_offset as u64,
            self.expected.map_or(u64::MAX, |bytes| bytes as u64),
        ];
        let numbers = |list: &[usize]| list.iter().map(|n| *n as u64).collect::<Vec<_>>();
        for list in [self.arenas.to_vec(), numbers(self.bytes), numbers(self.offsets)] {
            scalars.extend(list);
            scalars.resize(scalars.len() + MAX_RANKS - world, 0);
        }
        scalars
    }

    /// Enqueues the operation: blocks of `source` to all ranks, theirs to `destination`.
    pub fn launch(&self, client: &Client, source: &CudaTensor, destination: &CudaTensor, done: &CudaTensor) {
        let scalars = self.scalars();
        kernel(Kind::Announce, "float").launch(client, 1, vec![], &[], scalars.clone());
        kernel(Kind::Push, "float").launch(client, BLOCKS, vec![], &[&source.handle, &done.handle], scalars.clone());
        kernel(Kind::Collect, "float").launch(client, BLOCKS, vec![], &[&destination.handle], scalars);
    }
}

/// `out[offset..offset + count]` = sum of `ranks` lists of `count` in `parts`, in their order.
pub(super) fn sum(client: &Client, parts: &CudaTensor, out: &CudaTensor, ranks: usize, count: usize, offset: usize) {
    let real = if parts.dtype == DType::F64 { "double" } else { "float" };
    let grid = (count as u64).div_ceil(u64::from(THREADS)).clamp(1, 1024) as u32;
    let scalars = [ranks, count, offset].map(|n| n as u64).to_vec();
    kernel(Kind::Sum, real).launch(client, grid, vec![], &[&parts.handle, &out.handle], scalars);
}

/// The largest power of two up to 16 that divides `bytes`.
pub(super) fn unit(bytes: usize) -> usize {
    if bytes == 0 { 16 } else { 1 << bytes.trailing_zeros().min(4) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_compiles_for_sm_90a() {
        for real in ["float", "double"] {
            for kind in [Kind::Announce, Kind::Push, Kind::Collect, Kind::Sum] {
                crate::kernels::nvrtc::compile_for_sm_90a(kernel(kind, real).source());
            }
        }
    }

    #[test]
    fn units_divide() {
        assert_eq!([0, 1, 2, 12, 24, 64, 4096].map(unit), [16, 1, 2, 4, 8, 16, 16]);
    }

    #[test]
    fn scalars_have_the_layout_of_the_source() {
        let exchange = Exchange {
            sequence: 7,
            rank: 1,
            arenas: &[100, 200],
            capacity: 64,
            limit_ns: 5,
            control: 9,
            unit: 8,
            bytes: &[8, 16],
            offsets: &[0, 8],
            dst_stride: 0,
            dst_offset: 3,
            expected: None,
        };
        let scalars = exchange.scalars();
        assert_eq!(scalars.len(), 10 + 3 * MAX_RANKS);
        assert_eq!(scalars[..10], [7, 1, 2, 64, 5, 9, 8, 0, 3, u64::MAX]);
        assert_eq!(
            [scalars[10], scalars[11], scalars[12], scalars[26], scalars[27], scalars[43]],
            [100, 200, 0, 8, 16, 8]
        );
    }
}

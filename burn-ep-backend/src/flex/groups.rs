//! Row groups of experts and their split into parallel tasks.

use std::ops::Range;

use burn_flex::FlexTensor;

use super::slice::ints;

/// Rows of activations per task: enough that packing the weight costs little next to the product, and the same on any
/// number of threads, so that results are too.
pub(crate) const ROW_TILE: usize = 64;

/// Rows of one task: part of the rows of one expert.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RowTile {
    pub expert: usize,
    pub rows: Range<usize>,
}

/// Rows of each expert from `offsets [E + 1]`.
///
/// Offsets outside `0..=rows` or out of order are clamped, so a wrong input gives wrong rows and never a bad access.
/// Rows past the last offset belong to no expert (exchange buffers may be larger than their content).
pub(crate) fn group_ranges(offsets_e1: &FlexTensor, rows: usize) -> Vec<Range<usize>> {
    let offsets: Vec<usize> = ints(offsets_e1)
        .into_iter()
        .map(|o| usize::try_from(o).unwrap_or(0).min(rows))
        .collect();
    let mut end = 0;
    offsets
        .windows(2)
        .map(|pair| {
            let start = pair[0].max(end);
            end = pair[1].max(start);
            start..end
        })
        .collect()
}

/// Splits the groups into tiles of at most [`ROW_TILE`] rows.
pub(crate) fn row_tiles(groups: &[Range<usize>]) -> Vec<RowTile> {
    let mut tiles = Vec::new();
    for (expert, group) in groups.iter().enumerate() {
        for start in group.clone().step_by(ROW_TILE) {
            tiles.push(RowTile {
                expert,
                rows: start..group.end.min(start + ROW_TILE),
            });
        }
    }
    tiles
}

/// The part of a `[R, width]` buffer that belongs to each tile.
pub(crate) fn split_rows<'a, A>(mut buffer: &'a mut [A], width: usize, tiles: &[RowTile]) -> Vec<&'a mut [A]> {
    let mut parts = Vec::with_capacity(tiles.len());
    let mut row = 0;
    for tile in tiles {
        let (_gap, rest) = buffer.split_at_mut((tile.rows.start - row) * width);
        let (part, rest) = rest.split_at_mut(tile.rows.len() * width);
        parts.push(part);
        buffer = rest;
        row = tile.rows.end;
    }
    parts
}

/// Output rows `first..` of one expert's weight gradient.
pub(crate) struct WeightTile<'a, A> {
    pub expert: usize,
    pub first: usize,
    pub out: &'a mut [A],
}

/// Splits a weight gradient `[E, out_rows, width]` into tasks; experts without rows get none and stay as they are.
pub(crate) fn weight_tiles<'a, A>(grad: &'a mut [A], groups: &[Range<usize>], out_rows: usize, width: usize) -> Vec<WeightTile<'a, A>> {
    if out_rows * width == 0 {
        return Vec::new();
    }
    let mut tiles = Vec::new();
    for (expert, (weight, group)) in grad.chunks_mut(out_rows * width).zip(groups).enumerate() {
        if group.is_empty() {
            continue;
        }
        for (index, out) in weight.chunks_mut(ROW_TILE * width).enumerate() {
            tiles.push(WeightTile {
                expert,
                first: index * ROW_TILE,
                out,
            });
        }
    }
    tiles
}

#[cfg(test)]
mod tests {
    use super::super::numeric::int_tensor;
    use super::*;

    #[test]
    fn bad_offsets_are_clamped_into_the_rows() {
        let groups = |offsets: &[i32]| group_ranges(&int_tensor(offsets.to_vec(), [offsets.len()]), 6);
        assert_eq!(groups(&[0, 2, 2, 6]), [0..2, 2..2, 2..6]);
        assert_eq!(groups(&[0, 2, 4]), [0..2, 2..4]);
        assert_eq!(groups(&[-3, 9, 4, 7]), [0..6, 6..6, 6..6]);
    }

    #[test]
    fn tiles_cover_every_row_once() {
        let groups = [0..0, 0..300, 300..301, 301..301, 301..1000];
        let tiles = row_tiles(&groups);
        let mut rows = Vec::new();
        for tile in &tiles {
            assert!(tile.rows.len() <= ROW_TILE && groups[tile.expert].contains(&tile.rows.start));
            rows.extend(tile.rows.clone());
        }
        assert_eq!(rows, (0..1000).collect::<Vec<_>>());

        let mut buffer: Vec<usize> = (0..2000).collect();
        let parts = split_rows(&mut buffer, 2, &tiles);
        for (tile, part) in tiles.iter().zip(parts) {
            assert_eq!((part[0], part.len()), (2 * tile.rows.start, 2 * tile.rows.len()));
        }
    }
}

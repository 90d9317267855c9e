//! How rows are dealt to units: a team of units works on one row at a time and walks over the rows in equal steps.

use burn_backend::TensorMetadata;
use cubecl::prelude::*;

use super::super::raw::{CudaTensor, multiprocessors};
use super::{THREADS_PER_PROCESSOR, vector_size};

/// Vectors of a row that one unit may hold in registers.
const MAX_ITEMS: usize = 8;

/// Rows, their width and the teams that work on them.
#[derive(Debug, Clone, Copy)]
pub struct Rows {
    /// Number of rows.
    pub count: usize,
    /// Elements of a row.
    pub width: usize,
    /// Elements of a vector access; divides the width.
    pub vector: usize,
    /// Vectors of a row for each unit.
    pub items: usize,
    /// Planes in a team.
    pub planes: usize,
    /// Cubes to launch.
    pub cubes: u32,
    /// Units of a team (x) and teams of a cube (y).
    pub cube_dim: CubeDim,
}

impl Rows {
    /// The rows of the last axis of `x`, cut into `groups` equal rows each. The number of teams is a multiple of the
    /// groups, so that every team stays within one. None if there is no element or a row is too wide.
    pub fn of(x: &CudaTensor, groups: usize) -> Option<Self> {
        let shape = x.shape();
        let (elements, full_width) = (shape.num_elements(), shape.iter().last().copied()?);
        if elements == 0 {
            return None;
        }
        let width = full_width / groups;
        let plane = x.client.properties().hardware.plane_size_max;
        Self::new(elements / width, width, groups, plane, multiprocessors(&x.client))
    }

    fn new(count: usize, width: usize, groups: usize, plane: u32, processors: u32) -> Option<Self> {
        let vector = vector_size(&[width]);
        let vectors = width / vector;
        let mut units = plane;
        while (units as usize) * 4 < vectors && units < 1024 {
            units *= 2;
        }
        let items = vectors.div_ceil(units as usize);
        if items > MAX_ITEMS {
            return None;
        }
        // teams of several planes meet at a barrier of the whole cube, so they do not share one
        let teams = if units == plane { 256 / plane } else { 1 };
        let resident = processors as usize * (THREADS_PER_PROCESSOR / (units * teams)).max(1) as usize;
        let cubes = count.div_ceil(teams as usize).min(resident).next_multiple_of(groups);
        Some(Self {
            count,
            width,
            vector,
            items,
            planes: (units / plane) as usize,
            cubes: u32::try_from(cubes).ok()?,
            cube_dim: CubeDim::new_2d(units, teams),
        })
    }

    /// Width in vectors, as the kernels count.
    pub fn vectors(&self) -> usize {
        self.width / self.vector
    }

    /// Rows that a team reads at once when it holds at most `limit` vectors of a tensor.
    pub fn together(&self, limit: usize) -> usize {
        (limit / self.items).clamp(1, 4)
    }

    /// Teams in the launch.
    pub fn teams(&self) -> usize {
        self.cubes as usize * self.cube_dim.y as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn teams_cover_every_row_and_stay_within_a_group() {
        for width in [1, 3, 32, 96, 128, 512, 1000, 2688, 4096, 8192, 30_000, 32_768] {
            for groups in [1, 3, 8] {
                for count in [groups, 7 * groups, 100_000 * groups] {
                    let Some(rows) = Rows::new(count, width, groups, 32, 132) else {
                        assert!(width > 8192, "width {width} must fit");
                        continue;
                    };
                    let units = rows.cube_dim.x as usize;
                    assert!(units * rows.items * rows.vector >= width);
                    assert!(units * rows.cube_dim.y as usize <= 1024);
                    assert_eq!(units, rows.planes * 32);
                    assert!(rows.planes == 1 || rows.cube_dim.y == 1, "a barrier would be shared");
                    assert_eq!(rows.teams() % groups, 0);
                    assert_eq!(width % rows.vector, 0);
                }
            }
        }
    }

    #[test]
    fn rows_too_wide_for_registers_are_refused() {
        assert!(Rows::new(4, 4 * 1024 * MAX_ITEMS, 1, 32, 132).is_some());
        assert!(Rows::new(4, 4 * 1024 * MAX_ITEMS + 4, 1, 32, 132).is_none());
        assert!(Rows::new(4, 1024 * MAX_ITEMS + 1, 1, 32, 132).is_none());
    }
}

//! Tensors whose bytes are made on the host in chunks, on several threads: weights that are read from files.

use std::sync::Mutex;

use burn_backend::{DType, TensorData};

/// Bytes made at a time: small enough that every thread gets some of an attention weight and that it stays in a core's cache,
/// large enough that a device copies at full speed.
pub(crate) const CHUNK: usize = 4 << 20;

/// Writes the bytes of a tensor from an offset on. Offsets and lengths are multiples of the unit it is given with; several
/// threads call it at once.
pub type Fill<'a, E> = dyn Fn(usize, &mut [u8]) -> Result<(), E> + Sync + 'a;

/// Bytes of a chunk: whole units.
pub(crate) fn chunk_bytes(unit: usize) -> usize {
    let unit = unit.max(1);
    (CHUNK / unit).max(1) * unit
}

/// Of the errors of several threads the one with the lowest offset. As chunks are begun in order and a begun chunk is
/// finished, that is the same in every run.
pub(crate) struct FirstError<E>(Mutex<Option<(usize, E)>>);

impl<E> FirstError<E> {
    pub fn new() -> Self {
        Self(Mutex::new(None))
    }

    pub fn is_set(&self) -> bool {
        self.lock().is_some()
    }

    pub fn set(&self, offset: usize, error: E) {
        let mut first = self.lock();
        if first.as_ref().is_none_or(|(before, _)| offset < *before) {
            *first = Some((offset, error));
        }
    }

    pub fn into_result(self) -> Result<(), E> {
        match self.0.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner()) {
            Some((_, error)) => Err(error),
            None => Ok(()),
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<(usize, E)>> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// A whole tensor on the host, filled by the threads of the pool.
///
/// # Errors
/// The error of `fill` at the lowest offset.
pub fn host_data<E: Send>(shape: &[usize], dtype: DType, unit: usize, fill: &Fill<'_, E>) -> Result<TensorData, E> {
    let mut buffer = HostBuffer::new(dtype.size(), shape.iter().product());
    let bytes = buffer.bytes_mut();
    let step = chunk_bytes(unit);
    if bytes.len() <= step {
        if !bytes.is_empty() {
            fill(0, bytes)?;
        }
        return Ok(buffer.into_data(shape, dtype));
    }
    let threads = rayon::current_num_threads().min(bytes.len().div_ceil(step));
    let chunks = Mutex::new(bytes.chunks_mut(step).enumerate());
    let first = FirstError::new();
    rayon::in_place_scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|_| {
                loop {
                    let chunk = match first.is_set() {
                        true => None,
                        false => chunks.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).next(),
                    };
                    let Some((index, out)) = chunk else { break };
                    if let Err(error) = fill(index * step, out) {
                        first.set(index * step, error);
                    }
                }
            });
        }
    });
    first.into_result()?;
    Ok(buffer.into_data(shape, dtype))
}

/// Memory of one tensor, aligned for its elements so that the tensor takes it over without a copy.
enum HostBuffer {
    One(Vec<u8>),
    Two(Vec<u16>),
    Four(Vec<u32>),
    Eight(Vec<u64>),
}

impl HostBuffer {
    /// Zeros, which the system maps when they are first written.
    fn new(element_bytes: usize, elements: usize) -> Self {
        match element_bytes {
            8 => Self::Eight(vec![0; elements]),
            4 => Self::Four(vec![0; elements]),
            2 => Self::Two(vec![0; elements]),
            _ => Self::One(vec![0; elements]),
        }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Self::One(v) => v,
            Self::Two(v) => bytemuck::cast_slice_mut(v),
            Self::Four(v) => bytemuck::cast_slice_mut(v),
            Self::Eight(v) => bytemuck::cast_slice_mut(v),
        }
    }

    fn into_data(self, shape: &[usize], dtype: DType) -> TensorData {
        let mut data = match self {
            Self::One(v) => TensorData::new(v, shape.to_vec()),
            Self::Two(v) => TensorData::new(v, shape.to_vec()),
            Self::Four(v) => TensorData::new(v, shape.to_vec()),
            Self::Eight(v) => TensorData::new(v, shape.to_vec()),
        };
        data.dtype = dtype;
        data
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    fn counting(offset: usize, out: &mut [u8]) -> Result<(), usize> {
        for (i, element) in out.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            *element = ((offset / 4 + i) as u32).to_le_bytes();
        }
        Ok(())
    }

    #[test]
    fn chunks_come_together_in_place() {
        // Several chunks, the last one short; units of 12 bytes do not divide a chunk's size.
        let rows = 3 * CHUNK / 12 + 5;
        let data = host_data(&[rows, 3], DType::U32, 12, &|offset, out: &mut [u8]| {
            assert!(offset.is_multiple_of(12) && out.len().is_multiple_of(12));
            counting(offset, out)
        })
        .unwrap();
        assert_eq!(data.to_vec::<u32>().unwrap(), (0..3 * rows as u32).collect::<Vec<_>>());
        assert_eq!(host_data(&[0, 7], DType::U32, 28, &counting).unwrap().num_elements(), 0);
    }

    #[test]
    fn bits_are_kept() {
        let data = host_data(&[3], DType::BF16, 2, &|_, out: &mut [u8]| {
            out.copy_from_slice(&[0x80, 0x3f, 0, 0, 0x80, 0xbf]);
            Ok::<(), ()>(())
        });
        assert_eq!(data.unwrap().to_vec::<bf16>().unwrap(), [bf16::ONE, bf16::ZERO, -bf16::ONE]);
    }

    #[test]
    fn a_unit_larger_than_a_chunk_is_never_cut() {
        let unit = CHUNK + 4;
        let fill = |_: usize, out: &mut [u8]| if out.len() == unit { Ok(()) } else { Err(out.len()) };
        host_data(&[2, unit / 4], DType::U32, unit, &fill).unwrap();
    }

    /// All chunks from the third on fail; the later ones are quicker.
    #[test]
    fn the_first_error_wins() {
        let fill = |offset: usize, _: &mut [u8]| match offset / CHUNK {
            0 | 1 => Ok(()),
            2 => {
                std::thread::sleep(std::time::Duration::from_millis(20));
                Err(2)
            }
            later => Err(later),
        };
        assert_eq!(host_data(&[6 * CHUNK], DType::U8, 1, &fill).unwrap_err(), 2);
    }
}

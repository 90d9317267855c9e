//! What the attention kernels of all kinds share on the host side.

use super::raw::{CudaTensor, dense};

/// Masks as the kernels read them: dense, documents in i32.
pub struct Mask {
    /// `[B, Sq]` i32.
    pub doc_start: Option<CudaTensor>,
    /// `[B, Skv]`, one or four bytes a key, zero where it is hidden.
    pub key_visible: Option<CudaTensor>,
}

impl Mask {
    pub fn new(doc_start: Option<CudaTensor>, key_visible: Option<CudaTensor>) -> Self {
        Self {
            doc_start: doc_start.map(dense),
            key_visible: key_visible.map(dense),
        }
    }
}

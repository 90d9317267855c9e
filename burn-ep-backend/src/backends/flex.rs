//! Ops of the CPU backend: native kernels where plain tensors would be slow.

use burn_flex::Flex;

use crate::backend::MoeBackend;

impl MoeBackend for Flex {
    // ---- routing ----

    // ---- experts ----

    // ---- attention, norms, positions ----

    // ---- Mamba-2 ----

    // ---- loss, optimizer ----
}

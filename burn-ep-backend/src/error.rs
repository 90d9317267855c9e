//! One error type for every op of this crate.

/// Result of an op.
pub type Result<T, E = OpError> = std::result::Result<T, E>;

/// What an op refused, with the names a caller can act on.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum OpError {
    /// A tensor has another shape than the op's contract asks for.
    #[error("{op}: tensor `{tensor}` has shape {found:?}, expected {expected}")]
    Shape {
        op: &'static str,
        tensor: &'static str,
        found: Vec<usize>,
        expected: String,
    },
    /// A setting of a descriptor is outside what the op can do.
    #[error("{op}: `{field}` is {found}, expected {expected}")]
    Setting {
        op: &'static str,
        field: &'static str,
        found: String,
        expected: String,
    },
    /// A value inside a tensor is outside its domain, e.g. a label beyond the vocabulary.
    #[error("{op}: `{tensor}` holds {found} at index {index}, expected {expected}")]
    Value {
        op: &'static str,
        tensor: &'static str,
        index: usize,
        found: String,
        expected: String,
    },
    /// Ranks disagree, a peer is missing, or an exchange timed out.
    #[error("rank {rank} of {world}: {op}: {why}")]
    Comm {
        rank: usize,
        world: usize,
        op: &'static str,
        why: String,
    },
}

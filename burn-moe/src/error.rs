//! The error type of the library: every variant names the field, what was found, what was expected.

use std::path::PathBuf;

use burn_ep_backend::OpError;

/// Result of this library.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong, where, and what would have been right.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A field of `config.json` or of a settings struct.
    #[error("config field `{field}`: found {found}, expected {expected}")]
    Config { field: String, found: String, expected: String },
    /// A micro-batch.
    #[error("batch field `{field}`: found {found}, expected {expected}")]
    Batch {
        field: &'static str,
        found: String,
        expected: String,
    },
    /// A file of a checkpoint.
    #[error("{path}: {what}: found {found}, expected {expected}", path = path.display())]
    Checkpoint {
        path: PathBuf,
        what: String,
        found: String,
        expected: String,
    },
    /// Tensors of a checkpoint that do not fit the model (the text lists them).
    #[error("{0}")]
    Mismatch(String),
    /// Training data.
    #[error("{path}, line {line}: {why}", path = path.display())]
    Data { path: PathBuf, line: usize, why: String },
    /// The operating system refused.
    #[error("{path}: {what}: {source}", path = path.display())]
    Io {
        path: PathBuf,
        what: &'static str,
        source: std::io::Error,
    },
    /// Tokenizer or chat template.
    #[error("{what}: {why}")]
    Text { what: String, why: String },
    /// Training cannot go on, e.g. a loss that is not a number.
    #[error("step {step}: {why}")]
    Training { step: u64, why: String },
    /// The Hugging Face Hub.
    #[error("hub: {repo}@{revision}: {why}")]
    Hub { repo: String, revision: String, why: String },
    /// An op of the backend.
    #[error(transparent)]
    Op(#[from] OpError),
}

impl Error {
    /// A bad field of a config.
    pub fn config(field: impl Into<String>, found: impl ToString, expected: impl ToString) -> Self {
        Self::Config {
            field: field.into(),
            found: found.to_string(),
            expected: expected.to_string(),
        }
    }

    /// A bad field of a batch.
    pub fn batch(field: &'static str, found: impl ToString, expected: impl ToString) -> Self {
        Self::Batch {
            field,
            found: found.to_string(),
            expected: expected.to_string(),
        }
    }

    /// A bad checkpoint file.
    pub fn checkpoint(path: impl Into<PathBuf>, what: impl Into<String>, found: impl ToString, expected: impl ToString) -> Self {
        Self::Checkpoint {
            path: path.into(),
            what: what.into(),
            found: found.to_string(),
            expected: expected.to_string(),
        }
    }

    /// A failed file operation.
    pub fn io(path: impl Into<PathBuf>, what: &'static str, source: std::io::Error) -> Self {
        Self::Io {
            path: path.into(),
            what,
            source,
        }
    }
}

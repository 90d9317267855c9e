//! From a JSON-lines file to micro-batches: tokenizer, chat template, labels, packing, order.
//!
//! 1. [`Tokenizer`] and [`ChatTemplate`] come from the checkpoint folder, as transformers reads them;
//! 2. [`Dataset::from_jsonl`] turns every line into a [`Document`]: token ids and labels, where only what the assistant
//!    says has labels ([`chat`]);
//! 3. [`Loader`] shuffles the documents per epoch, packs or pads them ([`batch`]) and hands each rank its share as
//!    [`crate::batch::HostBatch`]; its [`DataPosition`] goes into training checkpoints.

pub mod batch;
pub mod chat;
mod jsonl;
pub mod loader;
mod python;
mod template;
mod tokenizer;

pub use batch::Layout;
pub use chat::{Conversation, Document};
pub use jsonl::{Dataset, EncodeOptions, EncodeReport, TooLong};
pub use loader::{DataPosition, Loader, LoaderOptions};
pub use template::{ChatTemplate, RenderOptions, Rendered};
pub use tokenizer::{Encoded, Tokenizer};

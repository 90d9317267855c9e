//! A data set: JSON lines on disk, encoded documents in memory.

use std::fmt;
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use serde_json::Value;

use super::chat::{Conversation, Document};
use super::template::ChatTemplate;
use super::tokenizer::Tokenizer;
use crate::batch::IGNORE_INDEX;
use crate::error::{Error, Result};

/// What happens to a document with more than `max_len` tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum TooLong {
    /// Refuse the data set, naming the line.
    #[default]
    Error,
    /// Cut the end off and count it in [`EncodeReport`].
    Truncate,
}

/// How lines become documents.
#[derive(Debug, Clone, Copy)]
pub struct EncodeOptions {
    /// Most tokens per document.
    pub max_len: usize,
    /// What happens to longer ones.
    pub too_long: TooLong,
    /// Vocabulary of the model; a token outside it is an error.
    pub vocab_size: usize,
}

/// What encoding did, for the log.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EncodeReport {
    /// Documents kept.
    pub documents: usize,
    /// Their tokens.
    pub tokens: usize,
    /// Tokens that count towards the loss.
    pub label_tokens: usize,
    /// Documents cut to the length limit.
    pub truncated: usize,
    /// Tokens cut off them.
    pub truncated_tokens: usize,
    /// Documents left out because no scored token was left after the cut.
    pub dropped: usize,
}

impl fmt::Display for EncodeReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} documents, {} tokens, {} scored",
            self.documents, self.tokens, self.label_tokens
        )?;
        if self.truncated > 0 {
            write!(
                f,
                "; {} cut by {} tokens in total, {} of them dropped",
                self.truncated, self.truncated_tokens, self.dropped
            )?;
        }
        Ok(())
    }
}

/// Encoded documents.
#[derive(Debug, Clone)]
pub struct Dataset {
    documents: Vec<Document>,
    report: EncodeReport,
}

impl Dataset {
    /// Reads JSON lines. Each line is one of
    /// - `{"messages": [{"role": .., "content": ..}, ..]}`, optionally with `"tools"`: rendered by the chat template,
    ///   labels on the assistant's tokens;
    /// - `{"prompt": "..", "completion": ".."}`: plain text, labels on the completion and the end-of-sequence token;
    /// - `{"text": ".."}`: plain text, labels everywhere.
    ///
    /// Other keys are ignored, blank lines skipped. Errors name file and line; a file without documents is an error.
    pub fn from_jsonl(
        path: impl AsRef<Path>,
        tokenizer: &Tokenizer,
        template: Option<&ChatTemplate>,
        options: &EncodeOptions,
    ) -> Result<Self> {
        let path = path.as_ref();
        if options.max_len < 2 {
            return Err(Error::config("max_len", options.max_len, "at least 2 (a token and its successor)"));
        }
        let bytes = std::fs::read(path).map_err(|e| Error::io(path, "read the data set", e))?;
        let lines: Vec<(usize, &[u8])> = bytes
            .split(|&b| b == b'\n')
            .zip(1..)
            .map(|(line, number)| (number, line.trim_ascii()))
            .filter(|(_, line)| !line.is_empty())
            .collect();
        let encoder = Encoder {
            tokenizer,
            template,
            options,
        };
        // Collecting into a Result keeps the file's order, and the first bad line is the one reported.
        let encoded: Vec<Result<(Option<Document>, usize)>> = lines
            .par_iter()
            .map(|&(line, text)| {
                encoder.line(text).map_err(|why| Error::Data {
                    path: PathBuf::from(path),
                    line,
                    why,
                })
            })
            .collect();

        let mut documents = Vec::with_capacity(encoded.len());
        let mut report = EncodeReport::default();
        for line in encoded {
            let (document, cut) = line?;
            report.truncated += usize::from(cut > 0);
            report.truncated_tokens += cut;
            match document {
                Some(document) => documents.push(document),
                None => report.dropped += 1,
            }
        }
        if documents.is_empty() {
            return Err(Error::Data {
                path: path.into(),
                line: lines.last().map_or(1, |(line, _)| *line),
                why: match report.dropped {
                    0 => "the data set is empty, expected at least one JSON line".into(),
                    n => format!(
                        "no scored token is left in any of {n} documents after the cut to {} tokens",
                        options.max_len
                    ),
                },
            });
        }
        Ok(Self::with_report(documents, report))
    }

    /// Documents made elsewhere. Each needs as many labels as ids, at least one scored token, and none at its start.
    pub fn from_documents(documents: Vec<Document>) -> Result<Self> {
        if documents.is_empty() {
            return Err(Error::batch("documents", 0, "at least one"));
        }
        for (i, document) in documents.iter().enumerate() {
            if document.labels.len() != document.ids.len() {
                let expected = format!("{} (one per id) in document {i}", document.ids.len());
                return Err(Error::batch("labels", document.labels.len(), expected));
            }
            if document.num_label_tokens() == 0 {
                return Err(Error::batch("labels", "none", format!("at least one scored token in document {i}")));
            }
            if document.labels[0] != IGNORE_INDEX {
                let expected = format!("-100 for the first token of document {i}, which nothing predicts");
                return Err(Error::batch("labels", document.labels[0], expected));
            }
        }
        Ok(Self::with_report(documents, EncodeReport::default()))
    }

    fn with_report(documents: Vec<Document>, mut report: EncodeReport) -> Self {
        report.documents = documents.len();
        report.tokens = documents.iter().map(Document::len).sum();
        report.label_tokens = documents.iter().map(Document::num_label_tokens).sum();
        Self { documents, report }
    }

    /// The documents, in file order.
    pub fn documents(&self) -> &[Document] {
        &self.documents
    }

    /// What encoding did.
    pub fn report(&self) -> &EncodeReport {
        &self.report
    }

    /// Hash of all ids and labels (FNV-1a), to recognise the data set on resume.
    pub fn fingerprint(&self) -> u64 {
        let mut hash = 0xcbf2_9ce4_8422_2325_u64;
        let mut add = |value: i32| {
            for byte in value.to_le_bytes() {
                hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
            }
        };
        for document in &self.documents {
            add(document.ids.len() as i32);
            document.ids.iter().chain(&document.labels).for_each(|&v| add(v));
        }
        hash
    }
}

struct Encoder<'a> {
    tokenizer: &'a Tokenizer,
    template: Option<&'a ChatTemplate>,
    options: &'a EncodeOptions,
}

impl Encoder<'_> {
    /// The document of one line and the number of tokens cut off it; no document when none of the rest is scored.
    fn line(&self, text: &[u8]) -> Result<(Option<Document>, usize), String> {
        let json: Value = serde_json::from_slice(text).map_err(|e| {
            // serde_json counts lines within this one.
            let why = e.to_string();
            let why = why.split(" at line ").next().unwrap_or_default();
            format!("not valid JSON: {why} at column {}", e.column())
        })?;
        let mut document = self.encode(json)?;
        let EncodeOptions {
            max_len,
            too_long,
            vocab_size,
        } = *self.options;
        if let Some(id) = document.ids.iter().find(|id| **id as usize >= vocab_size) {
            let token = self.tokenizer.decode(&[*id], false).unwrap_or_default();
            return Err(format!(
                "token id {id} ({token:?}) is outside the model's vocabulary of {vocab_size}; tokenizer and model do not belong together"
            ));
        }
        if document.num_label_tokens() == 0 {
            return Err("the document has no token to learn from".into());
        }
        let cut = document.len().saturating_sub(max_len);
        if cut > 0 && too_long == TooLong::Error {
            return Err(format!(
                "the document has {} tokens, expected at most {max_len}; raise the sequence length, shorten the document, or ask for truncation",
                document.len()
            ));
        }
        document.ids.truncate(max_len);
        document.labels.truncate(max_len);
        Ok((Some(document).filter(|d| d.num_label_tokens() > 0), cut))
    }

    fn encode(&self, mut json: Value) -> Result<Document, String> {
        let Some(fields) = json.as_object_mut() else {
            return Err("found no JSON object, expected one with `messages`, with `prompt` and `completion`, or with `text`".into());
        };
        if let Some(messages) = fields.remove("messages") {
            let Value::Array(messages) = messages else {
                return Err(format!("messages: found {messages}, expected a list"));
            };
            let template = self
                .template
                .ok_or("found `messages`, but the checkpoint has no chat template (chat_template.jinja or tokenizer_config.json)")?;
            let tools = fields.remove("tools").filter(|t| !t.is_null());
            let conversation = Conversation::new(messages, tools).map_err(|e| e.to_string())?;
            return conversation.encode(self.tokenizer, template).map_err(|e| e.to_string());
        }
        let string = |name: &str| match fields.get(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text.as_str())),
            Some(other) => Err(format!("{name}: found {other}, expected a string (for chats use `messages`)")),
        };
        match (string("prompt")?, string("completion")?, string("text")?) {
            (Some(prompt), Some(completion), None) => self.plain(&format!("{prompt}{completion}"), prompt.len()),
            (None, None, Some(text)) => self.plain(text, 0),
            _ => {
                let keys: Vec<&str> = fields.keys().map(String::as_str).collect();
                Err(format!(
                    "found the keys [{}], expected `messages`, `prompt` with `completion`, or `text`",
                    keys.join(", ")
                ))
            }
        }
    }

    /// Plain text with the tokenizer's own special tokens and EOS; what ends after byte `scored_from` is scored.
    fn plain(&self, text: &str, scored_from: usize) -> Result<Document, String> {
        if text.len() == scored_from {
            return Err("there is no text to learn from".into());
        }
        let encoded = self.tokenizer.encode(text, true).map_err(|e| e.to_string())?;
        let eos = *self
            .tokenizer
            .eos_ids()
            .first()
            .ok_or("the checkpoint names no eos_token to end the text with")?;
        let mut ids = encoded.ids;
        if ids.last() != Some(&eos) {
            ids.push(eos);
        }
        // A special token that the tokenizer adds in front has an empty span; the last token is EOS.
        let last = ids.len() - 1;
        Ok(Document::new(ids, |t| t == last || encoded.spans[t].end > scored_from))
    }
}

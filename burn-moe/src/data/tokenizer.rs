//! The tokenizer of a checkpoint folder: `tokenizer.json` plus the special tokens that other files name.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use serde_json::Value;

use crate::checkpoint::ConfigJson;
use crate::error::{Error, Result};

/// Text as tokens.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Encoded {
    /// Token ids.
    pub ids: Vec<i32>,
    /// Bytes of the text behind each token.
    pub spans: Vec<Range<usize>>,
}

/// A Hugging Face fast tokenizer with the special tokens of its checkpoint.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// `eos_token`, `bos_token`, .. as the chat template sees them.
    named: BTreeMap<String, String>,
    eos: Vec<i32>,
    bos: Option<i32>,
    pad: Option<i32>,
    vocab_size: usize,
}

impl Tokenizer {
    /// Reads `tokenizer.json`, and the special tokens from `tokenizer_config.json`, `special_tokens_map.json`,
    /// `generation_config.json` and `config.json` where present.
    ///
    /// End-of-sequence ids are the union of all files: a model may end a turn with a token that is not the tokenizer's
    /// own `eos_token`.
    pub fn from_folder(folder: impl AsRef<Path>) -> Result<Self> {
        let folder = folder.as_ref();
        let path = folder.join("tokenizer.json");
        if !path.is_file() {
            return Err(Error::checkpoint(
                path,
                "tokenizer",
                "no such file",
                "a fast tokenizer; convert a slow one with transformers' `AutoTokenizer.from_pretrained(..).save_pretrained(..)`",
            ));
        }
        let bytes = std::fs::read(&path).map_err(|e| Error::io(&path, "read the tokenizer", e))?;
        let mut inner = tokenizers::Tokenizer::from_bytes(&bytes)
            .map_err(|e| Error::checkpoint(&path, "tokenizer", e, "a tokenizer.json of the crate `tokenizers`"))?;
        // transformers clears both before every call; lengths are this library's own business.
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|e| text_error("tokenizer", e))?;

        let config = read_json(&folder.join("tokenizer_config.json"))?;
        let legacy = read_json(&folder.join("special_tokens_map.json"))?;
        let mut named = BTreeMap::new();
        for (key, value) in entries(&legacy).chain(entries(&config)) {
            if let (true, Some(token)) = (key.ends_with("_token"), token_text(value)) {
                named.insert(key.clone(), token.to_string());
            }
        }
        let vocab_size = inner.get_vocab(true).values().max().map_or(0, |&id| id as usize + 1);
        let id_of = |key: &str| named.get(key).and_then(|t: &String| inner.token_to_id(t)).map(|id| id as i32);

        let (mut eos, mut bos, mut pad) = (Vec::from_iter(id_of("eos_token")), id_of("bos_token"), id_of("pad_token"));
        for file in ["generation_config.json", "config.json"] {
            let path = folder.join(file);
            let json = read_json(&path)?;
            let ids = |key: &str| token_ids(&path, &json, key);
            for id in ids("eos_token_id")? {
                if !eos.contains(&id) {
                    eos.push(id);
                }
            }
            bos = bos.or(ids("bos_token_id")?.first().copied());
            pad = pad.or(ids("pad_token_id")?.first().copied());
        }
        Ok(Self {
            inner,
            named,
            eos,
            bos,
            pad,
            vocab_size,
        })
    }

    /// Token ids and byte spans. `add_special_tokens` lets the tokenizer add its own (usually BOS); chat templates write
    /// them into the text instead.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Encoded> {
        let encoding = self
            .inner
            .encode(text, add_special_tokens)
            .map_err(|e| text_error("tokenizer", e))?;
        Ok(Encoded {
            ids: encoding.get_ids().iter().map(|&id| id as i32).collect(),
            spans: encoding.get_offsets().iter().map(|&(start, end)| start..end).collect(),
        })
    }

    /// Text of tokens. `skip_special_tokens` leaves out BOS, EOS and the like.
    pub fn decode(&self, ids: &[i32], skip_special_tokens: bool) -> Result<String> {
        let ids = ids
            .iter()
            .map(|&id| u32::try_from(id).map_err(|_| text_error("tokenizer", format!("token id {id} is negative"))))
            .collect::<Result<Vec<u32>>>()?;
        self.inner.decode(&ids, skip_special_tokens).map_err(|e| text_error("tokenizer", e))
    }

    /// Id of a token, if the vocabulary has it.
    pub fn token_to_id(&self, token: &str) -> Option<i32> {
        self.inner.token_to_id(token).map(|id| id as i32)
    }

    /// Whether the tokenizer lists the id among its special tokens.
    pub fn is_special(&self, id: i32) -> bool {
        let token = u32::try_from(id).ok().and_then(|id| self.inner.id_to_token(id));
        token.is_some_and(|t| self.inner.get_added_vocabulary().is_special_token(&t))
    }

    /// Highest token id plus one. A model's embedding may be larger (padded), never smaller.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Ids that end a sequence or a turn, the tokenizer's own `eos_token` first.
    pub fn eos_ids(&self) -> &[i32] {
        &self.eos
    }

    /// Beginning-of-sequence id.
    pub fn bos_id(&self) -> Option<i32> {
        self.bos
    }

    /// Id written into padding; the end-of-sequence id, else 0, for tokenizers without a pad token (padding is masked, so
    /// its value never counts).
    pub fn pad_id(&self) -> i32 {
        self.pad.or(self.eos.first().copied()).unwrap_or(0)
    }

    /// `eos_token`, `bos_token`, .. by name.
    pub fn special_tokens(&self) -> &BTreeMap<String, String> {
        &self.named
    }
}

fn text_error(what: &str, why: impl ToString) -> Error {
    Error::Text {
        what: what.into(),
        why: why.to_string(),
    }
}

/// A file with a JSON object, which may hold Python's `Infinity` (published configs do); null when there is none.
pub(super) fn read_json(path: &Path) -> Result<Value> {
    match std::fs::read_to_string(path) {
        Ok(text) => ConfigJson::parse(path, text).map(|json| json.to_value()),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(Value::Null),
        Err(e) => Err(Error::io(path, "read", e)),
    }
}

fn entries(json: &Value) -> impl Iterator<Item = (&String, &Value)> {
    json.as_object().into_iter().flatten()
}

/// A special token is a string, or an object with its text under `content`.
fn token_text(value: &Value) -> Option<&str> {
    value.as_str().or_else(|| value.get("content")?.as_str())
}

/// `key` as one id or a list of ids; empty when absent or null.
fn token_ids(path: &Path, json: &Value, key: &str) -> Result<Vec<i32>> {
    let value = &json[key];
    let list = match value {
        Value::Null => return Ok(Vec::new()),
        Value::Array(list) => list.as_slice(),
        one => std::slice::from_ref(one),
    };
    list.iter()
        .map(|id| {
            let id = id.as_i64().and_then(|id| i32::try_from(id).ok()).filter(|id| *id >= 0);
            id.ok_or_else(|| Error::checkpoint(path, key, value, "a token id or a list of token ids"))
        })
        .collect()
}

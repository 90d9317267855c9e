//! One training document: token ids, and labels for what the assistant says.
//!
//! Templates with `{% generation %}` blocks say themselves what the assistant generates. For all others the conversation
//! is rendered up to every assistant turn, once ending in the generation prompt and once with the turn, and the
//! difference is what the assistant says. That needs a template whose output for the first n messages begins its output
//! for all of them; others are refused.

use std::ops::Range;

use serde_json::Value;

use super::template::{ChatTemplate, RenderOptions};
use super::tokenizer::{Encoded, Tokenizer};
use crate::batch::IGNORE_INDEX;
use crate::error::{Error, Result};

/// Tokens of one document. `labels[t]` is `ids[t]` where it counts towards the loss, else [`IGNORE_INDEX`]; the first
/// token never counts, since nothing before it predicts it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Document {
    /// Token ids.
    pub ids: Vec<i32>,
    /// As many labels, not shifted.
    pub labels: Vec<i32>,
}

impl Document {
    /// Labels the tokens for which `scored` is true.
    pub fn new(ids: Vec<i32>, scored: impl Fn(usize) -> bool) -> Self {
        let labels = ids
            .iter()
            .enumerate()
            .map(|(t, &id)| if t > 0 && scored(t) { id } else { IGNORE_INDEX })
            .collect();
        Self { ids, labels }
    }

    /// Tokens.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Whether there is no token.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// Tokens that count towards the loss.
    pub fn num_label_tokens(&self) -> usize {
        self.labels.iter().filter(|&&l| l != IGNORE_INDEX).count()
    }
}

/// Checked chat messages, with every field of the file kept for the template.
#[derive(Debug, Clone, PartialEq)]
pub struct Conversation {
    messages: Vec<Value>,
    tools: Option<Value>,
}

impl Conversation {
    /// Messages are objects with `role` and `content` (text, or a list of parts; absent only beside `tool_calls`).
    /// `tools` are definitions for templates that print them.
    pub fn new(messages: Vec<Value>, tools: Option<Value>) -> Result<Self> {
        if messages.is_empty() {
            return Err(bad("messages", "found an empty list, expected at least one message"));
        }
        for (i, message) in messages.iter().enumerate() {
            let field = |name: &str| format!("messages[{i}].{name}");
            if !message.is_object() {
                return Err(bad(
                    &format!("messages[{i}]"),
                    format!("found {message}, expected an object with role and content"),
                ));
            }
            match &message["role"] {
                Value::String(_) => {}
                Value::Null => {
                    return Err(bad(
                        &field("role"),
                        "missing, expected \"system\", \"user\", \"assistant\" or \"tool\"",
                    ));
                }
                other => return Err(bad(&field("role"), format!("found {other}, expected a string"))),
            }
            match &message["content"] {
                Value::String(_) | Value::Array(_) => {}
                Value::Null if message["tool_calls"].is_array() => {}
                Value::Null => return Err(bad(&field("content"), "missing, expected text")),
                other => return Err(bad(&field("content"), format!("found {other}, expected text or a list of parts"))),
            }
        }
        Ok(Self { messages, tools })
    }

    /// The messages.
    pub fn messages(&self) -> &[Value] {
        &self.messages
    }

    /// Tokens with labels on what the assistant says, its end-of-turn token included.
    pub fn encode(&self, tokenizer: &Tokenizer, template: &ChatTemplate) -> Result<Document> {
        let (text, said) = self.assistant_spans(template)?;
        let encoded = tokenizer.encode(&text, false)?;
        let mut scored = vec![false; encoded.ids.len()];
        for bytes in said {
            let mut tokens = tokens_of(&encoded, &bytes);
            if !template.has_generation_blocks() {
                tokens = without_trailing_space(tokenizer, &encoded.ids, tokens)?;
            }
            scored[tokens].fill(true);
        }
        let document = Document::new(encoded.ids, |t| scored[t]);
        if document.num_label_tokens() == 0 {
            return Err(bad("messages", "no assistant message to learn from"));
        }
        Ok(document)
    }

    /// Token ids that ask for the next assistant turn.
    pub fn encode_prompt(&self, tokenizer: &Tokenizer, template: &ChatTemplate) -> Result<Vec<i32>> {
        let text = self.render(template, self.messages.len(), true)?;
        Ok(tokenizer.encode(&text, false)?.ids)
    }

    /// The rendered conversation and the bytes of it that the assistant says.
    pub fn assistant_spans(&self, template: &ChatTemplate) -> Result<(String, Vec<Range<usize>>)> {
        if template.has_generation_blocks() {
            let rendered = template.render(&self.messages, &self.options(false))?;
            return Ok((rendered.text, rendered.generation));
        }
        let text = self.render(template, self.messages.len(), false)?;
        let mut spans = Vec::new();
        for (i, message) in self.messages.iter().enumerate() {
            if message["role"] != "assistant" {
                continue;
            }
            // Some templates refuse an empty conversation; then the turn has no prompt.
            let (before, prompt) = match i {
                0 => (String::new(), String::new()),
                _ => (self.render(template, i, false)?, self.render(template, i, true)?),
            };
            let through = self.render(template, i + 1, false)?;
            let start = common_prefix(&prompt, &through);
            let header_repeats = prompt.len() == before.len() || start > before.len();
            if !text.starts_with(&through) || start < before.len() || !through.starts_with(&before) || !header_repeats {
                return Err(Error::Text {
                    what: "chat template".into(),
                    why: format!(
                        "cannot tell what the assistant says in messages[{i}]: the template prints the conversation up to \
                         this message differently when more follows. Mark the assistant's text in the template by \
                         `{{% generation %}} .. {{% endgeneration %}}`, or use data with one answer per conversation"
                    ),
                });
            }
            spans.push(start..through.len());
        }
        Ok((text, spans))
    }

    fn render(&self, template: &ChatTemplate, messages: usize, add_generation_prompt: bool) -> Result<String> {
        Ok(template
            .render(&self.messages[..messages], &self.options(add_generation_prompt))?
            .text)
    }

    fn options(&self, add_generation_prompt: bool) -> RenderOptions<'_> {
        RenderOptions {
            add_generation_prompt,
            tools: self.tools.as_ref(),
        }
    }
}

fn bad(what: &str, why: impl ToString) -> Error {
    Error::Text {
        what: what.into(),
        why: why.to_string(),
    }
}

/// Bytes that both texts begin with, cut at a character. Reasoning templates end the prompt in an opening tag which an
/// answer without reasoning closes at once, so the prompt need not be a prefix of the turn.
fn common_prefix(a: &str, b: &str) -> usize {
    a.chars()
        .zip(b.chars())
        .take_while(|(x, y)| x == y)
        .map(|(c, _)| c.len_utf8())
        .sum()
}

/// Tokens from the first to the last that shares a byte with the range, as transformers builds its assistant mask.
fn tokens_of(encoded: &Encoded, bytes: &Range<usize>) -> Range<usize> {
    let touches = |span: &Range<usize>| span.start < bytes.end && span.end > bytes.start;
    match encoded.spans.iter().position(touches) {
        Some(first) => first..encoded.spans.iter().rposition(touches).map_or(first, |last| last + 1),
        None => 0..0,
    }
}

/// Drops white space that the template prints after the token that ends the turn: generation stops before it.
fn without_trailing_space(tokenizer: &Tokenizer, ids: &[i32], tokens: Range<usize>) -> Result<Range<usize>> {
    let Some(last_special) = tokens.clone().rev().find(|&t| tokenizer.is_special(ids[t])) else {
        return Ok(tokens);
    };
    let rest = tokenizer.decode(&ids[last_special + 1..tokens.end], false)?;
    let end = if rest.trim().is_empty() { last_special + 1 } else { tokens.end };
    Ok(tokens.start..end)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::collections::BTreeMap;

    fn spans(source: &str, messages: Value) -> Result<Vec<String>> {
        let template = ChatTemplate::new(source, BTreeMap::new())?;
        let Value::Array(messages) = messages else {
            unreachable!("tests pass lists")
        };
        let (text, spans) = Conversation::new(messages, None)?.assistant_spans(&template)?;
        Ok(spans.into_iter().map(|s| text[s].to_string()).collect())
    }

    fn chat() -> Value {
        json!([
            {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"},
            {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"},
        ])
    }

    const PLAIN: &str =
        "{% for m in messages %}<{{ m.role }}>{{ m.content }};\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";

    #[test]
    fn prefixes_find_what_the_assistant_says() {
        assert_eq!(spans(PLAIN, chat()).unwrap(), ["2;\n", "4;\n"]);
    }

    #[test]
    fn a_reasoning_prompt_that_the_answer_closes_is_not_scored() {
        let source = "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}<think></think>{% endif %}{{ m.content }};{% endfor %}{% if add_generation_prompt %}<assistant><think>\n{% endif %}";
        assert_eq!(spans(source, chat()).unwrap(), ["</think>2;", "</think>4;"]);
    }

    #[test]
    fn a_template_that_rewrites_earlier_turns_is_refused() {
        let source = "{% for m in messages %}<{{ m.role }}>{% if loop.last %}(last){% endif %}{{ m.content }};{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
        let error = spans(source, chat()).unwrap_err().to_string();
        assert!(error.contains("messages[1]") && error.contains("generation %}"), "{error}");
    }

    #[test]
    fn malformed_messages_name_index_and_field() {
        let cases = [
            (json!([]), "messages: found an empty list"),
            (json!(["hi"]), "messages[0]: found \"hi\""),
            (json!([{"content": "hi"}]), "messages[0].role: missing"),
            (json!([{"role": 3, "content": "hi"}]), "messages[0].role: found 3"),
            (
                json!([{"role": "user", "content": "hi"}, {"role": "assistant"}]),
                "messages[1].content: missing",
            ),
            (json!([{"role": "user", "content": 1}]), "messages[0].content: found 1"),
        ];
        for (messages, expected) in cases {
            let error = spans(PLAIN, messages).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error}");
        }
    }
}

//! Chat templates: Jinja as transformers sets it up, rendered by `minijinja`.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::value::{Kwargs, Value as JinjaValue};
use minijinja::{Environment, ErrorKind, State};
use serde_json::{Map, Value};

use super::python;
use super::tokenizer::{Tokenizer, read_json};
use crate::error::{Error, Result};

/// Around the output of `{% generation %}` blocks. Unicode noncharacters, which no text contains.
const BEGIN: char = '\u{FDD0}';
const END: char = '\u{FDD1}';

/// Name of the one template in the environment.
const NAME: &str = "chat_template";

/// What to render besides the messages.
#[derive(Debug, Clone, Default)]
pub struct RenderOptions<'a> {
    /// End with the header of an assistant turn.
    pub add_generation_prompt: bool,
    /// Tool definitions (JSON schemas) for templates that print them.
    pub tools: Option<&'a Value>,
}

/// Rendered text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rendered {
    /// What the model reads.
    pub text: String,
    /// Byte ranges that came out of `{% generation %}` blocks, in order.
    pub generation: Vec<Range<usize>>,
}

/// The chat template of a checkpoint.
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    environment: Arc<Environment<'static>>,
    has_generation_blocks: bool,
    special_tokens: BTreeMap<String, String>,
    variables: Map<String, Value>,
}

impl ChatTemplate {
    /// The template of a checkpoint folder: `chat_template.jinja`, else `chat_template` in `tokenizer_config.json` (a
    /// string, or a list of named ones of which `default` is taken). None when the folder has neither.
    pub fn from_folder(folder: impl AsRef<Path>, tokenizer: &Tokenizer) -> Result<Option<Self>> {
        let folder = folder.as_ref();
        let path = folder.join("chat_template.jinja");
        match std::fs::read_to_string(&path) {
            Ok(source) => return Self::new(&source, tokenizer.special_tokens().clone()).map(Some),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
            Err(e) => return Err(Error::io(path, "read the chat template", e)),
        }
        let path = folder.join("tokenizer_config.json");
        let config = read_json(&path)?;
        let bad = |found: &Value| Error::checkpoint(&path, "chat_template", found, "a string or a list of {name, template}");
        let source = match &config["chat_template"] {
            Value::Null => return Ok(None),
            Value::String(source) => source,
            Value::Array(list) => {
                let named: Vec<(&str, &str)> = list
                    .iter()
                    .map(|entry| entry["name"].as_str().zip(entry["template"].as_str()).ok_or_else(|| bad(entry)))
                    .collect::<Result<_>>()?;
                let names: Vec<&str> = named.iter().map(|(name, _)| *name).collect();
                let default = named.iter().find(|(name, _)| *name == "default");
                let only = named.first().filter(|_| named.len() == 1);
                default
                    .or(only)
                    .ok_or_else(|| Error::checkpoint(&path, "chat_template", names.join(", "), "one named `default`"))?
                    .1
            }
            other => return Err(bad(other)),
        };
        Self::new(source, tokenizer.special_tokens().clone()).map(Some)
    }

    /// Compiles a template. `special_tokens` (`eos_token`, ..) are variables in it.
    pub fn new(source: &str, special_tokens: BTreeMap<String, String>) -> Result<Self> {
        // Jinja2 reads every line ending as \n.
        let source = source.replace("\r\n", "\n").replace('\r', "\n");
        let (source, has_generation_blocks) = replace_generation_tags(&source)?;
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.set_formatter(|out, state, value| match python::print_like_python(value) {
            Some(text) => out.write_str(&text).map_err(minijinja::Error::from),
            None => minijinja::escape_formatter(out, state, value),
        });
        environment.add_filter("tojson", python::tojson);
        environment.add_function("raise_exception", |message: String| -> Result<JinjaValue, minijinja::Error> {
            Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
        });
        environment.add_function(GENERATION_FUNCTION, generation_block);
        set_clock(&mut environment, None);
        environment
            .add_template_owned(NAME, source)
            .map_err(|e| template_error("the template does not compile", &e))?;
        Ok(Self {
            environment: Arc::new(environment),
            has_generation_blocks,
            special_tokens,
            variables: Map::new(),
        })
    }

    /// Extra variables for the template, e.g. `enable_thinking`.
    pub fn with_variables(mut self, variables: Map<String, Value>) -> Self {
        self.variables = variables;
        self
    }

    /// Fixes what `strftime_now` calls now, in seconds since 1970 (UTC), so that a data set renders the same every day.
    pub fn with_clock(mut self, unix_seconds: u64) -> Self {
        set_clock(Arc::make_mut(&mut self.environment), Some(unix_seconds));
        self
    }

    /// Whether the template marks what the assistant generates by `{% generation %}` blocks.
    pub fn has_generation_blocks(&self) -> bool {
        self.has_generation_blocks
    }

    /// Renders messages (objects with `role` and `content`).
    pub fn render(&self, messages: &[Value], options: &RenderOptions) -> Result<Rendered> {
        let mut context = self.variables.clone();
        for (name, token) in &self.special_tokens {
            context.entry(name.clone()).or_insert_with(|| Value::from(token.as_str()));
        }
        context.insert("messages".into(), Value::from(messages));
        context.insert("tools".into(), options.tools.cloned().unwrap_or(Value::Null));
        context.insert("documents".into(), Value::Null);
        context.insert("add_generation_prompt".into(), Value::from(options.add_generation_prompt));
        let template = self
            .environment
            .get_template(NAME)
            .map_err(|e| template_error("the template is gone", &e))?;
        let marked = template
            .render(JinjaValue::from_serialize(&context))
            .map_err(|e| template_error("rendering failed", &e))?;
        unmark(&marked)
    }
}

const GENERATION_FUNCTION: &str = "__generation__";

/// `{% generation %}` becomes a call block of [`generation_block`]: same scoping and white space as in transformers.
fn replace_generation_tags(source: &str) -> Result<(String, bool)> {
    let compile = |pattern: &str| {
        regex::Regex::new(pattern).map_err(|e| Error::Text {
            what: "chat template".into(),
            why: e.to_string(),
        })
    };
    let begin = compile(r"\{%([-+]?)\s*generation\s*([-+]?)%\}")?;
    let end = compile(r"\{%([-+]?)\s*endgeneration\s*([-+]?)%\}")?;
    let found = begin.is_match(source);
    let source = begin.replace_all(source, format!("{{%${{1}} call {GENERATION_FUNCTION}() ${{2}}%}}"));
    let source = end.replace_all(&source, "{%${1} endcall ${2}%}");
    Ok((source.into_owned(), found))
}

fn generation_block(state: &State, options: Kwargs) -> Result<String, minijinja::Error> {
    let body: JinjaValue = options.get("caller")?;
    Ok(format!("{BEGIN}{}{END}", body.call(state, &[])?))
}

fn set_clock(environment: &mut Environment<'static>, unix_seconds: Option<u64>) {
    environment.add_function("strftime_now", move |format: String| -> Result<String, minijinja::Error> {
        let now = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
        python::strftime(&format, unix_seconds.unwrap_or_else(now)).map_err(|directive| {
            minijinja::Error::new(
                ErrorKind::InvalidOperation,
                format!("strftime_now: `{directive}` in {format:?} is not supported"),
            )
        })
    });
}

/// Takes the markers out and keeps where they were.
fn unmark(marked: &str) -> Result<Rendered> {
    let bad = || Error::Text {
        what: "chat template".into(),
        why: format!(
            "the messages contain U+{:04X} or U+{:04X}, which no text may contain",
            BEGIN as u32, END as u32
        ),
    };
    let mut text = String::with_capacity(marked.len());
    let mut generation = Vec::new();
    let mut open = None;
    for c in marked.chars() {
        match c {
            BEGIN if open.is_none() => open = Some(text.len()),
            END => generation.push(open.take().ok_or_else(bad)?..text.len()),
            BEGIN => return Err(bad()),
            c => text.push(c),
        }
    }
    if open.is_some() {
        return Err(bad());
    }
    Ok(Rendered { text, generation })
}

fn template_error(what: &str, error: &minijinja::Error) -> Error {
    let line = error.line().map(|l| format!(" (template line {l})")).unwrap_or_default();
    let detail = error.detail().map_or_else(|| error.kind().to_string(), str::to_string);
    let cause = std::error::Error::source(error).map(|e| format!(": {e}")).unwrap_or_default();
    Error::Text {
        what: format!("chat template: {what}{line}"),
        why: format!("{detail}{cause}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn render(source: &str, variables: Value) -> Result<Rendered> {
        let variables = variables.as_object().cloned().unwrap_or_default();
        ChatTemplate::new(source, BTreeMap::new())?
            .with_variables(variables)
            .render(&[], &RenderOptions::default())
    }

    // Expected strings: json.dumps of Python 3.
    #[test]
    fn tojson_is_python_json_dumps() {
        let value = json!({"x": {"b": [1, 2.5, "é<'&"], "a": {}, "c": [], "n": null, "t": true}});
        let cases = [
            (
                "{{ x | tojson }}",
                r#"{"b": [1, 2.5, "é<'&"], "a": {}, "c": [], "n": null, "t": true}"#,
            ),
            (
                "{{ x | tojson(sort_keys=true, separators=[',', ':']) }}",
                r#"{"a":{},"b":[1,2.5,"é<'&"],"c":[],"n":null,"t":true}"#,
            ),
            ("{{ x.b | tojson(ensure_ascii=true) }}", r#"[1, 2.5, "\u00e9<'&"]"#),
            (
                "{{ [x.b[:2], {'k': 1}] | tojson(indent=2) }}",
                "[\n  [\n    1,\n    2.5\n  ],\n  {\n    \"k\": 1\n  }\n]",
            ),
        ];
        for (source, expected) in cases {
            assert_eq!(render(source, value.clone()).unwrap().text, expected, "{source}");
        }
    }

    #[test]
    fn generation_blocks_become_ranges_and_keep_white_space() {
        let source = "{% for m in ['a', 'bb'] %}\n<{{ m }}>\n  {% generation %}\nsays {{ m }}{{ loop.index }}\n  {%- endgeneration %}\n;{% endfor %}";
        let rendered = render(source, json!({})).unwrap();
        assert_eq!(rendered.text, "<a>\nsays a1;<bb>\nsays bb2;");
        let said: Vec<&str> = rendered.generation.iter().map(|r| &rendered.text[r.clone()]).collect();
        assert_eq!(said, ["says a1", "says bb2"]);
    }

    #[test]
    fn loops_can_break_and_continue() {
        // transformers compiles templates with the loopcontrols extension
        let source =
            "{% for i in range(6) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}";
        assert_eq!(render(source, json!({})).unwrap().text, "023");
    }

    #[test]
    fn line_endings_of_any_system_are_newlines() {
        let rendered = render("{% if true %}\r\na\r\n{% endif %}\r\nb\rc\r\n", json!({})).unwrap();
        assert_eq!(rendered.text, "a\nb\nc");
    }

    #[test]
    fn errors_carry_the_templates_own_words() {
        let raised = render("{{ raise_exception('roles must alternate') }}", json!({}))
            .unwrap_err()
            .to_string();
        assert!(raised.contains("roles must alternate") && raised.contains("line 1"), "{raised}");
        let broken = render("{% if %}", json!({})).unwrap_err().to_string();
        assert!(broken.contains("does not compile"), "{broken}");
        let marker = render("{{ x }}", json!({"x": "a\u{FDD1}"})).unwrap_err().to_string();
        assert!(marker.contains("U+FDD1"), "{marker}");
    }

    #[test]
    fn values_print_as_in_python() {
        assert_eq!(render("{{ none }} {{ true }} {{ 1.0 }}", json!({})).unwrap().text, "None True 1.0");
        let value = json!({"x": ["it's", "say \"hi\"", "both ' and \"", "\n\\\u{7}é", null, {"k": [1, 0.5, {}]}]});
        let expected = r#"["it's", 'say "hi"', 'both \' and "', '\n\\\x07é', None, {'k': [1, 0.5, {}]}]"#;
        assert_eq!(render("{{ x }}", value).unwrap().text, expected);
        let clock = ChatTemplate::new("{{ strftime_now('%d %b %Y') }}", BTreeMap::new())
            .unwrap()
            .with_clock(1_721_952_000);
        assert_eq!(clock.render(&[], &RenderOptions::default()).unwrap().text, "26 Jul 2024");
    }
}

//! Chat templates against transformers: text, tokens and assistant masks of `fixtures/chat/expected.json`.

use std::collections::BTreeMap;
use std::path::PathBuf;

use burn_moe::batch::IGNORE_INDEX;
use burn_moe::data::{ChatTemplate, Conversation, RenderOptions, Tokenizer};
use serde::Deserialize;
use serde_json::{Map, Value};

#[derive(Deserialize)]
struct Expected {
    conversations: BTreeMap<String, Vec<Value>>,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    template: String,
    conversation: String,
    add_generation_prompt: bool,
    variables: Map<String, Value>,
    tools: Option<Value>,
    text: Option<String>,
    ids: Option<Vec<i32>>,
    assistant_mask: Option<Vec<u8>>,
    error: Option<String>,
}

pub fn fixtures() -> PathBuf {
    burn_moe_tests::fixture::root().join("chat")
}

pub fn tokenizer() -> Tokenizer {
    Tokenizer::from_folder(fixtures().join("tokenizer")).unwrap()
}

pub fn template(name: &str) -> ChatTemplate {
    let source = std::fs::read_to_string(fixtures().join(format!("templates/{name}.jinja"))).unwrap();
    ChatTemplate::new(&source, tokenizer().special_tokens().clone()).unwrap()
}

fn expected() -> Expected {
    let text = std::fs::read_to_string(fixtures().join("expected.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

#[test]
fn rendering_and_tokens_equal_transformers() {
    let (tokenizer, expected) = (tokenizer(), expected());
    let mut refused = 0;
    for case in &expected.cases {
        let label = format!("{} / {} / prompt {}", case.template, case.conversation, case.add_generation_prompt);
        let options = RenderOptions {
            add_generation_prompt: case.add_generation_prompt,
            tools: case.tools.as_ref(),
        };
        let template = template(&case.template).with_variables(case.variables.clone());
        let rendered = template.render(&expected.conversations[&case.conversation], &options);
        if let Some(error) = &case.error {
            let found = rendered.expect_err(&label).to_string();
            // The words of raise_exception are the template's own; other errors are the engine's.
            if error.contains("role") {
                assert!(found.contains(error.as_str()), "{label}: {found}");
            }
            refused += 1;
            continue;
        }
        let rendered = rendered.unwrap_or_else(|e| panic!("{label}: {e}"));
        assert_eq!(Some(&rendered.text), case.text.as_ref(), "{label}");
        let encoded = tokenizer.encode(&rendered.text, false).unwrap();
        assert_eq!(Some(&encoded.ids), case.ids.as_ref(), "{label}");
        assert_eq!(tokenizer.decode(&encoded.ids, false).unwrap(), rendered.text, "{label}");
    }
    assert!(
        refused > 0 && refused < expected.cases.len() / 2,
        "{refused} of {} refused",
        expected.cases.len()
    );
}

#[test]
fn labels_equal_the_assistant_masks_of_transformers() {
    let (tokenizer, expected) = (tokenizer(), expected());
    let mut compared = 0;
    for case in expected.cases.iter().filter(|c| !c.add_generation_prompt) {
        let Some(mask) = case.assistant_mask.as_ref().filter(|mask| mask.contains(&1)) else {
            continue;
        };
        let label = format!("{} / {}", case.template, case.conversation);
        let template = template(&case.template).with_variables(case.variables.clone());
        let conversation = Conversation::new(expected.conversations[&case.conversation].clone(), case.tools.clone()).unwrap();
        let document = conversation.encode(&tokenizer, &template).unwrap();
        assert_eq!(Some(&document.ids), case.ids.as_ref(), "{label}");
        let found: Vec<u8> = document.labels.iter().map(|&l| u8::from(l != IGNORE_INDEX)).collect();
        assert_eq!(&found, mask, "{label}");
        compared += 1;
    }
    assert!(compared >= 15, "only {compared} masks compared");
}

/// Where a template without generation blocks prints the same text as one with them, the labels must agree too.
#[test]
fn prefix_spans_equal_generation_blocks() {
    let (tokenizer, expected) = (tokenizer(), expected());
    let marked = template("chatml_generation");
    let unmarked = std::fs::read_to_string(fixtures().join("templates/chatml_generation.jinja")).unwrap();
    let unmarked = unmarked
        .replace("{% generation %}", "{% if true %}")
        .replace("{% endgeneration %}", "{% endif %}");
    let unmarked = ChatTemplate::new(&unmarked, tokenizer.special_tokens().clone()).unwrap();
    assert!(marked.has_generation_blocks() && !unmarked.has_generation_blocks());
    for name in ["single", "system", "multi_turn", "odd_text"] {
        let conversation = Conversation::new(expected.conversations[name].clone(), None).unwrap();
        let (a, b) = (conversation.encode(&tokenizer, &marked), conversation.encode(&tokenizer, &unmarked));
        let (a, mut b) = (a.unwrap(), b.unwrap());
        assert_eq!(a.ids, b.ids, "{name}");
        // The block ends after the newline that follows the end-of-turn token; prefixes leave that newline out.
        let newline = tokenizer.encode("\n", false).unwrap().ids[0];
        let end = tokenizer.token_to_id("<|im_end|>").unwrap();
        for t in 1..b.ids.len() {
            if a.ids[t] == newline && b.labels[t - 1] == end {
                b.labels[t] = newline;
            }
        }
        assert_eq!(a.labels, b.labels, "{name}");
    }
}

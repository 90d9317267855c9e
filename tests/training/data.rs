//! JSON lines to documents to batches, with the tokenizer of `fixtures/chat`.

use std::path::Path;
use std::sync::Arc;

use burn_moe::Error;
use burn_moe::batch::IGNORE_INDEX;
use burn_moe::data::{ChatTemplate, Dataset, EncodeOptions, Layout, Loader, LoaderOptions, Tokenizer, TooLong};

use super::data_chat::{fixtures, template, tokenizer};

const OPTIONS: EncodeOptions = EncodeOptions {
    max_len: 64,
    too_long: TooLong::Error,
    vocab_size: 400,
};

fn read(lines: &str, options: &EncodeOptions) -> Result<Dataset, Error> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("data.jsonl");
    std::fs::write(&path, lines).unwrap();
    Dataset::from_jsonl(&path, &tokenizer(), Some(&template("chatml")), options)
}

fn scored_text(data: &Dataset, document: usize) -> String {
    let labels = data.documents()[document].labels.iter().copied();
    let scored: Vec<i32> = labels.filter(|&l| l != IGNORE_INDEX).collect();
    tokenizer().decode(&scored, false).unwrap()
}

#[test]
fn each_form_of_line_scores_what_it_says() {
    let data = read(
        concat!(
            r#"{"messages": [{"role": "user", "content": "Two?"}, {"role": "assistant", "content": "Four."}], "id": 1}"#,
            "\n\n",
            r#"{"prompt": "2 + 2 =", "completion": " 4"}"#,
            "\r\n",
            r#"{"text": "Paris is a capital."}"#,
        ),
        &OPTIONS,
    )
    .unwrap();
    let tokenizer = tokenizer();
    let eos = tokenizer.token_to_id("<|im_end|>").unwrap();
    assert_eq!(data.report().documents, 3);
    assert_eq!(scored_text(&data, 0), "Four.<|im_end|>");
    assert_eq!(scored_text(&data, 1), " 4<|im_end|>");
    let text = &data.documents()[2];
    assert_eq!(tokenizer.decode(&text.ids, false).unwrap(), "Paris is a capital.<|im_end|>");
    assert_eq!((text.labels[0], &text.labels[1..]), (IGNORE_INDEX, &text.ids[1..]));
    assert_eq!(text.ids.last(), Some(&eos));
    let label_tokens: usize = data.documents().iter().map(|d| d.num_label_tokens()).sum();
    assert_eq!(data.report().label_tokens, label_tokens);
}

#[test]
fn bad_lines_name_file_line_and_reason() {
    let good = r#"{"text": "Paris"}"#;
    let cases = [
        ("{\"text\": ", "not valid JSON"),
        ("[1]", "no JSON object"),
        (r#"{"conversations": []}"#, "found the keys [conversations]"),
        (r#"{"prompt": "a"}"#, "found the keys [prompt]"),
        (r#"{"text": 3}"#, "text: found 3"),
        (r#"{"text": ""}"#, "no text to learn from"),
        (r#"{"messages": "hi"}"#, "messages: found \"hi\""),
        (r#"{"messages": [{"content": "hi"}]}"#, "messages[0].role: missing"),
        (r#"{"messages": [{"role": "user", "content": "hi"}]}"#, "no assistant message"),
        (r#"{"messages": [{"role": "user"}]}"#, "messages[0].content: missing"),
    ];
    for (line, expected) in cases {
        let error = read(&format!("{good}\n\n{line}\n{good}"), &OPTIONS).unwrap_err();
        assert!(matches!(&error, Error::Data { line: 3, .. }), "{error}");
        let error = error.to_string();
        assert!(error.contains("data.jsonl, line 3") && error.contains(expected), "{error}");
    }
    let not_utf8 = {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("data.jsonl");
        std::fs::write(&path, b"{\"text\": \"\xff\"}").unwrap();
        Dataset::from_jsonl(&path, &tokenizer(), None, &OPTIONS).unwrap_err()
    };
    assert!(matches!(not_utf8, Error::Data { line: 1, .. }), "{not_utf8}");
}

#[test]
fn empty_and_absent_data_sets_are_refused() {
    for lines in ["", "\n \n"] {
        let error = read(lines, &OPTIONS).unwrap_err().to_string();
        assert!(error.contains("data set is empty"), "{error}");
    }
    let error = Dataset::from_jsonl("/nonexistent/data.jsonl", &tokenizer(), None, &OPTIONS).unwrap_err();
    assert!(
        matches!(&error, Error::Io { path, .. } if path == Path::new("/nonexistent/data.jsonl")),
        "{error}"
    );
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("data.jsonl");
    std::fs::write(&path, r#"{"messages": [{"role": "assistant", "content": "hi"}]}"#).unwrap();
    let error = Dataset::from_jsonl(&path, &tokenizer(), None, &OPTIONS).unwrap_err().to_string();
    assert!(error.contains("no chat template"), "{error}");
}

#[test]
fn tokens_outside_the_vocabulary_are_refused() {
    let options = EncodeOptions { vocab_size: 5, ..OPTIONS };
    let error = read(r#"{"text": "Paris"}"#, &options).unwrap_err().to_string();
    assert!(error.contains("line 1") && error.contains("vocabulary of 5"), "{error}");
    let vocab = tokenizer().vocab_size();
    assert!(
        read(
            r#"{"text": "Paris"}"#,
            &EncodeOptions {
                vocab_size: vocab,
                ..OPTIONS
            }
        )
        .is_ok()
    );
}

#[test]
fn long_documents_are_an_error_or_counted() {
    let lines = concat!(
        r#"{"prompt": "a b c d e f g h i j k l", "completion": "m"}"#,
        "\n",
        r#"{"text": "a b c d e f g h i j k l m n o p"}"#,
        "\n",
        r#"{"text": "a b"}"#
    );
    let error = read(lines, &EncodeOptions { max_len: 8, ..OPTIONS }).unwrap_err().to_string();
    assert!(error.contains("line 1") && error.contains("at most 8"), "{error}");

    let whole = read(lines, &OPTIONS).unwrap();
    let options = EncodeOptions {
        max_len: 8,
        too_long: TooLong::Truncate,
        ..OPTIONS
    };
    let cut = read(lines, &options).unwrap();
    let lengths: Vec<usize> = whole.documents().iter().map(|d| d.len()).collect();
    let report = cut.report();
    // Of the first document only prompt is left: it is dropped.
    assert_eq!((report.documents, report.truncated, report.dropped), (2, 2, 1));
    assert_eq!(report.truncated_tokens, lengths[0] - 8 + lengths[1] - 8);
    assert_eq!(cut.documents()[0].ids, whole.documents()[1].ids[..8]);
    assert_eq!(cut.documents()[1], whole.documents()[2]);
    assert!(report.to_string().contains("2 cut"), "{report}");

    let nothing_left = read(lines.lines().next().unwrap(), &options).unwrap_err().to_string();
    assert!(nothing_left.contains("no scored token is left"), "{nothing_left}");
}

/// Batches of a packed loader carry the same documents as its padded twin, and their labels never cross documents.
#[test]
fn packed_batches_hold_whole_documents() {
    let lines: Vec<String> = (1..40).map(|i| format!(r#"{{"text": "{}"}}"#, "word ".repeat(i % 7 + 1))).collect();
    let data = Arc::new(read(&lines.join("\n"), &OPTIONS).unwrap());
    let options = LoaderOptions {
        layout: Layout::Packed,
        seed: 3,
        ..LoaderOptions::new(2, 64)
    };
    let mut loader = Loader::new(data.clone(), options).unwrap();
    let mut documents = Vec::new();
    for _ in 0..loader.batches_in_epochs(1) {
        let batch = loader.next_batch().unwrap();
        batch.validate(400).unwrap();
        let real = batch.attention_mask.clone().unwrap_or(vec![true; batch.tokens()]);
        let (starts, positions) = (batch.doc_start.as_ref().unwrap(), batch.position_ids.as_ref().unwrap());
        for i in (0..batch.tokens()).filter(|&i| real[i]) {
            assert_eq!(positions[i], (i % batch.seq) as i32 - starts[i]);
            if positions[i] == 0 {
                assert_eq!(batch.labels[i], IGNORE_INDEX);
                documents.push(Vec::new());
            }
            documents.last_mut().unwrap().push(batch.input_ids[i]);
        }
    }
    let mut expected: Vec<Vec<i32>> = data.documents().iter().map(|d| d.ids.clone()).collect();
    // The last batch may already begin the next epoch.
    documents.truncate(expected.len());
    documents.sort();
    expected.sort();
    assert_eq!(documents, expected);
}

#[test]
fn special_tokens_come_from_every_file() {
    let folder = tempfile::tempdir().unwrap();
    let copy = |file: &str| std::fs::copy(fixtures().join("tokenizer").join(file), folder.path().join(file)).unwrap();
    let write = |file: &str, text: &str| std::fs::write(folder.path().join(file), text).unwrap();
    let missing = Tokenizer::from_folder(folder.path()).unwrap_err().to_string();
    assert!(missing.contains("tokenizer.json"), "{missing}");
    copy("tokenizer.json");
    assert!(Tokenizer::from_folder(folder.path()).unwrap().eos_ids().is_empty());

    write(
        "tokenizer_config.json",
        r#"{"eos_token": {"content": "<|im_end|>"}, "chat_template": "x{{ eos_token }}"}"#,
    );
    write("generation_config.json", r#"{"eos_token_id": [5, 1], "pad_token_id": 6}"#);
    // Published Nemotron-H configs hold Python's Infinity.
    write(
        "config.json",
        r#"{"eos_token_id": 5, "bos_token_id": 2, "pad_token_id": null, "time_step_limit": [0.0, Infinity]}"#,
    );
    let tokenizer = Tokenizer::from_folder(folder.path()).unwrap();
    assert_eq!(tokenizer.eos_ids(), [1, 5]);
    assert_eq!((tokenizer.bos_id(), tokenizer.pad_id()), (Some(2), 6));
    let render = |tokenizer: &Tokenizer| {
        let template = ChatTemplate::from_folder(folder.path(), tokenizer)?;
        template.map(|t| t.render(&[], &Default::default()).map(|r| r.text)).transpose()
    };
    assert_eq!(render(&tokenizer).unwrap().as_deref(), Some("x<|im_end|>"));

    write(
        "tokenizer_config.json",
        r#"{"chat_template": [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]}"#,
    );
    assert_eq!(render(&tokenizer).unwrap().as_deref(), Some("d"));
    write(
        "tokenizer_config.json",
        r#"{"chat_template": [{"name": "rag", "template": "r"}, {"name": "tool_use", "template": "t"}]}"#,
    );
    assert!(render(&tokenizer).unwrap_err().to_string().contains("rag, tool_use"));
    write("chat_template.jinja", "file");
    assert_eq!(render(&tokenizer).unwrap().as_deref(), Some("file"));

    write("special_tokens_map.json", "[]");
    let error = Tokenizer::from_folder(folder.path()).unwrap_err().to_string();
    assert!(error.contains("special_tokens_map.json") && error.contains("an array"), "{error}");
    write("special_tokens_map.json", "{}");

    write("generation_config.json", r#"{"eos_token_id": "x"}"#);
    let error = Tokenizer::from_folder(folder.path()).unwrap_err().to_string();
    assert!(
        error.contains("generation_config.json") && error.contains("eos_token_id"),
        "{error}"
    );
}

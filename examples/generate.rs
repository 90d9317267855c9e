//! Let a checkpoint write: continue a text, or answer chat messages through the checkpoint's own template.
//!
//! ```text
//! cargo run --release --example generate
//! cargo run --release --example generate -- --model <folder or org/name> --prompt "Once upon a time"
//! cargo run --release --example generate -- --model <folder or org/name> --chat "Why is the sky blue?" --temperature 0.7 --top-p 0.9
//! ```
//!
//! Without arguments it asks the shipped tiny Nemotron-H a question, to which the answer is babble until `finetune_nemotron`
//! has trained it. How to sample comes from the checkpoint's `generation_config.json`, and from the command line where that says
//! otherwise. Every token costs one pass over that token: keys and values, and the states of Mamba layers, are kept.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use burn::tensor::FloatDType;
use burn_moe::backend::{Device, Infer};
use burn_moe::checkpoint::hub::{HubOptions, locate};
use burn_moe::data::{ChatTemplate, Conversation, Tokenizer};
use burn_moe::generate::generate;
use burn_moe::{Error, Result};
use burn_moe_examples::{asset, check_backend, log_warnings, say};
use burn_moe_models::{AutoModelForCausalLm, FromPretrainedOptions, GenerationOverrides, Pretrained};
use clap::{Parser, ValueEnum};
use serde_json::{Value, json};

const QUESTION: &str = "How many kilograms are in half a tonne?";

#[derive(Clone, Copy, ValueEnum)]
enum DtypeArg {
    Float32,
    Bfloat16,
}

/// Generate text with a checkpoint of any known family.
#[derive(Parser)]
#[command(version)]
struct Args {
    /// Checkpoint folder, or org/name on the Hugging Face Hub [default: the shipped tiny Nemotron-H]
    #[arg(long)]
    model: Option<String>,
    /// Branch, tag or commit on the Hub
    #[arg(long, requires = "model")]
    revision: Option<String>,
    /// Text to continue, without a chat template
    #[arg(long, group = "input")]
    prompt: Option<String>,
    /// Message of the user, rendered by the chat template
    #[arg(long, group = "input")]
    chat: Option<String>,
    /// File with a list of chat messages, or with an object that has `messages` and perhaps `tools`
    #[arg(long, group = "input")]
    messages: Option<PathBuf>,
    /// System message before `--chat`
    #[arg(long, requires = "chat")]
    system: Option<String>,
    /// Most tokens to add [default: generation_config.json, or 128]
    #[arg(long)]
    max_new_tokens: Option<usize>,
    /// Divides the logits; 0 always takes the best token [default: generation_config.json, or 0]
    #[arg(long)]
    temperature: Option<f64>,
    /// Sample among the best tokens only; 0: among all [default: generation_config.json, or 0]
    #[arg(long)]
    top_k: Option<usize>,
    /// Sample among the fewest best tokens with this much probability together [default: generation_config.json, or 1]
    #[arg(long)]
    top_p: Option<f64>,
    /// Sample among tokens with this much of the best one's probability [default: generation_config.json, or 0]
    #[arg(long)]
    min_p: Option<f64>,
    /// Make tokens that are already in the text less likely, if above 1 [default: generation_config.json, or 1]
    #[arg(long)]
    repetition_penalty: Option<f64>,
    /// Use nothing of generation_config.json but its end-of-sequence tokens
    #[arg(long)]
    ignore_generation_config: bool,
    /// Seed of the sampling: the same seed gives the same text
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Dtype of the weights [default: the checkpoint's]
    #[arg(long, value_enum)]
    dtype: Option<DtypeArg>,
    /// Do not stop at end-of-sequence tokens
    #[arg(long)]
    ignore_eos: bool,
    /// Name of the backend this program was built for
    #[arg(long)]
    backend: Option<String>,
}

fn main() -> ExitCode {
    log_warnings();
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<()> {
    if let Some(name) = &args.backend {
        check_backend(name)?;
    }
    let folder = match &args.model {
        Some(model) => locate(
            model,
            &HubOptions {
                revision: args.revision.clone(),
                progress: true,
                ..HubOptions::default()
            },
        )?,
        None => asset("tiny-nemotron-h"),
    };
    let tokenizer = Tokenizer::from_folder(&folder)?;
    let prompt = prompt(args, &folder, &tokenizer)?;

    let device = Device::default();
    let options = FromPretrainedOptions {
        dtype: args.dtype.map(|dtype| match dtype {
            DtypeArg::Float32 => FloatDType::F32,
            DtypeArg::Bfloat16 => FloatDType::BF16,
        }),
        progress: true,
        ..FromPretrainedOptions::default()
    };
    let loaded: Pretrained<Infer> = AutoModelForCausalLm::from_pretrained(&folder, &options, &device)?;
    let max_positions = loaded.model.capabilities().max_positions.unwrap_or(usize::MAX);
    let room = max_positions.saturating_sub(prompt.len());
    if room == 0 {
        return Err(Error::batch(
            "prompt",
            format!("{} tokens", prompt.len()),
            format!("fewer than the {max_positions} positions of the model"),
        ));
    }
    let overrides = GenerationOverrides {
        temperature: args.temperature,
        top_k: args.top_k,
        top_p: args.top_p,
        min_p: args.min_p,
        repetition_penalty: args.repetition_penalty,
        max_new_tokens: args.max_new_tokens,
    };
    let file = match args.ignore_generation_config {
        true => None,
        false => loaded.generation_config()?,
    };
    let (mut options, settings) = overrides.resolve(file.as_ref(), prompt.len())?;
    eprintln!("[{settings}]");
    options.max_new_tokens = options.max_new_tokens.min(room);
    options.seed = args.seed;
    options.stop_tokens = stop_tokens(args, &loaded, &tokenizer)?;
    let start = Instant::now();
    let tokens = generate(&loaded.model, &prompt, &options, &device)?;
    let seconds = start.elapsed().as_secs_f64();

    let text = tokenizer.decode(&tokens, true)?;
    match &args.prompt {
        Some(prompt) => say!("{prompt}{text}"),
        None => say!("{text}"),
    }
    let stopped = tokens.last().is_some_and(|token| options.stop_tokens.contains(token));
    let end = if stopped { "stopped by the model" } else { "the limit is reached" };
    let rate = tokens.len() as f64 / seconds;
    eprintln!("[{} tokens after {}, {rate:.1} tokens/s, {end}]", tokens.len(), prompt.len());
    Ok(())
}

/// Token ids of what the model continues.
fn prompt(args: &Args, folder: &Path, tokenizer: &Tokenizer) -> Result<Vec<i32>> {
    if let Some(text) = &args.prompt {
        return Ok(tokenizer.encode(text, true)?.ids);
    }
    let template = ChatTemplate::from_folder(folder, tokenizer)?.ok_or_else(|| {
        Error::config(
            "chat template",
            format!("none in {}", folder.display()),
            "chat_template.jinja or chat_template in tokenizer_config.json; without one use --prompt",
        )
    })?;
    conversation(args)?.encode_prompt(tokenizer, &template)
}

fn conversation(args: &Args) -> Result<Conversation> {
    if let Some(path) = &args.messages {
        let text = std::fs::read_to_string(path).map_err(|e| Error::io(path, "read the messages", e))?;
        let value: Value = serde_json::from_str(&text).map_err(|e| Error::Text {
            what: path.display().to_string(),
            why: e.to_string(),
        })?;
        let (messages, tools) = match value {
            Value::Array(messages) => (messages, None),
            Value::Object(mut map) => {
                let messages = map.remove("messages").and_then(|m| m.as_array().cloned()).unwrap_or_default();
                (messages, map.remove("tools"))
            }
            other => (vec![other], None),
        };
        return Conversation::new(messages, tools);
    }
    let system = args.system.iter().map(|text| json!({"role": "system", "content": text}));
    let question = args.chat.as_deref().unwrap_or(QUESTION);
    Conversation::new(system.chain([json!({"role": "user", "content": question})]).collect(), None)
}

/// What ends a text according to the tokenizer, `generation_config.json`, and the config with its family's defaults.
fn stop_tokens(args: &Args, loaded: &Pretrained<Infer>, tokenizer: &Tokenizer) -> Result<Vec<i32>> {
    if args.ignore_eos {
        return Ok(Vec::new());
    }
    let mut stop = loaded.stop_tokens()?;
    stop.extend(tokenizer.eos_ids());
    stop.sort_unstable();
    stop.dedup();
    Ok(stop)
}

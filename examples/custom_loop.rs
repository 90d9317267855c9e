//! Your own training loop: the parts that `Trainer` puts together, used one by one.
//!
//! ```text
//! cargo run --release --example custom_loop
//! ```

use std::sync::Arc;

use burn_moe::Result;
use burn_moe::backend::{Device, Train};
use burn_moe::data::{ChatTemplate, Dataset, EncodeOptions, Loader, LoaderOptions, Tokenizer, TooLong};
use burn_moe::model::CausalLm;
use burn_moe::optim::{AdamW, AdamWConfig, GradStore, ParamTable, clip_factor, global_norm};
use burn_moe::train::{StepSettings, forward_backward, no_hook};
use burn_moe_examples::asset;
use burn_moe_models::{AutoModelForCausalLm, FromPretrainedOptions};

fn main() -> Result<()> {
    let folder = asset("tiny-nemotron-h");
    let device = Device::default();
    let mut model = AutoModelForCausalLm::<Train>::from_pretrained(&folder, &FromPretrainedOptions::default(), &device)?.model;

    let tokenizer = Tokenizer::from_folder(&folder)?;
    let template = ChatTemplate::from_folder(&folder, &tokenizer)?;
    let encode = EncodeOptions {
        max_len: 128,
        too_long: TooLong::Error,
        vocab_size: model.vocab_size(),
    };
    let data = Dataset::from_jsonl(asset("instructions.jsonl"), &tokenizer, template.as_ref(), &encode)?;
    let mut loader = Loader::new(Arc::new(data), LoaderOptions::new(8, 128))?;

    let table = ParamTable::new(&model);
    let mut optimizer = AdamW::new(AdamWConfig::default(), table.clone())?;
    for step in 1..=30 {
        let batch = loader.next_batch()?;
        let settings = StepSettings::new(batch.num_label_tokens() as f64);
        let mut grads = GradStore::new();
        let stats = forward_backward(&model, &batch, &device, &settings, &mut grads, &mut no_hook)?;
        let norm = global_norm(&grads, &table, None)?;
        model = optimizer.step::<Train, _>(model, &mut grads, 2e-3, clip_factor(norm, 1.0))?;
        let loss = stats.cross_entropy_sum.into_scalar() as f64 * settings.label_scale;
        println!("step {step} loss {loss:.4} grad {norm:.3}");
    }
    Ok(())
}

//! bf16 models: ranks round at other places than one process, so runs drift apart, but only as far as rounding explains.

use burn::tensor::FloatDType;

use super::*;

const STEPS: usize = 20;

/// Losses of 20 steps in `dtype`.
fn losses(dtype: FloatDType, config: &str, world: usize) -> Vec<f64> {
    let ranks = on_ranks(world, |ep| {
        let mut trainer = trainer(model_in(dtype, config, &ep), LEARNING_RATE, &ep);
        (0..STEPS)
            .map(|step| trainer.train_step(&[batch(step, share(&ep), &[])]).unwrap().loss)
            .collect::<Vec<_>>()
    });
    ranks[0].clone()
}

// Megatron#1327, #1603.
#[test]
fn bf16_losses_agree_between_local_and_exchanged_experts_after_twenty_steps() {
    for (name, config) in [("nemotron_h", NEMOTRON), ("qwen3_moe", QWEN)] {
        let local = losses(FloatDType::BF16, config, 1);
        assert!(local[STEPS - 1] < local[0], "{name}: the run learns nothing: {local:?}");
        let exchanged = losses(FloatDType::BF16, config, 2);
        let wide = losses(FloatDType::F32, config, 1);
        assert_ne!(local, wide, "{name}: the bf16 run is not a bf16 run");
        let difference = (exchanged[STEPS - 1] / local[STEPS - 1] - 1.0).abs();
        assert!(difference < 1e-3, "{name}: {} for {}", exchanged[STEPS - 1], local[STEPS - 1]);
    }
}

//! The segmented step against one autodiff graph over the whole model with a plain cross entropy.

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::activation::{log_softmax, softmax};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{FloatDType, Int, Tensor, TensorData};
use burn_moe::batch::HostBatch;
use burn_moe::loss::AuxScaling;
use burn_moe::model::CausalLm;
use burn_moe::optim::{GradStore, ParamTable};
use burn_moe::train::{MicroBatchStats, Recompute, Segment, StepSettings, evaluate, forward_backward, no_hook};

use super::toy::{B, EXPERTS, Inner, TOP_K, ToyConfig, ToyLm, random_batch, rows};

/// Gradients by path, flattened.
pub type Grads = Vec<(String, Vec<f32>)>;

pub fn by_path(grads: &GradStore<Inner>, table: &ParamTable) -> Grads {
    let mut grads = grads.clone();
    let mut list = Vec::new();
    for info in table.entries() {
        if let Some((flat, _)) = grads.remove_flat(info.id) {
            let values = flat.cast(FloatDType::F32).into_data().to_vec().unwrap();
            list.push((info.path.clone(), values));
        }
    }
    list
}

/// On CUDA ten times the tolerance: sums run in another order, as in `parity/harness.rs`.
pub fn assert_close(got: &Grads, want: &Grads, tolerance: f32) {
    let tolerance = if cfg!(feature = "cuda") { 10.0 * tolerance } else { tolerance };
    let names = |grads: &Grads| grads.iter().map(|(path, _)| path.clone()).collect::<Vec<_>>();
    assert_eq!(names(got), names(want));
    for ((path, got), (_, want)) in got.iter().zip(want) {
        let norm = |v: &mut dyn Iterator<Item = f32>| v.map(|x| x * x).sum::<f32>().sqrt();
        let error = norm(&mut got.iter().zip(want).map(|(g, w)| g - w));
        let size = norm(&mut want.iter().copied());
        assert!(error <= tolerance * size + 1e-9, "{path}: error {error}, size {size}");
    }
}

fn segmented(model: &ToyLm<B>, batch: &HostBatch, settings: &StepSettings) -> (Grads, MicroBatchStats<Inner>) {
    let mut grads = GradStore::new();
    let stats = forward_backward::<B, _>(model, batch, &Default::default(), settings, &mut grads, &mut no_hook).unwrap();
    (by_path(&grads, &ParamTable::new(model)), stats)
}

/// Loss terms and gradients by one graph: `CE / N + aux * balance + z * mean(lse^2)`, written as the formulas stand.
fn whole_graph(model: &ToyLm<B>, batch: &HostBatch, aux: f64, z_loss: f64) -> (Grads, [f64; 3]) {
    let device = Default::default();
    let input = model.prepare(batch, 0, &device).unwrap();
    let mask: Vec<f32> = match &batch.attention_mask {
        Some(mask) => mask.iter().map(|&real| f32::from(u8::from(real))).collect(),
        None => vec![1.0; batch.tokens()],
    };
    let real = f64::from(mask.iter().sum::<f32>());
    let mask_t1 = Tensor::<B, 2>::from_data(TensorData::new(mask, [batch.tokens(), 1]), &device);

    let mut x = model.embed(&input).unwrap();
    let mut probs = Vec::new();
    let mut lse = Tensor::<B, 1>::zeros([1], &device);
    for index in 0..model.num_blocks() {
        let out = model.block(index, x, &input, None, None).unwrap();
        x = out.x_bsd;
        if let Some(router) = out.router {
            let z = router.logits_te;
            lse = lse + (z.clone().exp().sum_dim(1).log().powf_scalar(2.0) * mask_t1.clone()).sum();
            probs.push(softmax(z, 1));
        }
    }
    let routed = real * probs.len() as f64;

    let targets = batch.shifted_labels();
    let counted: Vec<i32> = (0..targets.len() as i32).filter(|&t| targets[t as usize] >= 0).collect();
    let n = counted.len();
    let labels: Vec<i32> = counted.iter().map(|&t| targets[t as usize]).collect();
    let counted = Tensor::<B, 1, Int>::from_data(TensorData::new(counted, [n]), &device);
    let labels = Tensor::<B, 2, Int>::from_data(TensorData::new(labels, [n, 1]), &device);
    let head = model.head(x).unwrap();
    let logits = head.hidden_td.matmul(head.weight_vd.transpose()).select(0, counted);
    let cross_entropy = log_softmax(logits, 1).gather(1, labels).sum().neg() / n as f64;

    let mut balance = Tensor::<B, 1>::zeros([1], &device);
    if !probs.is_empty() {
        // f on the host: for each row the TOP_K largest probabilities.
        let mut f = [0.0f32; EXPERTS];
        for p in &probs {
            let values = p.clone().into_data().to_vec::<f32>().unwrap();
            let mask = mask_t1.clone().into_data().to_vec::<f32>().unwrap();
            for (row, m) in values.chunks(EXPERTS).zip(mask) {
                let mut order: Vec<usize> = (0..EXPERTS).collect();
                order.sort_by(|&a, &b| row[b].total_cmp(&row[a]));
                order[..TOP_K].iter().for_each(|&e| f[e] += m / routed as f32);
            }
        }
        let f = Tensor::<B, 2>::from_floats([f], &device);
        for p in &probs {
            balance = balance + (p.clone() * mask_t1.clone() * f.clone()).sum() * (EXPERTS as f64 / routed);
        }
    }
    let z = lse / routed.max(1.0);
    let value = |t: &Tensor<B, 1>| f64::from(t.clone().into_scalar());
    let losses = [value(&cross_entropy), value(&balance), value(&z)];
    let mut gradients = (cross_entropy + balance * aux + z * z_loss).backward();
    let mut grads = GradStore::new();
    grads.collect::<B, _>(model, &mut gradients);
    (by_path(&grads, &ParamTable::new(model)), losses)
}

fn mean_cross_entropy(stats: &MicroBatchStats<Inner>, batch: &HostBatch) -> f64 {
    f64::from(stats.cross_entropy_sum.clone().into_scalar()) / batch.num_label_tokens() as f64
}

fn close(got: f64, want: f64) {
    assert!((got - want).abs() <= 1e-5 * want.abs() + 1e-7, "{got} {want}");
}

#[test]
fn segments_together_are_the_whole_graph() {
    for (tied, aux, z_loss, padded) in [
        (false, None, 0.0, false),
        (true, None, 0.0, true),
        (false, Some(0.3), 0.0, false),
        (true, Some(0.3), 0.2, true),
    ] {
        let model: ToyLm<B> = ToyConfig {
            tied,
            aux,
            ..ToyConfig::default()
        }
        .init(1);
        let mut batch = random_batch(3, 5, 2);
        if padded {
            batch.attention_mask = Some((0..15).map(|i| i % 5 < 3 || i < 5).collect());
        }
        let settings = StepSettings {
            z_loss,
            ..StepSettings::new(batch.num_label_tokens() as f64)
        };
        let (want, [cross_entropy, balance, z]) = whole_graph(&model, &batch, aux.unwrap_or(0.0), z_loss);
        for recompute in [Recompute::None, Recompute::All, Recompute::KeepEvery(2)] {
            let (got, stats) = segmented(
                &model,
                &batch,
                &StepSettings {
                    recompute,
                    ..settings.clone()
                },
            );
            assert_close(&got, &want, 1e-5);
            close(mean_cross_entropy(&stats, &batch), cross_entropy);
            assert_eq!(stats.balance.is_some(), aux.is_some());
            assert_eq!(stats.z_loss.is_some(), z_loss != 0.0);
            for (got, want) in [(stats.balance, balance), (stats.z_loss, z)] {
                got.into_iter().for_each(|got| close(f64::from(got.into_scalar()), want));
            }
        }
    }
}

#[test]
fn recomputing_changes_no_bit() {
    let model: ToyLm<B> = ToyConfig {
        layers: "mbdm",
        aux: Some(0.1),
        ..ToyConfig::default()
    }
    .init(3);
    let batch = random_batch(2, 7, 4);
    let settings = |recompute| StepSettings {
        recompute,
        ..StepSettings::new(batch.num_label_tokens() as f64)
    };
    let (kept, kept_stats) = segmented(&model, &batch, &settings(Recompute::None));
    let (recomputed, stats) = segmented(&model, &batch, &settings(Recompute::All));
    assert_eq!(kept, recomputed);
    let load = |stats: &MicroBatchStats<Inner>| -> Vec<Option<Vec<f32>>> {
        stats
            .expert_load
            .iter()
            .map(|l| l.clone().map(|l| l.into_data().to_vec().unwrap()))
            .collect()
    };
    assert_eq!(load(&kept_stats), load(&stats));
    // Two blocks of four are routed softly, one by sigmoid; each routes T * K rows.
    let totals: Vec<Option<f32>> = load(&stats).into_iter().map(|l| l.map(|l| l.iter().sum())).collect();
    assert_eq!(totals, [Some(28.0), Some(28.0), None, Some(28.0)]);
}

#[test]
fn two_half_batches_accumulate_to_the_whole() {
    for (aux, scaling) in [
        (None, AuxScaling::Average),
        (Some(0.2), AuxScaling::Average),
        (Some(0.2), AuxScaling::Reference),
    ] {
        let model: ToyLm<B> = ToyConfig {
            tied: true,
            aux,
            ..ToyConfig::default()
        }
        .init(5);
        let batch = random_batch(4, 6, 6);
        let halves = [rows(&batch, 0, 2), rows(&batch, 2, 4)];
        let n = batch.num_label_tokens() as f64;
        let mut grads = GradStore::new();
        let settings = StepSettings {
            micro_batch_weight: 0.5,
            aux_scaling: scaling,
            ..StepSettings::new(n)
        };
        for half in &halves {
            forward_backward::<B, _>(&model, half, &Default::default(), &settings, &mut grads, &mut no_hook).unwrap();
        }
        let got = by_path(&grads, &ParamTable::new(&model));

        // The same sum from whole graphs: cross entropy over everything, the balance loss per half.
        let (mut want, _) = whole_graph(&model, &batch, 0.0, 0.0);
        let weight = if scaling == AuxScaling::Average { 0.5 } else { 1.0 } * aux.unwrap_or(0.0);
        for half in &halves {
            let (with, _) = whole_graph(&model, half, weight, 0.0);
            let (without, _) = whole_graph(&model, half, 0.0, 0.0);
            for ((sum, with), without) in want.iter_mut().zip(with).zip(without) {
                for ((s, w), o) in sum.1.iter_mut().zip(with.1).zip(without.1) {
                    *s += w - o;
                }
            }
        }
        assert_close(&got, &want, 1e-5);
    }
}

#[test]
fn bf16_parameters_accumulate_in_fp32() {
    let model: ToyLm<B> = ToyConfig {
        dtype: FloatDType::BF16,
        ..ToyConfig::default()
    }
    .init(7);
    let batch = random_batch(2, 6, 8);
    let n = batch.num_label_tokens() as f64;
    let one = segmented(&model, &batch, &StepSettings::new(n)).0;
    let mut grads = GradStore::new();
    for _ in 0..257 {
        forward_backward::<B, _>(&model, &batch, &Default::default(), &StepSettings::new(n), &mut grads, &mut no_hook).unwrap();
    }
    let sum = by_path(&grads, &ParamTable::new(&model));
    let want: Grads = one
        .into_iter()
        .map(|(p, v)| (p, v.into_iter().map(|x| x * 257.0).collect()))
        .collect();
    // A bf16 sum would stop growing at 256 equal terms (error 0.4 % at the least).
    assert_close(&sum, &want, 1e-5);
}

#[test]
fn without_labels_loss_and_gradients_are_zero() {
    let model: ToyLm<B> = ToyConfig::default().init(9);
    let mut batch = random_batch(1, 4, 10);
    batch.labels = vec![-100; 4];
    let (grads, stats) = segmented(&model, &batch, &StepSettings::new(0.0));
    assert_eq!(stats.cross_entropy_sum.into_scalar(), 0.0);
    assert!(!grads.is_empty() && grads.iter().all(|(_, g)| g.iter().all(|&x| x == 0.0)));
}

#[test]
fn frozen_segments_get_no_gradient_and_stop_no_other() {
    let model: ToyLm<B> = ToyConfig::default().init(11);
    let mut frozen = model.clone();
    frozen.embed_tokens = frozen.embed_tokens.no_grad();
    frozen.layers = frozen
        .layers
        .into_iter()
        .enumerate()
        .map(|(i, l)| if i == 1 { l.no_grad() } else { l })
        .collect();
    frozen.norm = frozen.norm.no_grad();
    frozen.lm_head = frozen.lm_head.map(Module::no_grad);
    let batch = random_batch(2, 5, 12);
    let settings = StepSettings::new(batch.num_label_tokens() as f64);
    let (all, _) = segmented(&model, &batch, &settings);
    let (some, _) = segmented(&frozen, &batch, &settings);
    let want: Grads = all
        .into_iter()
        .filter(|(p, _)| p.starts_with("layers.0") || p.starts_with("layers.2"))
        .collect();
    assert_eq!(some, want);
}

#[test]
fn segments_report_in_order_with_their_parameters() {
    let model: ToyLm<B> = ToyConfig {
        tied: true,
        ..ToyConfig::default()
    }
    .init(13);
    let batch = random_batch(1, 4, 14);
    let table = ParamTable::new(&model);
    let mut seen = Vec::new();
    let mut hook = |segment: Segment, ids: &[ParamId], _: &mut GradStore<Inner>| {
        let paths: Vec<String> = ids.iter().map(|id| table.get(*id).unwrap().path.clone()).collect();
        seen.push((segment, paths));
        Ok(())
    };
    let settings = StepSettings::new(batch.num_label_tokens() as f64);
    forward_backward::<B, _>(&model, &batch, &Default::default(), &settings, &mut GradStore::new(), &mut hook).unwrap();
    let order: Vec<Segment> = seen.iter().map(|(segment, _)| *segment).collect();
    assert_eq!(
        order,
        [
            Segment::Head,
            Segment::Block(2),
            Segment::Block(1),
            Segment::Block(0),
            Segment::Embedding
        ]
    );
    // The tied weight has a part in both ends.
    assert_eq!(seen[0].1, ["embed_tokens.weight", "norm.weight"]);
    assert_eq!(seen[3].1, ["layers.0.mixer.up_proj.weight", "layers.0.mixer.down_proj.weight"]);
    assert_eq!(seen[4].1, ["embed_tokens.weight"]);
}

#[test]
fn evaluation_gives_the_training_loss() {
    use burn::module::AutodiffModule;
    let model: ToyLm<B> = ToyConfig::default().init(15);
    let batch = random_batch(2, 6, 16);
    let (sum, tokens) = evaluate(&model.valid(), &batch, &Default::default(), None).unwrap();
    let (_, [want, ..]) = whole_graph(&model, &batch, 0.0, 0.0);
    assert_eq!(tokens, batch.num_label_tokens());
    close(sum / tokens as f64, want);
}

#[test]
fn a_bad_batch_is_an_error() {
    let model: ToyLm<B> = ToyConfig::default().init(17);
    let mut batch = random_batch(1, 4, 18);
    batch.labels[2] = 99;
    let error = forward_backward::<B, _>(
        &model,
        &batch,
        &Default::default(),
        &StepSettings::new(1.0),
        &mut GradStore::new(),
        &mut no_hook,
    )
    .unwrap_err();
    assert!(error.to_string().contains("labels") && error.to_string().contains("99"), "{error}");
}

/// Copies of every float parameter, for comparing bytes.
pub fn snapshot<AB: AutodiffBackend, M: Module<AB>>(model: &M) -> Vec<(String, Vec<u8>)> {
    struct Values(Vec<(ParamId, Vec<u8>)>);
    impl<AB: AutodiffBackend> ModuleVisitor<AB> for Values {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<AB, D>>) {
            self.0.push((param.id, param.val().into_data().as_bytes().to_vec()));
        }
    }
    let mut values = Values(Vec::new());
    model.visit(&mut values);
    let table = ParamTable::new::<AB, M>(model);
    values
        .0
        .into_iter()
        .map(|(id, bytes)| (table.get(id).unwrap().path.clone(), bytes))
        .collect()
}

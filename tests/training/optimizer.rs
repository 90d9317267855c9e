//! AdamW, groups and clipping against formulas written out in f64.

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::{DType, FloatDType, Tensor, TensorData};
use burn_backend::TensorMetadata;
use burn_moe::Error;
use burn_moe::optim::{AdamW, AdamWConfig, GradStore, MomentDType, ParamGroup, ParamTable, freeze, global_norm};
use half::bf16;

use super::toy::{B, Inner, ToyConfig, ToyLm};

/// The type of a primitive of any backend.
fn dtype(primitive: &impl TensorMetadata) -> DType {
    primitive.dtype()
}

/// Values of every parameter, by path.
fn values(model: &ToyLm<B>) -> Vec<(String, Vec<f64>)> {
    struct Values(Vec<(ParamId, Vec<f64>)>);
    impl ModuleVisitor<B> for Values {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            self.0.push((param.id, param.val().into_data().iter::<f64>().collect()));
        }
    }
    let mut visitor = Values(Vec::new());
    model.visit(&mut visitor);
    let table = ParamTable::new(model);
    visitor
        .0
        .into_iter()
        .map(|(id, v)| (table.get(id).unwrap().path.clone(), v))
        .collect()
}

/// A gradient for every trainable parameter that depends on step and position.
fn gradients(table: &ParamTable, step: usize) -> (GradStore<Inner>, Vec<Vec<f64>>) {
    let mut store = GradStore::new();
    let mut host = Vec::new();
    for (p, info) in table.trainable().enumerate() {
        let n: usize = info.shape.iter().product();
        let grad: Vec<f32> = (0..n).map(|i| ((i * 7 + p * 3 + step * 5) as f32 * 0.37).sin() * 0.1).collect();
        host.push(grad.iter().map(|&g| f64::from(g)).collect());
        store.insert_flat(
            info.id,
            Tensor::from_data(TensorData::new(grad, [n]), &Default::default()),
            &info.shape,
        );
    }
    (store, host)
}

/// PyTorch's `AdamW`, one parameter.
struct Reference {
    m: Vec<f64>,
    v: Vec<f64>,
    w: Vec<f64>,
}

impl Reference {
    fn step(&mut self, grad: &[f64], t: i32, lr: f64, decay: f64) {
        let (b1, b2, eps) = (0.9, 0.95, 1e-8);
        for (((w, m), v), g) in self.w.iter_mut().zip(&mut self.m).zip(&mut self.v).zip(grad) {
            *w *= 1.0 - lr * decay;
            *m = b1 * *m + (1.0 - b1) * g;
            *v = b2 * *v + (1.0 - b2) * g * g;
            let denominator = v.sqrt() / (1.0 - f64::powi(b2, t)).sqrt() + eps;
            *w -= lr / (1.0 - f64::powi(b1, t)) * *m / denominator;
        }
    }
}

fn config(groups: Vec<ParamGroup>) -> AdamWConfig {
    AdamWConfig {
        beta2: 0.95,
        weight_decay: 0.1,
        groups,
        ..AdamWConfig::default()
    }
}

#[test]
fn adamw_follows_the_formulas_with_groups_and_clipping() {
    let mut model: ToyLm<B> = ToyConfig::default().init(1);
    let table = ParamTable::new(&model);
    let groups = vec![
        ParamGroup::new("norm").with_weight_decay(0.0),
        ParamGroup::new(r"experts\.").with_lr_scale(0.5),
        ParamGroup::new(r"layers\.1\.mixer\.experts\.up").with_lr_scale(2.0),
    ];
    let mut optimizer = AdamW::<Inner>::new(config(groups), table.clone()).unwrap();
    let mut want: Vec<(String, Reference)> = values(&model)
        .into_iter()
        .map(|(path, w)| {
            let zeros = vec![0.0; w.len()];
            (
                path,
                Reference {
                    m: zeros.clone(),
                    v: zeros,
                    w,
                },
            )
        })
        .collect();
    for (step, lr) in [1e-2, 2e-2, 5e-3].into_iter().enumerate() {
        let (mut store, grads) = gradients(&table, step);
        let factor = 0.25;
        model = optimizer.step::<B, _>(model, &mut store, lr, factor).unwrap();
        assert!(store.is_empty());
        for ((path, reference), grad) in want.iter_mut().zip(&grads) {
            let grad: Vec<f64> = grad.iter().map(|g| g * factor).collect();
            let decay = if path.contains("norm") { 0.0 } else { 0.1 };
            let scale = match path.as_str() {
                "layers.1.mixer.experts.up_proj" => 2.0,
                path if path.contains("experts.") => 0.5,
                _ => 1.0,
            };
            reference.step(&grad, step as i32 + 1, lr * scale, decay);
        }
    }
    for ((path, got), (_, want)) in values(&model).iter().zip(&want) {
        for (g, w) in got.iter().zip(&want.w) {
            assert!((g - w).abs() < 2e-6, "{path}: {g} {w}");
        }
    }
}

#[test]
fn a_master_copy_keeps_what_bf16_would_lose() {
    let toy = ToyConfig {
        dtype: FloatDType::BF16,
        ..ToyConfig::default()
    };
    let model: ToyLm<B> = toy.init(2);
    let before = values(&model);
    let table = ParamTable::new(&model);
    // Adam's first steps have size lr whatever the gradient: 1e-4 is below half a bf16 unit of any weight above 0.06.
    let run = |master_weights| {
        let mut model = model.clone();
        let settings = AdamWConfig {
            weight_decay: 0.0,
            master_weights,
            ..AdamWConfig::default()
        };
        let mut optimizer = AdamW::<Inner>::new(settings, table.clone()).unwrap();
        for _ in 0..50 {
            let (mut store, _) = gradients(&table, 0);
            model = optimizer.step::<B, _>(model, &mut store, 1e-4, 1.0).unwrap();
        }
        (values(&model), optimizer)
    };
    let (with, optimizer) = run(true);
    let (without, _) = run(false);
    let (_, grads) = gradients(&table, 0);
    let (mut moved, mut stuck, mut large) = (0, 0, 0);
    for (p, (path, start)) in before.iter().enumerate() {
        let id = table.entries()[p].id;
        let state = optimizer.state(id).unwrap();
        assert_eq!((dtype(&state.m), dtype(&state.v), state.step), (DType::F32, DType::F32, 50));
        assert_eq!(dtype(state.master.as_ref().unwrap()), DType::F32);
        for i in 0..start.len() {
            // A constant gradient: every step is lr * sign(g).
            let want = start[i] - 50.0 * 1e-4 * grads[p][i].signum();
            if grads[p][i].abs() > 1e-3 {
                let rounded = f64::from(bf16::from_f64(want).to_f32());
                let unit = (want.abs() / 128.0).max(1e-4);
                assert!((with[p].1[i] - rounded).abs() <= unit, "{path}[{i}]: {} {rounded}", with[p].1[i]);
                if start[i].abs() > 0.1 {
                    large += 1;
                    moved += usize::from(with[p].1[i] != start[i]);
                    stuck += usize::from(without[p].1[i] == start[i]);
                }
            }
        }
    }
    assert!(stuck == large && moved > large / 2, "moved {moved}, stuck {stuck} of {large}");
}

#[test]
fn moments_may_have_the_dtype_of_the_parameter() {
    let toy = ToyConfig {
        dtype: FloatDType::BF16,
        ..ToyConfig::default()
    };
    let model: ToyLm<B> = toy.init(3);
    let table = ParamTable::new(&model);
    let settings = AdamWConfig {
        moments: MomentDType::Param,
        ..AdamWConfig::default()
    };
    let mut optimizer = AdamW::<Inner>::new(settings, table.clone()).unwrap();
    optimizer.step::<B, _>(model, &mut gradients(&table, 0).0, 1e-3, 1.0).unwrap();
    let state = optimizer.state(table.entries()[0].id).unwrap();
    assert_eq!((dtype(&state.m), dtype(&state.v)), (DType::BF16, DType::BF16));
}

#[test]
fn a_tied_weight_is_one_parameter_with_one_update() {
    let mut model: ToyLm<B> = ToyConfig::default().init(4);
    model.lm_head = Some(model.embed_tokens.clone());
    let table = ParamTable::new(&model);
    let shared = table.entries().iter().find(|info| info.path == "embed_tokens.weight").unwrap();
    assert_eq!(shared.aliases, ["lm_head.weight"]);

    let mut grads = GradStore::<Inner>::new();
    let n: usize = shared.shape.iter().product();
    grads.insert_flat(shared.id, Tensor::full([n], 3.0, &Default::default()), &shared.shape);
    let norm = global_norm(&grads, &table, None).unwrap();
    assert!((norm - 3.0 * (n as f64).sqrt()).abs() < 1e-4, "{norm}");

    let start = values(&model);
    let mut optimizer = AdamW::<Inner>::new(config(vec![]), table).unwrap();
    let model = optimizer.step::<B, _>(model, &mut grads, 1e-2, 1.0).unwrap();
    let end = values(&model);
    let find = |list: &[(String, Vec<f64>)]| {
        list.iter()
            .filter(|(p, _)| p == "embed_tokens.weight")
            .map(|(_, v)| v.clone())
            .collect::<Vec<_>>()
    };
    let (start, end) = (find(&start), find(&end));
    assert_eq!(end.len(), 2);
    assert_eq!(end[0], end[1]);
    let want = start[0][0] * (1.0 - 1e-2 * 0.1) - 1e-2;
    assert!((end[0][0] - want).abs() < 1e-6, "{} {want}", end[0][0]);
}

#[test]
fn groups_are_checked_against_the_model() {
    let model: ToyLm<B> = ToyConfig::default().init(5);
    let table = ParamTable::new(&model);
    let error = |groups| AdamW::<Inner>::new(config(groups), table.clone()).unwrap_err();
    let missing = error(vec![ParamGroup::new("norm"), ParamGroup::new("no_such_layer").frozen()]).to_string();
    assert!(
        missing.contains("groups[1].pattern") && missing.contains("no_such_layer"),
        "{missing}"
    );
    let invalid = error(vec![ParamGroup::new("(")]).to_string();
    assert!(invalid.contains("groups[0].pattern"), "{invalid}");
    let negative = error(vec![ParamGroup::new("norm").with_weight_decay(-1.0)]).to_string();
    assert!(negative.contains("groups[0].weight_decay") && negative.contains("-1"), "{negative}");
    let beta = AdamW::<Inner>::new(
        AdamWConfig {
            beta1: 1.0,
            ..AdamWConfig::default()
        },
        table.clone(),
    )
    .unwrap_err();
    assert!(
        matches!(beta, Error::Config { ref field, .. } if field == "optimizer.beta1"),
        "{beta}"
    );
}

#[test]
fn later_groups_win_field_by_field() {
    let model: ToyLm<B> = ToyConfig::default().init(6);
    let table = ParamTable::new(&model);
    let groups = vec![
        ParamGroup::new(".").with_weight_decay(0.3).with_lr_scale(0.5),
        ParamGroup::new("norm").with_weight_decay(0.0),
        ParamGroup::new("embed").frozen(),
    ];
    let optimizer = AdamW::<Inner>::new(config(groups), table.clone()).unwrap();
    let of = |path: &str| {
        optimizer
            .groups()
            .get(table.entries().iter().find(|info| info.path == path).unwrap().id)
    };
    let norm = of("norm.weight");
    assert_eq!((norm.lr_scale, norm.weight_decay, norm.frozen), (0.5, 0.0, false));
    let embed = of("embed_tokens.weight");
    assert_eq!((embed.lr_scale, embed.weight_decay, embed.frozen), (0.5, 0.3, true));
    let frozen = ParamTable::new(&freeze::<B, _>(model, optimizer.groups()));
    let off: Vec<&str> = frozen
        .entries()
        .iter()
        .filter(|info| !info.trainable)
        .map(|info| info.path.as_str())
        .collect();
    assert_eq!(off, ["embed_tokens.weight"]);
}

#[test]
fn a_gradient_of_another_shape_is_refused_and_nothing_moves() {
    let model: ToyLm<B> = ToyConfig::default().init(7);
    let table = ParamTable::new(&model);
    let mut optimizer = AdamW::<Inner>::new(config(vec![]), table.clone()).unwrap();
    let mut grads = GradStore::<Inner>::new();
    grads.add(table.entries()[0].id, Tensor::<Inner, 2>::zeros([2, 2], &Default::default()));
    let error = optimizer.step::<B, _>(model, &mut grads, 1e-2, 1.0).unwrap_err().to_string();
    assert!(error.contains("embed_tokens.weight") && error.contains("[2, 2]"), "{error}");
    assert!(optimizer.state(table.entries()[0].id).is_none());
}

#[test]
fn stochastic_rounding_needs_something_to_round() {
    let table = |dtype: FloatDType| {
        let toy = ToyConfig {
            dtype,
            ..ToyConfig::default()
        };
        ParamTable::new(&toy.init::<B>(1))
    };
    let config = |master_weights, moments| AdamWConfig {
        stochastic_rounding: true,
        master_weights,
        moments,
        ..AdamWConfig::default()
    };
    for (dtype, config, accepted) in [
        (FloatDType::F32, config(false, MomentDType::Param), false),
        (FloatDType::BF16, config(true, MomentDType::F32), false),
        (FloatDType::BF16, config(true, MomentDType::Param), true),
        (FloatDType::BF16, config(false, MomentDType::F32), true),
    ] {
        let result = AdamW::<Inner>::new(config.clone(), table(dtype));
        assert_eq!(result.is_ok(), accepted, "{dtype:?} {config:?}");
        if let Err(error) = result {
            assert!(error.to_string().contains("stochastic_rounding"), "{error}");
        }
    }
}

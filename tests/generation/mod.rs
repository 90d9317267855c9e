//! Generation with caches.

use burn::module::AutodiffModule;
use burn::tensor::Tensor;
use burn_ep_backend::comm::EpGroup;
use burn_moe::backend::{Device, Infer};
use burn_moe::generate::{GenerateOptions, Session, candidates, generate};
use burn_moe::model::CausalLm;
use burn_moe_models::{AutoConfig, AutoModelForCausalLm, FromConfigOptions};
use burn_moe_tests::fixture::relative_error;
use burn_moe_tests::tiny;

use crate::ep::on_ranks;

const IDS: [i32; 11] = [7, 3, 9, 1, 4, 5, 2, 8, 6, 11, 10];

fn models() -> Vec<AutoModelForCausalLm<Infer>> {
    let texts = tiny::SPARSE.iter().chain(tiny::DENSE);
    texts
        .map(|text| tiny::model(&AutoConfig::from_text(*text).unwrap()).valid())
        .collect()
}

/// Logits `[S][V]` of one pass over the whole row.
fn uncached(model: &AutoModelForCausalLm<Infer>, ids: &[i32]) -> Vec<Vec<f32>> {
    let input = model.prepare(&tiny::row(ids, None), 0, &Device::default()).unwrap();
    let logits: Tensor<Infer, 3> = model.logits(&input).unwrap();
    let values: Vec<f32> = logits.into_data().to_vec().unwrap();
    values.chunks(model.vocab_size()).map(<[f32]>::to_vec).collect()
}

/// Token by token, in one piece, and in pieces shorter and longer than the convolution and the window.
#[test]
fn cached_logits_are_those_of_one_pass() {
    for model in models() {
        let expected = uncached(&model, &IDS);
        for pieces in [vec![1; 11], vec![11], vec![4, 1, 6], vec![1, 7, 2, 1]] {
            let device = Device::default();
            let mut session = Session::new(&model, &device, None);
            let mut seen = 0;
            for piece in pieces.iter().copied() {
                let logits = session.extend(&IDS[seen..seen + piece]).unwrap();
                seen += piece;
                let error = relative_error(&logits, &expected[seen - 1]);
                assert!(
                    error < 1e-5,
                    "{}: {pieces:?}, after {seen} tokens: {error:e}",
                    model.config().model_type()
                );
            }
        }
    }
}

#[test]
fn greedy_generation_takes_the_best_token_until_a_stop_token() {
    for model in models() {
        let mut ids = IDS.to_vec();
        let mut expected = Vec::new();
        for _ in 0..6 {
            let logits = uncached(&model, &ids).pop().unwrap();
            let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap() as i32;
            expected.push(best);
            ids.push(best);
        }
        let mut options = GenerateOptions {
            max_new_tokens: 6,
            ..Default::default()
        };
        assert_eq!(generate(&model, &IDS, &options, &Device::default()).unwrap(), expected);

        options.stop_tokens = vec![expected[2]];
        let until = expected.iter().position(|t| *t == expected[2]).unwrap();
        assert_eq!(generate(&model, &IDS, &options, &Device::default()).unwrap(), expected[..=until]);
    }
}

#[test]
fn the_seed_decides_the_sample() {
    let model = &models()[0];
    let sample = |seed| {
        let options = GenerateOptions {
            max_new_tokens: 12,
            temperature: 3.0,
            seed,
            ..Default::default()
        };
        generate(model, &IDS, &options, &Device::default()).unwrap()
    };
    assert_eq!(sample(1), sample(1));
    assert_ne!(sample(1), sample(2));
}

/// Every rank holds its experts only and generates the same text as one rank alone.
#[test]
fn expert_parallel_ranks_generate_the_same_text() {
    for text in tiny::SPARSE {
        let config = AutoConfig::from_text(*text).unwrap();
        let run = |ep: Option<EpGroup>| {
            let device = Device::default();
            let build = FromConfigOptions {
                seed: 1,
                ep: ep.clone(),
                ..Default::default()
            };
            let model = AutoModelForCausalLm::<Infer>::from_config(&config, &build, &device).unwrap();
            let options = GenerateOptions {
                max_new_tokens: 8,
                temperature: 1.0,
                ep,
                ..Default::default()
            };
            generate(&model, &IDS, &options, &device).unwrap()
        };
        let alone = run(None);
        for world in [2, 4] {
            for tokens in on_ranks(world, |ep| run(Some(ep))) {
                assert_eq!(tokens, alone, "{world} ranks");
            }
        }
    }
}

#[test]
fn bad_prompts_are_refused() {
    for model in models() {
        let options = GenerateOptions::default();
        for prompt in [&[][..], &[1, 99], &[-1]] {
            let error = generate(&model, prompt, &options, &Device::default()).unwrap_err().to_string();
            assert!(error.contains("input_ids"), "{error}");
        }
    }
}

#[derive(serde::Deserialize)]
struct Transformers {
    filters: Vec<Filter>,
    generated: Vec<Generated>,
}

#[derive(serde::Deserialize)]
struct Filter {
    settings: Settings,
    logits: Vec<f32>,
    seen: Vec<i32>,
    kept: Vec<(usize, f64)>,
}

#[derive(Debug, serde::Deserialize)]
struct Settings {
    temperature: f64,
    top_k: usize,
    top_p: f64,
    min_p: f64,
    repetition_penalty: f64,
}

#[derive(serde::Deserialize)]
struct Generated {
    fixture: String,
    prompt: Vec<i32>,
    repetition_penalty: f64,
    new: Vec<i32>,
}

fn transformers() -> Transformers {
    let path = burn_moe_tests::fixture::root().join("generation/expected.json");
    serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap()
}

/// Which tokens may come next and how likely they are, by the processors of transformers on the same logits.
#[test]
fn settings_filter_like_those_of_transformers() {
    let cases = transformers().filters;
    assert!(cases.len() > 100);
    for case in cases {
        let options = GenerateOptions {
            temperature: case.settings.temperature,
            top_k: case.settings.top_k,
            top_p: case.settings.top_p,
            min_p: case.settings.min_p,
            repetition_penalty: case.settings.repetition_penalty,
            ..Default::default()
        };
        let found = candidates(&case.logits, &case.seen, &options).unwrap();
        assert!(found.is_sorted_by(|a, b| a.1 >= b.1), "{:?}", case.settings);
        let mut found = found;
        found.sort_unstable_by_key(|(id, _)| *id);
        let ids = |kept: &[(usize, f64)]| kept.iter().map(|(id, _)| *id).collect::<Vec<_>>();
        assert_eq!(ids(&found), ids(&case.kept), "{:?}", case.settings);
        for ((id, found), (_, expected)) in found.iter().zip(&case.kept) {
            assert!(
                (found - expected).abs() < 1e-5,
                "{:?}: token {id}: {found} for {expected}",
                case.settings
            );
        }
    }
}

/// Greedy generation, with and without repetition penalty, from the same weights.
#[test]
fn greedy_text_is_that_of_transformers() {
    use burn_moe_models::FromPretrainedOptions;

    let options = FromPretrainedOptions {
        dtype: Some(burn::tensor::FloatDType::F32),
        ..Default::default()
    };
    for case in transformers().generated {
        let folder = burn_moe_tests::fixture::root().join(&case.fixture);
        let loaded = AutoModelForCausalLm::<Infer>::from_pretrained(&folder, &options, &Device::default()).unwrap();
        let options = GenerateOptions {
            max_new_tokens: case.new.len(),
            repetition_penalty: case.repetition_penalty,
            ..Default::default()
        };
        let new = generate(&loaded.model, &case.prompt, &options, &Device::default()).unwrap();
        assert_eq!(new, case.new, "{} with penalty {}", case.fixture, case.repetition_penalty);
    }
}

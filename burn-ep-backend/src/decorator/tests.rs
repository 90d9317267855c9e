use std::sync::{Arc, Mutex};

use burn::backend::Autodiff;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Bool, Device, Tensor, Tolerance, module::attention};
use burn_autodiff::checkpoint::strategy::BalancedCheckpointing;
use burn_flex::Flex;

use super::*;

type Plain = Autodiff<Flex>;
type Ep = EpBackend<Plain>;

/// What code that is generic over the backend asks for.
const fn trains<B: AutodiffBackend<InnerBackend: MoeBackend> + MoeBackend>() {}
const fn infers<B: MoeBackend + Copy + Default>() {}

/// Compiles only if the decorator fits every backend with the ops, known or not.
#[allow(dead_code)]
const fn fits_any<B: MoeBackend, A: AutodiffBackend<InnerBackend: MoeBackend> + MoeBackend>() {
    infers::<EpBackend<B>>();
    trains::<EpBackend<A>>();
}

const _: () = {
    infers::<EpBackend<Flex>>();
    trains::<Ep>();
    trains::<EpBackend<Autodiff<Flex, BalancedCheckpointing>>>();
    trains::<EpBackend<Ep>>();
};

#[test]
fn the_struct_asks_nothing_of_the_wrapped_type() {
    /// Not a backend, and without any derive.
    struct Opaque;
    let backend = EpBackend::<Opaque>::default();
    let copy = backend;
    assert_eq!(format!("{backend:?} {:?}", copy.clone()), "EpBackend EpBackend");
}

#[test]
fn the_name_shows_the_wrapped_backend() {
    let device = Device::<Flex>::default();
    let inner = <Flex as Backend>::name(&device);
    assert_eq!(<EpBackend<Flex> as Backend>::name(&device), format!("ep<{inner}>"));
}

/// Collects the `route` and `reason` of every routing event of this thread.
#[derive(Clone, Default)]
struct Recorder(Arc<Mutex<Vec<String>>>);

impl tracing::field::Visit for Recorder {
    fn record_str(&mut self, field: &tracing::field::Field, value: &str) {
        if matches!(field.name(), "route" | "reason") {
            self.0.lock().unwrap().push(value.to_string());
        }
    }

    fn record_debug(&mut self, _: &tracing::field::Field, _: &dyn fmt::Debug) {}
}

impl tracing::Subscriber for Recorder {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        metadata.target().contains("routing")
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        event.record(&mut self.clone());
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

/// Output and gradients of q, k, v of Burn's attention for the loss `sum(out * weights)`, and what the routing logged.
fn run<B: AutodiffBackend>(mask: Option<[[bool; 5]; 2]>, is_causal: bool) -> (Vec<Vec<f32>>, Vec<String>) {
    let device = Device::<B>::default();
    let tensor = |shape: [usize; 4], phase: f32| {
        let values: Vec<f32> = (0..shape.iter().product()).map(|i| 2.0 * (1.7 * i as f32 + phase).sin()).collect();
        Tensor::<B, 4>::from_data(burn::tensor::TensorData::new(values, shape), &device)
    };
    let (q, k, v) = (
        tensor([2, 4, 3, 8], 0.0).require_grad(),
        tensor([2, 4, 5, 8], 1.0).require_grad(),
        tensor([2, 4, 5, 6], 2.0).require_grad(),
    );
    let weights = tensor([2, 4, 3, 6], 3.0);
    let mask = mask.map(|m| Tensor::<B, 2, Bool>::from_data(m, &device).reshape([2, 1, 1, 5]));
    let options = AttentionModuleOptions {
        is_causal,
        ..Default::default()
    };
    let log = Recorder::default();
    let out = tracing::subscriber::with_default(log.clone(), || attention(q.clone(), k.clone(), v.clone(), mask, None, options));
    let grads = (out.clone() * weights).sum().backward();
    let data = |t: Tensor<B::InnerBackend, 4>| t.into_data().to_vec::<f32>().unwrap();
    let gradient = |t: &Tensor<B, 4>| data(t.grad(&grads).unwrap());
    let values = vec![data(out.inner()), gradient(&q), gradient(&k), gradient(&v)];
    let events = log.0.lock().unwrap().clone();
    (values, events)
}

fn assert_close(found: &[Vec<f32>], expected: &[Vec<f32>]) {
    for (found, expected) in found.iter().zip(expected) {
        let (found, expected) = (found.as_slice(), expected.as_slice());
        burn::tensor::TensorData::from(found).assert_approx_eq::<f32>(&expected.into(), Tolerance::absolute(1e-5));
    }
}

#[test]
fn causal_attention_is_rerouted_with_the_values_and_gradients_of_burn() {
    let (expected, silent) = run::<Plain>(None, true);
    assert!(silent.is_empty());
    let (found, log) = run::<Ep>(None, true);
    assert_eq!(log, ["flash_attention"]);
    assert_close(&found, &expected);
}

#[test]
fn a_key_mask_is_rerouted_too() {
    // Row 1 hides every key of its first query, which sees keys 0 to 2.
    let mask = Some([[false, true, false, false, false], [true, true, true, false, false]]);
    let (found, log) = run::<Ep>(mask, true);
    assert_eq!(log, ["flash_attention"]);
    assert_close(&found, &run::<Plain>(mask, true).0);
}

#[test]
fn other_attention_stays_with_burn_and_says_why() {
    let (found, log) = run::<Ep>(None, false);
    assert_eq!(log, ["burn", "not causal"]);
    assert_eq!(found, run::<Plain>(None, false).0);
    let (found, log) = with_routing(Routing::BurnOnly, || run::<Ep>(None, true));
    assert_eq!(log, ["burn", "rerouting is switched off"]);
    assert_eq!(found, run::<Plain>(None, true).0);
}

//! What a step hands to Burn's metrics.

use std::marker::PhantomData;
use std::sync::Arc;

use burn::tensor::{Tensor, backend::Backend};
use burn_train::metric::state::{FormatOptions, NumericMetricState};
use burn_train::metric::{
    Adaptor, ItemLazy, LossInput, Metric, MetricAttributes, MetricMetadata, MetricName, Numeric, NumericAttributes, NumericEntry,
    SerializedEntry,
};

/// Numbers of one step. Plain host values: metrics run on another thread, and a device read from there would wait for the
/// device twice.
#[derive(Debug, Clone, PartialEq)]
pub struct LearnerOutput {
    /// Cross entropy per label token; not a number after a failure.
    pub loss: f64,
    pub label_tokens: usize,
    /// Tokens, padding included.
    pub tokens: usize,
    /// Wall time of forward and backward.
    pub seconds: f64,
    /// Busiest expert over the mean, of the worst block.
    pub worst_load: Option<f64>,
}

impl LearnerOutput {
    pub(super) fn failed() -> Self {
        Self {
            loss: f64::NAN,
            label_tokens: 0,
            tokens: 0,
            seconds: 0.0,
            worst_load: None,
        }
    }
}

impl ItemLazy for LearnerOutput {
    type ItemSync = Self;

    fn sync(self) -> Self {
        self
    }
}

/// Burn's loss metric weighs an item by the length of its tensor: one entry per label token gives the token mean.
impl<B: Backend> Adaptor<LossInput<B>> for LearnerOutput {
    fn adapt(&self) -> LossInput<B> {
        LossInput::new(Tensor::full([self.label_tokens.max(1)], self.loss, &B::Device::default()))
    }
}

/// A number of [`LearnerOutput`] that [`ValueMetric`] can show.
pub trait StepValue: Send + Sync + Clone + 'static {
    const NAME: &'static str;
    const UNIT: Option<&'static str>;
    const HIGHER_IS_BETTER: bool;

    /// The value of one step and its weight in the running mean; None when the step has none.
    fn of(output: &LearnerOutput) -> Option<(f64, usize)>;
}

/// Running mean of one [`StepValue`].
#[derive(Clone)]
pub struct ValueMetric<V> {
    name: MetricName,
    state: NumericMetricState,
    value: PhantomData<V>,
}

impl<V: StepValue> ValueMetric<V> {
    /// The metric, without values yet.
    pub fn new() -> Self {
        Self {
            name: Arc::new(V::NAME.to_string()),
            state: NumericMetricState::new(),
            value: PhantomData,
        }
    }
}

impl<V: StepValue> Default for ValueMetric<V> {
    fn default() -> Self {
        Self::new()
    }
}

/// Input of [`ValueMetric`].
pub struct ValueInput<V>(Option<(f64, usize)>, PhantomData<V>);

impl<V: StepValue> Adaptor<ValueInput<V>> for LearnerOutput {
    fn adapt(&self) -> ValueInput<V> {
        ValueInput(V::of(self), PhantomData)
    }
}

impl<V: StepValue> Metric for ValueMetric<V> {
    type Input = ValueInput<V>;

    fn name(&self) -> MetricName {
        self.name.clone()
    }

    fn attributes(&self) -> MetricAttributes {
        NumericAttributes {
            unit: V::UNIT.map(str::to_string),
            higher_is_better: V::HIGHER_IS_BETTER,
        }
        .into()
    }

    fn update(&mut self, item: &Self::Input, _metadata: &MetricMetadata) -> SerializedEntry {
        let (value, weight) = item.0.unwrap_or((f64::NAN, 0));
        let format = FormatOptions::new(self.name()).precision(2);
        self.state.update(
            value,
            weight,
            match V::UNIT {
                Some(unit) => format.unit(unit),
                None => format,
            },
        )
    }

    fn clear(&mut self) {
        self.state.reset();
    }
}

impl<V: StepValue> Numeric for ValueMetric<V> {
    fn value(&self) -> NumericEntry {
        self.state.current_value()
    }

    fn running_value(&self) -> NumericEntry {
        self.state.running_value()
    }
}

/// [`StepValue`] of [`TokensPerSecondMetric`].
#[derive(Debug, Clone)]
pub struct TokensPerSecond;

impl StepValue for TokensPerSecond {
    const NAME: &'static str = "Tokens per second";
    const UNIT: Option<&'static str> = Some("tokens/s");
    const HIGHER_IS_BETTER: bool = true;

    fn of(output: &LearnerOutput) -> Option<(f64, usize)> {
        (output.tokens > 0).then(|| (output.tokens as f64 / output.seconds.max(1e-9), output.tokens))
    }
}

/// [`StepValue`] of [`ExpertLoadMetric`].
#[derive(Debug, Clone)]
pub struct WorstExpertLoad;

impl StepValue for WorstExpertLoad {
    const NAME: &'static str = "Expert load";
    const UNIT: Option<&'static str> = Some("x mean");
    const HIGHER_IS_BETTER: bool = false;

    fn of(output: &LearnerOutput) -> Option<(f64, usize)> {
        output.worst_load.map(|load| (load, 1))
    }
}

/// Tokens per second of forward and backward.
pub type TokensPerSecondMetric = ValueMetric<TokensPerSecond>;
/// Load of the busiest expert over the mean.
pub type ExpertLoadMetric = ValueMetric<WorstExpertLoad>;

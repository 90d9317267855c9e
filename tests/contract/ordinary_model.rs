//! An ordinary Burn model trains on the decorator as on the wrapped backend.

use burn::backend::{Autodiff, Flex};
use burn_ep_backend::EpBackend;

/// A model, its training and its records, written against Burn alone.
mod user {
    use burn::module::{AutodiffModule, Module, ModuleMapper, Param};
    use burn::nn::loss::CrossEntropyLossConfig;
    use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
    use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
    use burn::record::{BinBytesRecorder, FullPrecisionSettings, Recorder};
    use burn::tensor::activation::gelu;
    use burn::tensor::backend::{AutodiffBackend, Backend};
    use burn::tensor::module::attention;
    use burn::tensor::ops::AttentionModuleOptions;
    use burn::tensor::{Device, Int, Tensor, TensorData};

    const VOCAB: usize = 17;
    const WIDTH: usize = 16;
    const HEADS: usize = 2;

    #[derive(Module, Debug)]
    pub struct Net<B: Backend> {
        embedding: Embedding<B>,
        norm: LayerNorm<B>,
        qkv: Linear<B>,
        out: Linear<B>,
        norm_mlp: LayerNorm<B>,
        up: Linear<B>,
        down: Linear<B>,
        head: Linear<B>,
    }

    impl<B: Backend> Net<B> {
        /// Weights that are the same on every backend.
        pub fn new(device: &Device<B>) -> Self {
            let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(device);
            let net = Self {
                embedding: EmbeddingConfig::new(VOCAB, WIDTH).init(device),
                norm: LayerNormConfig::new(WIDTH).init(device),
                qkv: linear(WIDTH, 3 * WIDTH),
                out: linear(WIDTH, WIDTH),
                norm_mlp: LayerNormConfig::new(WIDTH).init(device),
                up: linear(WIDTH, 2 * WIDTH),
                down: linear(2 * WIDTH, WIDTH),
                head: LinearConfig::new(WIDTH, VOCAB).with_bias(false).init(device),
            };
            net.map(&mut Waves { phase: 0.0 })
        }

        /// `[B, S]` to `[B, S, V]`.
        pub fn forward(&self, ids: Tensor<B, 2, Int>) -> Tensor<B, 3> {
            let [b, s] = ids.dims();
            let x = self.embedding.forward(ids);
            let parts = self.qkv.forward(self.norm.forward(x.clone())).chunk(3, 2);
            let [q, k, v] = [0, 1, 2].map(|i| parts[i].clone().reshape([b, s, HEADS, WIDTH / HEADS]).swap_dims(1, 2));
            let options = AttentionModuleOptions {
                is_causal: true,
                ..Default::default()
            };
            let attended = attention(q, k, v, None, None, options).swap_dims(1, 2).reshape([b, s, WIDTH]);
            let x = x + self.out.forward(attended);
            let x = x.clone() + self.down.forward(gelu(self.up.forward(self.norm_mlp.forward(x))));
            self.head.forward(x)
        }
    }

    /// Fills every weight with a wave around what it was meant to be.
    struct Waves {
        phase: f32,
    }

    impl<B: Backend> ModuleMapper<B> for Waves {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
            self.phase += 1.0;
            let (shape, center) = (param.dims(), if D == 1 { 1.0 } else { 0.0 });
            let values: Vec<f32> = (0..shape.iter().product())
                .map(|i| center + 0.3 * (1.3 * i as f32 + self.phase).sin())
                .collect();
            param.map(|t| Tensor::from_data(TensorData::new(values.clone(), shape), &t.device()).set_require_grad(t.is_require_grad()))
        }
    }

    pub fn ids<B: Backend>(device: &Device<B>) -> Tensor<B, 2, Int> {
        Tensor::arange(0..24, device)
            .mul_scalar(5)
            .remainder_scalar(VOCAB as i32)
            .reshape([3, 8])
    }

    /// Losses of some steps of AdamW, and the trained model.
    pub fn train<B: AutodiffBackend>(steps: usize) -> (Vec<f32>, Net<B>) {
        let device = Device::<B>::default();
        let mut net = Net::<B>::new(&device);
        let mut optimizer = AdamWConfig::new().init();
        let loss_of = CrossEntropyLossConfig::new().init(&device);
        let ids = ids::<B>(&device);
        let targets = (ids.clone() + 1).remainder_scalar(VOCAB as i32).reshape([24]);
        let mut losses = Vec::new();
        for _ in 0..steps {
            let loss = loss_of.forward(net.forward(ids.clone()).reshape([24, VOCAB]), targets.clone());
            losses.push(loss.clone().into_scalar_f32());
            let grads = GradientsParams::from_grads(loss.backward(), &net);
            net = optimizer.step(0.01, net, grads);
        }
        (losses, net)
    }

    trait IntoScalarF32 {
        fn into_scalar_f32(self) -> f32;
    }

    impl<B: Backend> IntoScalarF32 for Tensor<B, 1> {
        fn into_scalar_f32(self) -> f32 {
            self.into_data().iter::<f32>().next().unwrap()
        }
    }

    /// Logits of the validation model.
    pub fn validate<B: AutodiffBackend>(net: &Net<B>) -> TensorData {
        let device = Device::<B>::default();
        net.valid().forward(ids::<B::InnerBackend>(&device)).into_data()
    }

    pub fn save<B: Backend>(net: Net<B>) -> Vec<u8> {
        let recorder = BinBytesRecorder::<FullPrecisionSettings>::default();
        recorder.record(net.into_record(), ()).unwrap()
    }

    pub fn load<B: Backend>(bytes: Vec<u8>) -> Net<B> {
        let device = Device::<B>::default();
        let recorder = BinBytesRecorder::<FullPrecisionSettings>::default();
        Net::new(&device).load_record(recorder.load(bytes, &device).unwrap())
    }
}

type Before = Autodiff<Flex>;
type After = EpBackend<Autodiff<Flex>>;

#[test]
fn training_gives_the_same_losses_and_the_same_validation_model() {
    let (expected, before) = user::train::<Before>(6);
    let (found, after) = user::train::<After>(6);
    assert!(expected[5] < 0.95 * expected[0], "the model learns: {expected:?}");
    for (found, expected) in found.iter().zip(&expected) {
        assert!((found - expected).abs() < 1e-5 * expected, "{found} against {expected}");
    }
    let tolerance = burn::tensor::Tolerance::<f32>::rel_abs(1e-4, 1e-4);
    user::validate(&after).assert_approx_eq(&user::validate(&before), tolerance);
}

#[test]
fn records_move_between_the_decorator_and_the_wrapped_backend() {
    let (_, trained) = user::train::<After>(2);
    let logits = user::validate(&trained);
    let bytes = user::save(trained);
    let back = user::load::<After>(bytes.clone());
    assert_eq!(user::validate(&back), logits);
    let plain = user::load::<Before>(bytes);
    let tolerance = burn::tensor::Tolerance::<f32>::rel_abs(1e-5, 1e-5);
    user::validate(&plain).assert_approx_eq(&logits, tolerance);
}

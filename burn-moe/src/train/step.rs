//! Forward and backward of one micro-batch.
//!
//! 1. The embedding runs without gradient recording.
//! 2. Each block runs either recorded (kept) or unrecorded (recomputed later); its input is a detached leaf either way.
//! 3. The router statistics of all blocks give the auxiliary losses.
//! 4. The head with the loss runs recorded and backward at once; it leaves the gradient of the last hidden state.
//! 5. From the last block to the first: run again if it was not kept, with the same routing, and go backward from the
//!    gradient of the output (and of the router logits); it leaves the gradient of its input.
//! 6. The embedding runs again, recorded, and backward.
//!
//! After each backward the gradients of the segment's parameters move into the [`GradStore`].

use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{DType, Int, Tensor, TensorData};
use burn_ep_backend::comm::{CommHandle, EpGroup};
use burn_ep_backend::ops::inject_gradient;
use burn_ep_backend::{CrossEntropyDesc, MoeBackend};

use super::segment::{backward, check};
use super::{Recompute, Segment, SegmentHook, TrainBackend, TrainableLm};
use crate::batch::HostBatch;
use crate::error::Result;
use crate::loss::{AuxScaling, BalanceLoss, BalanceStats, count_experts, router_z_sum, token_cross_entropy, z_loss_term};
use crate::model::{AuxLossSettings, BlockOutput, CausalLm, ModelInput};
use crate::optim::GradStore;

/// Settings of one micro-batch.
#[derive(Debug, Clone)]
pub struct StepSettings {
    /// Factor of each label token's cross entropy, see [`crate::loss::label_scale`].
    pub label_scale: f64,
    /// Factor of the mean losses (balance, z): one over the number of micro-batches of the optimizer step.
    pub micro_batch_weight: f64,
    pub recompute: Recompute,
    /// How the auxiliary loss of the model's config adds up.
    pub aux_scaling: AuxScaling,
    /// Router z-loss coefficient; 0 switches it off.
    pub z_loss: f64,
    /// Expert-parallel group; None: all experts are here.
    pub ep: Option<EpGroup>,
    /// Route evenly regardless of the logits (benchmarks).
    pub force_balanced: bool,
    pub cross_entropy: CrossEntropyDesc,
}

impl StepSettings {
    /// One micro-batch per step, losses over `label_tokens` tokens, no recomputation.
    pub fn new(label_tokens: f64) -> Self {
        Self {
            label_scale: crate::loss::label_scale(label_tokens),
            micro_batch_weight: 1.0,
            recompute: Recompute::None,
            aux_scaling: AuxScaling::default(),
            z_loss: 0.0,
            ep: None,
            force_balanced: false,
            cross_entropy: CrossEntropyDesc::default(),
        }
    }

    /// All ranks of the job: each has tokens of its own.
    fn world(&self) -> Option<&CommHandle> {
        self.ep.as_ref().map(EpGroup::world)
    }
}

/// Losses and router statistics of one micro-batch, still on the device where possible.
#[derive(Debug, Clone)]
pub struct MicroBatchStats<B: MoeBackend> {
    /// `[1]` fp32: cross entropy of this rank's tokens, summed, not yet divided by anything.
    pub cross_entropy_sum: Tensor<B, 1>,
    /// Balance loss `[1]` fp32 without coefficient, as it enters the total with `coefficient * micro_batch_weight`.
    pub balance: Option<Tensor<B, 1>>,
    /// Router z-loss `[1]` fp32, the mean over MoE layers and tokens.
    pub z_loss: Option<Tensor<B, 1>>,
    /// Unmasked rows per expert `[E]` of this rank, for each block; None for blocks without router.
    pub expert_load: Vec<Option<Tensor<B, 1>>>,
}

/// Runs one micro-batch forward and backward and adds its gradients to `grads`.
///
/// The total differentiated is
/// `label_scale * Σ CE + micro_batch_weight * (aux.coefficient * balance + z_loss * z)`.
/// On an error in an expert-parallel group the group is aborted, so that the other ranks end too.
pub fn forward_backward<B: TrainBackend, M: TrainableLm<B>>(
    model: &M,
    batch: &HostBatch,
    device: &B::Device,
    settings: &StepSettings,
    grads: &mut GradStore<B::InnerBackend>,
    on_segment: &mut SegmentHook<'_, B::InnerBackend>,
) -> Result<MicroBatchStats<B::InnerBackend>> {
    let mut sink = Collect { model, grads, on_segment };
    forward_backward_into(&mut sink, batch, device, settings)
}

/// [`forward_backward`] with another use of the gradients.
pub(super) fn forward_backward_into<B: TrainBackend, M: TrainableLm<B>>(
    sink: &mut impl SegmentSink<B, M>,
    batch: &HostBatch,
    device: &B::Device,
    settings: &StepSettings,
) -> Result<MicroBatchStats<B::InnerBackend>> {
    let result = run(sink, batch, device, settings);
    if let (Err(error), Some(comm)) = (&result, settings.world()) {
        comm.get().abort(&error.to_string());
    }
    result
}

/// Holds the model during a micro-batch and takes the gradients of its segments.
pub(super) trait SegmentSink<B: TrainBackend, M> {
    /// The model, as it is now.
    fn model(&self) -> &M;

    /// Hears all losses, `[1]` each, before the first backward.
    fn losses(&mut self, losses: Vec<Tensor<B::InnerBackend, 1>>);

    /// Takes what the backward pass of a segment left. Nothing else holds the segment's activations or parameters any more.
    fn finish(&mut self, segment: Segment, gradients: B::Gradients) -> Result<()>;
}

/// Collects all gradients.
struct Collect<'a, 'h, B: TrainBackend, M> {
    model: &'a M,
    grads: &'a mut GradStore<B::InnerBackend>,
    on_segment: &'a mut SegmentHook<'h, B::InnerBackend>,
}

impl<B: TrainBackend, M: TrainableLm<B>> SegmentSink<B, M> for Collect<'_, '_, B, M> {
    fn model(&self) -> &M {
        self.model
    }

    fn losses(&mut self, _losses: Vec<Tensor<B::InnerBackend, 1>>) {}

    fn finish(&mut self, segment: Segment, mut gradients: B::Gradients) -> Result<()> {
        let ids = self.grads.collect::<B, M>(self.model, &mut gradients);
        (self.on_segment)(segment, &ids, self.grads)
    }
}

/// Sum of the cross entropy over a batch and the number of its label tokens, without gradients.
pub fn evaluate<B: MoeBackend, M: CausalLm<B>>(
    model: &M,
    batch: &HostBatch,
    device: &B::Device,
    ep: Option<&EpGroup>,
) -> Result<(f64, usize)> {
    batch.validate(model.vocab_size())?;
    let mut input = model.prepare(batch, 0, device)?;
    input.ep = ep.cloned();
    let mut x = model.embed(&input)?;
    for index in 0..model.num_blocks() {
        x = model.block(index, x, &input, None, None)?.x_bsd;
    }
    check(ep)?;
    let loss = token_cross_entropy(model.head(x)?, labels(batch, device), &CrossEntropyDesc::default())?;
    let sum = loss.into_data().iter::<f64>().next().unwrap_or(f64::NAN);
    Ok((sum, batch.num_label_tokens()))
}

fn run<B: TrainBackend, M: TrainableLm<B>>(
    sink: &mut impl SegmentSink<B, M>,
    batch: &HostBatch,
    device: &B::Device,
    settings: &StepSettings,
) -> Result<MicroBatchStats<B::InnerBackend>> {
    batch.validate(sink.model().vocab_size())?;
    let mut input = sink.model().prepare(batch, 0, device)?;
    input.ep = settings.ep.clone();
    input.force_balanced = settings.force_balanced;
    let ep = settings.ep.as_ref();

    // Forward.
    let forward = Forward::run(sink.model(), &input, batch, settings)?;
    check(ep)?;
    let Forward { blocks, x_bsd, routers } = forward;
    let aux = routers.losses(settings, device)?;

    // Head and loss.
    let x = Tensor::<B, 3>::from_inner(x_bsd).require_grad();
    let loss_sum = token_cross_entropy(sink.model().head(x.clone())?, labels(batch, device), &settings.cross_entropy)?;
    let cross_entropy_sum = loss_sum.clone().inner();
    sink.losses(aux.values().chain([cross_entropy_sum.clone()]).collect());
    let mut gradients = backward(loss_sum * settings.label_scale, ep)?;
    let mut grad_bsd = input_gradient(&x, &mut gradients);
    drop(x);
    sink.finish(Segment::Head, gradients)?;

    // Blocks, last to first.
    let mask_t = input.visible_bs.clone().map(|mask| mask.flatten::<1>(0, 1));
    for (index, saved) in blocks.into_iter().enumerate().rev() {
        let (x, out) = saved.recorded(index, sink.model(), &input)?;
        let mut root = inject_gradient(out.x_bsd, Tensor::from_inner(grad_bsd))?;
        if let Some(router) = out.router {
            root = aux.add_terms(root, router.logits_te, mask_t.as_ref());
        }
        let mut gradients = backward(root, ep)?;
        grad_bsd = input_gradient(&x, &mut gradients);
        drop(x);
        sink.finish(Segment::Block(index), gradients)?;
    }

    // Embedding.
    let root = inject_gradient(sink.model().embed(&input)?, Tensor::from_inner(grad_bsd))?;
    let gradients = backward(root, ep)?;
    sink.finish(Segment::Embedding, gradients)?;

    Ok(MicroBatchStats {
        cross_entropy_sum,
        balance: aux.balance.map(|(loss, _)| loss.value),
        z_loss: aux.z.map(|z| z.value),
        expert_load: aux.expert_load,
    })
}

/// Shifted labels `[T]`.
fn labels<B: MoeBackend>(batch: &HostBatch, device: &B::Device) -> Tensor<B, 1, Int> {
    Tensor::from_data(TensorData::new(batch.shifted_labels(), [batch.tokens()]), device)
}

/// Gradient of a segment's input. A segment that ignores its input leaves none, which is a gradient of zero.
fn input_gradient<B: TrainBackend>(x: &Tensor<B, 3>, gradients: &mut B::Gradients) -> Tensor<B::InnerBackend, 3> {
    x.grad_remove(gradients).unwrap_or_else(|| x.clone().inner().zeros_like())
}

/// What the backward pass of a block needs.
enum SavedBlock<B: TrainBackend> {
    Kept {
        x: Tensor<B, 3>,
        out: BlockOutput<B>,
    },
    Dropped {
        x: Tensor<B::InnerBackend, 3>,
        /// Routing of the first pass: recomputation must not choose anew, or a tie could fall differently.
        ids_tk: Option<Tensor<B::InnerBackend, 2, Int>>,
    },
}

impl<B: TrainBackend> SavedBlock<B> {
    /// The block's input leaf and its recorded output.
    fn recorded<M: TrainableLm<B>>(self, index: usize, model: &M, input: &ModelInput<B>) -> Result<(Tensor<B, 3>, BlockOutput<B>)> {
        match self {
            Self::Kept { x, out } => Ok((x, out)),
            Self::Dropped { x, ids_tk } => {
                let x = Tensor::<B, 3>::from_inner(x).require_grad();
                let replay = ids_tk.map(Tensor::from_inner);
                let out = model.block(index, x.clone(), input, replay.as_ref(), None)?;
                check(input.ep.as_ref())?;
                Ok((x, out))
            }
        }
    }
}

/// The forward pass up to the head.
struct Forward<B: TrainBackend> {
    blocks: Vec<SavedBlock<B>>,
    x_bsd: Tensor<B::InnerBackend, 3>,
    routers: RouterStats<B::InnerBackend>,
}

impl<B: TrainBackend> Forward<B> {
    fn run<M: TrainableLm<B>>(model: &M, input: &ModelInput<B>, batch: &HostBatch, settings: &StepSettings) -> Result<Self> {
        let inner_model = model.valid();
        let inner_input = input.inner();
        let mut routers = RouterStats::new(model.aux_loss(), settings, batch, &inner_input);
        let mut x_bsd = inner_model.embed(&inner_input)?;
        let mut blocks = Vec::with_capacity(model.num_blocks());
        for index in 0..model.num_blocks() {
            let router = if settings.recompute.recomputes(index) {
                let out = inner_model.block(index, x_bsd.clone(), &inner_input, None, None)?;
                let ids_tk = out.router.as_ref().map(|r| r.ids_tk.clone());
                blocks.push(SavedBlock::Dropped { x: x_bsd, ids_tk });
                x_bsd = out.x_bsd;
                out.router.map(|r| (r.logits_te, r.ids_tk))
            } else {
                let x = Tensor::<B, 3>::from_inner(x_bsd).require_grad();
                let out = model.block(index, x.clone(), input, None, None)?;
                x_bsd = out.x_bsd.clone().inner();
                let router = out.router.clone().map(|r| (r.logits_te.inner(), r.ids_tk.inner()));
                blocks.push(SavedBlock::Kept { x, out });
                router
            };
            routers.observe(router)?;
        }
        Ok(Self { blocks, x_bsd, routers })
    }
}

/// Sums over the routers of all blocks, collected in the forward pass.
struct RouterStats<B: MoeBackend> {
    balance: Option<(BalanceStats<B>, f64)>,
    with_z: bool,
    z_sum: Option<Tensor<B, 1>>,
    mask_t: Option<Tensor<B, 1>>,
    /// Unmasked tokens of the batch.
    rows: f64,
    routers: usize,
    expert_load: Vec<Option<Tensor<B, 1>>>,
}

impl<B: MoeBackend> RouterStats<B> {
    fn new(aux: Option<AuxLossSettings>, settings: &StepSettings, batch: &HostBatch, input: &ModelInput<B>) -> Self {
        let rows = match &batch.attention_mask {
            Some(mask) => mask.iter().filter(|real| **real).count(),
            None => batch.tokens(),
        };
        Self {
            balance: aux.map(|aux| (BalanceStats::new(aux), aux.coefficient)),
            with_z: settings.z_loss != 0.0,
            z_sum: None,
            mask_t: input.visible_bs.clone().map(|mask| mask.flatten::<1>(0, 1)),
            rows: rows as f64,
            routers: 0,
            expert_load: Vec::new(),
        }
    }

    fn observe(&mut self, router: Option<(Tensor<B, 2>, Tensor<B, 2, Int>)>) -> Result<()> {
        let Some((logits_te, ids_tk)) = router else {
            self.expert_load.push(None);
            return Ok(());
        };
        let mask_t = self.mask_t.as_ref();
        let load_e = count_experts(ids_tk, mask_t, logits_te.dims()[1])?;
        self.expert_load.push(Some(load_e));
        self.routers += 1;
        if self.with_z {
            let sum = router_z_sum(logits_te.clone(), mask_t);
            self.z_sum = Some(match self.z_sum.take() {
                Some(old) => old + sum,
                None => sum,
            });
        }
        match &mut self.balance {
            Some((stats, _)) => stats.observe(logits_te, mask_t, self.rows),
            None => Ok(()),
        }
    }

    /// The losses of this micro-batch and their weights in the total.
    fn losses(self, settings: &StepSettings, device: &B::Device) -> Result<AuxLosses<B>> {
        let (comm, weight) = match settings.aux_scaling {
            AuxScaling::Average => (settings.world(), settings.micro_batch_weight),
            AuxScaling::Reference => (None, 1.0),
        };
        let balance = match self.balance {
            Some((stats, coefficient)) => Some((stats.finish(comm, device)?, coefficient * weight)),
            None => None,
        };
        let z = if self.with_z {
            let mut sum = self.z_sum.unwrap_or_else(|| Tensor::zeros([1], (device, DType::F32)));
            let mut rows = self.rows * self.routers as f64;
            if let Some(comm) = settings.world().filter(|comm| comm.get().world() > 1) {
                let mut sums = [sum.into_data().iter::<f64>().next().unwrap_or(f64::NAN), rows];
                comm.get().all_reduce_sum_f64(&mut sums)?;
                sum = Tensor::from_data(TensorData::new(vec![sums[0]], [1]), (device, DType::F32));
                rows = sums[1];
            }
            Some(ZLoss {
                value: sum * if rows > 0.0 { rows.recip() } else { 0.0 },
                coefficient: settings.z_loss * settings.micro_batch_weight,
                rows,
            })
        } else {
            None
        };
        Ok(AuxLosses {
            balance,
            z,
            expert_load: self.expert_load,
        })
    }
}

struct ZLoss<B: MoeBackend> {
    /// `[1]` fp32.
    value: Tensor<B, 1>,
    coefficient: f64,
    rows: f64,
}

struct AuxLosses<B: MoeBackend> {
    /// Loss and its factor in the total.
    balance: Option<(BalanceLoss<B>, f64)>,
    z: Option<ZLoss<B>>,
    expert_load: Vec<Option<Tensor<B, 1>>>,
}

impl<I: MoeBackend> AuxLosses<I> {
    /// `[1]` each.
    fn values(&self) -> impl Iterator<Item = Tensor<I, 1>> {
        let balance = self.balance.iter().map(|(loss, _)| loss.value.clone());
        balance.chain(self.z.iter().map(|z| z.value.clone()))
    }

    /// Adds to a block's root what the auxiliary losses contribute through its router logits.
    fn add_terms<B>(&self, mut root: Tensor<B, 1>, logits_te: Tensor<B, 2>, mask_t: Option<&Tensor<B, 1>>) -> Tensor<B, 1>
    where
        B: MoeBackend + AutodiffBackend<InnerBackend = I>,
    {
        if let Some((loss, factor)) = &self.balance {
            root = root + loss.term(logits_te.clone(), mask_t, *factor);
        }
        if let Some(z) = &self.z {
            root = root + z_loss_term(logits_te, mask_t, z.coefficient, z.rows);
        }
        root
    }
}

//! Backward of the selective scan: keeps the inputs and recomputes the state at each chunk start.

use burn_autodiff::{
    Autodiff,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn_backend::{
    AutodiffBackend,
    tensor::{FloatTensor, IntTensor},
};

use crate::backend::*;
use crate::desc::SsdDesc;

#[derive(Debug)]
struct SsdScan;

#[derive(Debug, Clone)]
struct State<B: MoeBackend> {
    input: SsdPrim<B>,
    desc: SsdDesc,
}

impl<B: MoeBackend> Backward<B, 7> for SsdScan {
    type State = State<B>;

    fn backward(self, ops: Ops<Self::State, 7>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let grad_y = grads.consume::<B>(&ops.node);
        let State { input, desc } = ops.state;
        let SsdGrads {
            x,
            dt,
            a_log,
            b,
            c,
            d,
            dt_bias,
        } = B::ssd_scan_backward(grad_y, input, &desc);
        for (parent, grad) in ops.parents.into_iter().zip([x, dt, a_log, b, c, d, dt_bias]) {
            if let Some(parent) = parent {
                grads.register::<B>(parent.id, grad);
            }
        }
    }
}

/// `inputs` are x, dt, a_log, b, c, d, dt_bias. Returns y and the final state; the latter carries no gradient.
pub fn ssd_scan<B: MoeBackend, C: CheckpointStrategy>(
    inputs: [FloatTensor<Autodiff<B, C>>; 7],
    initial_state: Option<FloatTensor<B>>,
    doc_start: Option<IntTensor<B>>,
    desc: &SsdDesc,
) -> (FloatTensor<Autodiff<B, C>>, FloatTensor<Autodiff<B, C>>) {
    let parents = inputs.each_ref().map(|input| input.node.clone());
    let [x, dt, a_log, b, c, d, dt_bias] = inputs.map(|input| input.primitive);
    let input = SsdPrim::<B> {
        x,
        dt,
        a_log,
        b,
        c,
        d,
        dt_bias,
        initial_state,
        doc_start_bs: doc_start,
    };
    let SsdOutPrim { y, final_state } = B::ssd_scan(input.clone(), desc);
    let y = match SsdScan.prepare::<C>(parents).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish(State { input, desc: *desc }, y),
        OpsKind::UnTracked(prep) => prep.finish(y),
    };
    (y, Autodiff::<B, C>::from_inner(final_state))
}

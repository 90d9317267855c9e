//! Ops under Burn's fusion layer. Products, the vocabulary loss and the embedding go to the inner backend as custom operations
//! in program order; every other op runs its reference, whose element-wise chains the fusion layer merges.

use core::fmt;
use core::marker::PhantomData;

use burn_backend::tensor::{Device, FloatTensor, IntTensor};
use burn_backend::{DType, Shape, TensorMetadata};
use burn_fusion::stream::{Operation, OperationStreams};
use burn_fusion::{Fusion, FusionBackend, FusionTensor};
use burn_ir::{CustomOpIr, HandleContainer, OperationIr, OperationOutput, TensorIr};

use crate::backend::{CrossEntropyPrim, MoeBackend};
use crate::desc::CrossEntropyDesc;
use crate::device::DeviceMemory;
use crate::kernels::dense::product_shape;

/// [`Cuda`](super::Cuda) under Burn's fusion layer.
pub type FusedCuda = Fusion<super::Cuda>;

/// A custom operation with a closure as its body.
struct Custom<B, F> {
    ir: CustomOpIr,
    run: F,
    backend: PhantomData<fn() -> B>,
}

impl<B, F> fmt::Debug for Custom<B, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Custom").field("ir", &self.ir).finish()
    }
}

impl<B, F> Operation<B::FusionRuntime> for Custom<B, F>
where
    B: FusionBackend,
    F: Fn(&[TensorIr], &mut HandleContainer<B::Handle>) -> Vec<FloatTensor<B>> + Send + Sync,
{
    fn execute(&self, handles: &mut HandleContainer<B::Handle>) {
        let outputs = (self.run)(&self.ir.inputs, handles);
        for (ir, tensor) in self.ir.outputs.iter().zip(outputs) {
            handles.register_float_tensor::<B>(&ir.id, tensor);
        }
    }
}

/// Registers `run` over the inner backend's tensors; `outputs` says what it returns. The tensors it returns must be of these
/// shapes: the fusion layer takes them from here.
fn custom<B, const OUT: usize>(
    name: &'static str,
    inputs: Vec<FusionTensor<B::FusionRuntime>>,
    outputs: [(Shape, DType); OUT],
    run: impl Fn(&[TensorIr], &mut HandleContainer<B::Handle>) -> Vec<FloatTensor<B>> + Send + Sync + 'static,
) -> [FusionTensor<B::FusionRuntime>; OUT]
where
    B: FusionBackend,
{
    let streams = OperationStreams::with_inputs(inputs.iter());
    let client = inputs[0].client.clone();
    let outputs = outputs.map(|(shape, dtype)| TensorIr::uninit(client.create_empty_handle(), shape, dtype));
    let inputs: Vec<TensorIr> = inputs.into_iter().map(FusionTensor::into_ir).collect();
    let ir = CustomOpIr::new(name, &inputs, &outputs);
    let operation = Custom::<B, _> {
        ir: ir.clone(),
        run,
        backend: PhantomData,
    };
    client.register(streams, OperationIr::Custom(ir), operation).outputs()
}

impl<B: FusionBackend + MoeBackend> MoeBackend for Fusion<B> {
    fn routed_matmul(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> {
        let output = (product_shape(&lhs.shape(), &rhs.shape()), lhs.dtype());
        let [out] = custom::<B, 1>("moe_matmul", vec![lhs, rhs], [output], |inputs, handles| {
            let [lhs, rhs] = [0, 1].map(|i| handles.get_float_tensor::<B>(&inputs[i]));
            vec![B::routed_matmul(lhs, rhs)]
        });
        out
    }

    fn routed_linear(x: FloatTensor<Self>, weight: FloatTensor<Self>, bias: Option<FloatTensor<Self>>) -> FloatTensor<Self> {
        let mut shape = x.shape();
        let rank = shape.num_dims();
        shape[rank - 1] = weight.shape()[1];
        let output = (shape, x.dtype());
        let inputs = [Some(x), Some(weight), bias].into_iter().flatten().collect();
        let [out] = custom::<B, 1>("moe_linear", inputs, [output], |inputs, handles| {
            let mut tensors = inputs.iter().map(|ir| handles.get_float_tensor::<B>(ir));
            let (x, weight) = (tensors.next(), tensors.next());
            let (x, weight) = (x.expect("two inputs at least"), weight.expect("two inputs at least"));
            let bias = tensors.next();
            vec![B::routed_linear(x, weight, bias)]
        });
        out
    }

    fn linear_cross_entropy(
        hidden_td: FloatTensor<Self>,
        weight_vd: FloatTensor<Self>,
        labels_t: IntTensor<Self>,
        with_grads: bool,
        desc: &CrossEntropyDesc,
    ) -> CrossEntropyPrim<Self> {
        let wide = crate::reference::prim::wide_dtype(hidden_td.dtype());
        let loss = (Shape::new([1]), wide);
        let desc = *desc;
        let run = move |inputs: &[TensorIr], handles: &mut HandleContainer<B::Handle>| {
            let [hidden, weight] = [0, 1].map(|i| handles.get_float_tensor::<B>(&inputs[i]));
            let labels = handles.get_int_tensor::<B>(&inputs[2]);
            let CrossEntropyPrim { loss_sum, grads } = B::linear_cross_entropy(hidden, weight, labels, with_grads, &desc);
            core::iter::once(loss_sum)
                .chain(grads.into_iter().flat_map(|(hidden, weight)| [hidden, weight]))
                .collect()
        };
        let grads = [&hidden_td, &weight_vd].map(|tensor| (tensor.shape(), tensor.dtype()));
        let inputs = vec![hidden_td, weight_vd, labels_t];
        if !with_grads {
            let [loss_sum] = custom::<B, 1>("moe_cross_entropy", inputs, [loss], run);
            return CrossEntropyPrim { loss_sum, grads: None };
        }
        let [grad_hidden, grad_weight] = grads;
        let [loss_sum, hidden, weight] = custom::<B, 3>("moe_cross_entropy_grads", inputs, [loss, grad_hidden, grad_weight], run);
        CrossEntropyPrim {
            loss_sum,
            grads: Some((hidden, weight)),
        }
    }

    fn routed_embedding(table_vd: FloatTensor<Self>, ids_bs: IntTensor<Self>) -> FloatTensor<Self> {
        let ([_, width], [b, s]) = (table_vd.shape().dims::<2>(), ids_bs.shape().dims::<2>());
        let output = (Shape::new([b, s, width]), table_vd.dtype());
        let [out] = custom::<B, 1>("moe_embedding", vec![table_vd, ids_bs], [output], |inputs, handles| {
            let table = handles.get_float_tensor::<B>(&inputs[0]);
            vec![B::routed_embedding(table, handles.get_int_tensor::<B>(&inputs[1]))]
        });
        out
    }

    fn embedding_grad(grad_bsd: FloatTensor<Self>, ids_bs: IntTensor<Self>, vocab: usize) -> FloatTensor<Self> {
        let [_, _, width] = grad_bsd.shape().dims::<3>();
        let output = (Shape::new([vocab, width]), grad_bsd.dtype());
        let [out] = custom::<B, 1>("moe_embedding_grad", vec![grad_bsd, ids_bs], [output], move |inputs, handles| {
            let grad = handles.get_float_tensor::<B>(&inputs[0]);
            vec![B::embedding_grad(grad, handles.get_int_tensor::<B>(&inputs[1]), vocab)]
        });
        out
    }

    fn scale_by(tensor: FloatTensor<Self>, factor_1: FloatTensor<Self>) -> FloatTensor<Self> {
        let output = (tensor.shape(), tensor.dtype());
        let [out] = custom::<B, 1>("moe_scale", vec![tensor, factor_1], [output], |inputs, handles| {
            let [tensor, factor] = [0, 1].map(|i| handles.get_float_tensor::<B>(&inputs[i]));
            vec![B::scale_by(tensor, factor)]
        });
        out
    }

    fn prepare_device(device: &Device<Self>) {
        B::prepare_device(device);
    }

    fn flush(device: &Device<Self>) {
        B::flush(device);
    }

    fn device_memory(device: &Device<Self>) -> Option<DeviceMemory> {
        B::device_memory(device)
    }

    fn reset_peak_memory(device: &Device<Self>) {
        B::reset_peak_memory(device);
    }
}

//! Adding rows into positions that repeat.

use burn::backend::Autodiff;
use burn::tensor::{IndexingUpdateOp, Int, Tensor};
use burn_ep_backend::ops;
use burn_flex::Flex;

type Ad = Autodiff<Flex>;

fn read<const D: usize>(tensor: Tensor<Flex, D>) -> Vec<f32> {
    tensor.into_data().to_vec().expect("f32")
}

/// tracel-ai/burn#4063, #4064: the primitive under our references sums repeated positions and sends every row its own
/// gradient.
#[test]
fn three_rows_into_five_positions() {
    let device = Default::default();
    let positions = [3usize, 0, 3];
    let rows = Tensor::<Ad, 2>::from_floats([[1.0, 2.0], [3.0, 4.0], [10.0, 20.0]], &device).require_grad();
    let base = Tensor::<Ad, 2>::ones([5, 2], &device).require_grad();
    let index = Tensor::<Ad, 1, Int>::from_ints(positions.map(|p| p as i32), &device);
    let out = base.clone().select_assign(0, index, rows.clone(), IndexingUpdateOp::Add);

    let mut expected = [1.0f32; 10];
    for (row, &position) in [[1.0, 2.0], [3.0, 4.0], [10.0, 20.0]].iter().zip(&positions) {
        (0..2).for_each(|c| expected[position * 2 + c] += row[c]);
    }
    assert_eq!(read(out.clone().inner()), expected);

    let upstream: Vec<f32> = (0..10).map(|v| v as f32).collect();
    let weights = Tensor::<Ad, 1>::from_floats(upstream.as_slice(), &device).reshape([5, 2]);
    let grads = (out * weights).sum().backward();
    let expected: Vec<f32> = positions.iter().flat_map(|p| upstream[p * 2..p * 2 + 2].to_vec()).collect();
    assert_eq!(read(rows.grad(&grads).expect("rows")), expected);
    assert_eq!(read(base.grad(&grads).expect("base")), upstream);
}

/// The same for our own pair: rows of one token are summed, weighted, and get their own gradients.
#[test]
fn rows_of_one_token_are_summed() {
    let device = Default::default();
    let ids = Tensor::<Ad, 2, Int>::from_ints([[2, 0, 2], [2, 1, 0]], &device);
    let order = ops::sort_by_expert(ids, 3).expect("valid ids");
    // Experts 0, 1, 2 hold slots 1 and 5, slot 4, slots 0, 2 and 3.
    let slots = [1usize, 5, 4, 0, 2, 3];
    let rows_values = [1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0];
    let rows = Tensor::<Ad, 1>::from_floats(rows_values, &device).reshape([6, 1]).require_grad();
    let weight_values = [0.5f32, 1.0, 2.0, 3.0, 4.0, 5.0];
    let weights = Tensor::<Ad, 1>::from_floats(weight_values, &device).reshape([2, 3]).require_grad();
    let out = ops::unpermute(rows.clone(), &order, Some(weights.clone())).expect("valid shapes");

    let upstream = [10.0f32, 100.0];
    let (mut sums, mut grad_rows, mut grad_weights) = ([0.0f32; 2], [0.0f32; 6], [0.0f32; 6]);
    for (row, &slot) in slots.iter().enumerate() {
        sums[slot / 3] += weight_values[slot] * rows_values[row];
        grad_rows[row] = weight_values[slot] * upstream[slot / 3];
        grad_weights[slot] = rows_values[row] * upstream[slot / 3];
    }
    assert_eq!(read(out.clone().inner()), sums);
    let grads = (out * Tensor::from_floats([[10.0], [100.0]], &device)).sum().backward();
    assert_eq!(read(rows.grad(&grads).expect("rows")), grad_rows);
    assert_eq!(read(weights.grad(&grads).expect("weights")), grad_weights);
}

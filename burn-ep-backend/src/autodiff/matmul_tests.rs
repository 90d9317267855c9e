//! The routed products on the CPU against Burn's own autodiff: values and gradients, dense and strided, broadcast or not.

use burn_autodiff::checkpoint::strategy::BalancedCheckpointing;
use burn_backend::DType;
use burn_flex::Flex;
use burn_tensor::backend::AutodiffBackend;
use burn_tensor::module::linear as burn_linear;
use burn_tensor::{Tensor, TensorPrimitive};

use super::*;
use crate::testing::{assert_close, f64s, tensor, values};
use crate::{EpBackend, Routing, with_routing};

type Burn = Autodiff<Flex>;
type Ep = EpBackend<Burn>;

/// How an operand comes about; its gradient is always that of the dense leaf.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Layout {
    Dense,
    /// Last two axes swapped in memory.
    Swapped,
    /// A part of a larger tensor.
    Cut,
    /// First axis of size 1, expanded.
    Expanded(usize),
}

/// The leaf and the operand made from it.
fn operand<B: AutodiffBackend, const D: usize>(shape: [usize; D], layout: Layout, seed: u64, dtype: DType) -> [Tensor<B, D>; 2] {
    let mut leaf_shape = shape;
    match layout {
        Layout::Swapped => leaf_shape.swap(D - 2, D - 1),
        Layout::Cut => leaf_shape[D - 1] += 3,
        Layout::Dense | Layout::Expanded(_) => {}
    }
    let leaf = tensor::<B, D>(&values(seed, leaf_shape.iter().product()), leaf_shape, dtype).require_grad();
    let operand = match layout {
        Layout::Dense => leaf.clone(),
        Layout::Swapped => leaf.clone().transpose(),
        Layout::Cut => {
            let width = shape[D - 1];
            leaf.clone().slice_dim(D - 1, 1..width + 1)
        }
        Layout::Expanded(size) => {
            let mut expanded = shape;
            expanded[0] = size;
            leaf.clone().expand(expanded)
        }
    };
    [leaf, operand]
}

/// Product and the gradients of both leaves for a random upstream gradient.
fn product<B: AutodiffBackend, const D: usize>(shapes: [[usize; D]; 2], layouts: [Layout; 2], dtype: DType) -> [Vec<f64>; 3] {
    let [a, lhs] = operand::<B, D>(shapes[0], layouts[0], 1, dtype);
    let [b, rhs] = operand::<B, D>(shapes[1], layouts[1], 2, dtype);
    let out = lhs.matmul(rhs);
    let upstream = tensor::<B, D>(&values(3, out.dims().iter().product()), out.dims(), dtype);
    let grads = (out.clone() * upstream).sum().backward();
    [
        f64s(out),
        f64s(a.grad(&grads).expect("lhs is tracked")),
        f64s(b.grad(&grads).expect("rhs is tracked")),
    ]
}

fn compare<const D: usize>(shapes: [[usize; D]; 2], layouts: [Layout; 2]) {
    for (dtype, tolerance) in [(DType::F64, 1e-12), (DType::F32, 1e-5)] {
        let expected = product::<Burn, D>(shapes, layouts, dtype);
        let found = product::<Ep, D>(shapes, layouts, dtype);
        for (name, (found, expected)) in ["out", "lhs", "rhs"].iter().zip(found.iter().zip(&expected)) {
            assert_close(&format!("{shapes:?} {layouts:?} {dtype:?} {name}"), found, expected, tolerance);
        }
    }
}

#[test]
fn products_match_burn_in_every_layout() {
    use Layout::*;
    for layouts in [
        [Dense, Dense],
        [Swapped, Dense],
        [Dense, Swapped],
        [Swapped, Swapped],
        [Cut, Swapped],
        [Swapped, Cut],
    ] {
        compare([[3, 5], [5, 4]], layouts);
        compare([[1, 5], [5, 1]], layouts);
        compare([[7, 1], [1, 6]], layouts);
        compare([[2, 3, 5], [2, 5, 4]], layouts);
        compare([[2, 3, 5], [1, 5, 4]], layouts);
        compare([[1, 3, 5], [4, 5, 2]], layouts);
        compare([[2, 1, 3, 4], [1, 3, 4, 5]], layouts);
        compare([[2, 3, 1, 4], [1, 1, 4, 5]], layouts);
        compare([[2, 3, 2, 4], [2, 3, 4, 2]], layouts);
    }
    compare([[1, 3, 5], [4, 5, 2]], [Expanded(4), Dense]);
    compare([[4, 3, 5], [1, 5, 2]], [Dense, Expanded(4)]);
}

#[test]
fn a_transposed_right_operand_gets_the_gradient_of_burn() {
    // The branch that backends with strides take; Flex itself never asks for it.
    for (shape, batch) in [([4, 3], vec![]), ([4, 3], vec![1]), ([4, 3], vec![2])] {
        let [k, n] = shape;
        let m = 5;
        let with_batch = |sizes: [usize; 2]| -> Shape { batch.iter().copied().chain(sizes).collect::<Vec<_>>().into() };
        let count = batch.iter().product::<usize>();
        let prim = |seed, sizes: [usize; 2]| {
            let flat = tensor::<Flex, 1>(
                &values(seed, count * sizes[0] * sizes[1]),
                [count * sizes[0] * sizes[1]],
                DType::F64,
            );
            Flex::float_reshape(flat.into_primitive().tensor(), with_batch(sizes))
        };
        use burn_backend::ops::FloatTensorOps;
        let (grad, lhs, rhs_shape) = (prim(1, [m, n]), prim(2, [m, k]), with_batch([k, n]));
        let [plain, swapped] = [false, true].map(|transposed| {
            let out = grad_rhs::<Flex>(grad.clone(), lhs.clone(), &rhs_shape, transposed);
            assert_eq!(out.shape(), rhs_shape);
            let out = Flex::float_reshape(out, Shape::new([count * k * n]));
            f64s(Tensor::<Flex, 1>::from_primitive(TensorPrimitive::Float(out)))
        });
        assert_close("gradient", &swapped, &plain, 1e-12);
    }
}

/// `module::linear` and its three gradients.
fn linear_case<B: AutodiffBackend, const D: usize>(shape: [usize; D], outputs: usize, bias: bool) -> Vec<Vec<f64>> {
    let inputs = shape[D - 1];
    let x = tensor::<B, D>(&values(1, shape.iter().product()), shape, DType::F64).require_grad();
    let weight = tensor::<B, 2>(&values(2, inputs * outputs), [inputs, outputs], DType::F64).require_grad();
    let bias = bias.then(|| tensor::<B, 1>(&values(3, outputs), [outputs], DType::F64).require_grad());
    let out = burn_linear(x.clone(), weight.clone(), bias.clone());
    let upstream = tensor::<B, D>(&values(4, out.dims().iter().product()), out.dims(), DType::F64);
    let grads = (out.clone() * upstream).sum().backward();
    let mut found = vec![f64s(out), f64s(x.grad(&grads).unwrap()), f64s(weight.grad(&grads).unwrap())];
    found.extend(bias.map(|bias| f64s(bias.grad(&grads).unwrap())));
    found
}

#[test]
fn linear_matches_burn() {
    for bias in [false, true] {
        let check = |found: Vec<Vec<f64>>, expected: Vec<Vec<f64>>| {
            assert_eq!(found.len(), 3 + usize::from(bias));
            for (found, expected) in found.iter().zip(&expected) {
                assert_close("linear", found, expected, 1e-12);
            }
        };
        check(linear_case::<Ep, 2>([3, 5], 4, bias), linear_case::<Burn, 2>([3, 5], 4, bias));
        check(linear_case::<Ep, 3>([2, 3, 5], 4, bias), linear_case::<Burn, 3>([2, 3, 5], 4, bias));
        check(
            linear_case::<Ep, 4>([2, 1, 3, 5], 1, bias),
            linear_case::<Burn, 4>([2, 1, 3, 5], 1, bias),
        );
    }
}

#[test]
fn untracked_operands_get_no_gradient() {
    let weight = tensor::<Ep, 2>(&values(1, 12), [3, 4], DType::F32);
    let x = tensor::<Ep, 2>(&values(2, 6), [2, 3], DType::F32).require_grad();
    let grads = x.clone().matmul(weight.clone()).sum().backward();
    assert!(x.grad(&grads).is_some() && weight.grad(&grads).is_none());
    let grads = x.clone().transpose().matmul(x.clone().detach()).sum().backward();
    assert!(x.grad(&grads).is_some());
    let out = burn_linear(weight.clone().transpose(), x.clone().transpose(), None);
    let grads = out.sum().backward();
    assert!(x.grad(&grads).is_some() && weight.grad(&grads).is_none());
}

#[test]
fn one_tensor_on_both_sides_gets_both_gradients() {
    fn run<B: AutodiffBackend>() -> Vec<f64> {
        let x = tensor::<B, 2>(&values(1, 9), [3, 3], DType::F64).require_grad();
        let grads = x.clone().matmul(x.clone().transpose()).matmul(x.clone()).sum().backward();
        f64s(x.grad(&grads).unwrap())
    }
    assert_close("x", &run::<Ep>(), &run::<Burn>(), 1e-12);
    assert_close("x", &with_routing(Routing::BurnOnly, run::<Ep>), &run::<Burn>(), 0.0);
}

#[test]
fn recomputed_operands_give_the_same_gradients() {
    fn run<B: AutodiffBackend>() -> Vec<f64> {
        let x = tensor::<B, 2>(&values(1, 12), [3, 4], DType::F64).require_grad();
        let w = tensor::<B, 2>(&values(2, 8), [4, 2], DType::F64).require_grad();
        // memory-bound producers on both sides are what this strategy recomputes
        let out = (x.clone() * 2.0).exp().matmul((w.clone() + 1.0).tanh());
        let grads = out.sum().backward();
        [f64s(x.grad(&grads).unwrap()), f64s(w.grad(&grads).unwrap())].concat()
    }
    assert_close(
        "x and w",
        &run::<EpBackend<Autodiff<Flex, BalancedCheckpointing>>>(),
        &run::<Burn>(),
        1e-12,
    );
}

//! Token embedding.

use burn::module::{Module, Param};
use burn::tensor::{Int, Tensor, backend::Backend};
use burn_ep_backend::MoeBackend;

use super::{Init, ParamBuilder};

/// Rows of `weight [V, D]`.
#[derive(Module, Debug)]
pub struct Embedding<B: Backend> {
    /// `[V, D]`.
    pub weight: Param<Tensor<B, 2>>,
    padding_row: Option<usize>,
}

impl<B: MoeBackend> Embedding<B> {
    /// Normal with deviation `std`. A padding row starts at zero and gets no gradient through the lookup.
    pub fn new(pb: &ParamBuilder<B>, vocab: usize, width: usize, std: f64, padding_row: Option<usize>) -> Self {
        let init = match padding_row {
            Some(row) => Init::NormalWithZeroRow { std, row },
            None => Init::Normal { std },
        };
        Self {
            weight: pb.param("weight", [vocab, width], init),
            padding_row,
        }
    }

    /// `[B, S]` ids, each below V, to `[B, S, D]`.
    pub fn forward(&self, ids_bs: Tensor<B, 2, Int>) -> Tensor<B, 3> {
        let x_bsd = burn::tensor::module::embedding(self.weight.val(), ids_bs.clone());
        match self.padding_row {
            Some(row) => {
                let padding = ids_bs.equal_elem(row as i64).unsqueeze_dim::<3>(2).expand(x_bsd.dims());
                x_bsd.clone().mask_where(padding, x_bsd.detach())
            }
            None => x_bsd,
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::backend::Autodiff;
    use burn::tensor::FloatDType;
    use burn_flex::Flex;

    use super::*;

    #[test]
    fn the_padding_row_is_read_but_gets_no_gradient() {
        type B = Autodiff<Flex>;
        let device = Default::default();
        let pb = ParamBuilder::<B>::new(&device, FloatDType::F32);
        let mut layer = Embedding::new(&pb, 3, 2, 1.0, Some(1));
        assert_eq!(layer.weight.val().slice(1..2).into_data().to_vec::<f32>().unwrap(), [0.0, 0.0]);
        layer.weight = Param::from_data([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], &device);
        let ids = Tensor::<B, 2, Int>::from_data([[0, 1, 2, 2]], &device);
        let x = layer.forward(ids);
        assert_eq!(
            x.clone().into_data().to_vec::<f32>().unwrap(),
            [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 5.0, 6.0]
        );
        let grads = x.sum().backward();
        let grad = layer.weight.val().grad(&grads).unwrap().into_data().to_vec::<f32>().unwrap();
        assert_eq!(grad, [1.0, 1.0, 0.0, 0.0, 2.0, 2.0]);
    }
}

//! The expert layer: every tile of rows goes through gather, up, activation, down while it is in cache.

use std::borrow::Cow;
use std::ops::Range;

use burn_backend::TensorMetadata;
use burn_flex::{Flex, FlexTensor};
use rayon::prelude::*;

use super::expert_activation::{activate, activate_backward};
use super::groups::{RowTile, group_ranges, row_tiles, split_rows, weight_tiles};
use super::matrix::{Matrix, product};
use super::numeric::{Real, dense, dims, float_tensor, round_all, wide, wide_range, with_real};
use super::permute::combine_rows;
use super::slice::ints;
use crate::backend::{ExpertMlpGrads, ExpertMlpPrim, ExpertOrderPrim, ExpertWeightsPrim};
use crate::desc::ExpertActivation;

pub(crate) fn expert_mlp(
    x_td: FlexTensor,
    order: &ExpertOrderPrim<Flex>,
    weights_tk: Option<FlexTensor>,
    experts: &ExpertWeightsPrim<Flex>,
    top_k: usize,
    activation: ExpertActivation,
) -> ExpertMlpPrim<Flex> {
    with_real!(x_td.dtype(), A => {
        Layer::new(experts, order, top_k, activation).forward::<A>(&dense(x_td), weights_tk.map(dense).as_ref())
    })
}

pub(crate) fn expert_mlp_backward(
    grad_td: FlexTensor,
    x_td: FlexTensor,
    up_rf: FlexTensor,
    order: &ExpertOrderPrim<Flex>,
    weights_tk: Option<FlexTensor>,
    experts: &ExpertWeightsPrim<Flex>,
    top_k: usize,
    activation: ExpertActivation,
) -> ExpertMlpGrads<Flex> {
    with_real!(x_td.dtype(), A => {
        let layer = Layer::new(experts, order, top_k, activation);
        layer.backward::<A>(&dense(grad_td), &dense(x_td), &dense(up_rf), weights_tk.map(dense).as_ref())
    })
}

/// Weights and order on the host.
struct Layer {
    up: FlexTensor,
    up_bias: Option<FlexTensor>,
    down: FlexTensor,
    down_bias: Option<FlexTensor>,
    activation: ExpertActivation,
    top_k: usize,
    slots_r: Vec<i64>,
    positions_r: Vec<i64>,
    groups: Vec<Range<usize>>,
    tiles: Vec<RowTile>,
    d: usize,
    /// Expert width F and width of the up product, `F * up_factor`.
    f: usize,
    f_up: usize,
}

/// What the weight gradients need of each sorted row.
struct RowGrads<A> {
    /// `[R, F * up_factor]`: gradient of the up product.
    up_rf: Vec<A>,
    /// `[R, F]`: routing weight times activation.
    act_rf: Vec<A>,
    /// `[R, D]`.
    x_rd: Vec<A>,
    /// `[R]`: gradient of the routing weight.
    weight_r: Vec<A>,
}

impl Layer {
    fn new(experts: &ExpertWeightsPrim<Flex>, order: &ExpertOrderPrim<Flex>, top_k: usize, activation: ExpertActivation) -> Self {
        let [_, d, f] = dims(&experts.down);
        let slots_r = ints(&order.slots_r);
        let groups = group_ranges(&order.offsets_e1, slots_r.len());
        Self {
            up: dense(experts.up.clone()),
            up_bias: experts.up_bias.clone().map(dense),
            down: dense(experts.down.clone()),
            down_bias: experts.down_bias.clone().map(dense),
            activation,
            top_k,
            slots_r,
            positions_r: ints(&order.positions_r),
            tiles: row_tiles(&groups),
            groups,
            d,
            f,
            f_up: f * activation.up_factor(),
        }
    }

    fn forward<A: Real>(&self, x_td: &FlexTensor, weights_tk: Option<&FlexTensor>) -> ExpertMlpPrim<Flex> {
        let (r, dtype) = (self.slots_r.len(), x_td.dtype());
        let x_wide = wide::<A>(x_td);
        let mut up_rf = vec![A::zero(); r * self.f_up];
        let mut y_rd = vec![A::zero(); r * self.d];
        let up_parts = split_rows(&mut up_rf, self.f_up, &self.tiles);
        let y_parts = split_rows(&mut y_rd, self.d, &self.tiles);
        self.tiles.par_iter().zip(up_parts).zip(y_parts).for_each(|((tile, up_nf), y_nd)| {
            let (n, e) = (tile.rows.len(), tile.expert);
            let x_nd = self.gather(&x_wide, tile.rows.clone(), 0..self.d);
            let up = slice_of::<A>(&self.up, e);
            product(
                up_nf,
                Matrix::new(&x_nd, n, self.d, self.d),
                Matrix::new(&up, self.f_up, self.d, self.d).t(),
            );
            add_bias(up_nf, self.up_bias.as_ref().map(|bias| slice_of::<A>(bias, e)));
            // The backward starts from the kept, rounded product, so the forward goes on from it too.
            round_all(up_nf, dtype);
            let act_nf = self.activations(up_nf, n);
            let down = slice_of::<A>(&self.down, e);
            product(
                y_nd,
                Matrix::new(&act_nf, n, self.f, self.f),
                Matrix::new(&down, self.d, self.f, self.f).t(),
            );
            add_bias(y_nd, self.down_bias.as_ref().map(|bias| slice_of::<A>(bias, e)));
        });
        let weights = weights_tk.map(wide::<A>);
        let out = combine_rows(&y_rd, self.d, &self.positions_r, weights.as_deref(), self.top_k);
        ExpertMlpPrim {
            out_td: float_tensor(out, x_td.shape(), dtype),
            up_rf: float_tensor(up_rf, [r, self.f_up], dtype),
        }
    }

    fn backward<A: Real>(
        &self,
        grad_td: &FlexTensor,
        x_td: &FlexTensor,
        up_rf: &FlexTensor,
        weights_tk: Option<&FlexTensor>,
    ) -> ExpertMlpGrads<Flex> {
        let (grad_wide, x_wide) = (wide::<A>(grad_td), wide::<A>(x_td));
        let weights = weights_tk.map(wide::<A>);
        let rows = self.row_gradients(&grad_wide, &wide(up_rf), weights.as_deref());

        let grad_x = combine_rows(&rows.x_rd, self.d, &self.positions_r, None, self.top_k);
        let grad_weights = weights_tk.map(|weights| {
            let by_slot = self.positions_r.iter().map(|&p| rows.weight_r[p as usize]).collect();
            float_tensor::<A>(by_slot, weights.shape(), weights.dtype())
        });
        ExpertMlpGrads {
            x_td: float_tensor(grad_x, x_td.shape(), x_td.dtype()),
            weights_tk: grad_weights,
            up: self.up_gradient(&rows, &x_wide),
            up_bias: self.up_bias.as_ref().map(|bias| {
                let grad = self.sum_rows(self.f_up, |row| Cow::Borrowed(&rows.up_rf[row * self.f_up..(row + 1) * self.f_up]));
                float_tensor(grad, bias.shape(), bias.dtype())
            }),
            down: self.down_gradient(&rows, &grad_wide),
            down_bias: self.down_bias.as_ref().map(|bias| {
                let grad = self.sum_rows(self.d, |row| {
                    let weight = self.routing_weight(weights.as_deref(), row);
                    self.token(&grad_wide, row).iter().map(|&g| weight * g).collect()
                });
                float_tensor(grad, bias.shape(), bias.dtype())
            }),
        }
    }

    /// Backward through down, activation and up of every row.
    ///
    /// With `y_r = down · act_r + bias`, the gradient of routing weight w_r is `<grad, y_r>`; it is formed as
    /// `<grad · down, act_r> + <grad, bias>`, so that the down product need not be kept or repeated.
    fn row_gradients<A: Real>(&self, grad_td: &[A], up_rf: &[A], weights_tk: Option<&[A]>) -> RowGrads<A> {
        let r = self.slots_r.len();
        let mut rows = RowGrads {
            up_rf: vec![A::zero(); r * self.f_up],
            act_rf: vec![A::zero(); r * self.f],
            x_rd: vec![A::zero(); r * self.d],
            weight_r: vec![A::zero(); r],
        };
        let parts = split_rows(&mut rows.up_rf, self.f_up, &self.tiles)
            .into_par_iter()
            .zip(split_rows(&mut rows.act_rf, self.f, &self.tiles))
            .zip(split_rows(&mut rows.x_rd, self.d, &self.tiles))
            .zip(split_rows(&mut rows.weight_r, 1, &self.tiles));
        self.tiles
            .par_iter()
            .zip(parts)
            .for_each(|(tile, (((grad_up, act_nf), grad_x), grad_weight))| {
                let (n, e) = (tile.rows.len(), tile.expert);
                let grad_nd = self.gather(grad_td, tile.rows.clone(), 0..self.d);
                let down = slice_of::<A>(&self.down, e);
                let bias = self.down_bias.as_ref().map(|bias| slice_of::<A>(bias, e));
                let mut grad_act = vec![A::zero(); n * self.f];
                product(
                    &mut grad_act,
                    Matrix::new(&grad_nd, n, self.d, self.d),
                    Matrix::new(&down, self.d, self.f, self.f),
                );
                let up_nf = &up_rf[tile.rows.start * self.f_up..tile.rows.end * self.f_up];
                act_nf.copy_from_slice(&self.activations(up_nf, n));
                for (i, row) in tile.rows.clone().enumerate() {
                    let (act, grad_act) = (&mut act_nf[i * self.f..][..self.f], &mut grad_act[i * self.f..][..self.f]);
                    let from_bias = bias.as_ref().map_or(A::zero(), |b| A::dot(&grad_nd[i * self.d..][..self.d], b));
                    grad_weight[i] = A::dot(act, grad_act) + from_bias;
                    let weight = self.routing_weight(weights_tk, row);
                    act.iter_mut().for_each(|v| *v = *v * weight);
                    grad_act.iter_mut().for_each(|v| *v = *v * weight);
                    let (up, grad_up) = (&up_nf[i * self.f_up..][..self.f_up], &mut grad_up[i * self.f_up..][..self.f_up]);
                    activate_backward(self.activation, up, grad_act, grad_up);
                }
                let up = slice_of::<A>(&self.up, e);
                product(
                    grad_x,
                    Matrix::new(grad_up, n, self.f_up, self.f_up),
                    Matrix::new(&up, self.f_up, self.d, self.d),
                );
            });
        rows
    }

    /// `[E, F * up_factor, D]`: `grad_up_e^T · x_e`.
    fn up_gradient<A: Real>(&self, rows: &RowGrads<A>, x_td: &[A]) -> FlexTensor {
        let mut grad = vec![A::zero(); self.groups.len() * self.f_up * self.d];
        let tiles = weight_tiles(&mut grad, &self.groups, self.f_up, self.d);
        tiles.into_par_iter().for_each(|tile| {
            let group = self.groups[tile.expert].clone();
            let columns = tile.out.len() / self.d;
            let grad_up = &rows.up_rf[group.start * self.f_up + tile.first..group.end * self.f_up];
            let grad_up = Matrix::new(grad_up, group.len(), columns, self.f_up);
            let x_nd = self.gather(x_td, group.clone(), 0..self.d);
            product(tile.out, grad_up.t(), Matrix::new(&x_nd, group.len(), self.d, self.d));
        });
        float_tensor(grad, self.up.shape(), self.up.dtype())
    }

    /// `[E, D, F]`: `grad_e^T · (weight * act)_e`.
    fn down_gradient<A: Real>(&self, rows: &RowGrads<A>, grad_td: &[A]) -> FlexTensor {
        let mut grad = vec![A::zero(); self.groups.len() * self.d * self.f];
        let tiles = weight_tiles(&mut grad, &self.groups, self.d, self.f);
        tiles.into_par_iter().for_each(|tile| {
            let group = self.groups[tile.expert].clone();
            let columns = tile.out.len() / self.f;
            let grad_nc = self.gather(grad_td, group.clone(), tile.first..tile.first + columns);
            let act = Matrix::new(&rows.act_rf[group.start * self.f..group.end * self.f], group.len(), self.f, self.f);
            product(tile.out, Matrix::new(&grad_nc, group.len(), columns, columns).t(), act);
        });
        float_tensor(grad, self.down.shape(), self.down.dtype())
    }

    /// `[E, width]`: sum over the rows of each expert.
    fn sum_rows<'a, A: Real>(&self, width: usize, row: impl Fn(usize) -> Cow<'a, [A]> + Sync) -> Vec<A> {
        let mut sums = vec![A::zero(); self.groups.len() * width];
        sums.par_chunks_mut(width.max(1)).zip(&self.groups).for_each(|(sum, group)| {
            for index in group.clone() {
                sum.iter_mut().zip(row(index).iter()).for_each(|(s, &v)| *s += v);
            }
        });
        sums
    }

    /// Activation `[n, F]` of `n` rows of the up product.
    fn activations<A: Real>(&self, up_nf: &[A], n: usize) -> Vec<A> {
        let mut act = vec![A::zero(); n * self.f];
        for i in 0..n {
            activate(
                self.activation,
                &up_nf[i * self.f_up..][..self.f_up],
                &mut act[i * self.f..][..self.f],
            );
        }
        act
    }

    /// Columns of the token of each sorted row: `[rows, columns]`.
    fn gather<A: Real>(&self, values_td: &[A], rows: Range<usize>, columns: Range<usize>) -> Vec<A> {
        let mut out = Vec::with_capacity(rows.len() * columns.len());
        for row in rows {
            out.extend_from_slice(&self.token(values_td, row)[columns.clone()]);
        }
        out
    }

    /// The `[D]` values of the token that sorted row `row` belongs to.
    fn token<'a, A>(&self, values_td: &'a [A], row: usize) -> &'a [A] {
        let token = self.slots_r[row] as usize / self.top_k;
        &values_td[token * self.d..(token + 1) * self.d]
    }

    fn routing_weight<A: Real>(&self, weights_tk: Option<&[A]>, row: usize) -> A {
        weights_tk.map_or(A::one(), |weights| weights[self.slots_r[row] as usize])
    }
}

/// Part `expert` of a tensor stacked over experts.
fn slice_of<A: Real>(stacked: &FlexTensor, expert: usize) -> Cow<'_, [A]> {
    let shape = stacked.shape();
    let size: usize = shape.iter().skip(1).product();
    wide_range(stacked, expert * size..(expert + 1) * size)
}

fn add_bias<A: Real>(rows: &mut [A], bias: Option<Cow<'_, [A]>>) {
    let Some(bias) = bias else { return };
    for row in rows.chunks_exact_mut(bias.len().max(1)) {
        row.iter_mut().zip(bias.iter()).for_each(|(v, &b)| *v += b);
    }
}

// Written by scripts/generate_decorator.py: do not edit. One line a method, 418 methods.
#![allow(clippy::all)]

use core::future::Future;
use core::ops::Range;

use burn_backend::ops::*;
use burn_backend::quantization::*;
use burn_backend::tensor::{BoolTensor, Device, FloatTensor, IntTensor, QuantizedTensor};
use burn_backend::*;

use super::{EpBackend, moe, routing};
use crate::MoeBackend;

impl<B: MoeBackend> FloatTensorOps<Self> for EpBackend<B> {
    fn float_from_data(data: TensorData, device: &Device<Self>) -> FloatTensor<Self> { B::float_from_data(data, device) }
    fn float_random(shape: Shape, distribution: Distribution, device: &Device<Self>, dtype: FloatDType) -> FloatTensor<Self> { B::float_random(shape, distribution, device, dtype) }
    fn float_zeros(shape: Shape, device: &Device<Self>, dtype: FloatDType) -> FloatTensor<Self> { B::float_zeros(shape, device, dtype) }
    fn float_ones(shape: Shape, device: &Device<Self>, dtype: FloatDType) -> FloatTensor<Self> { B::float_ones(shape, device, dtype) }
    fn float_full(shape: Shape, fill_value: Scalar, device: &Device<Self>, dtype: FloatDType) -> FloatTensor<Self> { B::float_full(shape, fill_value, device, dtype) }
    fn float_into_data(tensor: FloatTensor<Self>) -> impl Future<Output = Result<TensorData, ExecutionError>> + Send { crate::device::note_read(); B::float_into_data(tensor) }
    fn float_device(tensor: &FloatTensor<Self>) -> Device<Self> { B::float_device(tensor) }
    fn float_to_device(tensor: FloatTensor<Self>, device: &Device<Self>) -> FloatTensor<Self> { B::float_to_device(tensor, device) }
    fn float_into_int(tensor: FloatTensor<Self>, out_dtype: IntDType) -> IntTensor<Self> { B::float_into_int(tensor, out_dtype) }
    fn float_empty(shape: Shape, device: &Device<Self>, dtype: FloatDType) -> FloatTensor<Self> { B::float_empty(shape, device, dtype) }
    fn float_repeat_dim(tensor: FloatTensor<Self>, dim: usize, times: usize) -> FloatTensor<Self> { B::float_repeat_dim(tensor, dim, times) }
    fn float_add(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> { B::float_add(lhs, rhs) }
    fn float_add_scalar(lhs: FloatTensor<Self>, rhs: Scalar) -> FloatTensor<Self> { B::float_add_scalar(lhs, rhs) }
    fn float_clamp_min(tensor: FloatTensor<Self>, min: Scalar) -> FloatTensor<Self> { B::float_clamp_min(tensor, min) }
    fn float_clamp_max(tensor: FloatTensor<Self>, max: Scalar) -> FloatTensor<Self> { B::float_clamp_max(tensor, max) }
    fn float_clamp(tensor: FloatTensor<Self>, min: Scalar, max: Scalar) -> FloatTensor<Self> { B::float_clamp(tensor, min, max) }
    fn float_sub(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> { B::float_sub(lhs, rhs) }
    fn float_sub_scalar(lhs: FloatTensor<Self>, rhs: Scalar) -> FloatTensor<Self> { B::float_sub_scalar(lhs, rhs) }
    fn float_mul(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> { B::float_mul(lhs, rhs) }
    fn float_mul_scalar(lhs: FloatTensor<Self>, rhs: Scalar) -> FloatTensor<Self> { B::float_mul_scalar(lhs, rhs) }
    fn float_div(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> { B::float_div(lhs, rhs) }
    fn float_div_scalar(lhs: FloatTensor<Self>, rhs: Scalar) -> FloatTensor<Self> { B::float_div_scalar(lhs, rhs) }
    fn float_remainder(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> { B::float_remainder(lhs, rhs) }
    fn float_remainder_scalar(lhs: FloatTensor<Self>, rhs: Scalar) -> FloatTensor<Self> { B::float_remainder_scalar(lhs, rhs) }
    fn float_matmul(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> { routing::float_matmul::<B>(lhs, rhs) }
    fn float_cross(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>, dim: usize) -> FloatTensor<Self> { B::float_cross(lhs, rhs, dim) }
    fn float_neg(tensor: FloatTensor<Self>) -> FloatTensor<Self> { B::float_neg(tensor) }
    fn float_recip(tensor: FloatTensor<Self>) -> FloatTensor<Self> { B::float_recip(tensor) }
    fn float_transpose(tensor: FloatTensor<Self>) -> FloatTensor<Self> { B::float_transpose(tensor) }
    fn float_swap_dims(tensor: FloatTensor<Self>, dim1: usize, dim2: usize) -> FloatTensor<Self> { B::float_swap_dims(tensor, dim1, dim2) }
    fn float_permute(tensor: FloatTensor<Self>, axes: &[usize]) -> FloatTensor<Self> { B::float_permute(tensor, axes) }
    fn float_flip(tensor: FloatTensor<Self>, axes: &[usize]) -> FloatTensor<Self> { B::float_flip(tensor, axes) }
    fn float_reshape(tensor: FloatTensor<Self>, shape: Shape) -> FloatTensor<Self> { B::float_reshape(tensor, shape) }
    fn float_gather(dim: usize, tensor: FloatTensor<Self>, indices: IntTensor<Self>) -> FloatTensor<Self> { B::float_gather(dim, tensor, indices) }
    fn float_scatter_add(dim: usize, tensor: FloatTensor<Self>, indices: IntTensor<Self>, value: FloatTensor<Self>) -> FloatTensor<Self> { B::float_scatter_add(dim, tensor, indices, value) }
    fn float_scatter_nd(data: FloatTensor<Self>, indices: IntTensor<Self>, values: FloatTensor<Self>, reduction: burn_backend::tensor::IndexingUpdateOp) -> FloatTensor<Self> { B::float_scatter_nd(data, indices, values, reduction) }
    fn float_gather_nd(data: FloatTensor<Self>, indices: IntTensor<Self>) -> FloatTensor<Self> { B::float_gather_nd(data, indices) }
    fn float_select(tensor: FloatTensor<Self>, dim: usize, indices: IntTensor<Self>) -> FloatTensor<Self> { B::float_select(tensor, dim, indices) }
    fn float_select_add(tensor: FloatTensor<Self>, dim: usize, indices: IntTensor<Self>, value: FloatTensor<Self>) -> FloatTensor<Self> { B::float_select_add(tensor, dim, indices, value) }
    fn float_slice(tensor: FloatTensor<Self>, slices: &[Slice]) -> FloatTensor<Self> { B::float_slice(tensor, slices) }
    fn float_slice_assign(tensor: FloatTensor<Self>, slices: &[Slice], value: FloatTensor<Self>) -> FloatTensor<Self> { B::float_slice_assign(tensor, slices, value) }
    fn float_mask_where(tensor: FloatTensor<Self>, mask: BoolTensor<Self>, value: FloatTensor<Self>) -> FloatTensor<Self> { B::float_mask_where(tensor, mask, value) }
    fn float_mask_fill(tensor: FloatTensor<Self>, mask: BoolTensor<Self>, value: Scalar) -> FloatTensor<Self> { B::float_mask_fill(tensor, mask, value) }
    fn float_equal(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>, out_dtype: BoolDType) -> BoolTensor<Self> { B::float_equal(lhs, rhs, out_dtype) }
    fn float_not_equal(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>, out_dtype: BoolDType) -> BoolTensor<Self> { B::float_not_equal(lhs, rhs, out_dtype) }
    fn float_equal_elem(lhs: FloatTensor<Self>, rhs: Scalar, out_dtype: BoolDType) -> BoolTensor<Self> { B::float_equal_elem(lhs, rhs, out_dtype) }
    fn float_not_equal_elem(lhs: FloatTensor<Self>, rhs: Scalar, out_dtype: BoolDType) -> BoolTensor<Self> { B::float_not_equal_elem(lhs, rhs, out_dtype) }
    fn float_greater(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>, out_dtype: BoolDType) -> BoolTensor<Self> { B::float_greater(lhs, rhs, out_dtype) }
    fn float_greater_elem(lhs: FloatTensor<Self>, rhs: Scalar, out_dtype: BoolDType) -> BoolTensor<Self> { B::float_greater_elem(lhs, rhs, out_dtype) }
    fn float_greater_equal(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>, out_dtype: BoolDType) -> BoolTensor<Self> { B::float_greater_equal(lhs, rhs, out_dtype) }
    fn float_greater_equal_elem(lhs: FloatTensor<Self>, rhs: Scalar, out_dtype: BoolDType) -> BoolTensor<Self> { B::float_greater_equal_elem(lhs, rhs, out_dtype) }
    fn float_lower(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>, out_dtype: BoolDType) -> BoolTensor<Self> { B::float_lower(lhs, rhs, out_dtype) }
    fn float_lower_elem(lhs: FloatTensor<Self>, rhs: Scalar, out_dtype: BoolDType) -> BoolTensor<Self> { B::float_lower_elem(lhs, rhs, out_dtype) }
    fn float_lower_equal(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>, out_dtype: BoolDType) -> BoolTensor<Self> { B::float_lower_equal(lhs, rhs, out_dtype) }
    fn float_lower_equal_elem(lhs: FloatTensor<Self>, rhs: Scalar, out_dtype: BoolDType) -> BoolTensor<Self> { B::float_lower_equal_elem(lhs, rhs, out_dtype) }
    fn float_detach(tensor: FloatTensor<Self>) -> FloatTensor<Self> { B::float_detach(tensor) }
    fn float_set_require_grad(tensor: FloatTensor<Self>, require_grad: bool) -> FloatTensor<Self> { B::float_set_require_grad(tensor, require_grad) }
    fn float_is_require_grad(tensor: &FloatTensor<Self>) -> bool { B::float_is_require_grad(tensor) }
    fn float_sum(tensor: FloatTensor<Self>) -> FloatTensor<Self> { B::float_sum(tensor) }
    fn float_sum_dim(tensor: FloatTensor<Self>, dim: usize) -> FloatTensor<Self> { B::float_sum_dim(tensor, dim) }
    fn float_prod(tensor: FloatTensor<Self>) -> FloatTensor<Self> { B::float_prod(tensor) }
    fn float_prod_dim(tensor: FloatTensor<Self>, dim: usize) -> FloatTensor<Self> { B::float_prod_dim(tensor, dim) }
    fn float_mean(tensor: FloatTensor<Self>) -> FloatTensor<Self> { B::float_mean(tensor) }
    fn float_mean_dim(tensor: FloatTensor<Self>, dim: usize) -> FloatTensor<Self> { B::float_mean_dim(tensor, dim) }
    fn float_cumsum(tensor: FloatTensor<Self>, dim: usize) -> FloatTensor<Self> { B::float_cumsum(tensor, dim) }
    fn float_cumprod(tensor: FloatTensor<Self>, dim: usize) -> FloatTensor<Self> { B::float_cumprod(tensor, dim) }
    fn float_cummin(tensor: FloatTensor<Self>, dim: usize) -> FloatTensor<Self> { B::float_cummin(tensor, dim) }
    fn float_cummax(tensor: FloatTensor<Self>, dim: usize) -> FloatTensor<Self> { B::float_cummax(tensor, dim) }
    fn float_cast(tensor: FloatTensor<Self>, dtype: FloatDType) -> FloatTensor<Self> { B::float_cast(tensor, dtype) }
    fn float_exp(tensor: FloatTensor<Self>) -> FloatTensor<Self> { B::float_exp(tensor) }
    fn float_log(tensor: FloatTensor<Self>) -> FloatTensor<Self> { B::float_log(tensor) }
    fn float_log1p(tensor: FloatTensor<Self>) -> FloatTensor<Self> { B::float_log1p(tensor) }
    fn float_powf(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> { B::float_powf(lhs, rhs) }
    fn float_powi(lhs: FloatTensor<Self>, rhs: IntTensor<Self>) -> FloatTensor<Self> { B::float_powi(lhs, rhs) }
    fn float_powi_scalar(lhs: FloatTensor<Self>, rhs: Scalar) -> FloatTensor<Self> { B::float_powi_scalar(lhs, rhs) }
    fn float_powi_scalar_impl(lhs: FloatTensor<Self>, rhs: Scalar) -> FloatTensor<Self> { B::float_powi_scalar_impl(lhs, rhs) }
    fn float_powf_scalar(tensor: FloatTensor<Self>, value: Scalar) -> FloatTensor<Self> { B::float_powf_scalar(tensor, value) }
    fn float_powf_scalar_impl(tensor: FloatTensor<Self>, value: Scalar) -> FloatTensor<Self> { B::float_powf_scalar_impl(tensor, value) }
    fn float_sqrt(tensor: FloatTensor<Self>) -> FloatTensor<Self> { B::float_sqrt(tensor) }
    fn float_abs(tensor: FloatTensor<Self>) -> FloatTensor<Self> { B::float_abs(tensor) }
    fn float_cos(tensor: FloatTensor<Self>) -> FloatTensor<Self> { B::float_cos(tensor) }
    fn float_sin(tensor: FloatTensor<Self>) -> FloatTensor<Self> { B::float_sin(tensor) }
    fn float_tan(tensor: FloatTensor<Self>) -> FloatTensor<Self> { B::float_tan(tensor) }
    fn float_cosh(tensor: FloatTensor<Self>) -> FloatTensor<Self> { B::float_cosh(tensor) }
    fn float_sinh(tensor: FloatTensor<Self>) -> FloatTensor<Self> { B::float_sinh(tensor) }
    fn float_tanh(tensor: FloatTensor<Self>) -> FloatTensor<Self> { B::float_tanh(tensor) }
    fn float_acos(tensor: FloatTensor<Self>) -> FloatTensor<Self> { B::float_acos(tensor) }
    fn float_acosh(tensor: FloatTensor<Self>) -> FloatTensor<Self> { B::float_acosh(tensor) }
    fn float_asin(tensor: FloatTensor<Self>) -> FloatTensor<Self> { B::float_asin(tensor) }
    fn float_asinh(tensor: FloatTensor<Self>) -> FloatTensor<Self> { B::float_asinh(tensor) }
    fn float_atan(tensor: FloatTensor<Self>) -> FloatTensor<Self> { B::float_atan(tensor) }
    fn float_atanh(tensor: FloatTensor<Self>) -> FloatTensor<Self> { B::float_atanh(tensor) }
    fn float_atan2(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> { B::float_atan2(lhs, rhs) }
    fn float_round(tensor: FloatTensor<Self>) -> FloatTensor<Self> { B::float_round(tensor) }
    fn float_floor(tensor: FloatTensor<Self>) -> FloatTensor<Self> { B::float_floor(tensor) }
    fn float_ceil(tensor: FloatTensor<Self>) -> FloatTensor<Self> { B::float_ceil(tensor) }
    fn float_trunc(tensor: FloatTensor<Self>) -> FloatTensor<Self> { B::float_trunc(tensor) }
    fn float_erf(tensor: FloatTensor<Self>) -> FloatTensor<Self> { B::float_erf(tensor) }
    fn float_cat(tensors: Vec<FloatTensor<Self>>, dim: usize) -> FloatTensor<Self> { B::float_cat(tensors, dim) }
    fn float_argmax(tensor: FloatTensor<Self>, dim: usize, out_dtype: IntDType) -> IntTensor<Self> { B::float_argmax(tensor, dim, out_dtype) }
    fn float_argtopk(tensor: FloatTensor<Self>, dim: usize, k: usize, out_dtype: IntDType) -> IntTensor<Self> { B::float_argtopk(tensor, dim, k, out_dtype) }
    fn float_topk(tensor: FloatTensor<Self>, dim: usize, k: usize) -> FloatTensor<Self> { B::float_topk(tensor, dim, k) }
    fn float_argmin(tensor: FloatTensor<Self>, dim: usize, out_dtype: IntDType) -> IntTensor<Self> { B::float_argmin(tensor, dim, out_dtype) }
    fn float_max(tensor: FloatTensor<Self>) -> FloatTensor<Self> { B::float_max(tensor) }
    fn float_max_dim(tensor: FloatTensor<Self>, dim: usize) -> FloatTensor<Self> { B::float_max_dim(tensor, dim) }
    fn float_max_dim_with_indices(tensor: FloatTensor<Self>, dim: usize, indices_dtype: IntDType) -> (FloatTensor<Self>, IntTensor<Self>) { B::float_max_dim_with_indices(tensor, dim, indices_dtype) }
    fn float_min(tensor: FloatTensor<Self>) -> FloatTensor<Self> { B::float_min(tensor) }
    fn float_min_dim(tensor: FloatTensor<Self>, dim: usize) -> FloatTensor<Self> { B::float_min_dim(tensor, dim) }
    fn float_min_dim_with_indices(tensor: FloatTensor<Self>, dim: usize, indices_dtype: IntDType) -> (FloatTensor<Self>, IntTensor<Self>) { B::float_min_dim_with_indices(tensor, dim, indices_dtype) }
    fn float_max_abs(tensor: FloatTensor<Self>) -> FloatTensor<Self> { B::float_max_abs(tensor) }
    fn float_max_abs_dim(tensor: FloatTensor<Self>, dim: usize) -> FloatTensor<Self> { B::float_max_abs_dim(tensor, dim) }
    fn float_any(tensor: FloatTensor<Self>, out_dtype: BoolDType) -> BoolTensor<Self> { B::float_any(tensor, out_dtype) }
    fn float_any_dim(tensor: FloatTensor<Self>, dim: usize, out_dtype: BoolDType) -> BoolTensor<Self> { B::float_any_dim(tensor, dim, out_dtype) }
    fn float_all(tensor: FloatTensor<Self>, out_dtype: BoolDType) -> BoolTensor<Self> { B::float_all(tensor, out_dtype) }
    fn float_all_dim(tensor: FloatTensor<Self>, dim: usize, out_dtype: BoolDType) -> BoolTensor<Self> { B::float_all_dim(tensor, dim, out_dtype) }
    fn float_sign(tensor: FloatTensor<Self>) -> FloatTensor<Self> { B::float_sign(tensor) }
    fn float_expand(tensor: FloatTensor<Self>, shape: Shape) -> FloatTensor<Self> { B::float_expand(tensor, shape) }
    fn float_sort(tensor: FloatTensor<Self>, dim: usize, descending: bool) -> FloatTensor<Self> { B::float_sort(tensor, dim, descending) }
    fn float_sort_with_indices(tensor: FloatTensor<Self>, dim: usize, descending: bool, indices_dtype: IntDType) -> (FloatTensor<Self>, IntTensor<Self>) { B::float_sort_with_indices(tensor, dim, descending, indices_dtype) }
    fn float_argsort(tensor: FloatTensor<Self>, dim: usize, descending: bool, out_dtype: IntDType) -> IntTensor<Self> { B::float_argsort(tensor, dim, descending, out_dtype) }
    fn float_grid_sample_2d(tensor: FloatTensor<Self>, grid: FloatTensor<Self>, options: GridSampleOptions) -> FloatTensor<Self> { B::float_grid_sample_2d(tensor, grid, options) }
    fn float_unfold(tensor: FloatTensor<Self>, dim: usize, size: usize, step: usize) -> FloatTensor<Self> { B::float_unfold(tensor, dim, size, step) }
    fn float_is_nan(tensor: FloatTensor<Self>, out_dtype: BoolDType) -> BoolTensor<Self> { B::float_is_nan(tensor, out_dtype) }
    fn float_is_inf(tensor: FloatTensor<Self>, out_dtype: BoolDType) -> BoolTensor<Self> { B::float_is_inf(tensor, out_dtype) }
}

impl<B: MoeBackend> IntTensorOps<Self> for EpBackend<B> {
    fn int_empty(shape: Shape, device: &Device<Self>, dtype: IntDType) -> IntTensor<Self> { B::int_empty(shape, device, dtype) }
    fn int_into_data(tensor: IntTensor<Self>) -> impl Future<Output = Result<TensorData, ExecutionError>> + Send { crate::device::note_read(); B::int_into_data(tensor) }
    fn int_from_data(data: TensorData, device: &Device<Self>) -> IntTensor<Self> { B::int_from_data(data, device) }
    fn int_device(tensor: &IntTensor<Self>) -> Device<Self> { B::int_device(tensor) }
    fn int_to_device(tensor: IntTensor<Self>, device: &Device<Self>) -> IntTensor<Self> { B::int_to_device(tensor, device) }
    fn int_reshape(tensor: IntTensor<Self>, shape: Shape) -> IntTensor<Self> { B::int_reshape(tensor, shape) }
    fn int_slice(tensor: IntTensor<Self>, slices: &[Slice]) -> IntTensor<Self> { B::int_slice(tensor, slices) }
    fn int_slice_assign(tensor: IntTensor<Self>, slices: &[Slice], value: IntTensor<Self>) -> IntTensor<Self> { B::int_slice_assign(tensor, slices, value) }
    fn int_into_float(tensor: IntTensor<Self>, out_dtype: FloatDType) -> FloatTensor<Self> { B::int_into_float(tensor, out_dtype) }
    fn int_mask_where(tensor: IntTensor<Self>, mask: BoolTensor<Self>, value: IntTensor<Self>) -> IntTensor<Self> { B::int_mask_where(tensor, mask, value) }
    fn int_mask_fill(tensor: IntTensor<Self>, mask: BoolTensor<Self>, value: Scalar) -> IntTensor<Self> { B::int_mask_fill(tensor, mask, value) }
    fn int_gather(dim: usize, tensor: IntTensor<Self>, indices: IntTensor<Self>) -> IntTensor<Self> { B::int_gather(dim, tensor, indices) }
    fn int_scatter_add(dim: usize, tensor: IntTensor<Self>, indices: IntTensor<Self>, value: IntTensor<Self>) -> IntTensor<Self> { B::int_scatter_add(dim, tensor, indices, value) }
    fn int_scatter_nd(data: IntTensor<Self>, indices: IntTensor<Self>, values: IntTensor<Self>, reduction: burn_backend::tensor::IndexingUpdateOp) -> IntTensor<Self> { B::int_scatter_nd(data, indices, values, reduction) }
    fn int_gather_nd(data: IntTensor<Self>, indices: IntTensor<Self>) -> IntTensor<Self> { B::int_gather_nd(data, indices) }
    fn int_select(tensor: IntTensor<Self>, dim: usize, indices: IntTensor<Self>) -> IntTensor<Self> { B::int_select(tensor, dim, indices) }
    fn int_select_add(tensor: IntTensor<Self>, dim: usize, indices: IntTensor<Self>, value: IntTensor<Self>) -> IntTensor<Self> { B::int_select_add(tensor, dim, indices, value) }
    fn int_repeat_dim(tensor: IntTensor<Self>, dim: usize, times: usize) -> IntTensor<Self> { B::int_repeat_dim(tensor, dim, times) }
    fn int_cat(tensors: Vec<IntTensor<Self>>, dim: usize) -> IntTensor<Self> { B::int_cat(tensors, dim) }
    fn int_equal(lhs: IntTensor<Self>, rhs: IntTensor<Self>, out_dtype: BoolDType) -> BoolTensor<Self> { B::int_equal(lhs, rhs, out_dtype) }
    fn int_not_equal(lhs: IntTensor<Self>, rhs: IntTensor<Self>, out_dtype: BoolDType) -> BoolTensor<Self> { B::int_not_equal(lhs, rhs, out_dtype) }
    fn int_equal_elem(lhs: IntTensor<Self>, rhs: Scalar, out_dtype: BoolDType) -> BoolTensor<Self> { B::int_equal_elem(lhs, rhs, out_dtype) }
    fn int_not_equal_elem(lhs: IntTensor<Self>, rhs: Scalar, out_dtype: BoolDType) -> BoolTensor<Self> { B::int_not_equal_elem(lhs, rhs, out_dtype) }
    fn int_greater(lhs: IntTensor<Self>, rhs: IntTensor<Self>, out_dtype: BoolDType) -> BoolTensor<Self> { B::int_greater(lhs, rhs, out_dtype) }
    fn int_greater_elem(lhs: IntTensor<Self>, rhs: Scalar, out_dtype: BoolDType) -> BoolTensor<Self> { B::int_greater_elem(lhs, rhs, out_dtype) }
    fn int_greater_equal(lhs: IntTensor<Self>, rhs: IntTensor<Self>, out_dtype: BoolDType) -> BoolTensor<Self> { B::int_greater_equal(lhs, rhs, out_dtype) }
    fn int_greater_equal_elem(lhs: IntTensor<Self>, rhs: Scalar, out_dtype: BoolDType) -> BoolTensor<Self> { B::int_greater_equal_elem(lhs, rhs, out_dtype) }
    fn int_lower(lhs: IntTensor<Self>, rhs: IntTensor<Self>, out_dtype: BoolDType) -> BoolTensor<Self> { B::int_lower(lhs, rhs, out_dtype) }
    fn int_lower_elem(lhs: IntTensor<Self>, rhs: Scalar, out_dtype: BoolDType) -> BoolTensor<Self> { B::int_lower_elem(lhs, rhs, out_dtype) }
    fn int_lower_equal(lhs: IntTensor<Self>, rhs: IntTensor<Self>, out_dtype: BoolDType) -> BoolTensor<Self> { B::int_lower_equal(lhs, rhs, out_dtype) }
    fn int_lower_equal_elem(lhs: IntTensor<Self>, rhs: Scalar, out_dtype: BoolDType) -> BoolTensor<Self> { B::int_lower_equal_elem(lhs, rhs, out_dtype) }
    fn int_add(lhs: IntTensor<Self>, rhs: IntTensor<Self>) -> IntTensor<Self> { B::int_add(lhs, rhs) }
    fn int_add_scalar(lhs: IntTensor<Self>, rhs: Scalar) -> IntTensor<Self> { B::int_add_scalar(lhs, rhs) }
    fn int_powi(lhs: IntTensor<Self>, rhs: IntTensor<Self>) -> IntTensor<Self> { B::int_powi(lhs, rhs) }
    fn int_powi_scalar(lhs: IntTensor<Self>, rhs: Scalar) -> IntTensor<Self> { B::int_powi_scalar(lhs, rhs) }
    fn int_powi_scalar_impl(lhs: IntTensor<Self>, rhs: Scalar) -> IntTensor<Self> { B::int_powi_scalar_impl(lhs, rhs) }
    fn int_clamp_min(tensor: IntTensor<Self>, min: Scalar) -> IntTensor<Self> { B::int_clamp_min(tensor, min) }
    fn int_clamp_max(tensor: IntTensor<Self>, max: Scalar) -> IntTensor<Self> { B::int_clamp_max(tensor, max) }
    fn int_clamp(tensor: IntTensor<Self>, min: Scalar, max: Scalar) -> IntTensor<Self> { B::int_clamp(tensor, min, max) }
    fn int_sub(lhs: IntTensor<Self>, rhs: IntTensor<Self>) -> IntTensor<Self> { B::int_sub(lhs, rhs) }
    fn int_sub_scalar(lhs: IntTensor<Self>, rhs: Scalar) -> IntTensor<Self> { B::int_sub_scalar(lhs, rhs) }
    fn int_mul(lhs: IntTensor<Self>, rhs: IntTensor<Self>) -> IntTensor<Self> { B::int_mul(lhs, rhs) }
    fn int_mul_scalar(lhs: IntTensor<Self>, rhs: Scalar) -> IntTensor<Self> { B::int_mul_scalar(lhs, rhs) }
    fn int_div(lhs: IntTensor<Self>, rhs: IntTensor<Self>) -> IntTensor<Self> { B::int_div(lhs, rhs) }
    fn int_div_scalar(lhs: IntTensor<Self>, rhs: Scalar) -> IntTensor<Self> { B::int_div_scalar(lhs, rhs) }
    fn int_remainder(lhs: IntTensor<Self>, rhs: IntTensor<Self>) -> IntTensor<Self> { B::int_remainder(lhs, rhs) }
    fn int_remainder_scalar(lhs: IntTensor<Self>, rhs: Scalar) -> IntTensor<Self> { B::int_remainder_scalar(lhs, rhs) }
    fn int_matmul(lhs: IntTensor<Self>, rhs: IntTensor<Self>) -> IntTensor<Self> { B::int_matmul(lhs, rhs) }
    fn int_neg(tensor: IntTensor<Self>) -> IntTensor<Self> { B::int_neg(tensor) }
    fn int_zeros(shape: Shape, device: &Device<Self>, dtype: IntDType) -> IntTensor<Self> { B::int_zeros(shape, device, dtype) }
    fn int_ones(shape: Shape, device: &Device<Self>, dtype: IntDType) -> IntTensor<Self> { B::int_ones(shape, device, dtype) }
    fn int_full(shape: Shape, fill_value: Scalar, device: &Device<Self>, dtype: IntDType) -> IntTensor<Self> { B::int_full(shape, fill_value, device, dtype) }
    fn int_sum(tensor: IntTensor<Self>) -> IntTensor<Self> { B::int_sum(tensor) }
    fn int_sum_dim(tensor: IntTensor<Self>, dim: usize) -> IntTensor<Self> { B::int_sum_dim(tensor, dim) }
    fn int_prod(tensor: IntTensor<Self>) -> IntTensor<Self> { B::int_prod(tensor) }
    fn int_prod_dim(tensor: IntTensor<Self>, dim: usize) -> IntTensor<Self> { B::int_prod_dim(tensor, dim) }
    fn int_mean(tensor: IntTensor<Self>) -> IntTensor<Self> { B::int_mean(tensor) }
    fn int_mean_dim(tensor: IntTensor<Self>, dim: usize) -> IntTensor<Self> { B::int_mean_dim(tensor, dim) }
    fn int_cumsum(tensor: IntTensor<Self>, dim: usize) -> IntTensor<Self> { B::int_cumsum(tensor, dim) }
    fn int_cumprod(tensor: IntTensor<Self>, dim: usize) -> IntTensor<Self> { B::int_cumprod(tensor, dim) }
    fn int_cummin(tensor: IntTensor<Self>, dim: usize) -> IntTensor<Self> { B::int_cummin(tensor, dim) }
    fn int_cummax(tensor: IntTensor<Self>, dim: usize) -> IntTensor<Self> { B::int_cummax(tensor, dim) }
    fn int_argmax(tensor: IntTensor<Self>, dim: usize) -> IntTensor<Self> { B::int_argmax(tensor, dim) }
    fn int_argtopk(tensor: IntTensor<Self>, dim: usize, k: usize) -> IntTensor<Self> { B::int_argtopk(tensor, dim, k) }
    fn int_topk(tensor: IntTensor<Self>, dim: usize, k: usize) -> IntTensor<Self> { B::int_topk(tensor, dim, k) }
    fn int_argmin(tensor: IntTensor<Self>, dim: usize) -> IntTensor<Self> { B::int_argmin(tensor, dim) }
    fn int_max(tensor: IntTensor<Self>) -> IntTensor<Self> { B::int_max(tensor) }
    fn int_max_dim(tensor: IntTensor<Self>, dim: usize) -> IntTensor<Self> { B::int_max_dim(tensor, dim) }
    fn int_max_dim_with_indices(tensor: IntTensor<Self>, dim: usize) -> (IntTensor<Self>, IntTensor<Self>) { B::int_max_dim_with_indices(tensor, dim) }
    fn int_max_abs(tensor: IntTensor<Self>) -> IntTensor<Self> { B::int_max_abs(tensor) }
    fn int_max_abs_dim(tensor: IntTensor<Self>, dim: usize) -> IntTensor<Self> { B::int_max_abs_dim(tensor, dim) }
    fn int_min(tensor: IntTensor<Self>) -> IntTensor<Self> { B::int_min(tensor) }
    fn int_min_dim(tensor: IntTensor<Self>, dim: usize) -> IntTensor<Self> { B::int_min_dim(tensor, dim) }
    fn int_min_dim_with_indices(tensor: IntTensor<Self>, dim: usize) -> (IntTensor<Self>, IntTensor<Self>) { B::int_min_dim_with_indices(tensor, dim) }
    fn int_abs(tensor: IntTensor<Self>) -> IntTensor<Self> { B::int_abs(tensor) }
    fn int_transpose(tensor: IntTensor<Self>) -> IntTensor<Self> { B::int_transpose(tensor) }
    fn int_swap_dims(tensor: IntTensor<Self>, dim1: usize, dim2: usize) -> IntTensor<Self> { B::int_swap_dims(tensor, dim1, dim2) }
    fn int_permute(tensor: IntTensor<Self>, axes: &[usize]) -> IntTensor<Self> { B::int_permute(tensor, axes) }
    fn int_flip(tensor: IntTensor<Self>, axes: &[usize]) -> IntTensor<Self> { B::int_flip(tensor, axes) }
    fn int_random(shape: Shape, distribution: Distribution, device: &Device<Self>, dtype: IntDType) -> IntTensor<Self> { B::int_random(shape, distribution, device, dtype) }
    fn int_arange_step(range: Range<i64>, step: usize, device: &Device<Self>, dtype: IntDType) -> IntTensor<Self> { B::int_arange_step(range, step, device, dtype) }
    fn int_arange(range: Range<i64>, device: &Device<Self>, dtype: IntDType) -> IntTensor<Self> { B::int_arange(range, device, dtype) }
    fn int_any(tensor: IntTensor<Self>, out_dtype: BoolDType) -> BoolTensor<Self> { B::int_any(tensor, out_dtype) }
    fn int_any_dim(tensor: IntTensor<Self>, dim: usize, out_dtype: BoolDType) -> BoolTensor<Self> { B::int_any_dim(tensor, dim, out_dtype) }
    fn int_all(tensor: IntTensor<Self>, out_dtype: BoolDType) -> BoolTensor<Self> { B::int_all(tensor, out_dtype) }
    fn int_all_dim(tensor: IntTensor<Self>, dim: usize, out_dtype: BoolDType) -> BoolTensor<Self> { B::int_all_dim(tensor, dim, out_dtype) }
    fn int_sign(tensor: IntTensor<Self>) -> IntTensor<Self> { B::int_sign(tensor) }
    fn int_expand(tensor: IntTensor<Self>, shape: Shape) -> IntTensor<Self> { B::int_expand(tensor, shape) }
    fn int_sort(tensor: IntTensor<Self>, dim: usize, descending: bool) -> IntTensor<Self> { B::int_sort(tensor, dim, descending) }
    fn int_sort_with_indices(tensor: IntTensor<Self>, dim: usize, descending: bool) -> (IntTensor<Self>, IntTensor<Self>) { B::int_sort_with_indices(tensor, dim, descending) }
    fn int_argsort(tensor: IntTensor<Self>, dim: usize, descending: bool) -> IntTensor<Self> { B::int_argsort(tensor, dim, descending) }
    fn bitwise_and(lhs: IntTensor<Self>, rhs: IntTensor<Self>) -> IntTensor<Self> { B::bitwise_and(lhs, rhs) }
    fn bitwise_and_scalar(lhs: IntTensor<Self>, rhs: Scalar) -> IntTensor<Self> { B::bitwise_and_scalar(lhs, rhs) }
    fn bitwise_or(lhs: IntTensor<Self>, rhs: IntTensor<Self>) -> IntTensor<Self> { B::bitwise_or(lhs, rhs) }
    fn bitwise_or_scalar(lhs: IntTensor<Self>, rhs: Scalar) -> IntTensor<Self> { B::bitwise_or_scalar(lhs, rhs) }
    fn bitwise_xor(lhs: IntTensor<Self>, rhs: IntTensor<Self>) -> IntTensor<Self> { B::bitwise_xor(lhs, rhs) }
    fn bitwise_xor_scalar(lhs: IntTensor<Self>, rhs: Scalar) -> IntTensor<Self> { B::bitwise_xor_scalar(lhs, rhs) }
    fn bitwise_not(tensor: IntTensor<Self>) -> IntTensor<Self> { B::bitwise_not(tensor) }
    fn bitwise_left_shift(lhs: IntTensor<Self>, rhs: IntTensor<Self>) -> IntTensor<Self> { B::bitwise_left_shift(lhs, rhs) }
    fn bitwise_left_shift_scalar(lhs: IntTensor<Self>, rhs: Scalar) -> IntTensor<Self> { B::bitwise_left_shift_scalar(lhs, rhs) }
    fn bitwise_right_shift(lhs: IntTensor<Self>, rhs: IntTensor<Self>) -> IntTensor<Self> { B::bitwise_right_shift(lhs, rhs) }
    fn bitwise_right_shift_scalar(lhs: IntTensor<Self>, rhs: Scalar) -> IntTensor<Self> { B::bitwise_right_shift_scalar(lhs, rhs) }
    fn int_cast(tensor: IntTensor<Self>, dtype: IntDType) -> IntTensor<Self> { B::int_cast(tensor, dtype) }
    fn int_unfold(tensor: IntTensor<Self>, dim: usize, size: usize, step: usize) -> IntTensor<Self> { B::int_unfold(tensor, dim, size, step) }
}

impl<B: MoeBackend> BoolTensorOps<Self> for EpBackend<B> {
    fn bool_empty(shape: Shape, device: &Device<Self>, dtype: BoolDType) -> BoolTensor<Self> { B::bool_empty(shape, device, dtype) }
    fn bool_zeros(shape: Shape, device: &Device<Self>, dtype: BoolDType) -> BoolTensor<Self> { B::bool_zeros(shape, device, dtype) }
    fn bool_ones(shape: Shape, device: &Device<Self>, dtype: BoolDType) -> BoolTensor<Self> { B::bool_ones(shape, device, dtype) }
    fn bool_into_data(tensor: BoolTensor<Self>) -> impl Future<Output = Result<TensorData, ExecutionError>> + Send { crate::device::note_read(); B::bool_into_data(tensor) }
    fn bool_from_data(data: TensorData, device: &Device<Self>) -> BoolTensor<Self> { B::bool_from_data(data, device) }
    fn bool_into_int(tensor: BoolTensor<Self>, out_dtype: IntDType) -> IntTensor<Self> { B::bool_into_int(tensor, out_dtype) }
    fn bool_into_float(tensor: BoolTensor<Self>, out_dtype: FloatDType) -> FloatTensor<Self> { B::bool_into_float(tensor, out_dtype) }
    fn bool_device(tensor: &BoolTensor<Self>) -> Device<Self> { B::bool_device(tensor) }
    fn bool_to_device(tensor: BoolTensor<Self>, device: &Device<Self>) -> BoolTensor<Self> { B::bool_to_device(tensor, device) }
    fn bool_reshape(tensor: BoolTensor<Self>, shape: Shape) -> BoolTensor<Self> { B::bool_reshape(tensor, shape) }
    fn bool_slice(tensor: BoolTensor<Self>, slices: &[Slice]) -> BoolTensor<Self> { B::bool_slice(tensor, slices) }
    fn bool_slice_assign(tensor: BoolTensor<Self>, slices: &[Slice], value: BoolTensor<Self>) -> BoolTensor<Self> { B::bool_slice_assign(tensor, slices, value) }
    fn bool_mask_where(tensor: BoolTensor<Self>, mask: BoolTensor<Self>, value: BoolTensor<Self>) -> BoolTensor<Self> { B::bool_mask_where(tensor, mask, value) }
    fn bool_mask_fill(tensor: BoolTensor<Self>, mask: BoolTensor<Self>, value: Scalar) -> BoolTensor<Self> { B::bool_mask_fill(tensor, mask, value) }
    fn bool_gather(dim: usize, tensor: BoolTensor<Self>, indices: IntTensor<Self>) -> BoolTensor<Self> { B::bool_gather(dim, tensor, indices) }
    fn bool_scatter_or(dim: usize, tensor: BoolTensor<Self>, indices: IntTensor<Self>, value: BoolTensor<Self>) -> BoolTensor<Self> { B::bool_scatter_or(dim, tensor, indices, value) }
    fn bool_select(tensor: BoolTensor<Self>, dim: usize, indices: IntTensor<Self>) -> BoolTensor<Self> { B::bool_select(tensor, dim, indices) }
    fn bool_select_or(tensor: BoolTensor<Self>, dim: usize, indices: IntTensor<Self>, value: BoolTensor<Self>) -> BoolTensor<Self> { B::bool_select_or(tensor, dim, indices, value) }
    fn bool_repeat_dim(tensor: BoolTensor<Self>, dim: usize, times: usize) -> BoolTensor<Self> { B::bool_repeat_dim(tensor, dim, times) }
    fn bool_cat(tensors: Vec<BoolTensor<Self>>, dim: usize) -> BoolTensor<Self> { B::bool_cat(tensors, dim) }
    fn bool_equal(lhs: BoolTensor<Self>, rhs: BoolTensor<Self>) -> BoolTensor<Self> { B::bool_equal(lhs, rhs) }
    fn bool_not_equal(lhs: BoolTensor<Self>, rhs: BoolTensor<Self>) -> BoolTensor<Self> { B::bool_not_equal(lhs, rhs) }
    fn bool_equal_elem(lhs: BoolTensor<Self>, rhs: Scalar) -> BoolTensor<Self> { B::bool_equal_elem(lhs, rhs) }
    fn bool_not_equal_elem(lhs: BoolTensor<Self>, rhs: Scalar) -> BoolTensor<Self> { B::bool_not_equal_elem(lhs, rhs) }
    fn bool_not(tensor: BoolTensor<Self>) -> BoolTensor<Self> { B::bool_not(tensor) }
    fn bool_and(lhs: BoolTensor<Self>, rhs: BoolTensor<Self>) -> BoolTensor<Self> { B::bool_and(lhs, rhs) }
    fn bool_or(lhs: BoolTensor<Self>, rhs: BoolTensor<Self>) -> BoolTensor<Self> { B::bool_or(lhs, rhs) }
    fn bool_xor(lhs: BoolTensor<Self>, rhs: BoolTensor<Self>) -> BoolTensor<Self> { B::bool_xor(lhs, rhs) }
    fn bool_transpose(tensor: BoolTensor<Self>) -> BoolTensor<Self> { B::bool_transpose(tensor) }
    fn bool_swap_dims(tensor: BoolTensor<Self>, dim1: usize, dim2: usize) -> BoolTensor<Self> { B::bool_swap_dims(tensor, dim1, dim2) }
    fn bool_permute(tensor: BoolTensor<Self>, axes: &[usize]) -> BoolTensor<Self> { B::bool_permute(tensor, axes) }
    fn bool_flip(tensor: BoolTensor<Self>, axes: &[usize]) -> BoolTensor<Self> { B::bool_flip(tensor, axes) }
    fn bool_any(tensor: BoolTensor<Self>) -> BoolTensor<Self> { B::bool_any(tensor) }
    fn bool_any_dim(tensor: BoolTensor<Self>, dim: usize) -> BoolTensor<Self> { B::bool_any_dim(tensor, dim) }
    fn bool_all(tensor: BoolTensor<Self>) -> BoolTensor<Self> { B::bool_all(tensor) }
    fn bool_all_dim(tensor: BoolTensor<Self>, dim: usize) -> BoolTensor<Self> { B::bool_all_dim(tensor, dim) }
    fn bool_argwhere(tensor: BoolTensor<Self>, out_dtype: IntDType) -> impl Future<Output = IntTensor<Self>> + 'static + Send { B::bool_argwhere(tensor, out_dtype) }
    fn bool_expand(tensor: BoolTensor<Self>, shape: Shape) -> BoolTensor<Self> { B::bool_expand(tensor, shape) }
    fn bool_unfold(tensor: BoolTensor<Self>, dim: usize, size: usize, step: usize) -> BoolTensor<Self> { B::bool_unfold(tensor, dim, size, step) }
}

impl<B: MoeBackend> ModuleOps<Self> for EpBackend<B> {
    fn embedding(weights: FloatTensor<Self>, indices: IntTensor<Self>) -> FloatTensor<Self> { routing::embedding::<B>(weights, indices) }
    fn embedding_backward(weights: FloatTensor<Self>, output_grad: FloatTensor<Self>, indices: IntTensor<Self>) -> FloatTensor<Self> { B::embedding_backward(weights, output_grad, indices) }
    fn linear(x: FloatTensor<Self>, weight: FloatTensor<Self>, bias: Option<FloatTensor<Self>>) -> FloatTensor<Self> { routing::linear::<B>(x, weight, bias) }
    fn linear_x_backward(weight: FloatTensor<Self>, output_grad: FloatTensor<Self>) -> FloatTensor<Self> { B::linear_x_backward(weight, output_grad) }
    fn linear_weight_backward(x: FloatTensor<Self>, output_grad: FloatTensor<Self>) -> FloatTensor<Self> { B::linear_weight_backward(x, output_grad) }
    fn linear_bias_backward(output_grad: FloatTensor<Self>) -> FloatTensor<Self> { B::linear_bias_backward(output_grad) }
    fn conv1d(x: FloatTensor<Self>, weight: FloatTensor<Self>, bias: Option<FloatTensor<Self>>, options: ConvOptions<1>) -> FloatTensor<Self> { B::conv1d(x, weight, bias, options) }
    fn conv1d_x_backward(x: FloatTensor<Self>, weight: FloatTensor<Self>, output_grad: FloatTensor<Self>, options: ConvOptions<1>) -> FloatTensor<Self> { B::conv1d_x_backward(x, weight, output_grad, options) }
    fn conv1d_weight_backward(x: FloatTensor<Self>, weight: FloatTensor<Self>, output_grad: FloatTensor<Self>, options: ConvOptions<1>) -> FloatTensor<Self> { B::conv1d_weight_backward(x, weight, output_grad, options) }
    fn conv1d_bias_backward(x: FloatTensor<Self>, bias: FloatTensor<Self>, output_grad: FloatTensor<Self>) -> FloatTensor<Self> { B::conv1d_bias_backward(x, bias, output_grad) }
    fn conv2d(x: FloatTensor<Self>, weight: FloatTensor<Self>, bias: Option<FloatTensor<Self>>, options: ConvOptions<2>) -> FloatTensor<Self> { B::conv2d(x, weight, bias, options) }
    fn conv2d_x_backward(x: FloatTensor<Self>, weight: FloatTensor<Self>, output_grad: FloatTensor<Self>, options: ConvOptions<2>) -> FloatTensor<Self> { B::conv2d_x_backward(x, weight, output_grad, options) }
    fn conv2d_weight_backward(x: FloatTensor<Self>, weight: FloatTensor<Self>, output_grad: FloatTensor<Self>, options: ConvOptions<2>) -> FloatTensor<Self> { B::conv2d_weight_backward(x, weight, output_grad, options) }
    fn conv2d_bias_backward(x: FloatTensor<Self>, bias: FloatTensor<Self>, output_grad: FloatTensor<Self>) -> FloatTensor<Self> { B::conv2d_bias_backward(x, bias, output_grad) }
    fn deform_conv2d(x: FloatTensor<Self>, offset: FloatTensor<Self>, weight: FloatTensor<Self>, mask: Option<FloatTensor<Self>>, bias: Option<FloatTensor<Self>>, options: DeformConvOptions<2>) -> FloatTensor<Self> { B::deform_conv2d(x, offset, weight, mask, bias, options) }
    fn deform_conv2d_backward(x: FloatTensor<Self>, offset: FloatTensor<Self>, weight: FloatTensor<Self>, mask: Option<FloatTensor<Self>>, bias: Option<FloatTensor<Self>>, output_grad: FloatTensor<Self>, options: DeformConvOptions<2>) -> DeformConv2dBackward<Self> { let r = B::deform_conv2d_backward(x, offset, weight, mask, bias, output_grad, options); DeformConv2dBackward::new(r.x_grad, r.offset_grad, r.weight_grad, r.mask_grad, r.bias_grad) }
    fn conv3d(x: FloatTensor<Self>, weight: FloatTensor<Self>, bias: Option<FloatTensor<Self>>, options: ConvOptions<3>) -> FloatTensor<Self> { B::conv3d(x, weight, bias, options) }
    fn conv3d_x_backward(x: FloatTensor<Self>, weight: FloatTensor<Self>, output_grad: FloatTensor<Self>, options: ConvOptions<3>) -> FloatTensor<Self> { B::conv3d_x_backward(x, weight, output_grad, options) }
    fn conv3d_weight_backward(x: FloatTensor<Self>, weight: FloatTensor<Self>, output_grad: FloatTensor<Self>, options: ConvOptions<3>) -> FloatTensor<Self> { B::conv3d_weight_backward(x, weight, output_grad, options) }
    fn conv3d_bias_backward(x: FloatTensor<Self>, bias: FloatTensor<Self>, output_grad: FloatTensor<Self>) -> FloatTensor<Self> { B::conv3d_bias_backward(x, bias, output_grad) }
    fn conv_transpose1d(x: FloatTensor<Self>, weight: FloatTensor<Self>, bias: Option<FloatTensor<Self>>, options: ConvTransposeOptions<1>) -> FloatTensor<Self> { B::conv_transpose1d(x, weight, bias, options) }
    fn conv_transpose1d_x_backward(weight: FloatTensor<Self>, output_grad: FloatTensor<Self>, options: ConvTransposeOptions<1>) -> FloatTensor<Self> { B::conv_transpose1d_x_backward(weight, output_grad, options) }
    fn conv_transpose1d_weight_backward(x: FloatTensor<Self>, weight: FloatTensor<Self>, output_grad: FloatTensor<Self>, options: ConvTransposeOptions<1>) -> FloatTensor<Self> { B::conv_transpose1d_weight_backward(x, weight, output_grad, options) }
    fn conv_transpose1d_bias_backward(x: FloatTensor<Self>, bias: FloatTensor<Self>, output_grad: FloatTensor<Self>) -> FloatTensor<Self> { B::conv_transpose1d_bias_backward(x, bias, output_grad) }
    fn conv_transpose2d(x: FloatTensor<Self>, weight: FloatTensor<Self>, bias: Option<FloatTensor<Self>>, options: ConvTransposeOptions<2>) -> FloatTensor<Self> { B::conv_transpose2d(x, weight, bias, options) }
    fn conv_transpose2d_x_backward(weight: FloatTensor<Self>, output_grad: FloatTensor<Self>, options: ConvTransposeOptions<2>) -> FloatTensor<Self> { B::conv_transpose2d_x_backward(weight, output_grad, options) }
    fn conv_transpose2d_weight_backward(x: FloatTensor<Self>, weight: FloatTensor<Self>, output_grad: FloatTensor<Self>, options: ConvTransposeOptions<2>) -> FloatTensor<Self> { B::conv_transpose2d_weight_backward(x, weight, output_grad, options) }
    fn conv_transpose2d_bias_backward(x: FloatTensor<Self>, bias: FloatTensor<Self>, output_grad: FloatTensor<Self>) -> FloatTensor<Self> { B::conv_transpose2d_bias_backward(x, bias, output_grad) }
    fn conv_transpose3d(x: FloatTensor<Self>, weight: FloatTensor<Self>, bias: Option<FloatTensor<Self>>, options: ConvTransposeOptions<3>) -> FloatTensor<Self> { B::conv_transpose3d(x, weight, bias, options) }
    fn conv_transpose3d_x_backward(weight: FloatTensor<Self>, output_grad: FloatTensor<Self>, options: ConvTransposeOptions<3>) -> FloatTensor<Self> { B::conv_transpose3d_x_backward(weight, output_grad, options) }
    fn conv_transpose3d_weight_backward(x: FloatTensor<Self>, weight: FloatTensor<Self>, output_grad: FloatTensor<Self>, options: ConvTransposeOptions<3>) -> FloatTensor<Self> { B::conv_transpose3d_weight_backward(x, weight, output_grad, options) }
    fn conv_transpose3d_bias_backward(x: FloatTensor<Self>, bias: FloatTensor<Self>, output_grad: FloatTensor<Self>) -> FloatTensor<Self> { B::conv_transpose3d_bias_backward(x, bias, output_grad) }
    fn unfold4d(x: FloatTensor<Self>, kernel_size: [usize; 2], options: UnfoldOptions) -> FloatTensor<Self> { B::unfold4d(x, kernel_size, options) }
    fn avg_pool1d(x: FloatTensor<Self>, kernel_size: usize, stride: usize, padding: usize, count_include_pad: bool, ceil_mode: bool) -> FloatTensor<Self> { B::avg_pool1d(x, kernel_size, stride, padding, count_include_pad, ceil_mode) }
    fn avg_pool1d_backward(x: FloatTensor<Self>, grad: FloatTensor<Self>, kernel_size: usize, stride: usize, padding: usize, count_include_pad: bool, ceil_mode: bool) -> FloatTensor<Self> { B::avg_pool1d_backward(x, grad, kernel_size, stride, padding, count_include_pad, ceil_mode) }
    fn avg_pool2d(x: FloatTensor<Self>, kernel_size: [usize; 2], stride: [usize; 2], padding: [usize; 2], count_include_pad: bool, ceil_mode: bool) -> FloatTensor<Self> { B::avg_pool2d(x, kernel_size, stride, padding, count_include_pad, ceil_mode) }
    fn avg_pool2d_backward(x: FloatTensor<Self>, grad: FloatTensor<Self>, kernel_size: [usize; 2], stride: [usize; 2], padding: [usize; 2], count_include_pad: bool, ceil_mode: bool) -> FloatTensor<Self> { B::avg_pool2d_backward(x, grad, kernel_size, stride, padding, count_include_pad, ceil_mode) }
    fn adaptive_avg_pool2d(x: FloatTensor<Self>, output_size: [usize; 2]) -> FloatTensor<Self> { B::adaptive_avg_pool2d(x, output_size) }
    fn adaptive_avg_pool2d_backward(x: FloatTensor<Self>, grad: FloatTensor<Self>) -> FloatTensor<Self> { B::adaptive_avg_pool2d_backward(x, grad) }
    fn adaptive_avg_pool1d(x: FloatTensor<Self>, output_size: usize) -> FloatTensor<Self> { B::adaptive_avg_pool1d(x, output_size) }
    fn adaptive_avg_pool1d_backward(x: FloatTensor<Self>, grad: FloatTensor<Self>) -> FloatTensor<Self> { B::adaptive_avg_pool1d_backward(x, grad) }
    fn max_pool1d(x: FloatTensor<Self>, kernel_size: usize, stride: usize, padding: usize, dilation: usize, ceil_mode: bool) -> FloatTensor<Self> { B::max_pool1d(x, kernel_size, stride, padding, dilation, ceil_mode) }
    fn max_pool1d_with_indices(x: FloatTensor<Self>, kernel_size: usize, stride: usize, padding: usize, dilation: usize, ceil_mode: bool) -> MaxPool1dWithIndices<Self> { let r = B::max_pool1d_with_indices(x, kernel_size, stride, padding, dilation, ceil_mode); MaxPool1dWithIndices::new(r.output, r.indices) }
    fn max_pool1d_with_indices_backward(x: FloatTensor<Self>, kernel_size: usize, stride: usize, padding: usize, dilation: usize, ceil_mode: bool, output_grad: FloatTensor<Self>, indices: IntTensor<Self>) -> MaxPool1dBackward<Self> { let r = B::max_pool1d_with_indices_backward(x, kernel_size, stride, padding, dilation, ceil_mode, output_grad, indices); MaxPool1dBackward::new(r.x_grad) }
    fn max_pool2d(x: FloatTensor<Self>, kernel_size: [usize; 2], stride: [usize; 2], padding: [usize; 2], dilation: [usize; 2], ceil_mode: bool) -> FloatTensor<Self> { B::max_pool2d(x, kernel_size, stride, padding, dilation, ceil_mode) }
    fn max_pool2d_with_indices(x: FloatTensor<Self>, kernel_size: [usize; 2], stride: [usize; 2], padding: [usize; 2], dilation: [usize; 2], ceil_mode: bool) -> MaxPool2dWithIndices<Self> { let r = B::max_pool2d_with_indices(x, kernel_size, stride, padding, dilation, ceil_mode); MaxPool2dWithIndices::new(r.output, r.indices) }
    fn max_pool2d_with_indices_backward(x: FloatTensor<Self>, kernel_size: [usize; 2], stride: [usize; 2], padding: [usize; 2], dilation: [usize; 2], ceil_mode: bool, output_grad: FloatTensor<Self>, indices: IntTensor<Self>) -> MaxPool2dBackward<Self> { let r = B::max_pool2d_with_indices_backward(x, kernel_size, stride, padding, dilation, ceil_mode, output_grad, indices); MaxPool2dBackward::new(r.x_grad) }
    fn interpolate(x: FloatTensor<Self>, output_size: [usize; 2], options: InterpolateOptions) -> FloatTensor<Self> { B::interpolate(x, output_size, options) }
    fn interpolate_backward(x: FloatTensor<Self>, grad: FloatTensor<Self>, output_size: [usize; 2], options: InterpolateOptions) -> FloatTensor<Self> { B::interpolate_backward(x, grad, output_size, options) }
    fn attention(query: FloatTensor<Self>, key: FloatTensor<Self>, value: FloatTensor<Self>, mask: Option<BoolTensor<Self>>, attn_bias: Option<FloatTensor<Self>>, options: AttentionModuleOptions) -> FloatTensor<Self> { routing::attention::<B>(query, key, value, mask, attn_bias, options) }
    fn layer_norm(tensor: FloatTensor<Self>, gamma: FloatTensor<Self>, beta: Option<FloatTensor<Self>>, epsilon: f64) -> FloatTensor<Self> { B::layer_norm(tensor, gamma, beta, epsilon) }
    fn ctc_loss(log_probs: FloatTensor<Self>, targets: IntTensor<Self>, input_lengths: IntTensor<Self>, target_lengths: IntTensor<Self>, blank: usize) -> FloatTensor<Self> { B::ctc_loss(log_probs, targets, input_lengths, target_lengths, blank) }
    fn has_ctc_loss_backward() -> bool { B::has_ctc_loss_backward() }
    fn ctc_loss_backward(log_probs: FloatTensor<Self>, targets: IntTensor<Self>, input_lengths: IntTensor<Self>, target_lengths: IntTensor<Self>, grad_loss: FloatTensor<Self>, blank: usize) -> FloatTensor<Self> { B::ctc_loss_backward(log_probs, targets, input_lengths, target_lengths, grad_loss, blank) }
    fn rfft(signal: FloatTensor<Self>, dim: usize, n: Option<usize>) -> (FloatTensor<Self>, FloatTensor<Self>) { B::rfft(signal, dim, n) }
    fn irfft(spectrum_re: FloatTensor<Self>, spectrum_im: FloatTensor<Self>, dim: usize, n: Option<usize>) -> FloatTensor<Self> { B::irfft(spectrum_re, spectrum_im, dim, n) }
}

impl<B: MoeBackend> ActivationOps<Self> for EpBackend<B> {
    fn leaky_relu(tensor: FloatTensor<Self>, negative_slope: Scalar) -> FloatTensor<Self> { B::leaky_relu(tensor, negative_slope) }
    fn relu(tensor: FloatTensor<Self>) -> FloatTensor<Self> { B::relu(tensor) }
    fn relu_backward(output: FloatTensor<Self>, grad: FloatTensor<Self>) -> FloatTensor<Self> { B::relu_backward(output, grad) }
    fn gelu(tensor: FloatTensor<Self>) -> FloatTensor<Self> { B::gelu(tensor) }
    fn prelu(tensor: FloatTensor<Self>, alpha: FloatTensor<Self>) -> FloatTensor<Self> { B::prelu(tensor, alpha) }
    fn gelu_backward(x: FloatTensor<Self>, grad: FloatTensor<Self>) -> FloatTensor<Self> { B::gelu_backward(x, grad) }
    fn sigmoid(tensor: FloatTensor<Self>) -> FloatTensor<Self> { B::sigmoid(tensor) }
    fn sigmoid_backward(output: FloatTensor<Self>, grad: FloatTensor<Self>) -> FloatTensor<Self> { B::sigmoid_backward(output, grad) }
    fn hard_sigmoid(tensor: FloatTensor<Self>, alpha: Scalar, beta: Scalar) -> FloatTensor<Self> { B::hard_sigmoid(tensor, alpha, beta) }
    fn log_sigmoid(tensor: FloatTensor<Self>) -> FloatTensor<Self> { B::log_sigmoid(tensor) }
    fn softmax(tensor: FloatTensor<Self>, dim: usize) -> FloatTensor<Self> { B::softmax(tensor, dim) }
    fn log_softmax(tensor: FloatTensor<Self>, dim: usize) -> FloatTensor<Self> { B::log_softmax(tensor, dim) }
    fn softmin(tensor: FloatTensor<Self>, dim: usize) -> FloatTensor<Self> { B::softmin(tensor, dim) }
    fn log_sigmoid_backward(x: FloatTensor<Self>, grad: FloatTensor<Self>) -> FloatTensor<Self> { B::log_sigmoid_backward(x, grad) }
}

impl<B: MoeBackend> QTensorOps<Self> for EpBackend<B> {
    fn q_from_data(data: TensorData, device: &Device<Self>) -> QuantizedTensor<Self> { B::q_from_data(data, device) }
    fn quantize(tensor: FloatTensor<Self>, scheme: &QuantScheme, qparams: QuantizationParametersPrimitive<Self>) -> QuantizedTensor<Self> { B::quantize(tensor, scheme, QuantizationParametersPrimitive { scales: qparams.scales }) }
    fn quantize_dynamic(tensor: FloatTensor<Self>, scheme: &QuantScheme) -> QuantizedTensor<Self> { B::quantize_dynamic(tensor, scheme) }
    fn dequantize(tensor: QuantizedTensor<Self>, dtype: FloatDType) -> FloatTensor<Self> { B::dequantize(tensor, dtype) }
    fn q_device(tensor: &QuantizedTensor<Self>) -> Device<Self> { B::q_device(tensor) }
    fn q_to_device(tensor: QuantizedTensor<Self>, device: &Device<Self>) -> QuantizedTensor<Self> { B::q_to_device(tensor, device) }
    fn q_reshape(tensor: QuantizedTensor<Self>, shape: Shape) -> QuantizedTensor<Self> { B::q_reshape(tensor, shape) }
    fn q_into_data(tensor: QuantizedTensor<Self>) -> impl Future<Output = Result<TensorData, ExecutionError>> + Send { crate::device::note_read(); B::q_into_data(tensor) }
    fn q_detach(tensor: QuantizedTensor<Self>) -> QuantizedTensor<Self> { B::q_detach(tensor) }
    fn q_set_require_grad(tensor: QuantizedTensor<Self>, require_grad: bool) -> QuantizedTensor<Self> { B::q_set_require_grad(tensor, require_grad) }
    fn q_is_require_grad(tensor: &QuantizedTensor<Self>) -> bool { B::q_is_require_grad(tensor) }
    fn q_expand(tensor: QuantizedTensor<Self>, shape: Shape) -> QuantizedTensor<Self> { B::q_expand(tensor, shape) }
    fn q_transpose(tensor: QuantizedTensor<Self>) -> QuantizedTensor<Self> { B::q_transpose(tensor) }
    fn q_swap_dims(tensor: QuantizedTensor<Self>, dim1: usize, dim2: usize) -> QuantizedTensor<Self> { B::q_swap_dims(tensor, dim1, dim2) }
    fn q_permute(tensor: QuantizedTensor<Self>, axes: &[usize]) -> QuantizedTensor<Self> { B::q_permute(tensor, axes) }
    fn q_flip(tensor: QuantizedTensor<Self>, axes: &[usize]) -> QuantizedTensor<Self> { B::q_flip(tensor, axes) }
    fn q_select(tensor: QuantizedTensor<Self>, dim: usize, indices: IntTensor<Self>) -> QuantizedTensor<Self> { B::q_select(tensor, dim, indices) }
    fn q_slice(tensor: QuantizedTensor<Self>, slices: &[Slice]) -> QuantizedTensor<Self> { B::q_slice(tensor, slices) }
    fn q_gather(dim: usize, tensor: QuantizedTensor<Self>, indices: IntTensor<Self>) -> QuantizedTensor<Self> { B::q_gather(dim, tensor, indices) }
    fn q_repeat_dim(tensor: QuantizedTensor<Self>, dim: usize, times: usize) -> QuantizedTensor<Self> { B::q_repeat_dim(tensor, dim, times) }
    fn q_add(lhs: QuantizedTensor<Self>, rhs: QuantizedTensor<Self>) -> TensorPrimitive<Self> { moe::primitive_out::<B>(B::q_add(lhs, rhs)) }
    fn q_add_scalar(lhs: QuantizedTensor<Self>, rhs: Scalar) -> TensorPrimitive<Self> { moe::primitive_out::<B>(B::q_add_scalar(lhs, rhs)) }
    fn q_clamp_min(tensor: QuantizedTensor<Self>, min: Scalar) -> TensorPrimitive<Self> { moe::primitive_out::<B>(B::q_clamp_min(tensor, min)) }
    fn q_clamp_max(tensor: QuantizedTensor<Self>, max: Scalar) -> TensorPrimitive<Self> { moe::primitive_out::<B>(B::q_clamp_max(tensor, max)) }
    fn q_clamp(tensor: QuantizedTensor<Self>, min: Scalar, max: Scalar) -> TensorPrimitive<Self> { moe::primitive_out::<B>(B::q_clamp(tensor, min, max)) }
    fn q_sub(lhs: QuantizedTensor<Self>, rhs: QuantizedTensor<Self>) -> TensorPrimitive<Self> { moe::primitive_out::<B>(B::q_sub(lhs, rhs)) }
    fn q_sub_scalar(lhs: QuantizedTensor<Self>, rhs: Scalar) -> TensorPrimitive<Self> { moe::primitive_out::<B>(B::q_sub_scalar(lhs, rhs)) }
    fn q_mul(lhs: QuantizedTensor<Self>, rhs: QuantizedTensor<Self>) -> TensorPrimitive<Self> { moe::primitive_out::<B>(B::q_mul(lhs, rhs)) }
    fn q_mul_scalar(lhs: QuantizedTensor<Self>, rhs: Scalar) -> TensorPrimitive<Self> { moe::primitive_out::<B>(B::q_mul_scalar(lhs, rhs)) }
    fn q_div(lhs: QuantizedTensor<Self>, rhs: QuantizedTensor<Self>) -> TensorPrimitive<Self> { moe::primitive_out::<B>(B::q_div(lhs, rhs)) }
    fn q_div_scalar(lhs: QuantizedTensor<Self>, rhs: Scalar) -> TensorPrimitive<Self> { moe::primitive_out::<B>(B::q_div_scalar(lhs, rhs)) }
    fn q_matmul(lhs: TensorPrimitive<Self>, rhs: TensorPrimitive<Self>) -> TensorPrimitive<Self> { moe::primitive_out::<B>(B::q_matmul(moe::primitive_in::<B>(lhs), moe::primitive_in::<B>(rhs))) }
    fn q_neg(tensor: QuantizedTensor<Self>) -> TensorPrimitive<Self> { moe::primitive_out::<B>(B::q_neg(tensor)) }
    fn q_recip(tensor: QuantizedTensor<Self>) -> TensorPrimitive<Self> { moe::primitive_out::<B>(B::q_recip(tensor)) }
    fn q_sum(tensor: QuantizedTensor<Self>) -> TensorPrimitive<Self> { moe::primitive_out::<B>(B::q_sum(tensor)) }
    fn q_sum_dim(tensor: QuantizedTensor<Self>, dim: usize) -> TensorPrimitive<Self> { moe::primitive_out::<B>(B::q_sum_dim(tensor, dim)) }
    fn q_prod(tensor: QuantizedTensor<Self>) -> TensorPrimitive<Self> { moe::primitive_out::<B>(B::q_prod(tensor)) }
    fn q_prod_dim(tensor: QuantizedTensor<Self>, dim: usize) -> TensorPrimitive<Self> { moe::primitive_out::<B>(B::q_prod_dim(tensor, dim)) }
    fn q_mean(tensor: QuantizedTensor<Self>) -> TensorPrimitive<Self> { moe::primitive_out::<B>(B::q_mean(tensor)) }
    fn q_mean_dim(tensor: QuantizedTensor<Self>, dim: usize) -> TensorPrimitive<Self> { moe::primitive_out::<B>(B::q_mean_dim(tensor, dim)) }
    fn q_cumsum(tensor: QuantizedTensor<Self>, dim: usize) -> TensorPrimitive<Self> { moe::primitive_out::<B>(B::q_cumsum(tensor, dim)) }
    fn q_cumprod(tensor: QuantizedTensor<Self>, dim: usize) -> TensorPrimitive<Self> { moe::primitive_out::<B>(B::q_cumprod(tensor, dim)) }
    fn q_cummin(tensor: QuantizedTensor<Self>, dim: usize) -> TensorPrimitive<Self> { moe::primitive_out::<B>(B::q_cummin(tensor, dim)) }
    fn q_cummax(tensor: QuantizedTensor<Self>, dim: usize) -> TensorPrimitive<Self> { moe::primitive_out::<B>(B::q_cummax(tensor, dim)) }
    fn q_exp(tensor: QuantizedTensor<Self>) -> TensorPrimitive<Self> { moe::primitive_out::<B>(B::q_exp(tensor)) }
    fn q_log(tensor: QuantizedTensor<Self>) -> TensorPrimitive<Self> { moe::primitive_out::<B>(B::q_log(tensor)) }
    fn q_log1p(tensor: QuantizedTensor<Self>) -> TensorPrimitive<Self> { moe::primitive_out::<B>(B::q_log1p(tensor)) }
    fn q_powf(lhs: QuantizedTensor<Self>, rhs: QuantizedTensor<Self>) -> TensorPrimitive<Self> { moe::primitive_out::<B>(B::q_powf(lhs, rhs)) }
    fn q_powi(lhs: QuantizedTensor<Self>, rhs: IntTensor<Self>) -> TensorPrimitive<Self> { moe::primitive_out::<B>(B::q_powi(lhs, rhs)) }
    fn q_powi_scalar(lhs: QuantizedTensor<Self>, rhs: Scalar) -> TensorPrimitive<Self> { moe::primitive_out::<B>(B::q_powi_scalar(lhs, rhs)) }
    fn q_powf_scalar(tensor: QuantizedTensor<Self>, value: Scalar) -> TensorPrimitive<Self> { moe::primitive_out::<B>(B::q_powf_scalar(tensor, value)) }
    fn q_sqrt(tensor: QuantizedTensor<Self>) -> TensorPrimitive<Self> { moe::primitive_out::<B>(B::q_sqrt(tensor)) }
    fn q_abs(tensor: QuantizedTensor<Self>) -> QuantizedTensor<Self> { B::q_abs(tensor) }
    fn q_cos(tensor: QuantizedTensor<Self>) -> TensorPrimitive<Self> { moe::primitive_out::<B>(B::q_cos(tensor)) }
    fn q_sin(tensor: QuantizedTensor<Self>) -> TensorPrimitive<Self> { moe::primitive_out::<B>(B::q_sin(tensor)) }
    fn q_tan(tensor: QuantizedTensor<Self>) -> TensorPrimitive<Self> { moe::primitive_out::<B>(B::q_tan(tensor)) }
    fn q_cosh(tensor: QuantizedTensor<Self>) -> TensorPrimitive<Self> { moe::primitive_out::<B>(B::q_cosh(tensor)) }
    fn q_sinh(tensor: QuantizedTensor<Self>) -> TensorPrimitive<Self> { moe::primitive_out::<B>(B::q_sinh(tensor)) }
    fn q_tanh(tensor: QuantizedTensor<Self>) -> TensorPrimitive<Self> { moe::primitive_out::<B>(B::q_tanh(tensor)) }
    fn q_erf(tensor: QuantizedTensor<Self>) -> TensorPrimitive<Self> { moe::primitive_out::<B>(B::q_erf(tensor)) }
    fn q_cat(tensors: Vec<QuantizedTensor<Self>>, dim: usize) -> QuantizedTensor<Self> { B::q_cat(tensors, dim) }
    fn q_argmax(tensor: QuantizedTensor<Self>, dim: usize, out_dtype: IntDType) -> IntTensor<Self> { B::q_argmax(tensor, dim, out_dtype) }
    fn q_argtopk(tensor: QuantizedTensor<Self>, dim: usize, k: usize, out_dtype: IntDType) -> IntTensor<Self> { B::q_argtopk(tensor, dim, k, out_dtype) }
    fn q_topk(tensor: QuantizedTensor<Self>, dim: usize, k: usize) -> QuantizedTensor<Self> { B::q_topk(tensor, dim, k) }
    fn q_argmin(tensor: QuantizedTensor<Self>, dim: usize, out_dtype: IntDType) -> IntTensor<Self> { B::q_argmin(tensor, dim, out_dtype) }
    fn q_max(tensor: QuantizedTensor<Self>) -> QuantizedTensor<Self> { B::q_max(tensor) }
    fn q_max_dim(tensor: QuantizedTensor<Self>, dim: usize) -> QuantizedTensor<Self> { B::q_max_dim(tensor, dim) }
    fn q_max_dim_with_indices(tensor: QuantizedTensor<Self>, dim: usize, out_dtype: IntDType) -> (QuantizedTensor<Self>, IntTensor<Self>) { B::q_max_dim_with_indices(tensor, dim, out_dtype) }
    fn q_min(tensor: QuantizedTensor<Self>) -> QuantizedTensor<Self> { B::q_min(tensor) }
    fn q_min_dim(tensor: QuantizedTensor<Self>, dim: usize) -> QuantizedTensor<Self> { B::q_min_dim(tensor, dim) }
    fn q_min_dim_with_indices(tensor: QuantizedTensor<Self>, dim: usize, out_dtype: IntDType) -> (QuantizedTensor<Self>, IntTensor<Self>) { B::q_min_dim_with_indices(tensor, dim, out_dtype) }
    fn q_max_abs(tensor: QuantizedTensor<Self>) -> QuantizedTensor<Self> { B::q_max_abs(tensor) }
    fn q_max_abs_dim(tensor: QuantizedTensor<Self>, dim: usize) -> QuantizedTensor<Self> { B::q_max_abs_dim(tensor, dim) }
    fn q_any(tensor: QuantizedTensor<Self>, out_dtype: BoolDType) -> BoolTensor<Self> { B::q_any(tensor, out_dtype) }
    fn q_any_dim(tensor: QuantizedTensor<Self>, dim: usize, out_dtype: BoolDType) -> BoolTensor<Self> { B::q_any_dim(tensor, dim, out_dtype) }
    fn q_all(tensor: QuantizedTensor<Self>, out_dtype: BoolDType) -> BoolTensor<Self> { B::q_all(tensor, out_dtype) }
    fn q_all_dim(tensor: QuantizedTensor<Self>, dim: usize, out_dtype: BoolDType) -> BoolTensor<Self> { B::q_all_dim(tensor, dim, out_dtype) }
    fn q_sort(tensor: QuantizedTensor<Self>, dim: usize, descending: bool) -> QuantizedTensor<Self> { B::q_sort(tensor, dim, descending) }
    fn q_sort_with_indices(tensor: QuantizedTensor<Self>, dim: usize, descending: bool, out_dtype: IntDType) -> (QuantizedTensor<Self>, IntTensor<Self>) { B::q_sort_with_indices(tensor, dim, descending, out_dtype) }
    fn q_argsort(tensor: QuantizedTensor<Self>, dim: usize, descending: bool, out_dtype: IntDType) -> IntTensor<Self> { B::q_argsort(tensor, dim, descending, out_dtype) }
}

impl<B: MoeBackend> TransactionOps<Self> for EpBackend<B> {
    fn tr_execute(transaction: TransactionPrimitive<Self>) -> impl Future<Output = Result<TransactionPrimitiveData, ExecutionError>> + Send { crate::device::note_read(); B::tr_execute(TransactionPrimitive::new(transaction.read_floats, transaction.read_qfloats, transaction.read_ints, transaction.read_bools)) }
}

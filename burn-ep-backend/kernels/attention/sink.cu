// ---- gradient of the sink logits ------------------------------------------------------------------------------------------
// -sum over rows of exp(sink - LSE) delta; a block per head, always the same order of sums. nl = -log2(e) LSE and delta are
// [B, Hq, groups 64], -inf and 0 behind the last row.
extern "C" __global__ void __launch_bounds__(256)
attn_bwd_sink(const float* nl, const float* delta, const float* sink, float* dsink, const __grid_constant__ Info info) {
  __shared__ float part[8];
  const int h = (int)blockIdx.x, hq = (int)info.hq, padded = row_groups(info) * 64;
  const float z = sink[h] * LOG2E;
  float a = 0.f;
  for (int b = 0; b < (int)info.batch; ++b) {
    const u64 row = ((u64)b * hq + h) * padded;
    for (int i = (int)threadIdx.x; i < padded; i += 256) a = fmaf(exp2f(z + nl[row + i]), delta[row + i], a);
  }
  for (int s = 16; s; s >>= 1) a += __shfl_xor_sync(~0u, a, s);
  if ((threadIdx.x & 31) == 0) part[threadIdx.x >> 5] = a;
  __syncthreads();
  if (threadIdx.x == 0) dsink[h] = -(part[0] + part[1] + part[2] + part[3] + part[4] + part[5] + part[6] + part[7]);
}

// Sums of the parts of all chunks, in order: [parts, 3, H] to three times [H].
extern "C" __global__ void __launch_bounds__(128)
ssd_sums(const float* parts, float* a_log, float* skip, float* dt_bias, const __grid_constant__ Info info) {
  const u32 i = blockIdx.x * 128 + threadIdx.x;
  if (i >= 3 * HEADS) return;
  double sum = 0.;
#pragma unroll 8
  for (u64 n = 0; n < info.batch * info.chunks; ++n) sum += parts[n * (3 * HEADS) + i];
  float* out = i < HEADS ? a_log : i < 2 * HEADS ? skip : dt_bias;
  out[i % HEADS] = (float)sum;
}

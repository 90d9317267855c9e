// out[0] = sum of x[0..n], one block, in a fixed order and double precision.
#define THREADS 1024
struct Info { u64 n; };

extern "C" __global__ void __launch_bounds__(THREADS) ENTRY(const float* x, float* out, const __grid_constant__ Info info) {
  __shared__ double part[THREADS];
  double sum = 0.0;
  for (u64 i = threadIdx.x; i < info.n; i += THREADS) sum += (double)x[i];
  part[threadIdx.x] = sum;
  for (int half = THREADS / 2; half; half >>= 1) {
    __syncthreads();
    if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
  }
  if (threadIdx.x == 0) out[0] = (float)part[0];
}

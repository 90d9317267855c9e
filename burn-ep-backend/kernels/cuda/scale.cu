// y[i] = x[i] * scale[0], product in fp32, one rounding. x and y may be the same buffer. 16-byte aligned.
#define THREADS 512
struct Info { u64 n; };

extern "C" __global__ void __launch_bounds__(THREADS) ENTRY(const Elem* x, const float* scale, Elem* y, const __grid_constant__ Info info) {
  const float factor = scale[0];
  const u64 vectors = info.n / VEC, step = (u64)gridDim.x * THREADS, first = (u64)blockIdx.x * THREADS + threadIdx.x;
  const Pack* xv = reinterpret_cast<const Pack*>(x);
  Pack* yv = reinterpret_cast<Pack*>(y);
  for (u64 v = first; v < vectors; v += step) {
    float e[VEC];
    unpack(xv[v], e);
    #pragma unroll
    for (int i = 0; i < VEC; ++i) e[i] *= factor;
    yv[v] = pack(e);
  }
  for (u64 i = vectors * VEC + first; i < info.n; i += step) y[i] = from_f32(to_f32(x[i]) * factor);
}

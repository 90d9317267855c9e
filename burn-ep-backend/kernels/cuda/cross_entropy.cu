// Cross entropy of rows of logits, one block per row: two passes, the second out of the L2 cache.
//   pass 1: running maximum and sum of exponentials in fp32; loss[first + row] = logsumexp - logit of the label
//   pass 2: the logits turn into their gradient, softmax - [label], in place
// A row with the label `ignore` has loss 0 and gradient 0. A label outside the vocabulary makes the loss NaN and the gradient
// 0. Rows start at multiples of 16 bytes (`ld` elements apart); elements past `vocab` are not touched.
#define THREADS 1024
#define WARPS (THREADS / 32)
#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f
#define LOWEST (-3.0e38f)                       // below every finite logit, and no infinity minus infinity

struct Info { u64 vocab, ld, first, ignore, grads; };

__device__ __forceinline__ float exp2_fast(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }

// maximum m and sum s of exp(x - m), of two parts
__device__ __forceinline__ void merge(float& m, float& s, float m2, float s2) {
  const float top = fmaxf(m, m2);
  s = s * exp2_fast((m - top) * LOG2E) + s2 * exp2_fast((m2 - top) * LOG2E);
  m = top;
}

extern "C" __global__ void __launch_bounds__(THREADS) ENTRY(Elem* logits, const Index* labels, float* loss, const __grid_constant__ Info info) {
  __shared__ float part_m[WARPS], part_s[WARPS], lse2, at_label;
  const u64 row = blockIdx.x;
  const int vocab = (int)info.vocab, vectors = vocab / VEC;
  Elem* x = logits + row * info.ld;
  Pack* xv = reinterpret_cast<Pack*>(x);
  const long long label = labels[info.first + row];
  const bool ignored = label == (long long)info.ignore, inside = label >= 0 && label < vocab;

  if (ignored || !inside) {
    if (threadIdx.x == 0) loss[info.first + row] = ignored ? 0.0f : __uint_as_float(0x7fc00000u);
    if (info.grads) {
      for (int v = threadIdx.x; v < vectors; v += THREADS) xv[v] = Pack{{0u, 0u, 0u, 0u}};
      for (int c = vectors * VEC + threadIdx.x; c < vocab; c += THREADS) x[c] = from_f32(0.0f);
    }
    return;
  }

  float m = LOWEST, s = 0.0f;
  auto take = [&](const Pack& p) {
    float y[VEC];
    unpack(p, y);
    float top = y[0];
    #pragma unroll
    for (int i = 1; i < VEC; ++i) top = fmaxf(top, y[i]);
    if (top > m) { s *= exp2_fast((m - top) * LOG2E); m = top; }
    const float shift = m * LOG2E;
    #pragma unroll
    for (int i = 0; i < VEC; ++i) s += exp2_fast(fmaf(y[i], LOG2E, -shift));
  };
  int v = threadIdx.x;
  for (; v + 3 * THREADS < vectors; v += 4 * THREADS) {   // four loads in flight
    const Pack a = xv[v], b = xv[v + THREADS], c = xv[v + 2 * THREADS], d = xv[v + 3 * THREADS];
    take(a); take(b); take(c); take(d);
  }
  for (; v < vectors; v += THREADS) take(xv[v]);
  for (int c = vectors * VEC + threadIdx.x; c < vocab; c += THREADS) merge(m, s, to_f32(x[c]), 1.0f);

  #pragma unroll
  for (int o = 16; o; o >>= 1) merge(m, s, __shfl_xor_sync(~0u, m, o), __shfl_xor_sync(~0u, s, o));
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  if (lane == 0) { part_m[warp] = m; part_s[warp] = s; }
  if (threadIdx.x == 0) at_label = to_f32(x[label]);     // before anything is overwritten
  __syncthreads();
  if (warp == 0) {
    m = lane < WARPS ? part_m[lane] : LOWEST;
    s = lane < WARPS ? part_s[lane] : 0.0f;
    #pragma unroll
    for (int o = 16; o; o >>= 1) merge(m, s, __shfl_xor_sync(~0u, m, o), __shfl_xor_sync(~0u, s, o));
    if (lane == 0) {
      lse2 = fmaf(m, LOG2E, log2f(s));
      // the difference first: maximum and label logit may be large and close
      loss[info.first + row] = (m - at_label) + log2f(s) * LN2;
    }
  }
  __syncthreads();
  if (!info.grads) return;

  const float shift = lse2;
  auto turn = [&](int v, const Pack& p) {
    float y[VEC];
    unpack(p, y);
    #pragma unroll
    for (int i = 0; i < VEC; ++i) {
      y[i] = exp2_fast(fmaf(y[i], LOG2E, -shift));
      if (v * VEC + i == (int)label) y[i] -= 1.0f;
    }
    xv[v] = pack(y);
  };
  // backwards: what pass 1 read last is the likeliest to be in the cache still
  int w = vectors - 1 - (int)threadIdx.x;
  for (; w - 3 * THREADS >= 0; w -= 4 * THREADS) {
    const Pack a = xv[w], b = xv[w - THREADS], c = xv[w - 2 * THREADS], d = xv[w - 3 * THREADS];
    turn(w, a); turn(w - THREADS, b); turn(w - 2 * THREADS, c); turn(w - 3 * THREADS, d);
  }
  for (; w >= 0; w -= THREADS) turn(w, xv[w]);
  for (int c = vectors * VEC + threadIdx.x; c < vocab; c += THREADS) {
    const float p = exp2_fast(fmaf(to_f32(x[c]), LOG2E, -shift));
    x[c] = from_f32(c == (int)label ? p - 1.0f : p);
  }
}

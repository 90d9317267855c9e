// RMSNorm of every head and rotary embedding (half-split, all channels) in one pass, and their backward in one more.
//   x, out, grad, grad_x [tokens, heads, WIDTH]   weight [WIDTH]   cos, sin [angle rows, WIDTH / 2], token t uses row t % rows
// LANES lanes share a row (one head of one token): lane l holds channels 8 l .. 8 l + 7 of both halves, which are the pairs that
// turn together. A warp works on 32 / LANES rows at once, ROWS times, so that enough loads are in flight.
// Defines: X, W, A (element of x, weight, tables: 0 bf16, 1 fp16, 2 fp32), WIDTH (a multiple of 16), LANES (a power of two, at
// least WIDTH / 16, at most 32), ROWS, LLAMA 0|1: the normalised row is rounded before it meets the weight.
typedef unsigned int u32;
typedef unsigned long long u64;
struct Scalars { u64 rows, heads, angle_rows, eps; };        // eps: bits of a float
#define HALF (WIDTH / 2)
#define TEAMS (32 / LANES)

template <int E> struct Element { typedef unsigned short T; };
template <> struct Element<2> { typedef float T; };
template <int E> __device__ __forceinline__ u32 pack(float lo, float hi) {
  u32 r;
  if (E == 0) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
template <int E> __device__ __forceinline__ float2 unpack(u32 v) {
  float2 r;
  if (E == 0) { r.x = __uint_as_float(v << 16); r.y = __uint_as_float(v & 0xffff0000u); }
  else asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\n}\n" : "=f"(r.x), "=f"(r.y) : "r"(v));
  return r;
}
// eight numbers as they lie in memory
template <int E> struct Raw { uint4 v[E == 2 ? 2 : 1]; };
template <int E> __device__ __forceinline__ Raw<E> fetch(const typename Element<E>::T* p) {
  Raw<E> r;
  #pragma unroll
  for (int i = 0; i < (E == 2 ? 2 : 1); ++i) r.v[i] = ((const uint4*)p)[i];
  return r;
}
template <int E> __device__ __forceinline__ void widen(const Raw<E>& r, float (&f)[8]) {
  #pragma unroll
  for (int i = 0; i < (E == 2 ? 2 : 1); ++i) {
    const u32 w[4] = {r.v[i].x, r.v[i].y, r.v[i].z, r.v[i].w};
    #pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (E == 2) f[4 * i + j] = __uint_as_float(w[j]);
      else { const float2 u = unpack<E>(w[j]); f[2 * j] = u.x; f[2 * j + 1] = u.y; }
    }
  }
}
template <int E> __device__ __forceinline__ void store(typename Element<E>::T* p, const float (&f)[8]) {
  #pragma unroll
  for (int i = 0; i < (E == 2 ? 2 : 1); ++i) {
    u32 w[4];
    #pragma unroll
    for (int j = 0; j < 4; ++j) w[j] = E == 2 ? __float_as_uint(f[4 * i + j]) : pack<E>(f[2 * j], f[2 * j + 1]);
    ((uint4*)p)[i] = make_uint4(w[0], w[1], w[2], w[3]);
  }
}
// rounded to the type of x
__device__ __forceinline__ void round_pair(float& a, float& b) {
#if X != 2
  const float2 r = unpack<X>(pack<X>(a, b));
  a = r.x; b = r.y;
#endif
}
__device__ __forceinline__ float team_sum(float v) {
  #pragma unroll
  for (int s = LANES / 2; s; s >>= 1) v += __shfl_xor_sync(~0u, v, s);
  return v;
}
typedef typename Element<X>::T XT;
typedef typename Element<W>::T WT;
typedef typename Element<A>::T AT;

extern "C" __global__ void __launch_bounds__(256)
norm_rope(const XT* x, const WT* weight, const AT* cosines, const AT* sines, XT* out, const __grid_constant__ Scalars info) {
  const u32 lane = threadIdx.x & 31, team = lane / LANES, at = lane % LANES * 8, heads = (u32)info.heads, angle_rows = (u32)info.angle_rows;
  const bool active = at < HALF;
  const u32 warp = blockIdx.x * 8 + threadIdx.x / 32, warps = gridDim.x * 8, rows = (u32)info.rows;
  const float eps = __uint_as_float((u32)info.eps);
  float w0[8] = {}, w1[8] = {};
  if (active) { widen<W>(fetch<W>(weight + at), w0); widen<W>(fetch<W>(weight + HALF + at), w1); }
  for (u64 first = (u64)warp * (TEAMS * ROWS); first < rows; first += (u64)warps * (TEAMS * ROWS)) {
    Raw<X> a[ROWS] = {}, b[ROWS] = {};
    #pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      const u64 row = first + i * TEAMS + team;
      if (active && row < rows) { a[i] = fetch<X>(x + row * WIDTH + at); b[i] = fetch<X>(x + row * WIDTH + HALF + at); }
    }
    #pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      const u64 row = first + i * TEAMS + team;
      const bool real = active && row < rows;
      float f[8], g[8], c[8], s[8], sum = 0.f;
      widen<X>(a[i], f); widen<X>(b[i], g);
      #pragma unroll
      for (int j = 0; j < 8; ++j) sum = fmaf(f[j], f[j], fmaf(g[j], g[j], sum));
      const float scale = rsqrtf(team_sum(sum) / WIDTH + eps);
      if (!real) continue;                        // no warp-wide instruction below
      const u32 angle = (u32)row / heads % angle_rows;
      widen<A>(fetch<A>(cosines + (u64)angle * HALF + at), c); widen<A>(fetch<A>(sines + (u64)angle * HALF + at), s);
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        float y0 = f[j] * scale, y1 = g[j] * scale;
#if LLAMA
        round_pair(y0, y1);
#endif
        y0 *= w0[j]; y1 *= w1[j];
        round_pair(y0, y1);
        f[j] = y0 * c[j] - y1 * s[j]; g[j] = y1 * c[j] + y0 * s[j];
      }
      store<X>(out + row * WIDTH + at, f); store<X>(out + row * WIDTH + HALF + at, g);
    }
  }
}

// parts [blocks, WIDTH]: what the rows of a block add to the gradient of the weight
extern "C" __global__ void __launch_bounds__(256)
norm_rope_backward(const XT* grad, const XT* x, const WT* weight, const AT* cosines, const AT* sines, XT* grad_x, float* parts,
                   const __grid_constant__ Scalars info) {
  __shared__ float sums[8][WIDTH];
  const u32 lane = threadIdx.x & 31, team = lane / LANES, at = lane % LANES * 8, heads = (u32)info.heads, angle_rows = (u32)info.angle_rows;
  const bool active = at < HALF;
  const u32 warp = blockIdx.x * 8 + threadIdx.x / 32, warps = gridDim.x * 8, rows = (u32)info.rows;
  const float eps = __uint_as_float((u32)info.eps);
  float w0[8] = {}, w1[8] = {}, d0[8] = {}, d1[8] = {};
  if (active) { widen<W>(fetch<W>(weight + at), w0); widen<W>(fetch<W>(weight + HALF + at), w1); }
  for (u64 first = (u64)warp * (TEAMS * ROWS); first < rows; first += (u64)warps * (TEAMS * ROWS)) {
    Raw<X> a[ROWS] = {}, b[ROWS] = {}, p[ROWS] = {}, q[ROWS] = {};
    #pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      const u64 row = first + i * TEAMS + team;
      if (active && row < rows) {
        a[i] = fetch<X>(x + row * WIDTH + at); b[i] = fetch<X>(x + row * WIDTH + HALF + at);
        p[i] = fetch<X>(grad + row * WIDTH + at); q[i] = fetch<X>(grad + row * WIDTH + HALF + at);
      }
    }
    #pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      const u64 row = first + i * TEAMS + team;
      const bool real = active && row < rows;
      float f[8], g[8], u[8], v[8], sum = 0.f, dot = 0.f;
      widen<X>(a[i], f); widen<X>(b[i], g); widen<X>(p[i], u); widen<X>(q[i], v);
      if (real) {
        const u32 angle = (u32)row / heads % angle_rows;
        float c[8], s[8];
        widen<A>(fetch<A>(cosines + (u64)angle * HALF + at), c); widen<A>(fetch<A>(sines + (u64)angle * HALF + at), s);
        #pragma unroll
        for (int j = 0; j < 8; ++j) {             // the gradient turned back: that of the normalised row
          const float t = u[j] * c[j] + v[j] * s[j];
          v[j] = v[j] * c[j] - u[j] * s[j]; u[j] = t;
        }
      }
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        sum = fmaf(f[j], f[j], fmaf(g[j], g[j], sum));
        dot = fmaf(u[j] * w0[j], f[j], fmaf(v[j] * w1[j], g[j], dot));
      }
      const float scale = rsqrtf(team_sum(sum) / WIDTH + eps), pull = team_sum(dot) / WIDTH * scale * scale;
      if (!real) continue;
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        d0[j] = fmaf(u[j], f[j] * scale, d0[j]); d1[j] = fmaf(v[j], g[j] * scale, d1[j]);
        u[j] = scale * (u[j] * w0[j] - f[j] * pull); v[j] = scale * (v[j] * w1[j] - g[j] * pull);
      }
      store<X>(grad_x + row * WIDTH + at, u); store<X>(grad_x + row * WIDTH + HALF + at, v);
    }
  }
  #pragma unroll
  for (int j = 0; j < 8; ++j) {
    #pragma unroll
    for (int s = LANES; s < 32; s <<= 1) { d0[j] += __shfl_xor_sync(~0u, d0[j], s); d1[j] += __shfl_xor_sync(~0u, d1[j], s); }
    if (team == 0 && active) { sums[threadIdx.x / 32][at + j] = d0[j]; sums[threadIdx.x / 32][HALF + at + j] = d1[j]; }
  }
  __syncthreads();
  for (u32 i = threadIdx.x; i < WIDTH; i += 256) {
    float all = 0.f;
    #pragma unroll
    for (int k = 0; k < 8; ++k) all += sums[k][i];
    parts[(u64)blockIdx.x * WIDTH + i] = all;
  }
}

// AdamW with moments in 8 bits (src/reference/adamw8.rs says what the codes mean). One warp for each block of 256 elements, which
// share a scale; each lane has 8 of them, so that 16-bit tensors are read and written 16 bytes at a time and codes 8. With 10 bytes an
// element the arithmetic is what takes the time: logarithms, powers and roots are the special function unit's own, integers
// become floats by their bits, and a code's rounding needs no division. After element.cuh, which holds the gradient's type;
// PARAM 0 bf16, 1 fp16, 2 fp32; MASTER 0|1: there is an fp32 copy; STOCHASTIC 0|1: bf16 parameters without one are rounded at random.
#define BLOCK 256
#define LANE_ELEMS 8
#define THREADS 256

#if PARAM == 0
typedef u16 Param;
__device__ __forceinline__ float load_param(Param x) { return __uint_as_float((u32)x << 16); }
__device__ __forceinline__ Param store_param(float x) {
  const u32 bits = __float_as_uint(x);
  return (bits & 0x7fffffffu) > 0x7f800000u ? (u16)0x7fff : (u16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
#elif PARAM == 1
typedef u16 Param;
__device__ __forceinline__ float load_param(Param x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x)); return y; }
__device__ __forceinline__ Param store_param(float x) { u16 y; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x)); return y; }
#else
typedef float Param;
__device__ __forceinline__ float load_param(Param x) { return x; }
__device__ __forceinline__ Param store_param(float x) { return x; }
#endif

// By-value scalars; all but n, seed and the flag are bits of a float.
struct Info { u64 n, decay, take_m, keep_v, take_v, v_root, eps, step_size, seed, has_scale; };

__device__ __forceinline__ float number(u64 bits) { return __uint_as_float((u32)bits); }

__device__ __forceinline__ u32 noise(u32 element, u32 seed, u32 tensor) {
  u32 x = element * 0x9e3779b1u ^ seed ^ tensor * 0x85ebca77u;
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

// The special function unit: 2^x, log2 x, root and reciprocal, each to two units in the last place.
__device__ __forceinline__ float fast_exp2(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ float fast_log2(float x) { float y; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ float fast_sqrt(float x) { float y; asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ float fast_rcp(float x) { float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }

// Byte k of a word as (byte - top) / 8, through the bits of 2^23 + byte; exact.
template <int TOP> __device__ __forceinline__ float exponent(u32 code) {
  return __uint_as_float(0x4b000000u | code) * 0.125f - (8388608.0f + TOP) * 0.125f;
}

// Value of a code in units of the scale.
template <int TOP> __device__ __forceinline__ float decode(u32 code) {
  return code == 0 ? 0.0f : fast_exp2(exponent<TOP>(code));
}

// Code of r in [0, 1]: one of the two around it, with r as the mean over the noise. Within a step of 2^(1/8) the distance of r to
// the lower code is (2^(f/8) - 1) / (2^(1/8) - 1), f the fraction of its logarithm; the cubic here is that to 1e-6.
template <int TOP> __device__ __forceinline__ u32 encode(float r, u32 noise) {
  const float place = fminf(fmaxf(fast_log2(r) * 8.0f + TOP, 0.0f), (float)TOP);
  const float shifted = __fadd_rd(place, 8388608.0f);          // 2^23 + floor(place)
  const float f = place - (shifted - 8388608.0f);
  const float between = f * (0.9573086f + f * (0.0414434f + f * 0.0012476f));
  const float first = TOP == 127 ? 55108.98747006743f : 3611622602.8383393f;  // 2^((TOP - 1) / 8): below code 1 is 0
  const float share = place < 1.0f ? r * first : between;
  // 23 random bits as a number in [1, 2)
  const bool up = __uint_as_float(0x3f800000u | (noise >> 9)) - 1.0f < share;
  return (__float_as_uint(shifted) & 0xffu) + (up ? 1u : 0u);  // at TOP, f is 0
}

__device__ __forceinline__ float warp_max(float x) {
  for (int step = 16; step; step >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}

// 8 elements, whole or the first `count` of them.
template <class T> struct alignas(16) Eight { T x[LANE_ELEMS]; };
struct alignas(8) Codes { unsigned char x[LANE_ELEMS]; };

template <class T, class V> __device__ __forceinline__ V load(const T* from, int count) {
  if (count == LANE_ELEMS) return *(const V*)from;
  V v;
  for (int k = 0; k < LANE_ELEMS; ++k) v.x[k] = k < count ? from[k] : (T)0;
  return v;
}
template <class T, class V> __device__ __forceinline__ void store(T* to, const V& v, int count) {
  if (count == LANE_ELEMS) {
    *(V*)to = v;
    return;
  }
  for (int k = 0; k < LANE_ELEMS; ++k)
    if (k < count) to[k] = v.x[k];
}

// Factors that bring values of at most `top` to [0, 1]: the first keeps the reciprocal of a denormal `top` finite.
struct Unit { float pre, inverse; };
__device__ __forceinline__ Unit unit_of(float top) {
  const float pre = top < 1e-30f ? 1.2676506e30f : 1.0f;       // 2^100
  return {pre, top > 0.0f ? fast_rcp(top * pre) : 0.0f};
}

extern "C" __global__ void __launch_bounds__(THREADS)
ENTRY(Param* param, const Elem* grad, unsigned char* m_codes, float* m_scales, unsigned char* v_codes, float* v_scales,
      float* master, const float* grad_scale, const __grid_constant__ Info info) {
  const float scale = info.has_scale ? *grad_scale : 1.0f;
  if (!(fabsf(scale) <= 3.0e38f)) return;       // a bad step changes nothing
  const u64 block = (u64)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
  if (block * BLOCK >= info.n) return;
  const u32 lane = threadIdx.x & 31;
  const u64 first = block * BLOCK + lane * LANE_ELEMS;
  const int count = first >= info.n ? 0 : (int)min((u64)LANE_ELEMS, info.n - first);  // what is missing counts as zero
  const u32 seed = (u32)info.seed;

  Eight<Param> p = load<Param, Eight<Param>>(param + first, count);
  const Eight<Elem> g = load<Elem, Eight<Elem>>(grad + first, count);
  Codes mc = load<unsigned char, Codes>(m_codes + first, count), vc = load<unsigned char, Codes>(v_codes + first, count);
#if MASTER
  Eight<float> w = load<float, Eight<float>>(master + first, count);
#else
  Eight<float> w;
#endif
  const float m_scale = m_scales[block], v_scale = v_scales[block];

  const float root_factor = fast_rcp(number(info.v_root));
  float m[LANE_ELEMS], v[LANE_ELEMS], m_max = 0.0f, v_max = 0.0f;
#pragma unroll
  for (int k = 0; k < LANE_ELEMS; ++k) {
    const float gk = to_f32(g.x[k]) * scale;
    const float old_m = copysignf(decode<127>(mc.x[k] & 127u), __uint_as_float((u32)mc.x[k] << 24)) * m_scale;
    const float old_v = decode<255>(vc.x[k]) * v_scale;
    m[k] = old_m + (gk - old_m) * number(info.take_m);
    v[k] = old_v * number(info.keep_v) + gk * number(info.take_v) * gk;
    m_max = fmaxf(m_max, fabsf(m[k]));
    v_max = fmaxf(v_max, v[k]);
    const float old = MASTER ? w.x[k] : load_param(p.x[k]);
    const float step = m[k] * fast_rcp(fast_sqrt(v[k]) * root_factor + number(info.eps));
    w.x[k] = old * number(info.decay) - step * number(info.step_size);
  }
  m_max = warp_max(m_max);
  v_max = warp_max(v_max);
  const Unit m_unit = unit_of(m_max), v_unit = unit_of(v_max);
#pragma unroll
  for (int k = 0; k < LANE_ELEMS; ++k) {
    const u32 element = (u32)first + k;
#if PARAM == 0 && STOCHASTIC && !MASTER
    const u32 bits = __float_as_uint(w.x[k]);
    const bool finite = (bits & 0x7f800000u) != 0x7f800000u;   // infinities and NaN stay
    p.x[k] = (u16)((bits + (finite ? noise(element, seed, 1) & 0xffffu : 0u)) >> 16);
#else
    p.x[k] = store_param(w.x[k]);
#endif
    const u32 code = encode<127>(fabsf(m[k]) * m_unit.pre * m_unit.inverse, noise(element, seed, 2));
    mc.x[k] = (unsigned char)(m[k] != 0.0f ? code | (m[k] < 0.0f && code ? 128u : 0u) : 0u);
    // A second moment that is not zero never becomes zero: the step would explode.
    const u32 v_code = encode<255>(v[k] * v_unit.pre * v_unit.inverse, noise(element, seed, 3));
    vc.x[k] = (unsigned char)(v[k] > 0.0f ? max(v_code, 1u) : 0u);
  }
  store(param + first, p, count);
  store(m_codes + first, mc, count);
  store(v_codes + first, vc, count);
#if MASTER
  store(master + first, w, count);
#endif
  if (lane == 0) { m_scales[block] = m_max; v_scales[block] = v_max; }
}

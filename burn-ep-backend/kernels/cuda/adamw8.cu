// AdamW with moments in 8 bits (src/reference/adamw8.rs says what the codes mean). One block of 256 threads for each block of
// 256 elements, which share a scale. After element.cuh, which holds the gradient's type; PARAM 0 bf16, 1 fp16, 2 fp32.
#define BLOCK 256
#define STEPS 8.0f                              // codes of a factor of two

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

// By-value scalars; all but n, seed and the flags are bits of a float.
struct Info { u64 n, decay, take_m, keep_v, take_v, v_root, eps, step_size, seed, stochastic, has_master, has_scale; };

__device__ __forceinline__ float number(u64 bits) { return __uint_as_float((u32)bits); }

__device__ __forceinline__ u32 noise(u32 element, u32 seed, u32 tensor) {
  u32 x = element * 0x9e3779b1u ^ seed ^ tensor * 0x85ebca77u;
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

// Value of a code in units of the scale; `top` is the largest code.
__device__ __forceinline__ float decode(int code, int top) { return code == 0 ? 0.0f : exp2f((code - top) / STEPS); }

// Code of r in [0, 1]: one of the two around it, with r as the mean over the noise.
__device__ __forceinline__ int encode(float r, int top, u32 noise) {
  if (!(r > 0.0f)) return 0;
  const int low = min(max((int)floorf(log2f(r) * STEPS) + top, 0), top);
  const float below = decode(low, top), above = decode(min(low + 1, top), top);
  const float share = above > below ? (r - below) / (above - below) : 0.0f;
  return min(low + ((float)(noise >> 8) * (1.0f / 16777216.0f) < share ? 1 : 0), top);
}

__device__ __forceinline__ float block_max(float x, float* parts) {
  for (int step = 16; step; step >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  if ((threadIdx.x & 31) == 0) parts[threadIdx.x >> 5] = x;
  __syncthreads();
  x = parts[0];
  for (int i = 1; i < BLOCK / 32; ++i) x = fmaxf(x, parts[i]);
  __syncthreads();
  return x;
}

extern "C" __global__ void __launch_bounds__(BLOCK)
ENTRY(Param* param, const Elem* grad, unsigned char* m_codes, float* m_scales, unsigned char* v_codes, float* v_scales,
      float* master, const float* grad_scale, const __grid_constant__ Info info) {
  __shared__ float parts[BLOCK / 32];
  const float scale = info.has_scale ? *grad_scale : 1.0f;
  if (!(fabsf(scale) <= 3.0e38f)) return;       // a bad step changes nothing
  const u64 blocks = (info.n + BLOCK - 1) / BLOCK;
  for (u64 block = blockIdx.x; block < blocks; block += gridDim.x) {
    const u64 i = block * BLOCK + threadIdx.x;
    const bool inside = i < info.n;
    float m = 0.0f, v = 0.0f;
    if (inside) {
      const float g = to_f32(grad[i]) * scale;
      const int mc = m_codes[i], vc = v_codes[i];
      const float old_m = decode(mc & 127, 127) * m_scales[block] * (mc & 128 ? -1.0f : 1.0f);
      const float old_v = decode(vc, 255) * v_scales[block];
      m = old_m + (g - old_m) * number(info.take_m);
      v = old_v * number(info.keep_v) + g * number(info.take_v) * g;
      float p = info.has_master ? master[i] : load_param(param[i]);
      p = p * number(info.decay) - m / (sqrtf(v) / number(info.v_root) + number(info.eps)) * number(info.step_size);
      if (info.has_master) master[i] = p;
#if PARAM == 0
      const u32 bits = __float_as_uint(p);
      if (info.stochastic && !info.has_master && (bits & 0x7f800000u) != 0x7f800000u)
        param[i] = (u16)((bits + (noise((u32)i, (u32)info.seed, 1) & 0xffffu)) >> 16);
      else
#endif
        param[i] = store_param(p);
    }
    const float m_max = block_max(fabsf(m), parts), v_max = block_max(v, parts);
    if (inside) {
      const int code = encode(m_max > 0.0f ? fabsf(m) / m_max : 0.0f, 127, noise((u32)i, (u32)info.seed, 2));
      m_codes[i] = (unsigned char)(code | (m < 0.0f && code ? 128 : 0));
      // A second moment that is not zero never becomes zero: the step would explode.
      const int vcode = encode(v_max > 0.0f ? v / v_max : 0.0f, 255, noise((u32)i, (u32)info.seed, 3));
      v_codes[i] = (unsigned char)(v > 0.0f ? max(vcode, 1) : 0);
    }
    if (threadIdx.x == 0) { m_scales[block] = m_max; v_scales[block] = v_max; }
  }
}

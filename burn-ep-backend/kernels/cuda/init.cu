// Initial values of a parameter: the numbers of src/init.rs, drawn on the device.
// OUT 0: float, 1: bf16, 2: half. Needs no header, so that it also compiles where only NVRTC is installed.
typedef unsigned long long u64;
typedef unsigned short u16;

// By-value scalars. scale: bits of a double; [zero_begin, zero_end): elements of the whole tensor that are zero.
struct Info { u64 n, key, offset, kind, scale, zero_begin, zero_end; };

#define CONSTANT 0
#define NORMAL 1
#define UNIFORM 2
#define GOLDEN 0x9e3779b97f4a7c15ULL

__device__ __forceinline__ u64 mix(u64 z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}

// Number `counter` of the stream, in the open interval (0, 1).
__device__ __forceinline__ double uniform(u64 key, u64 counter) {
  const u64 bits = mix(key + (counter + 1) * GOLDEN) >> 11;
  return ((double)bits + 0.5) / 9007199254740992.0;
}

#if OUT == 0
typedef float out_t;
__device__ __forceinline__ out_t store(float v) { return v; }
#elif OUT == 1
typedef u16 out_t;
// Round to nearest even; the values are finite.
__device__ __forceinline__ out_t store(float v) {
  const unsigned bits = __float_as_uint(v);
  return (u16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
#else
typedef u16 out_t;
__device__ __forceinline__ out_t store(float v) {
  u16 h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(v));
  return h;
}
#endif

extern "C" __global__ void ENTRY(out_t* __restrict__ out, const __grid_constant__ Info info) {
  const double scale = __longlong_as_double((long long)info.scale);
  // Neighbours share the radius of a normal pair, so a thread makes two elements.
  const u64 last = (info.offset + info.n + 1) / 2;
  const u64 step = (u64)gridDim.x * blockDim.x;
  for (u64 pair = info.offset / 2 + (u64)blockIdx.x * blockDim.x + threadIdx.x; pair < last; pair += step) {
    const u64 first = 2 * pair;
    double even = scale, odd = scale;
    if (info.kind == NORMAL) {
      const double radius = scale * sqrt(-2.0 * log(uniform(info.key, first)));
      double s, c;
      sincos(6.283185307179586 * uniform(info.key, first + 1), &s, &c);
      even = radius * c;
      odd = radius * s;
    } else if (info.kind == UNIFORM) {
      even = scale * (2.0 * uniform(info.key, first) - 1.0);
      odd = scale * (2.0 * uniform(info.key, first + 1) - 1.0);
    }
    for (int i = 0; i < 2; i++) {
      const u64 index = first + i;
      if (index < info.offset || index >= info.offset + info.n) continue;
      const bool zero = index >= info.zero_begin && index < info.zero_end;
      out[index - info.offset] = store(zero ? 0.0f : (float)(i ? odd : even));
    }
  }
}

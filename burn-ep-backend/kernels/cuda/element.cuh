// Elements of 16 or 32 bits as fp32, 16 bytes at a time. No header is needed. Defines in front:
//   ELEM 0 bf16, 1 fp16, 2 fp32      INDEX64 0|1: integers are 32 or 64 bits wide      ENTRY: name of the kernel
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

#if ELEM == 2
typedef float Elem;
#else
typedef u16 Elem;
#endif
#if INDEX64
typedef long long Index;
#else
typedef int Index;
#endif
#define VEC (16 / (int)sizeof(Elem))            // elements of an access

struct alignas(16) Pack { u32 word[4]; };

__device__ __forceinline__ float to_f32(Elem x) {
#if ELEM == 0
  return __uint_as_float((u32)x << 16);
#elif ELEM == 1
  float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x)); return y;
#else
  return x;
#endif
}
// rounds to nearest, ties to even
__device__ __forceinline__ Elem from_f32(float x) {
#if ELEM == 0
  const u32 bits = __float_as_uint(x);
  return (bits & 0x7fffffffu) > 0x7f800000u ? (u16)0x7fff : (u16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
#elif ELEM == 1
  u16 y; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x)); return y;
#else
  return x;
#endif
}
__device__ __forceinline__ void unpack(const Pack& p, float (&x)[VEC]) {
  #pragma unroll
  for (int i = 0; i < VEC; ++i) {
#if ELEM == 2
    x[i] = __uint_as_float(p.word[i]);
#else
    x[i] = to_f32((Elem)(p.word[i / 2] >> (16 * (i & 1))));
#endif
  }
}
__device__ __forceinline__ Pack pack(const float (&x)[VEC]) {
  Pack p;
#if ELEM == 2
  #pragma unroll
  for (int i = 0; i < 4; ++i) p.word[i] = __float_as_uint(x[i]);
#else
  #pragma unroll
  for (int i = 0; i < 4; ++i) p.word[i] = (u32)from_f32(x[2 * i]) | (u32)from_f32(x[2 * i + 1]) << 16;
#endif
  return p;
}

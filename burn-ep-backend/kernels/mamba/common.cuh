// Shared by the Mamba-2 kernels: numbers, tile products, loads. Plain CUDA C++ for compute capability 8.0 and later.
//
// Defines: T_BF16 (x, B, C, dy, y are bf16 and products run on the tensor cores; else fp32 and FMA).
typedef unsigned int u32;
typedef unsigned long long u64;
struct bf16 { unsigned short bits; };

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(bf16 v) { return __uint_as_float((u32)v.bits << 16); }
// rounds to nearest even
__device__ __forceinline__ unsigned short bf16_bits(float v) {
  unsigned short bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(v));
  return bits;
}
__device__ __forceinline__ void store(float* p, float v) { *p = v; }
__device__ __forceinline__ void store(bf16* p, float v) { p->bits = bf16_bits(v); }

// ---- what a product multiplies -----------------------------------------------------------------------------------
// Every product has one operand that was given (T) and one that may be computed (Word). On the tensor cores a computed
// number is the sum of two bf16, kept in the halves of a word: with the leading part cut off and the rest rounded the error is
// at most 2^-17 of the number, so that only the fp32 sums and the rounding of results remain.
#if T_BF16
typedef bf16 T;
typedef u32 Word;
__device__ __forceinline__ Word pack(float v) {
  const u32 leading = __float_as_uint(v) & 0xffff0000u;
  return leading | bf16_bits(v - __uint_as_float(leading));
}
__device__ __forceinline__ float unpack(Word w) { return __uint_as_float(w & 0xffff0000u) + __uint_as_float(w << 16); }
#else
typedef float T;
typedef float Word;
__device__ __forceinline__ Word pack(float v) { return v; }
__device__ __forceinline__ float unpack(Word w) { return w; }
#endif

// A matrix in shared memory by its rows r and the summed index k. `Rows`: k runs along memory; `Columns`: r does.
template <class E> struct Rows { const E* p; int stride; __device__ __forceinline__ E at(int r, int k) const { return p[r * stride + k]; } };
template <class E> struct Columns { const E* p; int stride; __device__ __forceinline__ E at(int r, int k) const { return p[k * stride + r]; } };
template <class E> __device__ __forceinline__ Rows<E> rows(const E* p, int stride) { return Rows<E>{p, stride}; }
template <class E> __device__ __forceinline__ Columns<E> columns(const E* p, int stride) { return Columns<E>{p, stride}; }

#if T_BF16
// Elements k and k + 1 of row r as bf16 pairs: `high` alone for given numbers, the sum of `high` and `low` for computed ones.
struct Given { static constexpr bool split = false; u32 high; };
struct Computed { static constexpr bool split = true; u32 high, low; };
__device__ __forceinline__ Computed split_pair(u32 first, u32 second) {
  return Computed{__byte_perm(first, second, 0x7632), __byte_perm(first, second, 0x5410)};
}
__device__ __forceinline__ Given pair(const Rows<bf16>& m, int r, int k) { return Given{*(const u32*)(m.p + r * m.stride + k)}; }
__device__ __forceinline__ Given pair(const Columns<bf16>& m, int r, int k) {
  return Given{(u32)m.at(r, k).bits | (u32)m.at(r, k + 1).bits << 16};
}
__device__ __forceinline__ Computed pair(const Rows<u32>& m, int r, int k) {
  const uint2 v = *(const uint2*)(m.p + r * m.stride + k);
  return split_pair(v.x, v.y);
}
__device__ __forceinline__ Computed pair(const Columns<u32>& m, int r, int k) { return split_pair(m.at(r, k), m.at(r, k + 1)); }

// D[16, 8] += A[16, 16] B[16, 8]
__device__ __forceinline__ void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void add_low(float (&d)[4], const Computed (&a)[4], const Given (&b)[2]) {
  mma(d, a[0].low, a[1].low, a[2].low, a[3].low, b[0].high, b[1].high);
}
__device__ __forceinline__ void add_low(float (&d)[4], const Given (&a)[4], const Computed (&b)[2]) {
  mma(d, a[0].high, a[1].high, a[2].high, a[3].high, b[0].low, b[1].low);
}
__device__ __forceinline__ void add_low(float (&)[4], const Given (&)[4], const Given (&)[2]) {}
#endif

// The part of a warp in D[M, N] = sum over k < K of A[m, k] B[n, k]: 16 rows from `row`, `count` of at most MAX blocks of 8
// columns from `column`. Lane 4 g + t holds D[row + g + 8 (e / 2), column + 8 f + 2 t + e % 2] in d[f][e], whatever computes it.
template <int MAX, class A, class B>
__device__ __forceinline__ void product(float (&d)[MAX][4], const A& a, int row, const B& b, int column, int count, int K) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = 2 * (lane & 3);
#if T_BF16
  for (int k = 0; k < K; k += 16) {
    const decltype(pair(a, 0, 0)) left[4] = {pair(a, row + g, k + t), pair(a, row + g + 8, k + t), pair(a, row + g, k + t + 8),
                                             pair(a, row + g + 8, k + t + 8)};
#pragma unroll
    for (int f = 0; f < MAX; ++f) {
      if (f < count) {
        const int n = column + 8 * f + g;
        const decltype(pair(b, 0, 0)) right[2] = {pair(b, n, k + t), pair(b, n, k + t + 8)};
        mma(d[f], left[0].high, left[1].high, left[2].high, left[3].high, right[0].high, right[1].high);
        add_low(d[f], left, right);
      }
    }
  }
#else
  for (int k = 0; k < K; ++k) {
    const float above = a.at(row + g, k), below = a.at(row + g + 8, k);
#pragma unroll
    for (int f = 0; f < MAX; ++f) {
      if (f < count) {
        const int n = column + 8 * f + t;
        const float left = b.at(n, k), right = b.at(n + 1, k);
        d[f][0] += above * left;
        d[f][1] += above * right;
        d[f][2] += below * left;
        d[f][3] += below * right;
      }
    }
  }
#endif
}

template <int MAX> __device__ __forceinline__ void clear(float (&d)[MAX][4]) {
#pragma unroll
  for (int f = 0; f < MAX; ++f) d[f][0] = d[f][1] = d[f][2] = d[f][3] = 0.f;
}

// ---- sums over lanes -----------------------------------------------------------------------------------------------
__device__ __forceinline__ float quad_sum(float v) {
  v += __shfl_xor_sync(~0u, v, 1);
  return v + __shfl_xor_sync(~0u, v, 2);
}
__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int d = 16; d > 0; d >>= 1) v += __shfl_xor_sync(~0u, v, d);
  return v;
}

// ---- loads ----------------------------------------------------------------------------------------------------------
// 64 rows of which `valid` exist, WIDTH columns padded with zeros to PADDED; vectors of 16 bytes where the width allows
// (the host side takes care of the alignment of rows).
template <int WIDTH, int PADDED, int THREADS> __device__ __forceinline__ void load_rows(T* to, int stride, const T* from, u64 row_stride, int valid) {
  constexpr int LANES = WIDTH % (16 / (int)sizeof(T)) == 0 ? 16 / (int)sizeof(T) : 1, ITEMS = PADDED / LANES;
  struct __align__(LANES * sizeof(T)) Vector { T v[LANES]; };
#pragma unroll 4
  for (int i = threadIdx.x; i < 64 * ITEMS; i += THREADS) {
    const int r = i / ITEMS, c = i % ITEMS * LANES;
    Vector v = {};
    if (r < valid && c < WIDTH) v = *(const Vector*)(from + r * row_stride + c);
    *(Vector*)(to + r * stride + c) = v;
  }
}

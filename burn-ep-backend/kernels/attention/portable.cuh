// Flash attention without instructions of one architecture, forward and backward, in fp32, bf16 or fp16; no atomics, so the
// result is the same in every run. bf16 and fp16 multiply on tensor cores (mma.sync), fp32 by fused multiply-adds.
// Tensors are dense: Q [B, Sq, Hq, Dk], K [B, Skv, Hkv, Dk], V [B, Skv, Hkv, Dv], O [B, Sq, Hq, Dv].
// The masks come as the tables of Ranges. Defines in front:
//   ELEM 0|1|2   DK, DV: head sizes   VEC 1: both are multiples of 16 bytes, 0: any
//   WARPS: a block owns 16 WARPS rows (queries, or keys in attn_portable_dkv)   STEP 16|32: rows of the other side per step
//   PARTS 1|2|3 (attn_portable_dkv): 1 dK, 2 dV, 3 both in one kernel
// A warp owns 16 rows. Scores, probabilities and outputs are in the registers of the m16n8k16 accumulator: of an 8 column
// tile, lane l holds rows l / 4 and l / 4 + 8, columns 2 (l % 4) and the next, as elements 0, 1 and 2, 3.
#define DKP ((DK + 15) / 16 * 16)                 // columns in shared memory, zeros behind the real ones
#define DVP ((DV + 15) / 16 * 16)
#define PER (16 / (int)sizeof(T))                 // elements in 16 bytes
#define LDK (DKP + PER)                           // row strides that keep the banks apart
#define LDV (DVP + PER)
#define LDP (STEP + 4)
#define OWN (16 * WARPS)
#define THREADS (32 * WARPS)
#define MINUS_INF (-__int_as_float(0x7f800000))
extern __shared__ __align__(1024) unsigned char smem[];

// `rows` rows of `dim` elements, `valid` of them real, to shared memory with rows of `ld` elements, `columns` of them written
__device__ __forceinline__ void load_rows(T* dst, int ld, int columns, const T* src, u64 stride, int dim, int rows, int valid) {
#if VEC
  const int chunks = columns / PER;
  for (int x = (int)threadIdx.x; x < rows * chunks; x += THREADS) {
    const int r = x / chunks, at = x % chunks * PER;
    const bool real = r < valid && at < dim;
    copy16(dst + r * ld + at, real ? src + (u64)r * stride + at : src, real);
  }
#else
  for (int x = (int)threadIdx.x; x < rows * columns; x += THREADS) {
    const int r = x / columns, at = x % columns;
    dst[r * ld + at] = r < valid && at < dim ? src[(u64)r * stride + at] : (T)0;
  }
#endif
}

#if ELEM == 0
// left operand of `accumulate`: through shared memory, because a lane needs the columns of its neighbours
struct Operand { const float* p; };
template <int N> __device__ __forceinline__ Operand operand(const float (&a)[N][4], float* scratch, int lane) {
  float* p = scratch + (lane >> 2) * LDP + (lane & 3) * 2;
  __syncwarp();
  #pragma unroll
  for (int n = 0; n < N; ++n) { p[n * 8] = a[n][0]; p[n * 8 + 1] = a[n][1]; p[8 * LDP + n * 8] = a[n][2]; p[8 * LDP + n * 8 + 1] = a[n][3]; }
  __syncwarp();
  return Operand{scratch};
}
// d[16 x 8 N] = a[16 x K] b[8 N x K]^T, both in shared memory
template <int N, int K> __device__ __forceinline__ void scores(float (&d)[N][4], const T* a, const T* b, int ld, int lane) {
  const float* x = a + (lane >> 2) * ld, *y = x + 8 * ld, *z = b + (lane & 3) * 2 * ld;
  #pragma unroll
  for (int n = 0; n < N; ++n) d[n][0] = d[n][1] = d[n][2] = d[n][3] = 0.f;
  #pragma unroll 2
  for (int k = 0; k < K; k += 4) {
    const float4 u = *(const float4*)(x + k), v = *(const float4*)(y + k);
    #pragma unroll
    for (int n = 0; n < N; ++n) {
      const float4 s = *(const float4*)(z + n * 8 * ld + k), t = *(const float4*)(z + (n * 8 + 1) * ld + k);
      d[n][0] = fmaf(u.w, s.w, fmaf(u.z, s.z, fmaf(u.y, s.y, fmaf(u.x, s.x, d[n][0]))));
      d[n][1] = fmaf(u.w, t.w, fmaf(u.z, t.z, fmaf(u.y, t.y, fmaf(u.x, t.x, d[n][1]))));
      d[n][2] = fmaf(v.w, s.w, fmaf(v.z, s.z, fmaf(v.y, s.y, fmaf(v.x, s.x, d[n][2]))));
      d[n][3] = fmaf(v.w, t.w, fmaf(v.z, t.z, fmaf(v.y, t.y, fmaf(v.x, t.x, d[n][3]))));
    }
  }
}
// d[16 x 8 N] += a[16 x STEP] b[STEP x 8 N], b in shared memory
template <int N> __device__ __forceinline__ void accumulate(float (&d)[N][4], const Operand& a, const T* b, int ld, int lane) {
  const float* x = a.p + (lane >> 2) * LDP, *y = b + (lane & 3) * 2;
  #pragma unroll 2
  for (int k = 0; k < STEP; ++k) {
    const float u = x[k], v = x[8 * LDP + k];
    #pragma unroll
    for (int n = 0; n < N; ++n) {
      const float2 s = *(const float2*)(y + k * ld + n * 8);
      d[n][0] = fmaf(u, s.x, d[n][0]); d[n][1] = fmaf(u, s.y, d[n][1]); d[n][2] = fmaf(v, s.x, d[n][2]); d[n][3] = fmaf(v, s.y, d[n][3]);
    }
  }
}
#else
struct Operand { u32 a[STEP / 16][4]; };
template <int N> __device__ __forceinline__ Operand operand(const float (&a)[N][4], float*, int) {
  Operand o;
  #pragma unroll
  for (int k = 0; k < STEP / 16; ++k) {
    o.a[k][0] = pack(a[2 * k][0], a[2 * k][1]); o.a[k][1] = pack(a[2 * k][2], a[2 * k][3]);
    o.a[k][2] = pack(a[2 * k + 1][0], a[2 * k + 1][1]); o.a[k][3] = pack(a[2 * k + 1][2], a[2 * k + 1][3]);
  }
  return o;
}
template <int N, int K> __device__ __forceinline__ void scores(float (&d)[N][4], const T* a, const T* b, int ld, int lane) {
  const T* x = a + (lane & 15) * ld + (lane >> 4) * 8, *y = b + ((lane >> 4) * 8 + (lane & 7)) * ld + (lane >> 3 & 1) * 8;
  #pragma unroll
  for (int n = 0; n < N; ++n) d[n][0] = d[n][1] = d[n][2] = d[n][3] = 0.f;
  #pragma unroll
  for (int k = 0; k < K; k += 16) {
    u32 u[4], v[4];
    ld_matrix(u, x + k);
    #pragma unroll
    for (int n = 0; n < N; n += 2) {
      ld_matrix(v, y + n * 8 * ld + k);
      mma(d[n], u, v[0], v[1]); mma(d[n + 1], u, v[2], v[3]);
    }
  }
}
template <int N> __device__ __forceinline__ void accumulate(float (&d)[N][4], const Operand& a, const T* b, int ld, int lane) {
  const T* y = b + (lane & 15) * ld + (lane >> 4) * 8;
  #pragma unroll
  for (int k = 0; k < STEP / 16; ++k) {
    #pragma unroll
    for (int n = 0; n < N; n += 2) {
      u32 v[4];
      ld_matrix_t(v, y + k * 16 * ld + n * 8);
      mma(d[n], a.a[k], v[0], v[1]); mma(d[n + 1], a.a[k], v[2], v[3]);
    }
  }
}
#endif

// rows of accumulators, times f0 (first row of the lane) and f1 (eighth after it)
template <int N> __device__ __forceinline__ void store_rows(const float (&d)[N][4], T* dst, u64 stride, int dim, int valid, float f0, float f1, int lane) {
  const int r = lane >> 2, c = (lane & 3) * 2;
  #pragma unroll
  for (int n = 0; n < N; ++n) {
    #pragma unroll
    for (int x = 0; x < 4; ++x) {
      const int row = r + (x >> 1) * 8, at = n * 8 + c + (x & 1);
      if (row < valid && at < dim) dst[(u64)row * stride + at] = narrow(d[n][x] * (x & 2 ? f1 : f0));
    }
  }
}

// bits of the keys from `key` (a multiple of STEP) on
__device__ __forceinline__ u32 visible_keys(const uint4* keys, int b, int blocks, int key) {
  return ((const u32*)(keys + (u64)b * blocks))[key >> 5] >> (key & 31);
}
#define ALL_KEYS ((1ull << STEP) - 1)

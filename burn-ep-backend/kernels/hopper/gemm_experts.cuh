// ---- fused activations of the experts ---------------------------------------------------------------------------------
// The product stays in the order of the weights: SwiGLU has F gate columns before F up columns, the clamped SwiGLU alternates
// gate and up. All outputs are [rows, halves, columns] for TMA, which clips columns at the end of a half.
//   EPI 1, 2, 3 (SwiGLU, relu^2, clamped SwiGLU): D[rows, product] = A B^T + bias, H[rows, F] = activation of the bf16 values
//           of D. With EPI 1 a tile loads BN / 2 gate rows of B and the BN / 2 up rows of the same columns, so that gate and up
//           of one column meet in one thread.
//   EPI 4, 5, 6 (their backward; B_MN and GATHER 1): the product is dH [rows, F]. From P = D of the forward and the weight w
//           of row r, w[slots[r]] (1 without WEIGHTED):
//           D[rows, product] = w dH dact/dP, in the order of P;   H[rows, F] = w act(P), the operand of the weight gradient;
//           dw[r, column tile] = sum of dH act(P) over the tile's columns: partial sums, no atomics.
//           64 columns of dH take six phases: P is fetched by TMA into both buffers, changed in place 16 columns at a time,
//           stored, and H goes out through the first buffer. Every phase hides behind a k block of the next tile.
#if EPI
// 1 / (1 + e^-x), two special-function instructions
__device__ __forceinline__ float sigmoid(float x) {
  float e, r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * -1.4426950408889634f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(1.f + e));
  return r; }
__device__ __forceinline__ u32 word(u32 a, u32 b, u32 select) { u32 r; asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(select)); return r; }

#if EPI == 1 || EPI == 4
#define HALVES 2
#else
#define HALVES 1
#endif
#if EPI == 1
#define PHASES (3 * (BN / 128))                          // gate, up, H for each 64 columns of F
#elif EPI == 2
#define PHASES (2 * CHUNKS)                              // product, H
#elif EPI == 3
#define PHASES (3 * (BN / 128))                          // 64 columns of the product, the next 64, their 64 of H
#else
#define STEPS 6                                          // fetch, four times 16 columns, H
#define PHASES (STEPS * CHUNKS)
#endif

struct Writer {
  const TensorMap *map, *map_h; unsigned char *d, *h; u32 slab; int n, lane, buf, row, rows, col0;
  float alpha, limit;
#if BIAS
  const float* bias; int group;
#endif
#if BACKWARD
  const TensorMap* map_p; u32 bar, parity;
#if WEIGHTED
  const int* slots; const float* w; float* dw; float w0, w1, dot0, dot1;
#endif
#endif

  // slab -> columns col .. of half `half` in a matrix [rows, halves, width]; the warp's writes to the slab end here
  __device__ __forceinline__ void store(const TensorMap* m, unsigned char* base, u32 src, int col, int half, int halves, int width) {
    if (rows >= 16) { if (lane == 0) tma_store_3d(m, src, col, half, row); }
    else copy_rows(src, (uint4*)base + (((u64)row * halves + half) * width + col) / 8, halves * width / 8, (width - col) / 8, rows, lane);
  }

#if !BACKWARD
  __device__ __forceinline__ u32 open() {
    if (lane == 0) bulk_wait_read<OUT_BUFS - 1>();
    __syncwarp();
    return slab + buf * OUT_SLAB;
  }
  __device__ __forceinline__ void close(const TensorMap* m, unsigned char* base, u32 src, int col, int half, int halves, int width) {
    fence_async();
    __syncwarp();
    store(m, base, src, col, half, halves, width);
    if (lane == 0) bulk_commit();                        // also when empty: the count of groups must follow the count of buffers
    __syncwarp();
    buf ^= 1;
  }
  // 64 columns of the product from column `col` of half `half`
  __device__ __forceinline__ void product(u32* v, int col, int half) {
#if BIAS
    #pragma unroll
    for (int j = 0; j < 8; ++j) {                        // the plain path rounds the product before it adds the bias, too
      const int c = col + 8 * j + 2 * (lane & 3);
      if (c < n) {
        const float2 b = __ldg((const float2*)(bias + ((u64)group * HALVES + half) * n + c));
        v[2 * j] = pack_bf16(bf_lo(v[2 * j]) + b.x, bf_hi(v[2 * j]) + b.y);
        v[2 * j + 1] = pack_bf16(bf_lo(v[2 * j + 1]) + b.x, bf_hi(v[2 * j + 1]) + b.y);
      }
    }
#endif
    const u32 dst = open();
    fill_slab(dst, v, lane);
    close(map, d, dst, col, half, HALVES, n);
  }
#endif

#if EPI == 1
  static __device__ __forceinline__ u32 act2(u32 g, u32 u) {
    const float a = bf_lo(g), b = bf_hi(g);
    return pack_bf16(a * sigmoid(a) * bf_lo(u), b * sigmoid(b) * bf_hi(u)); }
  __device__ __forceinline__ void phase(u32* pend, int p) {
    u32 *g = pend + 16 * (p / 3), *u = g + BN / 8;
    const int col = col0 + 64 * (p / 3);
    if (rows <= 0 || col >= n) return;                   // rows <= 0: nothing pending, or below the end of the group
    if (p % 3 == 0) product(g, col, 0);
    else if (p % 3 == 1) product(u, col, 1);
    else {
      const u32 dst = open();
      #pragma unroll
      for (int j = 0; j < 4; ++j)
        st_matrix(slab_addr(dst, j, lane), act2(g[4 * j], u[4 * j]), act2(g[4 * j + 1], u[4 * j + 1]), act2(g[4 * j + 2], u[4 * j + 2]), act2(g[4 * j + 3], u[4 * j + 3]));
      close(map_h, h, dst, col, 0, 1, n);
    }
  }
#elif EPI == 2
  static __device__ __forceinline__ u32 act2(u32 v) { const float a = fmaxf(bf_lo(v), 0.f), b = fmaxf(bf_hi(v), 0.f); return pack_bf16(a * a, b * b); }
  __device__ __forceinline__ void phase(u32* pend, int p) {
    u32* v = pend + 16 * (p / 2);
    const int col = col0 + 64 * (p / 2);
    if (rows <= 0 || col >= n) return;
    if (p % 2 == 0) { product(v, col, 0); return; }
    const u32 dst = open();
    #pragma unroll
    for (int j = 0; j < 4; ++j) st_matrix(slab_addr(dst, j, lane), act2(v[4 * j]), act2(v[4 * j + 1]), act2(v[4 * j + 2]), act2(v[4 * j + 3]));
    close(map_h, h, dst, col, 0, 1, n);
  }
#elif EPI == 3
  // gate in the low half of the word, up in the high one
  __device__ __forceinline__ float act(u32 v) const {
    const float g = fminf(bf_lo(v), limit), u = fminf(fmaxf(bf_hi(v), -limit), limit);
    return (u + 1.f) * g * sigmoid(alpha * g); }
  __device__ __forceinline__ void phase(u32* pend, int p) {
    u32* v = pend + 32 * (p / 3);
    const int col = col0 + 128 * (p / 3);
    if (rows <= 0 || col >= n) return;
    if (p % 3 < 2) { if (col + 64 * (p % 3) < n) product(v + 16 * (p % 3), col + 64 * (p % 3), 0); return; }
    // 8 columns of H come from two 8-column blocks of the product, of which lane q of four holds columns q and 4 + q of H.
    // Neighbours swap, so that even lanes hold columns q and q + 1, odd ones 4 + q - 1 and 4 + q: one word for each row.
    const u32 dst = open(), odd = lane & 1, r = lane >> 2, q = lane & 3;
    #pragma unroll
    for (int m = 0; m < 8; ++m) {
      const u32 a = pack_bf16(act(v[4 * m]), act(v[4 * m + 1])), b = pack_bf16(act(v[4 * m + 2]), act(v[4 * m + 3]));
      const u32 other = __shfl_xor_sync(~0u, odd ? a : b, 1), own = odd ? b : a;
      const u32 first = odd ? other : own, second = odd ? own : other;
      const u32 at = dst + r * 128 + ((m ^ r) << 4) + ((q >> 1) + 2 * odd) * 4;
      asm volatile("st.shared.u32 [%0], %1;" :: "r"(at), "r"(word(first, second, 0x5410)) : "memory");
      asm volatile("st.shared.u32 [%0], %1;" :: "r"(at + 1024), "r"(word(first, second, 0x7632)) : "memory");
    }
    close(map_h, h, dst, col / 2, 0, 1, n / 2);
  }
#else
  __device__ __forceinline__ float weight(int s) const {
#if WEIGHTED
    return s ? w1 : w0;
#else
    return 1.f;
#endif
  }
  __device__ __forceinline__ void dot(int s, float x) {
#if WEIGHTED
    if (s) dot1 += x; else dot0 += x;
#endif
  }
  // dH of two columns (packed), their gate and up (up unused by EPI 5) -> gradients of both, w act in place of dH
  __device__ __forceinline__ void backward2(u32& y, float (&g)[2], float (&u)[2], int s) {
    const float dh[2] = {bf_lo(y), bf_hi(y)};
    float a[2];
    #pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float z = dh[i] * weight(s);
#if EPI == 4
      const float sg = sigmoid(g[i]), silu = g[i] * sg;
      a[i] = silu * u[i];
      g[i] = z * u[i] * (sg + silu * (1.f - sg));
      u[i] = z * silu;
#elif EPI == 5
      const float x = fmaxf(g[i], 0.f);
      a[i] = x * x;
      g[i] = 2.f * z * x;
#else
      // clamped values are constants; a value on the limit still passes its gradient
      const float gc = fminf(g[i], limit), uc = fminf(fmaxf(u[i], -limit), limit), sg = sigmoid(alpha * gc), glu = gc * sg;
      a[i] = (uc + 1.f) * glu;
      g[i] = g[i] <= limit ? z * (uc + 1.f) * (sg + alpha * glu * (1.f - sg)) : 0.f;
      u[i] = fabsf(u[i]) <= limit ? z * glu : 0.f;
#endif
      dot(s, dh[i] * a[i]);
    }
    y = pack_bf16(weight(s) * a[0], weight(s) * a[1]);
  }
  __device__ __forceinline__ void fetch(int col, bool first) {
    fence_async();                                       // reads of the slabs by copy_rows
    __syncwarp();
    if (lane == 0) {
      bulk_wait_read<0>();
      bar_expect(bar, (EPI == 5 ? 1 : 2) * OUT_SLAB);
#if EPI == 4
      tma_load_3d<false>(slab, map_p, bar, col, 0, row);
      tma_load_3d<false>(slab + OUT_SLAB, map_p, bar, col, 1, row);
#elif EPI == 5
      tma_load_3d<false>(slab, map_p, bar, col, 0, row);
#else
      tma_load_3d<false>(slab, map_p, bar, 2 * col, 0, row);
      tma_load_3d<false>(slab + OUT_SLAB, map_p, bar, 2 * col + 64, 0, row);
#endif
    }
    __syncwarp();
#if WEIGHTED
    if (first) {
      const int r = lane >> 2;
      w0 = r < rows ? __ldg(w + __ldg(slots + row + r)) : 0.f;
      w1 = r + 8 < rows ? __ldg(w + __ldg(slots + row + r + 8)) : 0.f;
      dot0 = dot1 = 0.f;
    }
#endif
  }
  // 16 columns: 8-column blocks 2 j and 2 j + 1, registers v[0..4]
  __device__ __forceinline__ void columns(u32* v, int j) {
#if EPI == 6
    const u32 r = lane >> 2, q = lane & 3;
    #pragma unroll
    for (int i = 0; i < 4; ++i) {                        // block 2 j + i / 2, row r + 8 (i % 2): two words of gate and up
      const int block = 2 * j + i / 2;
      const u32 at = slab + (block >> 2) * OUT_SLAB + r * 128 + (((2 * (block & 3) + (q >> 1)) ^ r) << 4) + (q & 1) * 8 + (i % 2) * 1024;
      u32 p0, p1;
      asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(p0), "=r"(p1) : "r"(at) : "memory");
      float g[2] = {bf_lo(p0), bf_lo(p1)}, u[2] = {bf_hi(p0), bf_hi(p1)};
      backward2(v[i], g, u, i % 2);
      asm volatile("st.shared.v2.u32 [%0], {%1, %2};" :: "r"(at), "r"(pack_bf16(g[0], u[0])), "r"(pack_bf16(g[1], u[1])) : "memory");
    }
#elif EPI == 5
    const u32 at = slab_addr(slab, j, lane);
    u32 p[4];
    ld_matrix(at, p[0], p[1], p[2], p[3]);
    #pragma unroll
    for (int i = 0; i < 4; ++i) {                        // row r + 8 (i % 2)
      float g[2] = {bf_lo(p[i]), bf_hi(p[i])}, none[2] = {0.f, 0.f};
      backward2(v[i], g, none, i % 2);
      p[i] = pack_bf16(g[0], g[1]);
    }
    st_matrix(at, p[0], p[1], p[2], p[3]);
#else
    const u32 r = lane & 15;
    #pragma unroll
    for (int i = 0; i < 2; ++i) {                        // block 2 j + i: gate rows r, r + 8, up rows r, r + 8
      const u32 at = slab + (lane >> 4) * OUT_SLAB + r * 128 + (((2 * j + i) ^ (r & 7)) << 4);
      u32 p[4];
      ld_matrix(at, p[0], p[1], p[2], p[3]);
      #pragma unroll
      for (int t = 0; t < 2; ++t) {
        float g[2] = {bf_lo(p[t]), bf_hi(p[t])}, u[2] = {bf_lo(p[2 + t]), bf_hi(p[2 + t])};
        backward2(v[2 * i + t], g, u, t);
        p[t] = pack_bf16(g[0], g[1]); p[2 + t] = pack_bf16(u[0], u[1]);
      }
      st_matrix(at, p[0], p[1], p[2], p[3]);
    }
#endif
  }
  __device__ __forceinline__ void phase(u32* pend, int p) {
    const int c = p / STEPS, step = p % STEPS, col = col0 + 64 * c;
    u32* v = pend + 16 * c;
    if (rows <= 0) return;
    if (col < n) {
      if (step == 0) fetch(col, c == 0);
      else if (step <= 4) {
        if (step == 1) { bar_wait(bar, parity); parity ^= 1; }
        columns(v + 4 * (step - 1), step - 1);
        if (step == 4) {
          fence_async();
          __syncwarp();
#if EPI == 4
          store(map, d, slab, col, 0, 2, n);
          store(map, d, slab + OUT_SLAB, col, 1, 2, n);
#elif EPI == 5
          store(map, d, slab, col, 0, 1, n);
#else
          store(map, d, slab, 2 * col, 0, 1, 2 * n);
          if (2 * col + 64 < 2 * n) store(map, d, slab + OUT_SLAB, 2 * col + 64, 0, 1, 2 * n);
#endif
          if (lane == 0) bulk_commit();
          __syncwarp();
        }
      } else {
        if (lane == 0) bulk_wait_read<0>();
        __syncwarp();
        fill_slab(slab, v, lane);
        fence_async();
        __syncwarp();
        store(map_h, h, slab, col, 0, 1, n);
        if (lane == 0) bulk_commit();
        __syncwarp();
      }
    }
#if WEIGHTED
    if (p == PHASES - 1 && col0 < n) {                   // the second block of an N pair can lie past the last column tile
      float x = dot0, y = dot1;
      x += __shfl_xor_sync(~0u, x, 1); x += __shfl_xor_sync(~0u, x, 2);
      y += __shfl_xor_sync(~0u, y, 1); y += __shfl_xor_sync(~0u, y, 2);
      const int r = lane >> 2, tiles = (n + BN - 1) / BN;
      float* to = dw + (u64)(row + r) * tiles + col0 / BN;
      if ((lane & 3) == 0 && r < rows) to[0] = x;
      if ((lane & 3) == 0 && r + 8 < rows) to[8 * (u64)tiles] = y;
    }
#endif
  }
#endif
};
#endif

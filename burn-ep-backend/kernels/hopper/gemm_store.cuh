// ---- output of one consumer warp: 16 rows, 128 bytes of columns at a time ---------------------------------------------
// Accumulator fragment of wgmma: lane l of warp w holds rows 16 w + l/4 and + 8, columns 8 j + 2 (l % 4) and + 1 in
// registers 4 j .. 4 j + 3; packed to bf16 pairs, four of them are the 8x8 matrices (rows 0-7 | rows 8-15) x (columns
// 8 j | 8 (j + 1)) that one stmatrix.x4 stores. Slab row r keeps 16-byte chunk c at c ^ (r & 7) (the 128-byte swizzle).
struct Writer {
  const TensorMap *map, *map_h; unsigned char *d, *h; u32 slab, bar; int n, lane, buf, row, rows, col0;
#if EPI == 3
  const float* w; float* dw; float w0, w1, dot0, dot1; u32 phase;
#endif
  __device__ __forceinline__ u32 addr(u32 dst, int j) const { const u32 r = lane & 15, hi = lane >> 4; return dst + r * 128 + (((2 * j + hi) ^ (r & 7)) << 4); }
  // slab -> output columns col .. of a matrix with `width` columns; the caller has fenced and synchronised the warp
  __device__ __forceinline__ void store(const TensorMap* m, unsigned char* base, u32 src, int col, int width) {
    if (rows >= 16) { if (lane == 0) tma_store_2d(m, src, col, row); }             // TMA clips columns beyond the width
    else {
      const int per = F32 ? 4 : 8;                                                 // elements in 16 bytes
      copy_rows(src, (uint4*)base + ((u64)row * width + col) / per, width / per, (width - col) / per, rows, lane);
    }
  }
#if EPI == 0
  __device__ __forceinline__ void chunk(const u32* v, int c) {
    const int col = col0 + c * CHUNK_COLS;
    if (rows <= 0 || col >= n) return;                   // rows <= 0: nothing pending, or below the end of the group
    const u32 dst = slab + buf * OUT_SLAB;
    if (lane == 0) asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(OUT_BUFS - 1) : "memory");
    __syncwarp();
#if F32
    const u32 r = lane >> 2, q = lane & 3;
    #pragma unroll
    for (int j = 0; j < 4; ++j) {
      const u32 a = dst + r * 128 + (((2 * j + (q >> 1)) ^ r) << 4) + (q & 1) * 8; // rows r and r + 8 have the same r & 7
      asm volatile("st.shared.v2.u32 [%0], {%1, %2};" :: "r"(a), "r"(v[4 * j]), "r"(v[4 * j + 1]) : "memory");
      asm volatile("st.shared.v2.u32 [%0], {%1, %2};" :: "r"(a + 1024), "r"(v[4 * j + 2]), "r"(v[4 * j + 3]) : "memory");
    }
#else
    #pragma unroll
    for (int j = 0; j < 4; ++j) st_matrix(addr(dst, j), v[4 * j], v[4 * j + 1], v[4 * j + 2], v[4 * j + 3]);
#endif
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
    store(map, d, dst, col, n);
    // committed even when empty: the count of groups must follow the count of buffers
    if (lane == 0) asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    __syncwarp();
    buf = buf + 1 == OUT_BUFS ? 0 : buf + 1;
  }
#elif EPI == 1 || EPI == 2
  // buffer 0: 64 columns of the product; buffer 1: H. The activation reads the bf16 values that are stored.
  __device__ __forceinline__ void chunk(const u32* v, int c) {
    const int col = col0 + c * 64;
    if (rows <= 0 || (EPI == 1 ? col - (c & 1) * 64 : col) >= n) return;
    const u32 dst = slab, dh = slab + OUT_SLAB;
    if (lane == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    __syncwarp();
    #pragma unroll
    for (int j = 0; j < 4; ++j) st_matrix(addr(dst, j), v[4 * j], v[4 * j + 1], v[4 * j + 2], v[4 * j + 3]);
#if EPI == 1
    #pragma unroll
    for (int j = 0; j < 2; ++j) {                        // 16 columns of H from 32 of the product: gate, up, gate, up
      const u32* p = v + 8 * j;
      st_matrix(addr(dh, 2 * (c & 1) + j), swiglu2(p[0], p[2]), swiglu2(p[1], p[3]), swiglu2(p[4], p[6]), swiglu2(p[5], p[7]));
    }
#else
    #pragma unroll
    for (int j = 0; j < 4; ++j) st_matrix(addr(dh, j), relu2(v[4 * j]), relu2(v[4 * j + 1]), relu2(v[4 * j + 2]), relu2(v[4 * j + 3]));
#endif
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
    if (col < n) store(map, d, dst, col, n);
#if EPI == 1
    if (c & 1) store(map_h, h, dh, (col - 64) >> 1, n >> 1);
#else
    store(map_h, h, dh, col, n);
#endif
    if (lane == 0) asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    __syncwarp();
  }
#else
  // 64 columns of dH need 128 of P: fetched by TMA into both buffers one k block ahead, changed in place, stored.
  __device__ __forceinline__ void fetch(int c) {
    const int col = col0 + c * 64;
    if (rows <= 0 || col >= n) return;
    if (lane == 0) {
      asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
      bar_expect(bar, 2 * OUT_SLAB);
      tma_load_2d<false>(slab, map_h, bar, 2 * col, row);
      tma_load_2d<false>(slab + OUT_SLAB, map_h, bar, 2 * col + 64, row);
    }
    __syncwarp();
  }
  __device__ __forceinline__ u32 grad2(u32 g, u32 u, u32 y, float w, float& dot, u32& du) {
    const float g0 = bf_lo(g), g1 = bf_hi(g), u0 = bf_lo(u), u1 = bf_hi(u), y0 = bf_lo(y), y1 = bf_hi(y);
    const float s0 = sigmoid(g0), s1 = sigmoid(g1), a0 = g0 * s0, a1 = g1 * s1;
    dot = fmaf(y0, a0 * u0, dot); dot = fmaf(y1, a1 * u1, dot);
    const float z0 = y0 * w, z1 = y1 * w;
    du = pack_bf16(z0 * a0, z1 * a1);
    return pack_bf16(z0 * u0 * (s0 + a0 * (1.f - s0)), z1 * u1 * (s1 + a1 * (1.f - s1)));
  }
  __device__ __forceinline__ void chunk(const u32* v, int c) {
    const int col = col0 + c * 64;
    if (rows <= 0) return;
    if (col < n) {
      if (c == 0) {
        const int r = lane >> 2;
        w0 = r < rows ? __ldg(w + row + r) : 0.f; w1 = r + 8 < rows ? __ldg(w + row + r + 8) : 0.f;
        dot0 = dot1 = 0.f;
      }
      bar_wait(bar, phase); phase ^= 1;
      #pragma unroll
      for (int j = 0; j < 8; ++j) {                      // 8 columns of dH, 16 of P
        const u32 a = addr(slab + (j >> 2) * OUT_SLAB, j & 3);
        u32 g0, g1, u0, u1;
        ld_matrix(a, g0, g1, u0, u1);                    // gate rows r, r + 8; up rows r, r + 8
        g0 = grad2(g0, u0, v[2 * j], w0, dot0, u0);
        g1 = grad2(g1, u1, v[2 * j + 1], w1, dot1, u1);
        st_matrix(a, g0, g1, u0, u1);
      }
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      __syncwarp();
      store(map, d, slab, 2 * col, 2 * n);
      if (2 * col + 64 < 2 * n) store(map, d, slab + OUT_SLAB, 2 * col + 64, 2 * n);
      if (lane == 0) asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      __syncwarp();
    }
    if (c == CHUNKS - 1) {
      float x = dot0, y = dot1;
      x += __shfl_xor_sync(~0u, x, 1); x += __shfl_xor_sync(~0u, x, 2);
      y += __shfl_xor_sync(~0u, y, 1); y += __shfl_xor_sync(~0u, y, 2);
      const int r = lane >> 2;
      if ((lane & 3) == 0 && col0 < n) {
        if (r < rows) atomicAdd(dw + row + r, x);
        if (r + 8 < rows) atomicAdd(dw + row + r + 8, y);
      }
    }
  }
#endif
};
// a consumer warp hands a stage back to every block that fills it
__device__ __forceinline__ void release(u32 bar, int lane) {
#if CLUSTER == 2
  if (lane < 2) bar_arrive_remote(bar, lane);
#else
  if (lane == 0) bar_arrive(bar);
#endif
}


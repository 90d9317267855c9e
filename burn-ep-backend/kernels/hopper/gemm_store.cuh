// ---- output of one consumer warp: 16 rows, 128 bytes of columns at a time ---------------------------------------------
// Accumulator fragment of wgmma: lane l of warp w holds rows 16 w + l/4 and + 8, columns 8 j + 2 (l % 4) and + 1 in
// registers 4 j .. 4 j + 3; packed to bf16 pairs, four of them are the 8x8 matrices (rows 0-7 | rows 8-15) x (columns
// 8 j | 8 (j + 1)) that one stmatrix.x4 stores. Slab row r keeps 16-byte chunk c at c ^ (r & 7) (the 128-byte swizzle).
// smem address of 8x8 matrix (rows lane % 16, 8-column block 2 j + lane / 16) in a slab: operand of ldmatrix / stmatrix .x4
__device__ __forceinline__ u32 slab_addr(u32 slab, int j, int lane) {
  const u32 r = lane & 15, hi = lane >> 4;
  return slab + r * 128 + (((2 * j + hi) ^ (r & 7)) << 4); }
// 16 registers of a finished bf16 tile, 64 columns, to a slab
__device__ __forceinline__ void fill_slab(u32 slab, const u32* v, int lane) {
  #pragma unroll
  for (int j = 0; j < 4; ++j) st_matrix(slab_addr(slab, j, lane), v[4 * j], v[4 * j + 1], v[4 * j + 2], v[4 * j + 3]); }

#if !EPI
#define PHASES CHUNKS
// Stores a tile in PHASES pieces, each behind a k block of the next tile.
struct Writer {
  const TensorMap* map; unsigned char* d; u32 slab; int n, lane, buf, row, rows, col0;
  __device__ __forceinline__ void phase(u32* pend, int c) {
    const u32* v = pend + 16 * c;
    const int col = col0 + c * (F32 ? 32 : 64);
    if (rows <= 0 || col >= n) return;                   // rows <= 0: nothing pending, or below the end of the group
    const u32 dst = slab + buf * OUT_SLAB;
    if (lane == 0) bulk_wait_read<OUT_BUFS - 1>();
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
    fill_slab(dst, v, lane);
#endif
    fence_async();
    __syncwarp();
    if (rows >= 16) { if (lane == 0) tma_store_2d(map, dst, col, row); }             // TMA clips columns beyond the width
    else {
      const int per = F32 ? 4 : 8;                                                 // elements in 16 bytes
      copy_rows(dst, (uint4*)d + ((u64)row * n + col) / per, n / per, (n - col) / per, rows, lane);
    }
    if (lane == 0) bulk_commit();                        // also when empty: the count of groups must follow the count of buffers
    __syncwarp();
    buf = buf + 1 == OUT_BUFS ? 0 : buf + 1;
  }
};
#endif

// ---- tile scheduler -----------------------------------------------------------------------------------------------
// Work is counted in units: one unit is one tile (CLUSTER 1) or a pair of tiles (CLUSTER 2). Every warp role walks the
// same sequence on its own: unit = cluster id, + number of clusters, ..., or with DYN the units that the cluster's first
// loading thread drew from the counter and put into a queue in the shared memory of both blocks.
struct Tile { int row0, row_end, col0, group, k0, k1, m0; bool share_a; };   // rows of D; reduction range k0 .. k1; m0: column of A (WGRAD)
__device__ __forceinline__ int units_of(int row_tiles, int col_tiles) {
#if CLUSTER == 2
  return (row_tiles >> 1) * col_tiles + (row_tiles & 1) * ((col_tiles + 1) >> 1);
#else
  return row_tiles * col_tiles;
#endif
}
// position inside a group: bands of `raster` row units, column-major inside a band
__device__ __forceinline__ void locate(int l, int row_tiles, int col_tiles, int raster, u32 rank, int& rt, int& ct, bool& share_a) {
#if CLUSTER == 2
  int units_m = row_tiles >> 1;
  int paired = units_m * col_tiles;
  if (l >= paired) { share_a = true; rt = row_tiles - 1; ct = 2 * (l - paired) + (int)rank; return; }
#else
  int units_m = row_tiles;
#endif
  int band = l / (raster * col_tiles), first = band * raster, height = min(raster, units_m - first);
  int w = l - first * col_tiles;
  int mu = first + w % height;
  ct = w / height;
  share_a = false;
#if CLUSTER == 2
  rt = 2 * mu + (int)rank;
#else
  rt = mu;
#endif
}
enum { READER, LOADER, LEADER };                          // consumer warps and helpers; the loading thread; that of the first block
struct Scheduler {
  int unit, step, group, raster, col_tiles, groups, m, k; u32 rank;
  const int* tab; const int* off;
#if DYN
  u32* counter; u32 queue, seq, drawn;                   // seq: queue position; drawn: the leader's next unit
#endif
  // The leader (thread 0 of the first block) asks for the unit after this one when it starts loading this one, and hands it
  // out when it has issued all loads: consumers are behind it, so nobody waits.
  __device__ __forceinline__ bool next(Tile& t, int role) {
#if DYN
    const u32 slot = seq & (QUEUE - 1), ph = (seq / QUEUE) & 1, full = queue + 8 * slot, empty = full + 8 * QUEUE, word = queue + 16 * QUEUE + 4 * slot;
    ++seq;
    if (role == LEADER) {
      bar_wait(empty, ph ^ 1);
#if CLUSTER == 2
      store_remote(word, drawn, full, 0);
      store_remote(word, drawn, full, 1);
#else
      asm volatile("st.shared.u32 [%0], %1;" :: "r"(word), "r"(drawn) : "memory");
      bar_arrive(full);
#endif
    }
#if CLUSTER == 2
    if (role != READER) bar_expect(full, 4);
#endif
    bar_wait(full, ph);
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(unit) : "r"(word) : "memory");
    if (role == READER || GATHER) __syncwarp();          // without GATHER thread 0 is alone in its branch
    if ((threadIdx.x & 31) == 0) {
#if CLUSTER == 2
      bar_arrive_remote(empty, 0);                       // (cluster instructions are illegal in a launch without clusters)
#else
      bar_arrive(empty);
#endif
    }
#else
    unit += step;
#endif
    return locate_unit(t, role);
  }
  __device__ __forceinline__ bool locate_unit(Tile& t, int role) {
    while (group < groups && unit >= tab[group + 1]) ++group;
    if (group >= groups) return false;
    const int lo = __ldg(off + group), hi = __ldg(off + group + 1);
    int rt, ct;
#if WGRAD
    locate(unit - tab[group], (m + BM - 1) / BM, col_tiles, raster, rank, rt, ct, t.share_a);
    t.m0 = rt * BM; t.row0 = group * m + t.m0; t.row_end = (group + 1) * m; t.k0 = lo; t.k1 = hi;
#else
    locate(unit - tab[group], (hi - lo + BM - 1) / BM, col_tiles, raster, rank, rt, ct, t.share_a);
    t.m0 = 0; t.row0 = lo + rt * BM; t.row_end = hi; t.k0 = 0; t.k1 = k;
#endif
    t.col0 = ct * COLS; t.group = group;
#if DYN
    if (role == LEADER) drawn = step + atomicAdd(counter, 1u);
#endif
    return true;
  }
};


// ---- kernels that own query rows: their tiles, and what the rows see ----------------------------------------------------------
// A tile is 64 NWG query rows of one head, walked leftwards in blocks of KEYS keys; warpgroup w owns 64 of the rows. With SKIP it
// passes over the blocks that its own rows do not see: small windows then cost what they show.
#define BM (64 * NWG)
#define MINUS_INF (-__int_as_float(0x7f800000))

// least and greatest first key, least and greatest end of the 64 rows of group g
__device__ __forceinline__ int4 group_bounds(const int4* bounds, const Info& info, int b, int g) {
#if MASKED == 1
  return bounds[b * row_groups(info) + g];
#else
  const int sq = (int)info.sq, window = (int)info.window, low = g * 64 - window + 1;
  return make_int4(max(low, 0), max(min(low + 63, sq - window), 0), g * 64 + 1, min(g * 64 + 64, sq));
#endif
}

struct Tile { int m, b, h, first, last; };        // row tile, batch row, head; key blocks last .. first
struct Scheduler {
  int round, m_tiles, bh, hq, sq, groups; const int4* bounds;
  __device__ __forceinline__ void start(const Info& info, const int4* table) {
    round = 0; hq = (int)info.hq; sq = (int)info.sq; groups = row_groups(info); bounds = table;
    bh = (int)info.batch * hq; m_tiles = (sq + BM - 1) / BM;
  }
  __device__ __forceinline__ bool next(Tile& t, const Info& info) {
    while (true) {
      const int g = (int)gridDim.x, k = (int)blockIdx.x;
      const int i = round * g + (round & 1 ? g - 1 - k : k);  // snake order over tiles sorted longest first
      if (round * g >= m_tiles * bh) return false;
      ++round;
      if (i >= m_tiles * bh) continue;
      t.m = m_tiles - 1 - i / bh;
      const int j = i % bh;
      t.b = j / hq; t.h = j % hq;
#if MASKED
      int lo = 0x7fffffff, hi = 0;
      #pragma unroll
      for (int x = 0; x < NWG; ++x) if (t.m * NWG + x < groups) { const int4 r = group_bounds(bounds, info, t.b, t.m * NWG + x); lo = min(lo, r.x); hi = max(hi, r.w); }
      t.first = lo < hi ? lo / KEYS : 0;          // a tile that sees nothing walks one block, all hidden
      t.last = lo < hi ? (hi - 1) / KEYS : 0;
#else
      t.first = 0;
      t.last = (min(t.m * BM + BM, sq) - 1) / KEYS;
#endif
      return true;
    }
  }
};

// What the rows of one warpgroup see; a lane has rows r and r + 8 of its warp.
struct Sight {
  int lo0, hi0, lo1, hi1;                         // keys of the lane's rows: lo <= key < hi
  int full_lo, full_hi;                           // keys that every row sees
  int first, last;                                // SKIP: key blocks with a key that some row sees, at least one
#if MASKED == 1
  const u32* visible;                             // a bit per key, 0 if all are
#endif
  // row: first row of the warpgroup, r: the lane's first row behind it
  __device__ __forceinline__ void start(const Tile& t, const Info& info, const int* lo, const int* hi, const int4* bounds, const uint4* keys, int row, int r) {
    first = t.first; last = t.last;
#if MASKED == 0
    lo0 = lo1 = full_lo = 0; hi0 = row + r + 1; hi1 = hi0 + 8; full_hi = row + 1;
    if (SKIP) last = min(last, (row + 63) / KEYS);
#else
    const int g = row >> 6;                       // the last tile may have fewer groups than warpgroups
    const bool real = g < row_groups(info);
    const int4 x = real ? group_bounds(bounds, info, t.b, g) : make_int4(0, 0, 0x7fffffff, 0);
    full_lo = x.y; full_hi = x.z;
#if MASKED == 1
    const int at = (t.b * row_groups(info) + g) * 64 + r;
    lo0 = real ? lo[at] : 0; hi0 = real ? hi[at] : 0; lo1 = real ? lo[at + 8] : 0; hi1 = real ? hi[at + 8] : 0;
    if (!real) full_hi = 0;
    visible = info.visible ? (const u32*)(keys + (u64)t.b * key_blocks(info)) : 0;
#else
    hi0 = row + r + 1; hi1 = hi0 + 8; lo0 = hi0 - (int)info.window; lo1 = lo0 + 8;
#endif
    if (SKIP) {
      const bool any = x.x < x.w;
      first = any ? x.x / KEYS : last; last = any ? (x.w - 1) / KEYS : last;
    }
#endif
  }
  // scores of the keys of block n that a row does not see become -inf
  template <int N> __device__ __forceinline__ void hide(float (&sc)[N], int n, int lane) const {
    const int key = n * KEYS + (lane & 3) * 2;
#if MASKED
    if (n * KEYS < full_lo) {
      const int a = lo0 - key, b = lo1 - key;
      #pragma unroll
      for (int j = 0; j < N; ++j) if ((j >> 2) * 8 + (j & 1) < (j & 2 ? b : a)) sc[j] = MINUS_INF;
    }
#endif
    if (n * KEYS + KEYS > full_hi) {
      const int a = hi0 - key, b = hi1 - key;
      #pragma unroll
      for (int j = 0; j < N; ++j) if ((j >> 2) * 8 + (j & 1) >= (j & 2 ? b : a)) sc[j] = MINUS_INF;
    }
#if MASKED == 1
    if (visible) {
      #pragma unroll
      for (int x = 0; x < KEYS / 32; ++x) {
        const u32 all = visible[n * (KEYS / 32) + x], word = all >> ((lane & 3) * 2);
        if (all != ~0u) {
          #pragma unroll
          for (int y = 0; y < 16; ++y) if (!(word >> ((y >> 2) * 8 + (y & 1)) & 1)) sc[x * 16 + y] = MINUS_INF;
        }
      }
    }
#endif
  }
};

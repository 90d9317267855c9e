// ---- backward -------------------------------------------------------------------------------------------------------------
// With p = exp(s - LSE), dp = dO V^T and delta = dO . O: dV = P^T dO, ds = p (dp - delta), dQ = scale dS K, dK = scale dS^T Q.
// nl = -log2(e) LSE and delta are [B, Hq, groups 64], nl = -inf where a row sees nothing or does not exist.
#if BACKWARD == 1
// one warp a row
extern "C" __global__ void __launch_bounds__(256)
attn_portable_delta(const T* o, const T* d_o, const float* lse, float* nl, float* delta, const __grid_constant__ Info info) {
  const int lane = (int)threadIdx.x & 31, hq = (int)info.hq, sq = (int)info.sq, padded = row_groups(info) * 64;
  const u64 x = (u64)blockIdx.x * 8 + (threadIdx.x >> 5);
  const int i = (int)(x % padded);
  const u64 bh = x / padded;
  if (bh >= info.batch * info.hq) return;
  float a = 0.f, l = MINUS_INF;
  if (i < sq) {
    const u64 row = ((bh / hq * sq + i) * hq + bh % hq) * DV;
    for (int d = lane; d < DV; d += 32) a = fmaf(widen(o[row + d]), widen(d_o[row + d]), a);
    l = lse[bh * sq + i];
  }
  for (int s = 16; s; s >>= 1) a += __shfl_xor_sync(~0u, a, s);
  if (lane == 0) { delta[x] = a; nl[x] = l == MINUS_INF ? MINUS_INF : -LOG2E * l; }
}

#elif BACKWARD == 2
// dQ: a block is a tile of OWN queries of one head. Shared memory, in elements: (OWN + 2 STEP) (LDK + LDV), in fp32 OWN LDP more.
extern "C" __global__ void __launch_bounds__(THREADS)
attn_portable_dq(const T* q, const T* k, const T* v, const T* d_o, const float* nl, const float* delta, T* dq,
                 const int* lo, const int* hi, const int4* bounds, const uint4* keys, const __grid_constant__ Info info) {
  T* q_s = (T*)smem, *d_s = q_s + OWN * LDK, *k_s = d_s + OWN * LDV, *v_s = k_s + 2 * STEP * LDK;
  const int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5;
  float* scratch = (float*)(v_s + 2 * STEP * LDV) + warp * 16 * LDP;
  const int sq = (int)info.sq, skv = (int)info.skv, hq = (int)info.hq, hkv = (int)info.hkv, groups = row_groups(info), blocks = key_blocks(info);
  const int tiles = (sq + OWN - 1) / OWN, bh = (int)info.batch * hq, m = tiles - 1 - (int)blockIdx.x / bh, j = (int)blockIdx.x % bh;
  const int b = j / hq, h = j % hq, hk = h / (hq / hkv), row0 = m * OWN;
  const float scale = __uint_as_float((u32)info.scale), c = scale * LOG2E;
  const int4 r = bounds[b * groups + row0 / 64];
  const int first = r.x < r.w ? r.x / STEP : 0, last = r.x < r.w ? (r.w - 1) / STEP : -1;
  const T* kh = k + ((u64)b * skv * hkv + hk) * DK, *vh = v + ((u64)b * skv * hkv + hk) * DV;
  auto load = [&](int n, int buffer) {
    load_rows(k_s + buffer * STEP * LDK, LDK, DKP, kh + (u64)n * STEP * hkv * DK, (u64)hkv * DK, DK, STEP, skv - n * STEP);
    load_rows(v_s + buffer * STEP * LDV, LDV, DVP, vh + (u64)n * STEP * hkv * DV, (u64)hkv * DV, DV, STEP, skv - n * STEP);
    copy_commit();
  };
  load_rows(q_s, LDK, DKP, q + (((u64)b * sq + row0) * hq + h) * DK, (u64)hq * DK, DK, OWN, sq - row0);
  load_rows(d_s, LDV, DVP, d_o + (((u64)b * sq + row0) * hq + h) * DV, (u64)hq * DV, DV, OWN, sq - row0);
  if (last >= first) load(first, 0);
  const int mine = row0 + warp * 16 + (lane >> 2);
  const u64 at = (u64)b * groups * 64 + mine, stat = ((u64)b * hq + h) * groups * 64 + mine;
  const int lo0 = lo[at], hi0 = hi[at], lo1 = lo[at + 8], hi1 = hi[at + 8];
  const float n0 = nl[stat], n1 = nl[stat + 8], e0 = delta[stat], e1 = delta[stat + 8];
  float acc[DKP / 8][4];
  #pragma unroll
  for (int n = 0; n < DKP / 8; ++n) acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.f;
  #pragma unroll 1
  for (int n = first; n <= last; ++n) {
    const int buffer = (n - first) & 1;
    if (n < last) { load(n + 1, buffer ^ 1); copy_wait<1>(); } else copy_wait<0>();
    __syncthreads();
    float s[STEP / 8][4], dp[STEP / 8][4];
    scores<STEP / 8, DKP>(s, q_s + warp * 16 * LDK, k_s + buffer * STEP * LDK, LDK, lane);
    scores<STEP / 8, DVP>(dp, d_s + warp * 16 * LDV, v_s + buffer * STEP * LDV, LDV, lane);
    const u32 bits = visible_keys(keys, b, blocks, n * STEP);
    const bool partial = n * STEP < r.y || n * STEP + STEP > r.z || (bits & ALL_KEYS) != ALL_KEYS;
    #pragma unroll
    for (int t = 0; t < STEP / 8; ++t) {
      #pragma unroll
      for (int x = 0; x < 4; ++x) {
        const int i = t * 8 + (lane & 3) * 2 + (x & 1), key = n * STEP + i;
        const bool hidden = partial && !((bits >> i & 1) && key >= (x & 2 ? lo1 : lo0) && key < (x & 2 ? hi1 : hi0));
        const float p = hidden ? 0.f : exp2f(fmaf(s[t][x], c, x & 2 ? n1 : n0));
        s[t][x] = p * (dp[t][x] - (x & 2 ? e1 : e0));
      }
    }
    accumulate<DKP / 8>(acc, operand(s, scratch, lane), k_s + buffer * STEP * LDK, LDK, lane);
    __syncthreads();
  }
  copy_wait<0>();
  const int row = row0 + warp * 16;
  store_rows(acc, dq + (((u64)b * sq + row) * hq + h) * DK, (u64)hq * DK, DK, sq - row, scale, scale, lane);
}

#else
// dK and dV: a block is a tile of OWN keys of one key head and walks the queries of all its query heads, so that no sum is
// shared between blocks. Shared memory, in elements: (OWN + 2 STEP) (LDK + LDV), in fp32 OWN LDP more; then 8 STEP words.
extern "C" __global__ void __launch_bounds__(THREADS)
attn_portable_dkv(const T* q, const T* k, const T* v, const T* d_o, const float* nl, const float* delta, T* dk, T* dv,
                  const int* lo, const int* hi, const int4* bounds, const int2* steps, const uint4* keys,
                  const __grid_constant__ Info info) {
  T* k_s = (T*)smem, *v_s = k_s + OWN * LDK, *q_s = v_s + OWN * LDV, *d_s = q_s + 2 * STEP * LDK;
  float* scratch = (float*)(d_s + 2 * STEP * LDV);
  float* stats = scratch + (ELEM == 0) * OWN * LDP;  // for each buffer: nl, delta, lo, hi
  const int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5;
  scratch += warp * 16 * LDP;
  const int sq = (int)info.sq, skv = (int)info.skv, hq = (int)info.hq, hkv = (int)info.hkv, groups = row_groups(info), blocks = key_blocks(info);
  const int bh = (int)info.batch * hkv, j = (int)blockIdx.x % bh, key0 = (int)blockIdx.x / bh * OWN, b = j / hkv, hk = j % hkv, group = hq / hkv;
  const float scale = __uint_as_float((u32)info.scale), c = scale * LOG2E;
  const int2 range = steps[b * blocks + key0 / BN];
  const int per = 64 / STEP;                      // steps in a group of 64 queries
  const int count = (range.y - range.x + 1) * per, total = count * group;
  load_rows(k_s, LDK, DKP, k + (((u64)b * skv + key0) * hkv + hk) * DK, (u64)hkv * DK, DK, OWN, skv - key0);
  load_rows(v_s, LDV, DVP, v + (((u64)b * skv + key0) * hkv + hk) * DV, (u64)hkv * DV, DV, OWN, skv - key0);
  copy_commit();
  // step x: query head hk group + x / count, rows from (range.x per + x % count) STEP on; whether any of them sees a key here
  auto row_of = [&](int x) { return (range.x * per + x % count) * STEP; };
  auto seen = [&](int x) {
    const int4 g = bounds[b * groups + row_of(x) / 64];
    return row_of(x) < sq && g.x < key0 + OWN && g.w > key0;
  };
  auto next = [&](int x) { while (x < total && !seen(x)) ++x; return x; };
  auto load = [&](int x, int buffer) {
    const int row = row_of(x), h = hk * group + x / count;
    load_rows(q_s + buffer * STEP * LDK, LDK, DKP, q + (((u64)b * sq + row) * hq + h) * DK, (u64)hq * DK, DK, STEP, sq - row);
    load_rows(d_s + buffer * STEP * LDV, LDV, DVP, d_o + (((u64)b * sq + row) * hq + h) * DV, (u64)hq * DV, DV, STEP, sq - row);
    copy_commit();
    const u64 stat = ((u64)b * hq + h) * groups * 64 + row, at = (u64)b * groups * 64 + row;
    float* p = stats + buffer * 4 * STEP;
    for (int i = (int)threadIdx.x; i < STEP; i += THREADS) {
      p[i] = nl[stat + i]; p[STEP + i] = delta[stat + i];
      ((int*)p)[2 * STEP + i] = lo[at + i]; ((int*)p)[3 * STEP + i] = hi[at + i];
    }
  };
  const int mine = key0 + warp * 16 + (lane >> 2);
  const u32* words = (const u32*)(keys + (u64)b * blocks);
  const bool seen0 = mine < skv && (words[mine >> 5] >> (mine & 31) & 1), seen1 = mine + 8 < skv && (words[(mine + 8) >> 5] >> ((mine + 8) & 31) & 1);
#if PARTS & 1
  float ak[DKP / 8][4];
  #pragma unroll
  for (int n = 0; n < DKP / 8; ++n) ak[n][0] = ak[n][1] = ak[n][2] = ak[n][3] = 0.f;
#endif
#if PARTS & 2
  float av[DVP / 8][4];
  #pragma unroll
  for (int n = 0; n < DVP / 8; ++n) av[n][0] = av[n][1] = av[n][2] = av[n][3] = 0.f;
#endif
  int x = next(0), buffer = 0;
  if (x < total) load(x, 0);
  #pragma unroll 1
  while (x < total) {
    const int y = next(x + 1);
    if (y < total) { load(y, buffer ^ 1); copy_wait<1>(); } else copy_wait<0>();
    __syncthreads();
    const T* qs = q_s + buffer * STEP * LDK, *ds = d_s + buffer * STEP * LDV;
    const float* st = stats + buffer * 4 * STEP;
    const int* range_s = (const int*)st + 2 * STEP;
    float p[STEP / 8][4];
    scores<STEP / 8, DKP>(p, k_s + warp * 16 * LDK, qs, LDK, lane);
    #pragma unroll
    for (int t = 0; t < STEP / 8; ++t) {
      #pragma unroll
      for (int z = 0; z < 4; ++z) {
        const int i = t * 8 + (lane & 3) * 2 + (z & 1), key = mine + (z & 2) * 4;
        const bool sees = (z & 2 ? seen1 : seen0) && key >= range_s[i] && key < range_s[STEP + i];
        p[t][z] = sees ? exp2f(fmaf(p[t][z], c, st[i])) : 0.f;
      }
    }
#if PARTS & 2
    accumulate<DVP / 8>(av, operand(p, scratch, lane), ds, LDV, lane);
#endif
#if PARTS & 1
    float dp[STEP / 8][4];
    scores<STEP / 8, DVP>(dp, v_s + warp * 16 * LDV, ds, LDV, lane);
    #pragma unroll
    for (int t = 0; t < STEP / 8; ++t) {
      #pragma unroll
      for (int z = 0; z < 4; ++z) p[t][z] *= dp[t][z] - st[STEP + t * 8 + (lane & 3) * 2 + (z & 1)];
    }
    accumulate<DKP / 8>(ak, operand(p, scratch, lane), qs, LDK, lane);
#endif
    __syncthreads();
    x = y; buffer ^= 1;
  }
  copy_wait<0>();
  const int row = key0 + warp * 16;
#if PARTS & 1
  store_rows(ak, dk + (((u64)b * skv + row) * hkv + hk) * DK, (u64)hkv * DK, DK, skv - row, scale, scale, lane);
#endif
#if PARTS & 2
  store_rows(av, dv + (((u64)b * skv + row) * hkv + hk) * DV, (u64)hkv * DV, DV, skv - row, 1.f, 1.f, lane);
#endif
}
#endif

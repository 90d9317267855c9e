// ---- forward --------------------------------------------------------------------------------------------------------------
// A block is a tile of OWN queries of one head; keys come in steps, the next ones in the background.
// Shared memory, in elements: OWN LDK + 2 STEP (LDK + LDV), and in fp32 OWN LDP.
extern "C" __global__ void __launch_bounds__(THREADS)
attn_portable_fwd(const T* q, const T* k, const T* v, T* o, float* lse, const float* sink,
                  const int* lo, const int* hi, const int4* bounds, const uint4* keys, const __grid_constant__ Info info) {
  T* q_s = (T*)smem, *k_s = q_s + OWN * LDK, *v_s = k_s + 2 * STEP * LDK;
  const int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5;
  float* scratch = (float*)(v_s + 2 * STEP * LDV) + warp * 16 * LDP;
  const int sq = (int)info.sq, skv = (int)info.skv, hq = (int)info.hq, hkv = (int)info.hkv, groups = row_groups(info), blocks = key_blocks(info);
  const int tiles = (sq + OWN - 1) / OWN, bh = (int)info.batch * hq, m = tiles - 1 - (int)blockIdx.x / bh, j = (int)blockIdx.x % bh;
  const int b = j / hq, h = j % hq, hk = h / (hq / hkv), row0 = m * OWN;
  const float c = __uint_as_float((u32)info.scale) * LOG2E;
  const int4 r = bounds[b * groups + row0 / 64];
  const int first = r.x < r.w ? r.x / STEP : 0, last = r.x < r.w ? (r.w - 1) / STEP : -1;
  const T* kh = k + ((u64)b * skv * hkv + hk) * DK, *vh = v + ((u64)b * skv * hkv + hk) * DV;
  auto load = [&](int n, int buffer) {
    load_rows(k_s + buffer * STEP * LDK, LDK, DKP, kh + (u64)n * STEP * hkv * DK, (u64)hkv * DK, DK, STEP, skv - n * STEP);
    load_rows(v_s + buffer * STEP * LDV, LDV, DVP, vh + (u64)n * STEP * hkv * DV, (u64)hkv * DV, DV, STEP, skv - n * STEP);
    copy_commit();
  };
  load_rows(q_s, LDK, DKP, q + (((u64)b * sq + row0) * hq + h) * DK, (u64)hq * DK, DK, OWN, sq - row0);
  if (last >= first) load(first, 0);
  const u64 at = (u64)b * groups * 64 + row0 + warp * 16 + (lane >> 2);
  const int lo0 = lo[at], hi0 = hi[at], lo1 = lo[at + 8], hi1 = hi[at + 8];
  float acc[DVP / 8][4], m0 = MINUS_INF, m1 = MINUS_INF, l0 = 0.f, l1 = 0.f;
  #pragma unroll
  for (int n = 0; n < DVP / 8; ++n) acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.f;
  #pragma unroll 1
  for (int n = first; n <= last; ++n) {
    const int buffer = (n - first) & 1;
    if (n < last) { load(n + 1, buffer ^ 1); copy_wait<1>(); } else copy_wait<0>();
    __syncthreads();
    float s[STEP / 8][4];
    scores<STEP / 8, DKP>(s, q_s + warp * 16 * LDK, k_s + buffer * STEP * LDK, LDK, lane);
    const u32 bits = visible_keys(keys, b, blocks, n * STEP);
    const bool partial = n * STEP < r.y || n * STEP + STEP > r.z || (bits & ALL_KEYS) != ALL_KEYS;
    float x0 = m0, x1 = m1;
    #pragma unroll
    for (int t = 0; t < STEP / 8; ++t) {
      #pragma unroll
      for (int x = 0; x < 4; ++x) {
        const int i = t * 8 + (lane & 3) * 2 + (x & 1), key = n * STEP + i;
        s[t][x] *= c;
        if (partial && !((bits >> i & 1) && key >= (x & 2 ? lo1 : lo0) && key < (x & 2 ? hi1 : hi0))) s[t][x] = MINUS_INF;
      }
      x0 = fmaxf(x0, fmaxf(s[t][0], s[t][1])); x1 = fmaxf(x1, fmaxf(s[t][2], s[t][3]));
    }
    x0 = fmaxf(x0, __shfl_xor_sync(~0u, x0, 1)); x1 = fmaxf(x1, __shfl_xor_sync(~0u, x1, 1));
    x0 = fmaxf(x0, __shfl_xor_sync(~0u, x0, 2)); x1 = fmaxf(x1, __shfl_xor_sync(~0u, x1, 2));
    const float r0 = x0 == MINUS_INF ? 0.f : x0, r1 = x1 == MINUS_INF ? 0.f : x1;    // nothing seen yet: any reference does
    const float f0 = exp2f(m0 - r0), f1 = exp2f(m1 - r1);
    m0 = x0; m1 = x1; l0 *= f0; l1 *= f1;
    #pragma unroll
    for (int t = 0; t < STEP / 8; ++t) {
      s[t][0] = exp2f(s[t][0] - r0); s[t][1] = exp2f(s[t][1] - r0); s[t][2] = exp2f(s[t][2] - r1); s[t][3] = exp2f(s[t][3] - r1);
      l0 += s[t][0] + s[t][1]; l1 += s[t][2] + s[t][3];
    }
    #pragma unroll
    for (int t = 0; t < DVP / 8; ++t) { acc[t][0] *= f0; acc[t][1] *= f0; acc[t][2] *= f1; acc[t][3] *= f1; }
    accumulate<DVP / 8>(acc, operand(s, scratch, lane), v_s + buffer * STEP * LDV, LDV, lane);
    __syncthreads();                              // the next load overwrites this buffer
  }
  copy_wait<0>();
  l0 += __shfl_xor_sync(~0u, l0, 1); l1 += __shfl_xor_sync(~0u, l1, 1);
  l0 += __shfl_xor_sync(~0u, l0, 2); l1 += __shfl_xor_sync(~0u, l1, 2);
  float e0 = 1.f, e1 = 1.f;
  if (info.sink) {
    const float z = sink[h] * LOG2E, y0 = fmaxf(m0, z), y1 = fmaxf(m1, z);
    e0 = exp2f(m0 - y0); e1 = exp2f(m1 - y1); l0 = l0 * e0 + exp2f(z - y0); l1 = l1 * e1 + exp2f(z - y1); m0 = y0; m1 = y1;
  }
  const int row = row0 + warp * 16, mine = row + (lane >> 2);
  if ((lane & 3) == 0) {
    float* p = lse + ((u64)b * hq + h) * sq + mine;
    if (mine < sq) p[0] = l0 > 0.f ? (m0 + log2f(l0)) * 0.6931471805599453f : MINUS_INF;
    if (mine + 8 < sq) p[8] = l1 > 0.f ? (m1 + log2f(l1)) * 0.6931471805599453f : MINUS_INF;
  }
  store_rows(acc, o + (((u64)b * sq + row) * hq + h) * DV, (u64)hq * DV, DV, sq - row, l0 > 0.f ? e0 / l0 : 0.f, l1 > 0.f ? e1 / l1 : 0.f, lane);
}

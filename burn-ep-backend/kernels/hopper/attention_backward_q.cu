// ---- split backward, first kernel: row statistics and dQ ------------------------------------------------------------------------
// The split backward computes S and dP twice (7 products instead of 5), and in exchange needs no sums across blocks: no fp32
// workspace, no atomics, the same bits in every run, and its cost follows the visible pairs. This kernel owns query rows
// (attention_rows.cuh) and writes dQ, delta = dO . O and nl = -log2(e) LSE; attn_bwd_dkv owns keys.
// Inside a warpgroup S(n) = Q K(n) and dP(n) = dO V(n) run behind dQ += dS(n + 1) K(n + 1). dQ leaves through the Q buffer.
// Defines: NWG, STAGES, QBUFS > 1, KEYS 64, SKIP.   HD = HDK = HDV
// Shared memory: QBUFS NWG 64 HD 4 + STAGES KEYS HD 4 + 32 + 16 STAGES bytes, dynamic.
#define HD HDK
#define Q_WG (64 * HD * 2)
#define Q_BYTES (NWG * Q_WG)
#define K_BYTES (KEYS * HD * 2)
#define SLAB (KEYS * 128)                         // 64 columns of K or V
#define DO_OFF (QBUFS * Q_BYTES)
#define K_OFF (2 * QBUFS * Q_BYTES)
#define V_OFF (K_OFF + STAGES * K_BYTES)
#define BAR_OFF (V_OFF + STAGES * K_BYTES)

extern "C" __global__ void __launch_bounds__(128 * (NWG + 1), 1)
attn_bwd_dq(const __grid_constant__ TensorMap map_q,  // Q, box 64 tokens x 64
            const __grid_constant__ TensorMap map_do, // dO, likewise
            const __grid_constant__ TensorMap map_k,  // K, box KEYS tokens x 64
            const __grid_constant__ TensorMap map_v,  // V, likewise
            const __grid_constant__ TensorMap map_dq, // dQ, box 16 tokens x 64
            const half16*, const half16*, const half16*, const half16*, half16*,
            const half16* o, const float* lse, float* nl, float* delta,
            int* counter,                             // set to 0 for attn_bwd_dkv
#if MASKED == 1
            const int* lo, const int* hi, const int4* bounds, const uint4* keys,
#endif
            const __grid_constant__ Info info) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const u32 base = smem_u32(smem);
  const u32 q_full = base + BAR_OFF, q_empty = q_full + 16, kv_full = q_empty + 16, kv_empty = kv_full + 8 * STAGES;
  const int wg = __shfl_sync(~0u, threadIdx.x >> 7, 0), lane = threadIdx.x & 31;
  if (threadIdx.x == 0) {
    trap_unless((base & 1023) == 0);
    if (blockIdx.x == 0) *counter = 0;
    for (int i = 0; i < QBUFS; ++i) { bar_init(q_full + 8 * i, 1); bar_init(q_empty + 8 * i, 4 * NWG); }
    for (int i = 0; i < STAGES; ++i) { bar_init(kv_full + 8 * i, 1); bar_init(kv_empty + 8 * i, 4 * NWG); }
    fence_barriers();
  }
  __syncthreads();
#if MASKED != 1
  const int* lo = 0, *hi = 0; const int4* bounds = 0; const uint4* keys = 0;
#endif
  Scheduler sched;
  sched.start(info, bounds);
  Tile t;
  int s = 0; u32 ph = 0;                          // ring position of K and V
  int qb = 0; u32 qph = 0;

  if (wg == 0) {
    fewer_registers<REGS_LOAD>();
    if (threadIdx.x == 0) {
      const int group = (int)(info.hq / info.hkv);
      while (sched.next(t, info)) {
        bar_wait(q_empty + 8 * qb, qph ^ 1);
        bar_expect(q_full + 8 * qb, 2 * Q_BYTES);
        #pragma unroll
        for (int w = 0; w < NWG; ++w)
          #pragma unroll
          for (int c = 0; c < HD / 64; ++c) {
            const u32 dst = base + qb * Q_BYTES + w * Q_WG + c * 8192;
            tma_load(dst, &map_q, q_full + 8 * qb, c * 64, t.h, t.m * BM + w * 64, t.b);
            tma_load(dst + DO_OFF, &map_do, q_full + 8 * qb, c * 64, t.h, t.m * BM + w * 64, t.b);
          }
        if (++qb == QBUFS) { qb = 0; qph ^= 1; }
        const int hk = t.h / group;
        for (int n = t.last; n >= t.first; --n) {
          const u32 kd = base + K_OFF + s * K_BYTES, vd = base + V_OFF + s * K_BYTES;
          bar_wait(kv_empty + 8 * s, ph ^ 1);
          bar_expect(kv_full + 8 * s, 2 * K_BYTES);
          #pragma unroll
          for (int c = 0; c < HD / 64; ++c) {
            tma_load(kd + c * SLAB, &map_k, kv_full + 8 * s, c * 64, hk, n * KEYS, t.b);
            tma_load(vd + c * SLAB, &map_v, kv_full + 8 * s, c * 64, hk, n * KEYS, t.b);
          }
          if (++s == STAGES) { s = 0; ph ^= 1; }
        }
      }
    }
    return;
  }

  more_registers<REGS_MATH>();
  const int w = wg - 1, warp = (threadIdx.x >> 5) & 3, r = warp * 16 + (lane >> 2);   // the lane has rows r and r + 8
  const float scale = __uint_as_float((u32)info.scale), c = scale * LOG2E;
  const int dv = (int)info.dv;
  const u64 q_k = desc_k(base + w * Q_WG), o_k = desc_k(base + DO_OFF + w * Q_WG), k_k = desc_k(base + K_OFF), v_k = desc_k(base + V_OFF),
            k_mn = desc_mn(base + K_OFF, SLAB);
  float sc[KEYS / 2], dp[KEYS / 2], acc[HD / 2];
  u32 ds[KEYS / 4];
  Sight sight;
  int pending = -1;                               // Q buffer whose last reader is the output store
  auto step = [&]() { if (++s == STAGES) { s = 0; ph ^= 1; } };
  auto pass_over = [&]() {                        // a block that the rows of this warpgroup do not see
    bar_wait(kv_full + 8 * s, ph);
    if (lane == 0) bar_arrive(kv_empty + 8 * s);
    step();
  };
  while (sched.next(t, info)) {
    const int row = t.m * BM + w * 64, i = row + r;
    const bool real0 = i < sched.sq, real1 = i + 8 < sched.sq;
    uint4 o0[HD / 32], o1[HD / 32];               // a quarter of the columns of O, in chunks of 8
    const half16* src = o + (((u64)t.b * sched.sq + i) * sched.hq + t.h) * dv;
    #pragma unroll
    for (int x = 0; x < HD / 32; ++x) {
      const int at = (x * 4 + (lane & 3)) * 8;
      o0[x] = real0 && at < dv ? *(const uint4*)(src + at) : make_uint4(0, 0, 0, 0);
      o1[x] = real1 && at < dv ? *(const uint4*)(src + (u64)8 * sched.hq * dv + at) : make_uint4(0, 0, 0, 0);
    }
    const float* stat = lse + (u64)(t.b * sched.hq + t.h) * sched.sq + i;
    const float e0 = real0 ? stat[0] : MINUS_INF, e1 = real1 ? stat[8] : MINUS_INF;
    // a row that sees nothing has no probabilities
    const float nl0 = e0 == MINUS_INF ? MINUS_INF : -LOG2E * e0, nl1 = e1 == MINUS_INF ? MINUS_INF : -LOG2E * e1;
    sight.start(t, info, lo, hi, bounds, keys, row, r);
    bar_wait(q_full + 8 * qb, qph);
    float d0 = 0.f, d1 = 0.f;
    #pragma unroll
    for (int x = 0; x < HD / 32; ++x) {
      const int ch = x * 4 + (lane & 3);
      const u32 at = base + DO_OFF + qb * Q_BYTES + w * Q_WG + (ch >> 3) * 8192 + r * 128 + (((ch ^ r) & 7) << 4);
      const uint4 a = ld_shared_u4(at), b = ld_shared_u4(at + 1024);
      const u32 g[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}, y[8] = {o0[x].x, o0[x].y, o0[x].z, o0[x].w, o1[x].x, o1[x].y, o1[x].z, o1[x].w};
      #pragma unroll
      for (int z = 0; z < 4; ++z) {
        d0 = fmaf(low(g[z]), low(y[z]), d0); d0 = fmaf(high(g[z]), high(y[z]), d0);
        d1 = fmaf(low(g[z + 4]), low(y[z + 4]), d1); d1 = fmaf(high(g[z + 4]), high(y[z + 4]), d1);
      }
    }
    d0 += __shfl_xor_sync(~0u, d0, 1); d1 += __shfl_xor_sync(~0u, d1, 1);
    d0 += __shfl_xor_sync(~0u, d0, 2); d1 += __shfl_xor_sync(~0u, d1, 2);
    if ((lane & 3) == 0 && row < sched.groups * 64) {
      const u64 at = (u64)(t.b * sched.hq + t.h) * (sched.groups * 64) + i;
      nl[at] = nl0; nl[at + 8] = nl1; delta[at] = d0; delta[at + 8] = d1;
    }
    if (pending >= 0) {                           // the previous tile's dQ has left its Q buffer by now
      if (lane == 0) { bulk_wait_read(); bar_arrive(q_empty + 8 * pending); }
      __syncwarp();
    }
    if (SKIP) for (int n = t.last; n > sight.last; --n) pass_over();
    int prev = 0, add = 0;
    #pragma unroll 1
    for (int n = sight.last; n >= sight.first; --n) {
      bar_wait(kv_full + 8 * s, ph);
      const u64 qa = q_k + (u64)(qb * (Q_BYTES >> 4)), oa = o_k + (u64)(qb * (Q_BYTES >> 4));
      const u64 kb = k_k + (u64)(s * (K_BYTES >> 4)), vb = v_k + (u64)(s * (K_BYTES >> 4)), kt = k_mn + (u64)(s * (K_BYTES >> 4));
      wg_fence();
      wgmma_ss0<0, 0>(sc, qa, kb);
      #pragma unroll
      for (int k = 1; k < HD / 16; ++k) wgmma_ss<0, 0>(sc, qa + (k >> 2) * (8192 >> 4) + (k & 3) * 2, kb + (k >> 2) * (SLAB >> 4) + (k & 3) * 2);
      wg_commit();
      wgmma_ss0<0, 0>(dp, oa, vb);
      #pragma unroll
      for (int k = 1; k < HD / 16; ++k) wgmma_ss<0, 0>(dp, oa + (k >> 2) * (8192 >> 4) + (k & 3) * 2, vb + (k >> 2) * (SLAB >> 4) + (k & 3) * 2);
      wg_commit();
      wg_wait<1>();                               // dQ of the previous step, S
      if (add && lane == 0) bar_arrive(kv_empty + 8 * prev);
      sight.hide(sc, n, lane);
      #pragma unroll
      for (int j = 0; j < KEYS / 8; ++j) {
        sc[4 * j] = ex2(fmaf(sc[4 * j], c, nl0)); sc[4 * j + 1] = ex2(fmaf(sc[4 * j + 1], c, nl0));
        sc[4 * j + 2] = ex2(fmaf(sc[4 * j + 2], c, nl1)); sc[4 * j + 3] = ex2(fmaf(sc[4 * j + 3], c, nl1));
      }
      wg_wait<0>();                               // dP
      #pragma unroll
      for (int j = 0; j < KEYS / 8; ++j) {
        ds[2 * j] = pack(sc[4 * j] * (dp[4 * j] - d0), sc[4 * j + 1] * (dp[4 * j + 1] - d0));
        ds[2 * j + 1] = pack(sc[4 * j + 2] * (dp[4 * j + 2] - d1), sc[4 * j + 3] * (dp[4 * j + 3] - d1));
      }
      wg_fence();
      #pragma unroll
      for (int k = 0; k < KEYS / 16; ++k) wgmma_rs<1>(acc, ds[4 * k], ds[4 * k + 1], ds[4 * k + 2], ds[4 * k + 3], kt + k * (2048 >> 4), k | add);
      wg_commit();
      prev = s; add = 1;
      step();
    }
    wg_wait<0>();
    if (lane == 0) bar_arrive(kv_empty + 8 * prev);
    if (SKIP) for (int n = sight.first - 1; n >= t.first; --n) pass_over();
    named_sync(8 + w, 128);                       // all four warps are past their last read of this warpgroup's Q
    #pragma unroll
    for (int ch = 0; ch < HD / 64; ++ch) {
      u32 v[16];
      #pragma unroll
      for (int j = 0; j < 16; ++j) { const int x = ch * 32 + 2 * j; v[j] = pack(acc[x] * scale, acc[x + 1] * scale); }
      const u32 dst = base + qb * Q_BYTES + w * Q_WG + ch * 8192 + warp * 2048, x = lane & 15, y = lane >> 4;
      #pragma unroll
      for (int j = 0; j < 4; ++j) st_matrix(dst + x * 128 + (((2 * j + y) ^ (x & 7)) << 4), v + 4 * j);
    }
    fence_async();
    __syncwarp();
    if (lane == 0) {
      #pragma unroll
      for (int ch = 0; ch < HD / 64; ++ch) tma_store(&map_dq, base + qb * Q_BYTES + w * Q_WG + ch * 8192 + warp * 2048, ch * 64, t.h, row + warp * 16, t.b);
      bulk_commit();
    }
    __syncwarp();
    pending = qb;
    if (++qb == QBUFS) { qb = 0; qph ^= 1; }
  }
  if (lane == 0) bulk_wait_all();
}

// ---- forward ------------------------------------------------------------------------------------------------------
// Block = one loading warpgroup and NWG consumer warpgroups of 64 query rows each; a tile is 64 NWG query rows of one head,
// walked leftwards from its last block of KEYS keys. Q has QBUFS buffers, K and V are rings of STAGES blocks.
// Defines: KEYS 128, or 64 for small windows; SKIP (attention_rows.cuh), then the warpgroups take no turns.
// Shared memory: QBUFS NWG 64 HDK 2 + STAGES KEYS (HDK + HDV) 2 + 32 + 32 STAGES bytes, dynamic.
// Inside a warpgroup the products of step n are S(n) = Q K(n) and, issued right behind, O += P(n + 1) V(n + 1), so that the
// softmax of step n runs beside the second product; the warpgroups take turns in issuing them. P stays in registers: packed
// to 16 bits the accumulator fragment of S is the A fragment of the second product. O leaves through the Q buffer of its
// own tile.
#define Q_WG (64 * HDK * 2)
#define Q_BYTES (NWG * Q_WG)
#define K_BYTES (KEYS * HDK * 2)
#define V_BYTES (KEYS * HDV * 2)
#define SLAB (KEYS * 128)                           // 64 columns of K or V
#define K_OFF (QBUFS * Q_BYTES)
#define V_OFF (K_OFF + STAGES * K_BYTES)
#define BAR_OFF (V_OFF + STAGES * V_BYTES)
#define SLACK 8.0f                                // growth of the maximum, in powers of two, that is let pass

extern "C" __global__ void __launch_bounds__(128 * (NWG + 1), 1)
attn_fwd(const __grid_constant__ TensorMap map_q, // Q, box 64 tokens x 64
         const __grid_constant__ TensorMap map_k, // K, box KEYS tokens x 64
         const __grid_constant__ TensorMap map_v, // V, likewise
         const __grid_constant__ TensorMap map_o, // O, box 16 tokens x 64
         const half16*, const half16*, const half16*, half16*,
         float* lse,
         const float* sink,                       // [Hq], read if info.sink: a logit in the softmax sum, without a value
#if MASKED == 1
         const int* lo, const int* hi, const int4* bounds, const uint4* keys,
#endif
         const __grid_constant__ Info info) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const u32 base = smem_u32(smem);
  const u32 q_full = base + BAR_OFF, q_empty = q_full + 16, k_full = q_empty + 16, k_empty = k_full + 8 * STAGES,
            v_full = k_empty + 8 * STAGES, v_empty = v_full + 8 * STAGES;
  const int wg = __shfl_sync(~0u, threadIdx.x >> 7, 0), lane = threadIdx.x & 31;   // the shuffle keeps wg, and the descriptors, in uniform registers
  if (threadIdx.x == 0) {
    trap_unless((base & 1023) == 0);
    for (int i = 0; i < QBUFS; ++i) { bar_init(q_full + 8 * i, 1); bar_init(q_empty + 8 * i, 4 * NWG); }
    for (int i = 0; i < STAGES; ++i) { bar_init(k_full + 8 * i, 1); bar_init(k_empty + 8 * i, 4 * NWG); bar_init(v_full + 8 * i, 1); bar_init(v_empty + 8 * i, 4 * NWG); }
    fence_barriers();
  }
  __syncthreads();
  Scheduler sched;
#if MASKED != 1
  const int* lo = 0, *hi = 0; const int4* bounds = 0; const uint4* keys = 0;
#endif
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
        bar_expect(q_full + 8 * qb, Q_BYTES);
        #pragma unroll
        for (int w = 0; w < NWG; ++w)
          #pragma unroll
          for (int c = 0; c < HDK / 64; ++c)
            tma_load(base + qb * Q_BYTES + w * Q_WG + c * 8192, &map_q, q_full + 8 * qb, c * 64, t.h, t.m * BM + w * 64, t.b);
        if (++qb == QBUFS) { qb = 0; qph ^= 1; }
        const int hk = t.h / group;
        for (int n = t.last; n >= t.first; --n) {
          const u32 kd = base + K_OFF + s * K_BYTES, vd = base + V_OFF + s * V_BYTES;
          bar_wait(k_empty + 8 * s, ph ^ 1);
          bar_expect(k_full + 8 * s, K_BYTES);
          #pragma unroll
          for (int c = 0; c < HDK / 64; ++c) tma_load(kd + c * SLAB, &map_k, k_full + 8 * s, c * 64, hk, n * KEYS, t.b);
          bar_wait(v_empty + 8 * s, ph ^ 1);
          bar_expect(v_full + 8 * s, V_BYTES);
          #pragma unroll
          for (int c = 0; c < HDV / 64; ++c) tma_load(vd + c * SLAB, &map_v, v_full + 8 * s, c * 64, hk, n * KEYS, t.b);
          if (++s == STAGES) { s = 0; ph ^= 1; }
        }
      }
    }
  } else {
    more_registers<REGS_MATH>();
    const int w = wg - 1, warp = (threadIdx.x >> 5) & 3;
    const float c = __uint_as_float((u32)info.scale) * LOG2E;    // scores in units of log2
    const u64 dq0 = desc_k(base + w * Q_WG), dk0 = desc_k(base + K_OFF), dv0 = desc_mn(base + V_OFF, SLAB);
    float sc[KEYS / 2], acc[HDV / 2];                    // scores (then probabilities) and output of 64 rows: fragments of wgmma
    u32 p[KEYS / 4];                              // probabilities as 16-bit pairs: the A fragments of the second product
    float m0 = 0.f, m1 = 0.f, l0, l1;             // running maximum (log2 units) and this thread's part of the sum, rows r and r + 8
    float f0 = 1.f, f1 = 1.f; bool rescale = false;
    Sight sight;
    int pending = -1;                             // Q buffer whose last reader is the output store
    if (!SKIP && w == NWG - 1) named_arrive(1, 256);   // warpgroup 0 goes first
    auto turn = [&]() { if (!SKIP) named_sync(1 + w, 256); };
    auto pass = [&]() { if (!SKIP) named_arrive(1 + (w + 1 == NWG ? 0 : w + 1), 256); };
    auto qk = [&](int st) {
      const u64 a = dq0 + (u64)(qb * (Q_BYTES >> 4)), b = dk0 + (u64)(st * (K_BYTES >> 4));
      wg_fence();
      wgmma_ss0<0, 0>(sc, a, b);
      #pragma unroll
      for (int k = 1; k < HDK / 16; ++k) wgmma_ss<0, 0>(sc, a + (k >> 2) * (8192 >> 4) + (k & 3) * 2, b + (k >> 2) * (SLAB >> 4) + (k & 3) * 2);
      wg_commit();
    };
    auto pv = [&](int st, int add) {
      const u64 b = dv0 + (u64)(st * (V_BYTES >> 4));
      wg_fence();
      #pragma unroll
      for (int k = 0; k < KEYS / 16; ++k) wgmma_rs<1>(acc, p[4 * k], p[4 * k + 1], p[4 * k + 2], p[4 * k + 3], b + k * (2048 >> 4), k | add);
      wg_commit();
    };
    // probabilities in place of the scores; the maximum is only raised when it would grow by more than 2^8, so that the
    // output is seldom rescaled (the final division makes any reference value exact)
    auto softmax = [&](int n) {
      sight.hide(sc, n, lane);
      float x0 = fmaxf(sc[0], sc[1]), x1 = fmaxf(sc[2], sc[3]);
      #pragma unroll
      for (int j = 1; j < KEYS / 8; ++j) { x0 = fmaxf(x0, fmaxf(sc[4 * j], sc[4 * j + 1])); x1 = fmaxf(x1, fmaxf(sc[4 * j + 2], sc[4 * j + 3])); }
      x0 = fmaxf(x0, __shfl_xor_sync(~0u, x0, 1)); x1 = fmaxf(x1, __shfl_xor_sync(~0u, x1, 1));
      x0 = fmaxf(x0, __shfl_xor_sync(~0u, x0, 2)); x1 = fmaxf(x1, __shfl_xor_sync(~0u, x1, 2));
      x0 *= c; x1 *= c;
      const bool g0 = x0 > m0 + SLACK, g1 = x1 > m1 + SLACK;
      rescale = __any_sync(~0u, g0 | g1);
      const float n0 = g0 ? x0 : m0, n1 = g1 ? x1 : m1;
      f0 = ex2(m0 - n0); f1 = ex2(m1 - n1);
      m0 = n0; m1 = n1;
      float s0 = 0.f, s1 = 0.f;
      #pragma unroll
      for (int j = 0; j < KEYS / 8; ++j) {
        sc[4 * j] = ex2(fmaf(sc[4 * j], c, -n0)); sc[4 * j + 1] = ex2(fmaf(sc[4 * j + 1], c, -n0));
        sc[4 * j + 2] = ex2(fmaf(sc[4 * j + 2], c, -n1)); sc[4 * j + 3] = ex2(fmaf(sc[4 * j + 3], c, -n1));
        s0 += sc[4 * j] + sc[4 * j + 1]; s1 += sc[4 * j + 2] + sc[4 * j + 3];
      }
      l0 = l0 * f0 + s0; l1 = l1 * f1 + s1;
    };
    auto to_p = [&]() {
      #pragma unroll
      for (int j = 0; j < KEYS / 4; ++j) p[j] = pack(sc[2 * j], sc[2 * j + 1]);
    };
    auto step = [&]() { if (++s == STAGES) { s = 0; ph ^= 1; } };
    auto pass_over = [&]() {                      // a block that the rows of this warpgroup do not see
      bar_wait(k_full + 8 * s, ph); bar_wait(v_full + 8 * s, ph);
      if (lane == 0) { bar_arrive(k_empty + 8 * s); bar_arrive(v_empty + 8 * s); }
      step();
    };
    while (sched.next(t, info)) {
      m0 = m1 = -1e30f; l0 = l1 = 0.f;
      sight.start(t, info, lo, hi, bounds, keys, t.m * BM + w * 64, warp * 16 + (lane >> 2));
      bar_wait(q_full + 8 * qb, qph);
      if (SKIP) for (int n = t.last; n > sight.last; --n) pass_over();
      bar_wait(k_full + 8 * s, ph);
      turn();
      qk(s);
      pass();
      wg_wait<0>();
      if (lane == 0) bar_arrive(k_empty + 8 * s);
      softmax(sight.last);
      to_p();
      if (pending >= 0) {                         // the previous tile's output has left its Q buffer by now
        if (lane == 0) { bulk_wait_read(); bar_arrive(q_empty + 8 * pending); }
        __syncwarp();
      }
      int vs = s, add = 0; u32 vph = ph;
      step();
      #pragma unroll 1
      for (int n = sight.last - 1; n >= sight.first; --n) {
        bar_wait(k_full + 8 * s, ph);
        turn();
        qk(s);
        bar_wait(v_full + 8 * vs, vph);
        pv(vs, add);
        add = 1;
        pass();
        wg_wait<1>();
        if (lane == 0) bar_arrive(k_empty + 8 * s);
        softmax(n);
        wg_wait<0>();
        if (lane == 0) bar_arrive(v_empty + 8 * vs);
        if (rescale) {
          #pragma unroll
          for (int j = 0; j < HDV / 8; ++j) { acc[4 * j] *= f0; acc[4 * j + 1] *= f0; acc[4 * j + 2] *= f1; acc[4 * j + 3] *= f1; }
        }
        to_p();
        vs = s; vph = ph;
        step();
      }
      bar_wait(v_full + 8 * vs, vph);
      pv(vs, add);
      l0 += __shfl_xor_sync(~0u, l0, 1); l1 += __shfl_xor_sync(~0u, l1, 1);
      l0 += __shfl_xor_sync(~0u, l0, 2); l1 += __shfl_xor_sync(~0u, l1, 2);
      float e0 = 1.f, e1 = 1.f;
      if (info.sink) {
        const float z = sink[t.h] * LOG2E, y0 = fmaxf(m0, z), y1 = fmaxf(m1, z);
        e0 = ex2(m0 - y0); e1 = ex2(m1 - y1); l0 = l0 * e0 + ex2(z - y0); l1 = l1 * e1 + ex2(z - y1); m0 = y0; m1 = y1;
      }
      const int row = t.m * BM + w * 64 + warp * 16;
      {
        const int r = row + (lane >> 2);
        float* q = lse + (u64)(t.b * sched.hq + t.h) * sched.sq + r;
        if ((lane & 3) == 0) {
          if (r < sched.sq) q[0] = (m0 + lg2(l0)) * 0.6931471805599453f;
          if (r + 8 < sched.sq) q[8] = (m1 + lg2(l1)) * 0.6931471805599453f;
        }
      }
      e0 = l0 > 0.f ? e0 / l0 : 0.f; e1 = l1 > 0.f ? e1 / l1 : 0.f;
      wg_wait<0>();
      if (lane == 0) bar_arrive(v_empty + 8 * vs);
      if (SKIP) for (int n = sight.first - 1; n >= t.first; --n) pass_over();
      named_sync(8 + w, 128);                     // all four warps are past their last read of this warpgroup's Q
      #pragma unroll
      for (int ch = 0; ch < HDV / 64; ++ch) {
        u32 v[16];
        #pragma unroll
        for (int j = 0; j < 8; ++j) { const int i = ch * 32 + 4 * j; v[2 * j] = pack(acc[i] * e0, acc[i + 1] * e0); v[2 * j + 1] = pack(acc[i + 2] * e1, acc[i + 3] * e1); }
        const u32 dst = base + qb * Q_BYTES + w * Q_WG + ch * 8192 + warp * 2048, r = lane & 15, hi = lane >> 4;
        #pragma unroll
        for (int j = 0; j < 4; ++j) st_matrix(dst + r * 128 + (((2 * j + hi) ^ (r & 7)) << 4), v + 4 * j);
      }
      fence_async();
      __syncwarp();
      if (lane == 0) {
        #pragma unroll
        for (int ch = 0; ch < HDV / 64; ++ch) tma_store(&map_o, base + qb * Q_BYTES + w * Q_WG + ch * 8192 + warp * 2048, ch * 64, t.h, row, t.b);
        bulk_commit();
#if QBUFS == 1
        bulk_wait_read();                         // the next tile needs this buffer at once
        bar_arrive(q_empty);
#endif
      }
      __syncwarp();
#if QBUFS > 1
      pending = qb;
#endif
      if (++qb == QBUFS) { qb = 0; qph ^= 1; }
    }
    if (lane == 0) bulk_wait_all();
  }
}

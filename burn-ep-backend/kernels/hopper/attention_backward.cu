// ---- backward, main kernel ------------------------------------------------------------------------------------------------
// Block = one loading warpgroup and two consumer warpgroups; a tile is 128 keys (64 for each consumer) under one QUERY head,
// walked down in steps of 64 query rows. K and V stay in shared memory, dK and dV in registers; S and dP are computed
// transposed (keys x queries), so that packed P^T and dS^T are the A fragments of dV and dK. dS^T also goes through shared
// memory, because dQ sums over the keys of both warpgroups: each of them computes half of the columns.
// Tiles come from an atomic counter. The sums of dQ, and of dK and dV, are made by fp32 atomics in any order.
//   QSTAGES, STAGES: rings of Q and of dO   BULK 0|1: dQ added by red.global.v4 | by bulk reduce from shared memory
// Shared memory: 4 128 HD + (QSTAGES + STAGES) (64 HD 2 + 256 + 16) + 32768 + (BULK) 256 HD + (MASKED) QSTAGES 528 + 48 bytes,
// dynamic.
#define HD HDK                                    // = HDV
#define BQ 64                                     // query rows per step
#define HALVES (HD / 64)
#define KV_BYTES (BN * HD * 2)
#define KV_SLAB (BN * 128)
#define Q_BYTES (BQ * HD * 2)
#define Q_SLAB (BQ * 128)
#define DS_BYTES (BN * BQ * 2)
#define Q_OFF (2 * KV_BYTES)
#define DO_OFF (Q_OFF + QSTAGES * Q_BYTES)
#define DS_OFF (DO_OFF + STAGES * Q_BYTES)
#define OUT_OFF (DS_OFF + 2 * DS_BYTES)           // BULK: fp32 dQ on its way out, a part for each warp
#define OUT_WARP (HD * 32)
#define NL_OFF (OUT_OFF + BULK * 8 * OUT_WARP)    // 64 values for each stage of Q
#define DELTA_OFF (NL_OFF + QSTAGES * 256)        // 64 values for each stage of dO
#define MASK_OFF (DELTA_OFF + STAGES * 256)       // MASKED: lo, hi of 64 rows and their bounds for each stage of Q
#define MASK_BYTES 528
#define BAR_OFF (MASK_OFF + MASKED * QSTAGES * MASK_BYTES)

extern "C" __global__ void __launch_bounds__(384, 1)
attn_bwd(const __grid_constant__ TensorMap map_q,  // Q, box 64 tokens x 64
         const __grid_constant__ TensorMap map_do, // dO, likewise
         const __grid_constant__ TensorMap map_k,  // K, box 128 tokens x 64
         const __grid_constant__ TensorMap map_v,  // V, likewise
         const half16*, const half16*, const half16*, const half16*,
         const float* nl, const float* delta, float* ws, int* counter,
#if MASKED
         const int* lo, const int* hi, const int4* bounds, const int2* steps, const uint4* keys,
#endif
         const __grid_constant__ Info info) {
  float* dq = ws, *dk = ws + dk_start(info), *dv = ws + dv_start(info);
  extern __shared__ __align__(1024) unsigned char smem[];
  const u32 base = smem_u32(smem);
  const u32 kv_full = base + BAR_OFF, kv_empty = kv_full + 8, ds_full = kv_full + 16, q_full = kv_full + 32, q_empty = q_full + 8 * QSTAGES,
            do_full = q_empty + 8 * QSTAGES, do_empty = do_full + 8 * STAGES;
  volatile int* slot = (volatile int*)(smem + BAR_OFF + 32 + 16 * STAGES + 16 * QSTAGES);
  const int wg = __shfl_sync(~0u, threadIdx.x >> 7, 0), lane = threadIdx.x & 31;   // the shuffle keeps wg, and the descriptors, in uniform registers
  if (threadIdx.x == 0) {
    trap_unless((base & 1023) == 0);
    bar_init(kv_full, 1); bar_init(kv_empty, 8); bar_init(ds_full, 8); bar_init(ds_full + 8, 8);
    for (int i = 0; i < QSTAGES; ++i) { bar_init(q_full + 8 * i, 1); bar_init(q_empty + 8 * i, 8); }
    for (int i = 0; i < STAGES; ++i) { bar_init(do_full + 8 * i, 1); bar_init(do_empty + 8 * i, 8); }
    fence_barriers();
  }
  __syncthreads();
  const int hq = (int)info.hq, hkv = (int)info.hkv, group = hq / hkv;
  // order of the tiles: heads that share keys together (their sums stay in L2), longest first among them
  const int groups = row_groups(info), n_tiles = key_blocks(info), total = n_tiles * (int)info.batch * hq;
  int s = 0, t = 0; u32 ph = 0, th = 0, kph = 0;  // ring positions: s of Q, t of dO
  struct Tile { int n, h, b, first, last; };      // key block, query head, batch row; steps first ..= last
  auto decode = [&](int i) {
    const int per = n_tiles * group, c = i / per, r = i - c * per;
    const int bh = c * group + r % group;
    Tile x;
    x.n = r / group; x.b = bh / hq; x.h = bh % hq;
#if MASKED
    const int2 range = steps[x.b * n_tiles + x.n];
    x.first = range.x; x.last = range.y;
#else
    x.first = x.n * (BN / BQ); x.last = groups - 1;
#endif
    return x;
  };

  if (wg == 0) {
    fewer_registers<REGS_LOAD>();
    if (threadIdx.x == 0) {
      while (true) {
        const int i = atomicAdd(counter, 1);
        bar_wait(kv_empty, kph ^ 1); kph ^= 1;
        *slot = i < total ? i : -1;
        if (i >= total) { bar_arrive(kv_full); break; }
        const Tile x = decode(i);
        const int hk = x.h / group;
        bar_expect(kv_full, 2 * KV_BYTES);
        #pragma unroll
        for (int c = 0; c < HALVES; ++c) {
          tma_load(base + c * KV_SLAB, &map_k, kv_full, c * 64, hk, x.n * BN, x.b);
          tma_load(base + KV_BYTES + c * KV_SLAB, &map_v, kv_full, c * 64, hk, x.n * BN, x.b);
        }
        const u64 rows = tile_of(x.b, x.h, hq, groups, 0) * 64;
        for (int m = x.first; m <= x.last; ++m) {
          const u32 qd = base + Q_OFF + s * Q_BYTES, od = base + DO_OFF + t * Q_BYTES;
          bar_wait(q_empty + 8 * s, ph ^ 1);
          bar_expect(q_full + 8 * s, Q_BYTES + 256 + MASKED * MASK_BYTES);
          #pragma unroll
          for (int c = 0; c < HALVES; ++c) tma_load(qd + c * Q_SLAB, &map_q, q_full + 8 * s, c * 64, x.h, m * BQ, x.b);
          bulk_load(base + NL_OFF + s * 256, nl + rows + m * BQ, 256, q_full + 8 * s);
#if MASKED
          const u32 md = base + MASK_OFF + s * MASK_BYTES;
          const int g = x.b * groups + m;
          bulk_load(md, lo + g * 64, 256, q_full + 8 * s);
          bulk_load(md + 256, hi + g * 64, 256, q_full + 8 * s);
          bulk_load(md + 512, bounds + g, 16, q_full + 8 * s);
#endif
          bar_wait(do_empty + 8 * t, th ^ 1);
          bar_expect(do_full + 8 * t, Q_BYTES + 256);
          #pragma unroll
          for (int c = 0; c < HALVES; ++c) tma_load(od + c * Q_SLAB, &map_do, do_full + 8 * t, c * 64, x.h, m * BQ, x.b);
          bulk_load(base + DELTA_OFF + t * 256, delta + rows + m * BQ, 256, do_full + 8 * t);
          if (++t == STAGES) { t = 0; th ^= 1; }
          if (++s == QSTAGES) { s = 0; ph ^= 1; }
        }
      }
    }
  } else {
    more_registers<REGS_MATH>();
    const int w = wg - 1, warp = (threadIdx.x >> 5) & 3;
    const float c = __uint_as_float((u32)info.scale) * LOG2E;
    // K-major operands of the first two products, MN-major ones of the last three
    const u64 k_k = desc_k(base + w * 8192), v_k = desc_k(base + KV_BYTES + w * 8192), q_k = desc_k(base + Q_OFF), o_k = desc_k(base + DO_OFF);
    const u64 q_mn = desc_mn(base + Q_OFF, Q_SLAB), o_mn = desc_mn(base + DO_OFF, Q_SLAB), s_mn = desc_mn(base + DS_OFF, Q_SLAB),
              k_mn = desc_mn(base + (HD == 128 ? w * KV_SLAB : w * 64), KV_SLAB);
    float sc[32], dp[32], adk[HD / 2], adv[HD / 2], adq[HD / 4];
    u32 pp[16], ds[16];
    u32 it = 0;                                   // steps so far, over all tiles: ds buffer it & 1
    while (true) {
      bar_wait(kv_full, kph); kph ^= 1;
      const int tile = *slot;
      if (tile < 0) break;
      const Tile x = decode(tile);
      const int n = x.n, h = x.h, first = x.first, last = x.last;
      const int key = n * BN + w * 64 + warp * 16 + (lane >> 2);
      float* dqt = dq + tile_of(x.b, h, hq, groups, first) * (64 * HD) + (warp * (HD / 8) + w * (HD / 16)) * 128;
#if MASKED
      bool seen0, seen1, all_seen;                // keys `key` and `key + 8`, and all of the warpgroup
      {
        const uint4 k = keys[x.b * n_tiles + n];
        const u32 a = w ? k.z : k.x, b = w ? k.w : k.y, c = warp & 2 ? b : a;
        seen0 = c >> ((warp & 1) * 16 + (lane >> 2)) & 1;
        seen1 = c >> ((warp & 1) * 16 + (lane >> 2) + 8) & 1;
        all_seen = (a & b) == ~0u;
      }
#endif
      auto s_mma = [&](int st) {                  // S^T = K Q^T
        const u64 b = q_k + (u64)(st * (Q_BYTES >> 4));
        wg_fence();
        wgmma_ss0<0, 0>(sc, k_k, b);
        #pragma unroll
        for (int k = 1; k < HD / 16; ++k) wgmma_ss<0, 0>(sc, k_k + (k >> 2) * (KV_SLAB >> 4) + (k & 3) * 2, b + (k >> 2) * (Q_SLAB >> 4) + (k & 3) * 2);
        wg_commit();
      };
      auto dp_mma = [&]() {                       // dP^T = V dO^T
        const u64 b = o_k + (u64)(t * (Q_BYTES >> 4));
        wg_fence();
        wgmma_ss0<0, 0>(dp, v_k, b);
        #pragma unroll
        for (int k = 1; k < HD / 16; ++k) wgmma_ss<0, 0>(dp, v_k + (k >> 2) * (KV_SLAB >> 4) + (k & 3) * 2, b + (k >> 2) * (Q_SLAB >> 4) + (k & 3) * 2);
        wg_commit();
      };
      auto dv_mma = [&](int add) {                // dV += P^T dO
        const u64 b = o_mn + (u64)(t * (Q_BYTES >> 4));
        bar_wait(do_full + 8 * t, th);
        wg_fence();
        #pragma unroll
        for (int k = 0; k < BQ / 16; ++k) wgmma_rs<1>(adv, pp[4 * k], pp[4 * k + 1], pp[4 * k + 2], pp[4 * k + 3], b + k * (2048 >> 4), k | add);
        wg_commit();
      };
      auto dk_mma = [&](int st, int add) {        // dK += dS^T Q
        const u64 b = q_mn + (u64)(st * (Q_BYTES >> 4));
        wg_fence();
        #pragma unroll
        for (int k = 0; k < BQ / 16; ++k) wgmma_rs<1>(adk, ds[4 * k], ds[4 * k + 1], ds[4 * k + 2], ds[4 * k + 3], b + k * (2048 >> 4), k | add);
        wg_commit();
      };
      auto dq_mma = [&](u32 i) {                  // dQ of step i = dS K: this warpgroup's half of the columns, all 128 keys
        const u64 a = s_mn + (u64)((i & 1) * (DS_BYTES >> 4));
        wg_fence();
        wgmma_ss0<1, 1>(adq, a, k_mn);
        #pragma unroll
        for (int k = 1; k < BN / 16; ++k) wgmma_ss<1, 1>(adq, a + k * (2048 >> 4), k_mn + k * (2048 >> 4));
        wg_commit();
      };
      auto dq_add = [&]() {
#if BULK
        const u32 src = base + OUT_OFF + (w * 4 + warp) * OUT_WARP;
        if (lane == 0) bulk_wait_read();
        __syncwarp();
        #pragma unroll
        for (int j = 0; j < HD / 16; ++j) st_shared4(src + j * 512 + lane * 16, adq[4 * j], adq[4 * j + 1], adq[4 * j + 2], adq[4 * j + 3]);
        fence_async();
        __syncwarp();
        if (lane == 0) { bulk_add(dqt, src, OUT_WARP); bulk_commit(); }
#else
        #pragma unroll
        for (int j = 0; j < HD / 16; ++j) red4(dqt + lane * 4 + j * 128, adq[4 * j], adq[4 * j + 1], adq[4 * j + 2], adq[4 * j + 3]);
#endif
        dqt += 64 * HD;
      };
      auto exponent = [&](int m, int st) {        // P^T in 16 bits from S^T
        const u32 rd = base + NL_OFF + st * 256 + (lane & 3) * 8;
        #pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float2 l = ld_shared2(rd + j * 32);
          sc[4 * j] = ex2(fmaf(sc[4 * j], c, l.x)); sc[4 * j + 1] = ex2(fmaf(sc[4 * j + 1], c, l.y));
          sc[4 * j + 2] = ex2(fmaf(sc[4 * j + 2], c, l.x)); sc[4 * j + 3] = ex2(fmaf(sc[4 * j + 3], c, l.y));
        }
#if MASKED
        const u32 md = base + MASK_OFF + st * MASK_BYTES;
        const int max_lo = ld_shared_i2(md + 512).y, min_hi = ld_shared_i2(md + 520).x;
        if (n * BN + w * 64 < max_lo) {
          #pragma unroll
          for (int j = 0; j < 8; ++j) {
            const int2 l = ld_shared_i2(md + (lane & 3) * 8 + j * 32);
            if (key < l.x) sc[4 * j] = 0.f;
            if (key < l.y) sc[4 * j + 1] = 0.f;
            if (key + 8 < l.x) sc[4 * j + 2] = 0.f;
            if (key + 8 < l.y) sc[4 * j + 3] = 0.f;
          }
        }
        if (n * BN + w * 64 + 64 > min_hi) {
          #pragma unroll
          for (int j = 0; j < 8; ++j) {
            const int2 h = ld_shared_i2(md + 256 + (lane & 3) * 8 + j * 32);
            if (key >= h.x) sc[4 * j] = 0.f;
            if (key >= h.y) sc[4 * j + 1] = 0.f;
            if (key + 8 >= h.x) sc[4 * j + 2] = 0.f;
            if (key + 8 >= h.y) sc[4 * j + 3] = 0.f;
          }
        }
        if (!all_seen) {
          #pragma unroll
          for (int j = 0; j < 32; ++j) if (!(j & 2 ? seen1 : seen0)) sc[j] = 0.f;
        }
#else
        if (m < first + 2) {
          #pragma unroll
          for (int j = 0; j < 32; ++j) if (key + ((j >> 1) & 1) * 8 > m * BQ + (j >> 2) * 8 + (lane & 3) * 2 + (j & 1)) sc[j] = 0.f;
        }
#endif
        #pragma unroll
        for (int j = 0; j < 16; ++j) pp[j] = pack(sc[2 * j], sc[2 * j + 1]);
      };
      // Order of the products in one warpgroup: ... dV(m) dP(m) S(m+1) dK(m) dQ(m) dV(m+1) ...: dS(m) is computed while
      // S(m+1) runs, the exponentials of m+1 while dK(m) runs, dQ(m) leaves while dV(m+1) runs. No product is
      // conditional (else its accumulators stay alive around the loop, 32 registers too many): the first step computes a
      // dQ from whatever the buffer holds and the last one an S from the old stage, and both are ignored.
      bar_wait(q_full + 8 * s, ph);
      s_mma(s);
      wg_wait<0>();
      exponent(first, s);
      int prev = s, add = 0;
      #pragma unroll 1
      for (int m = first; m <= last; ++m) {
        const int cur = s;
        if (add) bar_wait(ds_full + 8 * ((it - 1) & 1), ((it - 1) >> 1) & 1);
        dq_mma(it - 1);
        dv_mma(add);
        wg_wait<1>();                             // dK and dQ of the previous step
        if (add) {
          if (lane == 0) bar_arrive(q_empty + 8 * prev);
          dq_add();
        }
        dp_mma();
        if (++s == QSTAGES) { s = 0; ph ^= 1; }
        if (m < last) bar_wait(q_full + 8 * s, ph);
        const int next = m < last ? s : cur;
        s_mma(next);
        wg_wait<1>();                             // dP (and dV)
        const u32 rd = base + DELTA_OFF + t * 256 + (lane & 3) * 8;
        #pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float2 e = ld_shared2(rd + j * 32);
          const float p0 = low(pp[2 * j]), p1 = high(pp[2 * j]), p2 = low(pp[2 * j + 1]), p3 = high(pp[2 * j + 1]);
          ds[2 * j] = pack(p0 * (dp[4 * j] - e.x), p1 * (dp[4 * j + 1] - e.y));
          ds[2 * j + 1] = pack(p2 * (dp[4 * j + 2] - e.x), p3 * (dp[4 * j + 3] - e.y));
        }
        {
          // both readers of this buffer are past it: dQ of the last step but one needed the other warpgroup's last dS
          const u32 dst = base + DS_OFF + (it & 1) * DS_BYTES + (w * 64 + warp * 16) * 128, r = lane & 15, hi = lane >> 4;
          #pragma unroll
          for (int j = 0; j < 4; ++j) st_matrix(dst + r * 128 + (((2 * j + hi) ^ (r & 7)) << 4), ds + 4 * j);
          fence_async();
          __syncwarp();
          if (lane == 0) { bar_arrive(ds_full + 8 * (it & 1)); bar_arrive(do_empty + 8 * t); }
        }
        if (++t == STAGES) { t = 0; th ^= 1; }
        dk_mma(cur, add);
        wg_wait<1>();                             // S of the next step
        exponent(m + 1, next);
        ++it; prev = cur; add = 1;
      }
      bar_wait(ds_full + 8 * ((it - 1) & 1), ((it - 1) >> 1) & 1);
      dq_mma(it - 1);
      wg_wait<0>();
      __syncwarp();
      if (lane == 0) { bar_arrive(q_empty + 8 * prev); bar_arrive(kv_empty); }
      dq_add();
      if (n * BN + w * 64 < (int)info.skv) {
        const u64 off = tile_of(x.b, h / group, hkv, key_groups(info), 2 * n + w) * (64 * HD) + warp * (HD / 8) * 128 + lane * 4;
        #pragma unroll
        for (int j = 0; j < HD / 8; ++j) put4(dv + off + j * 128, group > 1, adv[4 * j], adv[4 * j + 1], adv[4 * j + 2], adv[4 * j + 3]);
        #pragma unroll
        for (int j = 0; j < HD / 8; ++j) put4(dk + off + j * 128, group > 1, adk[4 * j], adk[4 * j + 1], adk[4 * j + 2], adk[4 * j + 3]);
      }
    }
    if (lane == 0) bulk_wait_all();
  }
}

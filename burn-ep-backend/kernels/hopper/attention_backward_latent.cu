// ---- backward, main kernel for 192 columns of Q and K and 128 of V (multi-head latent attention) ----------------------------
// Block = one loading warpgroup and two consumer warpgroups; a tile is 64 keys under one QUERY head, walked down in steps of 64
// query rows. The sums of dK and dV do not fit into the registers of one warpgroup together with the scores, so the two have
// different work, of equal length on the tensor cores:
//   warpgroup 0: S^T = K Q^T, P, dV += P^T dO, and dQ of the step before, from the dS that warpgroup 1 left in shared memory
//   warpgroup 1: S^T again, dP^T = V dO^T, dS, dK += dS^T Q
// The second S costs a fifth more products and saves an exchange of P. Defines: QSTAGES, STAGES as in attention_backward.cu.
// Shared memory: 64 (HDK + HDV) 2 + QSTAGES (64 HDK 2 + 256 + 16) + STAGES (64 HDV 2 + 256 + 16) + 16384 + 256 HDK
// + (MASKED) QSTAGES 528 + 64 bytes, dynamic.
#define TILE 64                                   // keys of a tile, query rows of a step
#define SLAB (TILE * 128)                         // 64 columns of 64 rows
#define K_BYTES (TILE * HDK * 2)                  // of Q too
#define V_BYTES (TILE * HDV * 2)                  // of dO too
#define Q_OFF (K_BYTES + V_BYTES)
#define DO_OFF (Q_OFF + QSTAGES * K_BYTES)
#define DS_OFF (DO_OFF + STAGES * V_BYTES)
#define OUT_OFF (DS_OFF + 2 * SLAB)               // fp32 dQ on its way out, a part for each warp
#define OUT_WARP (HDK * 64)
#define NL_OFF (OUT_OFF + 4 * OUT_WARP)           // 64 values for each stage of Q
#define DELTA_OFF (NL_OFF + QSTAGES * 256)        // 64 values for each stage of dO
#define MASK_OFF (DELTA_OFF + STAGES * 256)       // MASKED: lo, hi of 64 rows and their bounds for each stage of Q
#define MASK_BYTES 528
#define BAR_OFF (MASK_OFF + MASKED * QSTAGES * MASK_BYTES)

extern "C" __global__ void __launch_bounds__(384, 1)
attn_bwd(const __grid_constant__ TensorMap map_q,  // Q, box 64 tokens x 64; all maps
         const __grid_constant__ TensorMap map_do,
         const __grid_constant__ TensorMap map_k,
         const __grid_constant__ TensorMap map_v,
         const half16*, const half16*, const half16*, const half16*,
         const float* nl, const float* delta, float* ws, int* counter,
#if MASKED
         const int* lo, const int* hi, const int4* bounds, const int2* steps, const uint4* keys,
#endif
         const __grid_constant__ Info info) {
  float* dq = ws, *dk = ws + dk_start(info), *dv = ws + dv_start(info);
  extern __shared__ __align__(1024) unsigned char smem[];
  const u32 base = smem_u32(smem);
  const u32 kv_full = base + BAR_OFF, kv_empty = kv_full + 8, ds_full = kv_full + 16, ds_empty = kv_full + 32, q_full = kv_full + 48,
            q_empty = q_full + 8 * QSTAGES, do_full = q_empty + 8 * QSTAGES, do_empty = do_full + 8 * STAGES;
  volatile int* slot = (volatile int*)(smem + BAR_OFF + 48 + 16 * STAGES + 16 * QSTAGES);
  const int wg = __shfl_sync(~0u, threadIdx.x >> 7, 0), lane = threadIdx.x & 31;
  if (threadIdx.x == 0) {
    trap_unless((base & 1023) == 0);
    bar_init(kv_full, 1); bar_init(kv_empty, 8);
    for (int i = 0; i < 2; ++i) { bar_init(ds_full + 8 * i, 4); bar_init(ds_empty + 8 * i, 4); }
    for (int i = 0; i < QSTAGES; ++i) { bar_init(q_full + 8 * i, 1); bar_init(q_empty + 8 * i, 8); }
    for (int i = 0; i < STAGES; ++i) { bar_init(do_full + 8 * i, 1); bar_init(do_empty + 8 * i, 8); }
    fence_barriers();
  }
  __syncthreads();
  const int hq = (int)info.hq, hkv = (int)info.hkv, group = hq / hkv;
  const int groups = row_groups(info), n_tiles = key_groups(info), total = n_tiles * (int)info.batch * hq;
  int s = 0, t = 0; u32 ph = 0, th = 0, kph = 0;  // ring positions: s of Q, t of dO
  struct Tile { int n, h, b, first, last; };      // key tile, query head, batch row; steps first ..= last
  auto decode = [&](int i) {                      // heads that share keys together, longest tiles first among them
    const int per = n_tiles * group, c = i / per, r = i - c * per;
    const int bh = c * group + r % group;
    Tile x;
    x.n = r / group; x.b = bh / hq; x.h = bh % hq;
#if MASKED
    const int2 range = steps[x.b * key_blocks(info) + x.n / 2];
    x.first = range.x; x.last = range.y;
#else
    x.first = x.n; x.last = groups - 1;
#endif
    return x;
  };
  auto next_q = [&]() { if (++s == QSTAGES) { s = 0; ph ^= 1; } };
  auto next_do = [&]() { if (++t == STAGES) { t = 0; th ^= 1; } };

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
        bar_expect(kv_full, K_BYTES + V_BYTES);
        #pragma unroll
        for (int c = 0; c < HDK / 64; ++c) tma_load(base + c * SLAB, &map_k, kv_full, c * 64, hk, x.n * TILE, x.b);
        #pragma unroll
        for (int c = 0; c < HDV / 64; ++c) tma_load(base + K_BYTES + c * SLAB, &map_v, kv_full, c * 64, hk, x.n * TILE, x.b);
        const u64 rows = tile_of(x.b, x.h, hq, groups, 0) * 64;
        for (int m = x.first; m <= x.last; ++m) {
          const u32 qd = base + Q_OFF + s * K_BYTES, od = base + DO_OFF + t * V_BYTES;
          bar_wait(q_empty + 8 * s, ph ^ 1);
          bar_expect(q_full + 8 * s, K_BYTES + 256 + MASKED * MASK_BYTES);
          #pragma unroll
          for (int c = 0; c < HDK / 64; ++c) tma_load(qd + c * SLAB, &map_q, q_full + 8 * s, c * 64, x.h, m * TILE, x.b);
          bulk_load(base + NL_OFF + s * 256, nl + rows + m * TILE, 256, q_full + 8 * s);
#if MASKED
          const u32 md = base + MASK_OFF + s * MASK_BYTES;
          const int g = x.b * groups + m;
          bulk_load(md, lo + g * 64, 256, q_full + 8 * s);
          bulk_load(md + 256, hi + g * 64, 256, q_full + 8 * s);
          bulk_load(md + 512, bounds + g, 16, q_full + 8 * s);
#endif
          bar_wait(do_empty + 8 * t, th ^ 1);
          bar_expect(do_full + 8 * t, V_BYTES + 256);
          #pragma unroll
          for (int c = 0; c < HDV / 64; ++c) tma_load(od + c * SLAB, &map_do, do_full + 8 * t, c * 64, x.h, m * TILE, x.b);
          bulk_load(base + DELTA_OFF + t * 256, delta + rows + m * TILE, 256, do_full + 8 * t);
          next_do();
          next_q();
        }
      }
    }
    return;
  }

  more_registers<REGS_MATH>();
  const int warp = (threadIdx.x >> 5) & 3;
  const float c = __uint_as_float((u32)info.scale) * LOG2E;
  // K-major operands of S and dP, MN-major ones of the sums
  const u64 k_k = desc_k(base), v_k = desc_k(base + K_BYTES), q_k = desc_k(base + Q_OFF), o_k = desc_k(base + DO_OFF);
  const u64 k_mn = desc_mn(base, SLAB), q_mn = desc_mn(base + Q_OFF, SLAB), o_mn = desc_mn(base + DO_OFF, SLAB), s_mn = desc_mn(base + DS_OFF, SLAB);
  float sc[32];
  u32 pp[16];
  u32 it = 0;                                     // steps so far, over all tiles: dS buffer it & 1
  int key, key0;                                  // first key of this lane, of the tile
#if MASKED
  bool seen0, seen1, all_seen;                    // keys `key` and `key + 8`, and all of the tile
#endif
  auto start = [&](const Tile& x) {
    key0 = x.n * TILE; key = key0 + warp * 16 + (lane >> 2);
#if MASKED
    const uint4 k = keys[x.b * key_blocks(info) + x.n / 2];
    const u32 a = x.n & 1 ? k.z : k.x, b = x.n & 1 ? k.w : k.y, mine = warp & 2 ? b : a;
    seen0 = mine >> ((warp & 1) * 16 + (lane >> 2)) & 1;
    seen1 = mine >> ((warp & 1) * 16 + (lane >> 2) + 8) & 1;
    all_seen = (a & b) == ~0u;
#endif
  };
  auto s_mma = [&](int st) {                      // S^T = K Q^T
    const u64 b = q_k + (u64)(st * (K_BYTES >> 4));
    wg_fence();
    wgmma_ss0<0, 0>(sc, k_k, b);
    #pragma unroll
    for (int k = 1; k < HDK / 16; ++k) wgmma_ss<0, 0>(sc, k_k + (k >> 2) * (SLAB >> 4) + (k & 3) * 2, b + (k >> 2) * (SLAB >> 4) + (k & 3) * 2);
    wg_commit();
  };
  auto exponent = [&](int m, int st) {            // P^T in 16 bits from S^T
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
    if (key0 < max_lo) {
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int2 l = ld_shared_i2(md + (lane & 3) * 8 + j * 32);
        if (key < l.x) sc[4 * j] = 0.f;
        if (key < l.y) sc[4 * j + 1] = 0.f;
        if (key + 8 < l.x) sc[4 * j + 2] = 0.f;
        if (key + 8 < l.y) sc[4 * j + 3] = 0.f;
      }
    }
    if (key0 + TILE > min_hi) {
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
    if (m * TILE == key0) {
      #pragma unroll
      for (int j = 0; j < 32; ++j) if (key + ((j >> 1) & 1) * 8 > m * TILE + (j >> 2) * 8 + (lane & 3) * 2 + (j & 1)) sc[j] = 0.f;
    }
#endif
    #pragma unroll
    for (int j = 0; j < 16; ++j) pp[j] = pack(sc[2 * j], sc[2 * j + 1]);
  };

  if (wg == 1) {
    float adv[HDV / 2], adq[HDK / 2];
    while (true) {
      bar_wait(kv_full, kph); kph ^= 1;
      const int tile = *slot;
      if (tile < 0) break;
      const Tile x = decode(tile);
      start(x);
      float* dqt = dq + tile_of(x.b, x.h, hq, groups, x.first) * (64 * HDK) + warp * (HDK / 8) * 128;
      auto dq_mma = [&](u32 i) {                  // dQ of step i = dS K
        const u64 a = s_mn + (u64)((i & 1) * (SLAB >> 4));
        wg_fence();
        wgmma_ss0<1, 1>(adq, a, k_mn);
        #pragma unroll
        for (int k = 1; k < TILE / 16; ++k) wgmma_ss<1, 1>(adq, a + k * (2048 >> 4), k_mn + k * (2048 >> 4));
        wg_commit();
      };
      auto dq_add = [&]() {
        const u32 src = base + OUT_OFF + warp * OUT_WARP;
        if (lane == 0) bulk_wait_read();
        __syncwarp();
        #pragma unroll
        for (int j = 0; j < HDK / 8; ++j) st_shared4(src + j * 512 + lane * 16, adq[4 * j], adq[4 * j + 1], adq[4 * j + 2], adq[4 * j + 3]);
        fence_async();
        __syncwarp();
        if (lane == 0) { bulk_add(dqt, src, OUT_WARP); bulk_commit(); }
        dqt += 64 * HDK;
      };
      // Groups in flight: ... dV(m-1) S(m) dQ(m-1) dV(m) ...: the exponentials run beside dQ of the step before, which leaves
      // beside dV. No product is conditional: the first dQ reads whatever the buffer holds and is ignored.
      int add = 0, prev = 0;
      #pragma unroll 1
      for (int m = x.first; m <= x.last; ++m) {
        bar_wait(q_full + 8 * s, ph);
        s_mma(s);
        if (add) bar_wait(ds_full + 8 * ((it - 1) & 1), ((it - 1) >> 1) & 1);
        dq_mma(it - 1);
        wg_wait<1>();                             // dV of the previous step, S
        exponent(m, s);
        __syncwarp();
        if (lane == 0) { bar_arrive(q_empty + 8 * s); if (add) bar_arrive(do_empty + 8 * prev); }
        bar_wait(do_full + 8 * t, th);
        {
          const u64 b = o_mn + (u64)(t * (V_BYTES >> 4));
          wg_fence();
          #pragma unroll
          for (int k = 0; k < TILE / 16; ++k) wgmma_rs<1>(adv, pp[4 * k], pp[4 * k + 1], pp[4 * k + 2], pp[4 * k + 3], b + k * (2048 >> 4), k | add);
          wg_commit();
        }
        wg_wait<1>();                             // dQ of the previous step
        if (add) {
          if (lane == 0) bar_arrive(ds_empty + 8 * ((it - 1) & 1));
          dq_add();
        }
        prev = t; add = 1; ++it;
        next_do();
        next_q();
      }
      bar_wait(ds_full + 8 * ((it - 1) & 1), ((it - 1) >> 1) & 1);
      dq_mma(it - 1);
      wg_wait<0>();
      __syncwarp();
      if (lane == 0) { bar_arrive(do_empty + 8 * prev); bar_arrive(ds_empty + 8 * ((it - 1) & 1)); bar_arrive(kv_empty); }
      dq_add();
      float* out = dv + tile_of(x.b, x.h / group, hkv, n_tiles, x.n) * (64 * HDV) + warp * (HDV / 8) * 128 + lane * 4;
      #pragma unroll
      for (int j = 0; j < HDV / 8; ++j) put4(out + j * 128, group > 1, adv[4 * j], adv[4 * j + 1], adv[4 * j + 2], adv[4 * j + 3]);
    }
    if (lane == 0) bulk_wait_all();
  } else {
    float dp[32], adk[HDK / 2];
    u32 ds[16];
    while (true) {
      bar_wait(kv_full, kph); kph ^= 1;
      const int tile = *slot;
      if (tile < 0) break;
      const Tile x = decode(tile);
      start(x);
      // Groups in flight: ... dK(m-1) dP(m) S(m+1) dK(m) ...: dS is computed while the next S runs, the exponentials while dK
      // runs. The last step computes an S from the old stage, which is ignored.
      bar_wait(q_full + 8 * s, ph);
      s_mma(s);
      wg_wait<0>();
      exponent(x.first, s);
      int prev = s, add = 0;
      #pragma unroll 1
      for (int m = x.first; m <= x.last; ++m) {
        const int cur = s;
        bar_wait(do_full + 8 * t, th);
        {
          const u64 b = o_k + (u64)(t * (V_BYTES >> 4));
          wg_fence();
          wgmma_ss0<0, 0>(dp, v_k, b);            // dP^T = V dO^T
          #pragma unroll
          for (int k = 1; k < HDV / 16; ++k) wgmma_ss<0, 0>(dp, v_k + (k >> 2) * (SLAB >> 4) + (k & 3) * 2, b + (k >> 2) * (SLAB >> 4) + (k & 3) * 2);
          wg_commit();
        }
        next_q();
        if (m < x.last) bar_wait(q_full + 8 * s, ph);
        const int next = m < x.last ? s : cur;
        s_mma(next);
        wg_wait<1>();                             // dK of the previous step, dP
        if (add && lane == 0) bar_arrive(q_empty + 8 * prev);
        const u32 rd = base + DELTA_OFF + t * 256 + (lane & 3) * 8;
        #pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float2 e = ld_shared2(rd + j * 32);
          ds[2 * j] = pack(low(pp[2 * j]) * (dp[4 * j] - e.x), high(pp[2 * j]) * (dp[4 * j + 1] - e.y));
          ds[2 * j + 1] = pack(low(pp[2 * j + 1]) * (dp[4 * j + 2] - e.x), high(pp[2 * j + 1]) * (dp[4 * j + 3] - e.y));
        }
        bar_wait(ds_empty + 8 * (it & 1), ((it >> 1) & 1) ^ 1);
        const u32 dst = base + DS_OFF + (it & 1) * SLAB + warp * 16 * 128, r = lane & 15, h = lane >> 4;
        #pragma unroll
        for (int j = 0; j < 4; ++j) st_matrix(dst + r * 128 + (((2 * j + h) ^ (r & 7)) << 4), ds + 4 * j);
        fence_async();
        __syncwarp();
        if (lane == 0) { bar_arrive(ds_full + 8 * (it & 1)); bar_arrive(do_empty + 8 * t); }
        next_do();
        {
          const u64 b = q_mn + (u64)(cur * (K_BYTES >> 4));
          wg_fence();
          #pragma unroll
          for (int k = 0; k < TILE / 16; ++k) wgmma_rs<1>(adk, ds[4 * k], ds[4 * k + 1], ds[4 * k + 2], ds[4 * k + 3], b + k * (2048 >> 4), k | add);
          wg_commit();
        }
        wg_wait<1>();                             // S of the next step
        exponent(m + 1, next);
        prev = cur; add = 1; ++it;
      }
      wg_wait<0>();
      __syncwarp();
      if (lane == 0) { bar_arrive(q_empty + 8 * prev); bar_arrive(kv_empty); }
      float* out = dk + tile_of(x.b, x.h / group, hkv, n_tiles, x.n) * (64 * HDK) + warp * (HDK / 8) * 128 + lane * 4;
      #pragma unroll
      for (int j = 0; j < HDK / 8; ++j) put4(out + j * 128, group > 1, adk[4 * j], adk[4 * j + 1], adk[4 * j + 2], adk[4 * j + 3]);
    }
  }
}

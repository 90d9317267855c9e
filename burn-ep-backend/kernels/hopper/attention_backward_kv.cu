// ---- split backward, second kernel: dK and dV -------------------------------------------------------------------------------------
// Block = one loading warpgroup and two consumer warpgroups; a tile is 128 keys of one KEY head, 64 for each consumer, which walks
// down the row groups that see them once for every query head of the group: no other block adds to these dK and dV. As in
// attention_backward.cu, S and dP are computed transposed and stay in registers. A warpgroup passes over steps that its own
// keys are hidden from. Tiles come from the counter that attn_bwd_dq has cleared; dK and dV leave through the buffers of K and V.
// Defines: STAGES (ring of Q, dO and their statistics).   HD = HDK = HDV
// Shared memory: 4 128 HD + STAGES (64 HD 4 + 512 + 16) + (MASKED == 1) STAGES 528 + 32 bytes, dynamic.
#define HD HDK
#define KV_BYTES (BN * HD * 2)
#define KV_SLAB (BN * 128)
#define Q_BYTES (64 * HD * 2)
#define Q_SLAB 8192
#define Q_OFF (2 * KV_BYTES)
#define DO_OFF (Q_OFF + STAGES * Q_BYTES)
#define NL_OFF (DO_OFF + STAGES * Q_BYTES)        // nl and delta of 64 rows for each stage
#define MASK_OFF (NL_OFF + STAGES * 512)          // lo, hi of 64 rows and their bounds for each stage
#define MASK_BYTES 528
#define BAR_OFF (MASK_OFF + (MASKED == 1) * STAGES * MASK_BYTES)

extern "C" __global__ void __launch_bounds__(384, 1)
attn_bwd_dkv(const __grid_constant__ TensorMap map_q,  // Q, box 64 tokens x 64
             const __grid_constant__ TensorMap map_do, // dO, likewise
             const __grid_constant__ TensorMap map_k,  // K, box 128 tokens x 64
             const __grid_constant__ TensorMap map_v,  // V, likewise
             const __grid_constant__ TensorMap map_dk, // dK, box 16 tokens x 64
             const __grid_constant__ TensorMap map_dv, // dV, likewise
             const half16*, const half16*, const half16*, const half16*, half16*, half16*,
             const float* nl, const float* delta, int* counter,
#if MASKED == 1
             const int* lo, const int* hi, const int4* bounds, const int2* steps, const uint4* keys,
#endif
             const __grid_constant__ Info info) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const u32 base = smem_u32(smem);
  const u32 kv_full = base + BAR_OFF, kv_empty = kv_full + 8, full = kv_full + 16, empty = full + 8 * STAGES;
  volatile int* slot = (volatile int*)(smem + BAR_OFF + 16 + 16 * STAGES);
  const int wg = __shfl_sync(~0u, threadIdx.x >> 7, 0), lane = threadIdx.x & 31;
  if (threadIdx.x == 0) {
    trap_unless((base & 1023) == 0);
    bar_init(kv_full, 1); bar_init(kv_empty, 8);
    for (int i = 0; i < STAGES; ++i) { bar_init(full + 8 * i, 1); bar_init(empty + 8 * i, 8); }
    fence_barriers();
  }
  __syncthreads();
  const int hq = (int)info.hq, hkv = (int)info.hkv, group = hq / hkv, bh = (int)info.batch * hkv;
  const int groups = row_groups(info), total = key_blocks(info) * bh;
  int s = 0; u32 ph = 0, kph = 0;
  struct Tile { int n, h, b, first, last; };      // key block, key head, batch row; row groups first ..= last
  auto decode = [&](int i) {                      // longest first
    Tile x;
    x.n = i / bh; x.b = i % bh / hkv; x.h = i % hkv;
#if MASKED == 1
    const int2 range = steps[x.b * key_blocks(info) + x.n];
    x.first = range.x; x.last = range.y;
#else
    x.first = x.n * (BN / 64); x.last = groups - 1;
#if MASKED == 2
    x.last = min(x.last, (x.n * BN + BN + (int)info.window - 2) / 64);
#endif
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
        bar_expect(kv_full, 2 * KV_BYTES);
        #pragma unroll
        for (int c = 0; c < HD / 64; ++c) {
          tma_load(base + c * KV_SLAB, &map_k, kv_full, c * 64, x.h, x.n * BN, x.b);
          tma_load(base + KV_BYTES + c * KV_SLAB, &map_v, kv_full, c * 64, x.h, x.n * BN, x.b);
        }
        for (int h = x.h * group; h < x.h * group + group; ++h) {
          const u64 rows = tile_of(x.b, h, hq, groups, 0) * 64;
          for (int m = x.first; m <= x.last; ++m) {
            const u32 qd = base + Q_OFF + s * Q_BYTES, od = base + DO_OFF + s * Q_BYTES, bar = full + 8 * s;
            bar_wait(empty + 8 * s, ph ^ 1);
            bar_expect(bar, 2 * Q_BYTES + 512 + (MASKED == 1) * MASK_BYTES);
            #pragma unroll
            for (int c = 0; c < HD / 64; ++c) {
              tma_load(qd + c * Q_SLAB, &map_q, bar, c * 64, h, m * 64, x.b);
              tma_load(od + c * Q_SLAB, &map_do, bar, c * 64, h, m * 64, x.b);
            }
            bulk_load(base + NL_OFF + s * 512, nl + rows + m * 64, 256, bar);
            bulk_load(base + NL_OFF + s * 512 + 256, delta + rows + m * 64, 256, bar);
#if MASKED == 1
            const u32 md = base + MASK_OFF + s * MASK_BYTES;
            const int g = x.b * groups + m;
            bulk_load(md, lo + g * 64, 256, bar);
            bulk_load(md + 256, hi + g * 64, 256, bar);
            bulk_load(md + 512, bounds + g, 16, bar);
#endif
            if (++s == STAGES) { s = 0; ph ^= 1; }
          }
        }
      }
    }
    return;
  }

  more_registers<REGS_MATH>();
  const int w = wg - 1, warp = (threadIdx.x >> 5) & 3;
  const float scale = __uint_as_float((u32)info.scale), c = scale * LOG2E;
  // K-major operands of the first two products, MN-major ones of the sums
  const u64 k_k = desc_k(base + w * 8192), v_k = desc_k(base + KV_BYTES + w * 8192), q_k = desc_k(base + Q_OFF), o_k = desc_k(base + DO_OFF);
  const u64 q_mn = desc_mn(base + Q_OFF, Q_SLAB), o_mn = desc_mn(base + DO_OFF, Q_SLAB);
  float sc[32], dp[32], adk[HD / 2], adv[HD / 2];
  u32 pp[16], ds[16];
  while (true) {
    bar_wait(kv_full, kph); kph ^= 1;
    const int tile = *slot;
    if (tile < 0) break;
    const Tile x = decode(tile);
    const int key0 = x.n * BN + w * 64, key = key0 + warp * 16 + (lane >> 2);   // first key of the warpgroup, of the lane
    int m = x.first, left = group * (x.last - x.first + 1);                     // the step at the ring's position, steps from it on
    auto next = [&]() { if (++s == STAGES) { s = 0; ph ^= 1; } m = m == x.last ? x.first : m + 1; --left; };
    // on to the next step with a pair that is seen; with `must` the last one of all counts as such, so that the sums are written
    auto seek = [&](bool must) {
      while (left > 0) {
        bar_wait(full + 8 * s, ph);
#if MASKED == 1
        const u32 md = base + MASK_OFF + s * MASK_BYTES + 512;
        const bool sees = ld_shared_i2(md).x < key0 + 64 && ld_shared_i2(md + 8).y > key0;
#else
        bool sees = m * 64 + 63 >= key0;
#if MASKED == 2
        sees = sees && m * 64 - (int)info.window < key0 + 63;
#endif
#endif
        if (sees || (must && left == 1)) return true;
        __syncwarp();
        if (lane == 0) bar_arrive(empty + 8 * s);
        next();
      }
      return false;
    };
    auto s_mma = [&](int st) {                    // S^T = K Q^T
      const u64 b = q_k + (u64)(st * (Q_BYTES >> 4));
      wg_fence();
      wgmma_ss0<0, 0>(sc, k_k, b);
      #pragma unroll
      for (int k = 1; k < HD / 16; ++k) wgmma_ss<0, 0>(sc, k_k + (k >> 2) * (KV_SLAB >> 4) + (k & 3) * 2, b + (k >> 2) * (Q_SLAB >> 4) + (k & 3) * 2);
      wg_commit();
    };
    auto exponent = [&](int st) {                 // P^T in 16 bits from S^T of step m in stage st
      const u32 rd = base + NL_OFF + st * 512 + (lane & 3) * 8;
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float2 l = ld_shared2(rd + j * 32);
        sc[4 * j] = ex2(fmaf(sc[4 * j], c, l.x)); sc[4 * j + 1] = ex2(fmaf(sc[4 * j + 1], c, l.y));
        sc[4 * j + 2] = ex2(fmaf(sc[4 * j + 2], c, l.x)); sc[4 * j + 3] = ex2(fmaf(sc[4 * j + 3], c, l.y));
      }
#if MASKED == 1
      const u32 md = base + MASK_OFF + st * MASK_BYTES + (lane & 3) * 8;
      const int max_lo = ld_shared_i2(base + MASK_OFF + st * MASK_BYTES + 512).y, min_hi = ld_shared_i2(base + MASK_OFF + st * MASK_BYTES + 520).x;
      if (key0 < max_lo) {
        #pragma unroll
        for (int j = 0; j < 8; ++j) {
          const int2 l = ld_shared_i2(md + j * 32);
          if (key < l.x) sc[4 * j] = 0.f;
          if (key < l.y) sc[4 * j + 1] = 0.f;
          if (key + 8 < l.x) sc[4 * j + 2] = 0.f;
          if (key + 8 < l.y) sc[4 * j + 3] = 0.f;
        }
      }
      if (key0 + 64 > min_hi) {
        #pragma unroll
        for (int j = 0; j < 8; ++j) {
          const int2 h = ld_shared_i2(md + 256 + j * 32);
          if (key >= h.x) sc[4 * j] = 0.f;
          if (key >= h.y) sc[4 * j + 1] = 0.f;
          if (key + 8 >= h.x) sc[4 * j + 2] = 0.f;
          if (key + 8 >= h.y) sc[4 * j + 3] = 0.f;
        }
      }
      if (info.visible) {
        const u32 word = ((const u32*)(keys + x.b * key_blocks(info)))[key >> 5] >> (key & 7);   // keys `key` and `key + 8`: bits 0 and 8
        const u32 at = key & 24;
        const bool seen0 = word >> at & 1, seen1 = word >> at >> 8 & 1;
        #pragma unroll
        for (int j = 0; j < 32; ++j) if (!(j & 2 ? seen1 : seen0)) sc[j] = 0.f;
      }
#else
      const int apart = m * 64 + (lane & 3) * 2 - key;   // from the lane's first key to its first query
#if MASKED == 2
      const u32 window = (u32)info.window;
      if (m * 64 < key0 + 63 || m * 64 + 63 - key0 >= (int)window) {
        #pragma unroll
        for (int j = 0; j < 32; ++j) if ((u32)(apart + (j >> 2) * 8 + (j & 1) - (j & 2) * 4) >= window) sc[j] = 0.f;
      }
#else
      if (m * 64 < key0 + 63) {
        #pragma unroll
        for (int j = 0; j < 32; ++j) if (apart + (j >> 2) * 8 + (j & 1) - (j & 2) * 4 < 0) sc[j] = 0.f;
      }
#endif
#endif
      #pragma unroll
      for (int j = 0; j < 16; ++j) pp[j] = pack(sc[2 * j], sc[2 * j + 1]);
    };
    // Order of the products: ... dV(i) dP(i) S(i+1) dK(i) dV(i+1) ...: dS(i) is computed while S(i+1) runs, the exponentials of
    // i+1 while dK(i) runs. No product is conditional: the last step computes an S from its own stage, which is ignored.
    seek(true);
    s_mma(s);
    wg_wait<0>();
    exponent(s);
    int prev = s, add = 0;
    bool more = true;
    #pragma unroll 1
    while (more) {
      const int cur = s;
      next();
      more = seek(false);
      const int then = more ? s : cur;
      {
        const u64 b = o_mn + (u64)(cur * (Q_BYTES >> 4));
        wg_fence();
        #pragma unroll
        for (int k = 0; k < 4; ++k) wgmma_rs<1>(adv, pp[4 * k], pp[4 * k + 1], pp[4 * k + 2], pp[4 * k + 3], b + k * (2048 >> 4), k | add);   // dV += P^T dO
        wg_commit();
      }
      wg_wait<1>();                               // dK of the previous step; dP only now, for want of registers
      if (add && lane == 0) bar_arrive(empty + 8 * prev);
      {
        const u64 b = o_k + (u64)(cur * (Q_BYTES >> 4));
        wg_fence();
        wgmma_ss0<0, 0>(dp, v_k, b);              // dP^T = V dO^T
        #pragma unroll
        for (int k = 1; k < HD / 16; ++k) wgmma_ss<0, 0>(dp, v_k + (k >> 2) * (KV_SLAB >> 4) + (k & 3) * 2, b + (k >> 2) * (Q_SLAB >> 4) + (k & 3) * 2);
        wg_commit();
      }
      s_mma(then);
      wg_wait<1>();                               // dV, dP
      const u32 rd = base + NL_OFF + cur * 512 + 256 + (lane & 3) * 8;
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float2 e = ld_shared2(rd + j * 32);
        ds[2 * j] = pack(low(pp[2 * j]) * (dp[4 * j] - e.x), high(pp[2 * j]) * (dp[4 * j + 1] - e.y));
        ds[2 * j + 1] = pack(low(pp[2 * j + 1]) * (dp[4 * j + 2] - e.x), high(pp[2 * j + 1]) * (dp[4 * j + 3] - e.y));
      }
      {
        const u64 b = q_mn + (u64)(cur * (Q_BYTES >> 4));
        wg_fence();
        #pragma unroll
        for (int k = 0; k < 4; ++k) wgmma_rs<1>(adk, ds[4 * k], ds[4 * k + 1], ds[4 * k + 2], ds[4 * k + 3], b + k * (2048 >> 4), k | add);   // dK += dS^T Q
        wg_commit();
      }
      wg_wait<1>();                               // S of the next step
      exponent(then);
      prev = cur; add = 1;
    }
    wg_wait<0>();
    if (lane == 0) bar_arrive(empty + 8 * prev);
    named_sync(8 + w, 128);                       // all four warps are past their last read of this warpgroup's K and V
    const Tile y = decode(*slot);                 // again, rather than kept in registers
    auto leave = [&](const float (&sum)[HD / 2], const TensorMap* map, u32 buffer, float f) {
      #pragma unroll
      for (int ch = 0; ch < HD / 64; ++ch) {
        u32 v[16];
        #pragma unroll
        for (int j = 0; j < 16; ++j) { const int i = ch * 32 + 2 * j; v[j] = pack(sum[i] * f, sum[i + 1] * f); }
        const u32 dst = base + buffer + ch * KV_SLAB + (w * 64 + warp * 16) * 128, r = lane & 15, hi = lane >> 4;
        #pragma unroll
        for (int j = 0; j < 4; ++j) st_matrix(dst + r * 128 + (((2 * j + hi) ^ (r & 7)) << 4), v + 4 * j);
      }
      fence_async();
      __syncwarp();
      if (lane == 0) {
        #pragma unroll
        for (int ch = 0; ch < HD / 64; ++ch) tma_store(map, base + buffer + ch * KV_SLAB + (w * 64 + warp * 16) * 128, ch * 64, y.h, y.n * BN + w * 64 + warp * 16, y.b);
        bulk_commit();
      }
    };
    leave(adk, &map_dk, 0, scale);
    leave(adv, &map_dv, KV_BYTES, 1.f);
    if (lane == 0) { bulk_wait_read(); bar_arrive(kv_empty); }
    __syncwarp();
  }
  if (lane == 0) bulk_wait_all();
}

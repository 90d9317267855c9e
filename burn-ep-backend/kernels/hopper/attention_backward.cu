// ---- backward -----------------------------------------------------------------------------------------------------
// Three kernels: attn_bwd_pre (delta, zeros), the main one below, attn_bwd_post (fp32 sums to bf16).
// Gradients are summed in fp32 workspaces stored tile by tile (64 rows x HD) in the order of the wgmma fragments, so that
// a warp adds 512 contiguous bytes with one red.global.add.v4.f32:
//   float index inside a tile = ((warp * (HD / 8) + j) * 32 + lane) * 4 + i   for accumulator register 4 j + i
// nl = -log2(e) * LSE and delta are padded to 64 rows per sequence (nl = -inf there, so that the probability is 0).
#define BQ 64                                     // query rows per step
#define BN 128                                    // keys per tile, 64 for each of two consumer warpgroups
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
#define NL_OFF (OUT_OFF + (BULK == 1) * 8 * OUT_WARP)    // 64 values for each stage of Q
#define DELTA_OFF (NL_OFF + QSTAGES * 256)        // 64 values for each stage of dO
#define BAR_OFF (DELTA_OFF + STAGES * 256)
#define LOG2E 1.4426950408889634f

// sequences: batch entries, or documents packed one after the other
struct Seq { int b, row0, len, tile0, tiles; };  // batch coordinate, first token, length; first 64-row tile and tiles per head
__device__ __forceinline__ Seq sequence(int i, const Info& info, const int* cu) {
  Seq q;
#if VARLEN
  q.b = 0; q.row0 = cu[i]; q.len = cu[i + 1] - q.row0; q.tile0 = q.row0 / 64 + i; q.tiles = (int)(info.total / 64 + info.batch + 1);
#else
  q.b = i; q.row0 = 0; q.len = (int)info.seq; q.tiles = (q.len + 63) / 64; q.tile0 = 0;
#endif
  return q;
}
// first tile of a head; heads = number of heads of the tensor
__device__ __forceinline__ u64 tile_base(const Seq& q, int h, int heads) { return (u64)(q.b * heads + h) * q.tiles + q.tile0; }

__device__ __forceinline__ void bulk_load(u32 dst, const float* src, u32 bytes, u32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" :: "r"(dst), "l"(src), "r"(bytes), "r"(bar) : "memory"); }
__device__ __forceinline__ void red4(float* p, float a, float b, float c, float d) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" :: "l"(p), "f"(a), "f"(b), "f"(c), "f"(d) : "memory"); }
__device__ __forceinline__ float2 lds2(u32 a) { float2 v; asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(a) : "memory"); return v; }

// workspace: [dQ | dK | dV], all zeroed by the first kernel
__device__ __forceinline__ u64 q_floats(const Info& info) {
#if VARLEN
  return info.hq * (info.total / 64 + info.batch + 1) * (64 * HD);
#else
  return info.hq * info.batch * ((info.seq + 63) / 64) * (64 * HD);
#endif
}
#if BACKWARD == 1
// Main kernel. Block = one loading warpgroup and two consumer warpgroups; a tile is 128 keys (64 for each consumer) under one
// QUERY head, walked down in steps of 64 query rows. K and V stay in shared memory, dK and dV in registers; S and dP are
// computed transposed (keys x queries), so that packed P^T and dS^T are the A fragments of dV and dK. dS^T also goes
// through shared memory, because dQ sums over the keys of both warpgroups: each of them computes half of the columns.
// Tiles come from an atomic counter. Shared memory: 4 128 HD + (QSTAGES + STAGES) (64 HD 2 + 256 + 16) + 32768
// + (BULK == 1) 256 HD + 48 bytes, dynamic.
extern "C" __global__ void __launch_bounds__(384, 1)
ENTRY(const __grid_constant__ TensorMap map_q,    // [B, S, Hq, D], box 64 tokens x 64
      const __grid_constant__ TensorMap map_do,   // likewise
      const __grid_constant__ TensorMap map_k,    // [B, S, Hkv, D], box 128 tokens x 64
      const __grid_constant__ TensorMap map_v,
      const bf16*, const bf16*, const bf16*, const bf16*,
      const float* nl, const float* delta, float* ws, int* counter,
#if VARLEN
      const int* cu,
#endif
#if PROFILE
      u64* prof,
#endif
      const __grid_constant__ Info info) {
#if !VARLEN
  const int* cu = 0;
#endif
  float* dq = ws, *dk = ws + q_floats(info), *dv = dk + q_floats(info) / info.hq * info.hkv;
  extern __shared__ __align__(1024) unsigned char smem[];
  const u32 base = smem_u32(smem);
  const u32 kv_full = base + BAR_OFF, kv_empty = kv_full + 8, ds_full = kv_full + 16, q_full = kv_full + 32, q_empty = q_full + 8 * QSTAGES,
            do_full = q_empty + 8 * QSTAGES, do_empty = do_full + 8 * STAGES;
  volatile int* slot = (volatile int*)(smem + BAR_OFF + 32 + 16 * STAGES + 16 * QSTAGES);
  const int wg = __shfl_sync(~0u, threadIdx.x >> 7, 0), lane = threadIdx.x & 31;   // the shuffle keeps wg, and the descriptors, in uniform registers
  if (threadIdx.x == 0) {
    if (base & 1023) asm volatile("trap;");
    bar_init(kv_full, 1); bar_init(kv_empty, 8); bar_init(ds_full, 8); bar_init(ds_full + 8, 8);
    for (int i = 0; i < QSTAGES; ++i) { bar_init(q_full + 8 * i, 1); bar_init(q_empty + 8 * i, 8); }
    for (int i = 0; i < STAGES; ++i) { bar_init(do_full + 8 * i, 1); bar_init(do_empty + 8 * i, 8); }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  const int hq = (int)info.hq, hkv = (int)info.hkv, group = hq / hkv;
  // order of the tiles: chunks of heads that share keys (their sums stay in L2), longest first inside a chunk
  const int n_tiles = ((int)info.seq + BN - 1) / BN, chunk = group * CHUNKS, total = n_tiles * (int)info.batch * hq;
  int s = 0, t = 0; u32 ph = 0, th = 0, kph = 0;  // ring positions: s of Q, t of dO
  auto decode = [&](int i, int& n, int& h, int& sq) {
    const int per = n_tiles * chunk, c = i / per, r = i - c * per;
    n = r / chunk; const int bh = c * chunk + r % chunk; sq = bh / hq; h = bh % hq;
  };
  auto last_step = [&](int n, int len) {
    int last = (len - 1) / BQ;
#if WINDOW
    last = min(last, (n * BN + BN - 2 + (int)info.window) / BQ);
#endif
    return last;
  };

  if (wg == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(REGS_LOAD));
    if (threadIdx.x == 0) {
      while (true) {
        const int i = atomicAdd(counter, 1);
        int n = 0, h = 0, sq = 0;
        if (i < total) decode(i, n, h, sq);
        const Seq q = sequence(sq, info, cu);
        if (i < total && n * BN >= q.len) continue;
        bar_wait(kv_empty, kph ^ 1); kph ^= 1;
        *slot = i < total ? i : -1;
        if (i >= total) { bar_arrive(kv_full); break; }
        const int hk = h / group;
        bar_expect(kv_full, 2 * KV_BYTES);
        #pragma unroll
        for (int c = 0; c < HALVES; ++c) {
          tma_load(base + c * KV_SLAB, &map_k, kv_full, c * 64, hk, q.row0 + n * BN, q.b);
          tma_load(base + KV_BYTES + c * KV_SLAB, &map_v, kv_full, c * 64, hk, q.row0 + n * BN, q.b);
        }
        const u64 rows = tile_base(q, h, hq) * 64;
        const int last = last_step(n, q.len);
        for (int m = n * (BN / BQ); m <= last; ++m) {
          const u32 qd = base + Q_OFF + s * Q_BYTES, od = base + DO_OFF + t * Q_BYTES;
          bar_wait(q_empty + 8 * s, ph ^ 1);
          bar_expect(q_full + 8 * s, Q_BYTES + 256);
          #pragma unroll
          for (int c = 0; c < HALVES; ++c) tma_load(qd + c * Q_SLAB, &map_q, q_full + 8 * s, c * 64, h, q.row0 + m * BQ, q.b);
          bulk_load(base + NL_OFF + s * 256, nl + rows + m * BQ, 256, q_full + 8 * s);
          bar_wait(do_empty + 8 * t, th ^ 1);
          bar_expect(do_full + 8 * t, Q_BYTES + 256);
          #pragma unroll
          for (int c = 0; c < HALVES; ++c) tma_load(od + c * Q_SLAB, &map_do, do_full + 8 * t, c * 64, h, q.row0 + m * BQ, q.b);
          bulk_load(base + DELTA_OFF + t * 256, delta + rows + m * BQ, 256, do_full + 8 * t);
          if (++t == STAGES) { t = 0; th ^= 1; }
          if (++s == QSTAGES) { s = 0; ph ^= 1; }
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(REGS_MATH));
    const int w = wg - 1, warp = (threadIdx.x >> 5) & 3;
    const float c = __uint_as_float((u32)info.scale) * LOG2E;
    // K-major operands of the first two products, MN-major ones of the last three
    const u64 k_k = desc_k(base + w * 8192), v_k = desc_k(base + KV_BYTES + w * 8192), q_k = desc_k(base + Q_OFF), o_k = desc_k(base + DO_OFF);
    const u64 q_mn = desc_mn(base + Q_OFF, Q_SLAB), o_mn = desc_mn(base + DO_OFF, Q_SLAB), s_mn = desc_mn(base + DS_OFF, Q_SLAB),
              k_mn = desc_mn(base + (HD == 128 ? w * KV_SLAB : w * 64), KV_SLAB);
    float sc[32], dp[32], adk[HD / 2], adv[HD / 2], adq[HD / 4];
    u32 pp[16], ds[16];
    u32 it = 0;                                   // steps so far, over all tiles: ds buffer it & 1
#if PROFILE
    u64 c_all = clock64(), blocks = 0, t_all; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t_all));
#endif
    while (true) {
      bar_wait(kv_full, kph); kph ^= 1;
      const int tile = *slot;
      if (tile < 0) break;
      int n, h, sq; decode(tile, n, h, sq);
      const Seq q = sequence(sq, info, cu);
      const int first = n * (BN / BQ), last = last_step(n, q.len);
      const int key = n * BN + w * 64 + warp * 16 + (lane >> 2);
      float* dqt = dq + (tile_base(q, h, hq) + first) * (64 * HD) + (warp * (HD / 8) + w * (HD / 16)) * 128;
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
#if BULK == 1
        const u32 src = base + OUT_OFF + (w * 4 + warp) * OUT_WARP;
        if (lane == 0) bulk_wait_read();
        __syncwarp();
        #pragma unroll
        for (int j = 0; j < HD / 16; ++j) asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" :: "r"(src + j * 512 + lane * 16), "f"(adq[4 * j]), "f"(adq[4 * j + 1]), "f"(adq[4 * j + 2]), "f"(adq[4 * j + 3]) : "memory");
        fence_async();
        __syncwarp();
        if (lane == 0) {
          asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" :: "l"(dqt), "r"(src), "n"(OUT_WARP) : "memory");
          bulk_commit();
        }
#elif BULK == 0
        #pragma unroll
        for (int j = 0; j < HD / 16; ++j) red4(dqt + lane * 4 + j * 128, adq[4 * j], adq[4 * j + 1], adq[4 * j + 2], adq[4 * j + 3]);
#endif
        dqt += 64 * HD;
      };
      auto exponent = [&](int m, int st) {        // P^T in bf16 from S^T
        const u32 rd = base + NL_OFF + st * 256 + (lane & 3) * 8;
        #pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float2 l = lds2(rd + j * 32);
          sc[4 * j] = ex2(fmaf(sc[4 * j], c, l.x)); sc[4 * j + 1] = ex2(fmaf(sc[4 * j + 1], c, l.y));
          sc[4 * j + 2] = ex2(fmaf(sc[4 * j + 2], c, l.x)); sc[4 * j + 3] = ex2(fmaf(sc[4 * j + 3], c, l.y));
        }
        if (m < first + 2) {
          #pragma unroll
          for (int j = 0; j < 32; ++j) if (key + ((j >> 1) & 1) * 8 > m * BQ + (j >> 2) * 8 + (lane & 3) * 2 + (j & 1)) sc[j] = 0.f;
        }
#if WINDOW
        if (m * BQ + BQ - 1 - (int)info.window >= n * BN) {
          #pragma unroll
          for (int j = 0; j < 32; ++j) if (key + ((j >> 1) & 1) * 8 + (int)info.window <= m * BQ + (j >> 2) * 8 + (lane & 3) * 2 + (j & 1)) sc[j] = 0.f;
        }
#endif
        #pragma unroll
        for (int j = 0; j < 16; ++j) pp[j] = pack_bf16(sc[2 * j], sc[2 * j + 1]);
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
          const float2 e = lds2(rd + j * 32);
          const float p0 = __uint_as_float(pp[2 * j] << 16), p1 = __uint_as_float(pp[2 * j] & 0xffff0000u), p2 = __uint_as_float(pp[2 * j + 1] << 16), p3 = __uint_as_float(pp[2 * j + 1] & 0xffff0000u);
          ds[2 * j] = pack_bf16(p0 * (dp[4 * j] - e.x), p1 * (dp[4 * j + 1] - e.y));
          ds[2 * j + 1] = pack_bf16(p2 * (dp[4 * j + 2] - e.x), p3 * (dp[4 * j + 3] - e.y));
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
      if (n * BN + w * 64 < q.len) {
        const u64 off = (tile_base(q, h / group, hkv) + 2 * n + w) * (64 * HD) + warp * (HD / 8) * 128 + lane * 4;
        #pragma unroll
        for (int j = 0; j < HD / 8; ++j) red4(dv + off + j * 128, adv[4 * j], adv[4 * j + 1], adv[4 * j + 2], adv[4 * j + 3]);
        #pragma unroll
        for (int j = 0; j < HD / 8; ++j) red4(dk + off + j * 128, adk[4 * j], adk[4 * j + 1], adk[4 * j + 2], adk[4 * j + 3]);
      }
#if PROFILE
      blocks += last - first + 1;
#endif
    }
    if (lane == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#if PROFILE
    if (threadIdx.x == 128) {
      u64 t1; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t1));
      u64* q = prof + blockIdx.x * 3;
      q[0] = clock64() - c_all; q[1] = t1 - t_all; q[2] = blocks;
    }
#endif
  }
}

#else
// nl and delta of every query row (HD / 8 lanes a row), zeros for the workspace and the tile counter
extern "C" __global__ void __launch_bounds__(256) attn_bwd_pre(const bf16* o, const bf16* d_o, const float* lse, float* nl, float* delta, uint4* zero, int* counter,
#if VARLEN
    const int* cu,
#endif
    const __grid_constant__ Info info) {
#if !VARLEN
  const int* cu = 0;
#endif
  const u32 tid = blockIdx.x * 256 + threadIdx.x, step = gridDim.x * 256, per = HD / 8, hq = (u32)info.hq;
  if (tid == 0) *counter = 0;
  for (u64 i = tid; i < info.zeros; i += step) zero[i] = make_uint4(0, 0, 0, 0);
  const u32 padded = ((u32)info.seq + 63) / 64 * 64;           // longest sequence
  const u32 rows = (u32)info.batch * padded * hq;
  for (u32 r = tid / per, l = tid % per; r < (rows + 31) / 32 * 32; r += step / per) {   // whole warps
    const bool in = r < rows;
    const int h = (int)(r % hq), i = (int)(r / hq % padded), sq = in ? (int)(r / hq / padded) : 0;
    const Seq q = sequence(sq, info, cu);
    float a = 0.f; bool real = in && i < q.len;
    if (real) {
      const u64 off = (((u64)q.b * info.seq + q.row0 + i) * hq + h) * HD + l * 8;
      const uint4 u = *(const uint4*)(o + off), v = *(const uint4*)(d_o + off);
      const u32 uu[4] = {u.x, u.y, u.z, u.w}, vv[4] = {v.x, v.y, v.z, v.w};
      #pragma unroll
      for (int z = 0; z < 4; ++z) { a = fmaf(__uint_as_float(uu[z] << 16), __uint_as_float(vv[z] << 16), a); a = fmaf(__uint_as_float(uu[z] & 0xffff0000u), __uint_as_float(vv[z] & 0xffff0000u), a); }
    }
    #pragma unroll
    for (int s = per / 2; s; s >>= 1) a += __shfl_xor_sync(~0u, a, s);
    if (in && l == 0 && i < (q.len + 63) / 64 * 64) {
      const u64 dst = tile_base(q, h, hq) * 64 + i;
#if VARLEN
      const u64 src = (u64)h * info.total + q.row0 + i;
#else
      const u64 src = ((u64)q.b * hq + h) * info.seq + i;
#endif
      delta[dst] = a;
      nl[dst] = real ? -LOG2E * lse[src] : -__int_as_float(0x7f800000);
    }
  }
}

// one block per 64-row tile: fragment order fp32 to rows of bf16, times the scale where asked
__device__ __forceinline__ void convert(const float* src, bf16* dst, int heads, int h, int row, int rows, float f, unsigned char* sm) {
  const int t = threadIdx.x;
  #pragma unroll
  for (int x = t; x < 16 * HD; x += 128) {
    const float4 v = *(const float4*)(src + x * 4);
    const int lane = x & 31, j = (x >> 5) % (HD / 8), warp = (x >> 5) / (HD / 8), r = warp * 16 + (lane >> 2);
    u32* p = (u32*)(sm + r * (HD * 2 + 16) + j * 16 + (lane & 3) * 4);
    p[0] = pack_bf16(v.x * f, v.y * f);
    p[8 * (HD * 2 + 16) / 4] = pack_bf16(v.z * f, v.w * f);
  }
  __syncthreads();
  for (int x = t; x < 64 * (HD / 8); x += 128) {
    const int r = x / (HD / 8), ch = x % (HD / 8);
    if (r < rows) *(uint4*)(dst + ((u64)(row + r) * heads + h) * HD + ch * 8) = *(const uint4*)(sm + r * (HD * 2 + 16) + ch * 16);
  }
}
extern "C" __global__ void __launch_bounds__(128) attn_bwd_post(const float* ws, bf16* oq, bf16* ok, bf16* ov,
#if VARLEN
    const int* cu,
#endif
    const __grid_constant__ Info info) {
#if !VARLEN
  const int* cu = 0;
#endif
  const float* dq = ws, *dk = ws + q_floats(info), *dv = dk + q_floats(info) / info.hq * info.hkv;
  __shared__ __align__(16) unsigned char sm[64 * (HD * 2 + 16)];
  const int hq = (int)info.hq, hkv = (int)info.hkv, all = hq + 2 * hkv;
  const int nt = ((int)info.seq + 63) / 64;
  const int x = (int)(blockIdx.x % all), i = (int)(blockIdx.x / all % nt), sq = (int)(blockIdx.x / all / nt);
  const Seq q = sequence(sq, info, cu);
  if (i * 64 >= q.len) return;
  const float scale = __uint_as_float((u32)info.scale);
  const u64 row = (u64)q.b * info.seq + q.row0 + i * 64;
  const int rows = min(64, q.len - i * 64);
  if (x < hq) convert(dq + (tile_base(q, x, hq) + i) * (64 * HD), oq + row * hq * HD, hq, x, 0, rows, scale, sm);
  else if (x < hq + hkv) convert(dk + (tile_base(q, x - hq, hkv) + i) * (64 * HD), ok + row * hkv * HD, hkv, x - hq, 0, rows, scale, sm);
  else convert(dv + (tile_base(q, x - hq - hkv, hkv) + i) * (64 * HD), ov + row * hkv * HD, hkv, x - hq - hkv, 0, rows, 1.f, sm);
}
#endif

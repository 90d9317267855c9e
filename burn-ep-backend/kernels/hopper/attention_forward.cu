// ---- forward ------------------------------------------------------------------------------------------------------
// Block = one loading warpgroup and NWG consumer warpgroups of 64 query rows each; a tile is 64 NWG query rows of one head,
// walked from its diagonal leftwards in blocks of 128 keys. Q is double-buffered, K and V are rings of STAGES blocks.
// Shared memory: 2 NWG 64 HD 2 + 2 STAGES 128 HD 2 + 32 + 32 STAGES bytes, dynamic.
// Inside a warpgroup the products of step n are S(n) = Q K(n) and, issued right behind, O += P(n + 1) V(n + 1), so that the
// softmax of step n runs beside the second product; the warpgroups take turns in issuing them (PINGPONG). P stays in
// registers: packed to bf16 the accumulator fragment of S is the A fragment of the second product. O leaves through the
// Q buffer of its own tile.
#define BM (64 * NWG)
#define BN 128
#define HALVES (HD / 64)
#define Q_WG (64 * HD * 2)
#define Q_BYTES (NWG * Q_WG)
#define KV_BYTES (BN * HD * 2)
#define KV_OFF (2 * Q_BYTES)
#define BAR_OFF (KV_OFF + 2 * STAGES * KV_BYTES)
#define LOG2E 1.4426950408889634f

struct Tile { int m, b, h, row0, len, first, last; };       // first token of the document, its length; key blocks last .. first
struct Scheduler {
  int round, m_tiles, bh, batch, hq, seq, window; const int* cu;
  __device__ __forceinline__ bool next(Tile& t) {
    while (true) {
      const int g = (int)gridDim.x, k = (int)blockIdx.x;
      const int i = round * g + (round & 1 ? g - 1 - k : k);  // snake order over tiles sorted longest first
      if (round * g >= m_tiles * bh) return false;
      ++round;
      if (i >= m_tiles * bh) continue;
      t.m = m_tiles - 1 - i / bh;
      const int j = i % bh;
      t.b = j / hq; t.h = j % hq;
#if VARLEN
      t.row0 = cu[t.b]; t.len = cu[t.b + 1] - t.row0;
      if (t.m * BM >= t.len) continue;
#else
      t.row0 = 0; t.len = seq;
#endif
      t.last = (min(t.m * BM + BM, t.len) - 1) / BN;
#if WINDOW
      t.first = max(0, t.m * BM - window + 1) / BN;
#else
      t.first = 0;
#endif
      return true;
    }
  }
};

extern "C" __global__ void __launch_bounds__(128 * (NWG + 1), 1)
ENTRY(const __grid_constant__ TensorMap map_q,    // [B, S, Hq, D], box 64 tokens x 64
      const __grid_constant__ TensorMap map_k,    // [B, S, Hkv, D], box 128 tokens x 64
      const __grid_constant__ TensorMap map_v,
      const __grid_constant__ TensorMap map_o,    // [B, S, Hq, D], box 16 tokens x 64
      const bf16*, const bf16*, const bf16*, bf16* o,
      float* lse,                                 // [B, Hq, S] (packed: [Hq, T])
#if VARLEN
      const int* cu,                              // [documents + 1]
#endif
#if SINK
      const float* sink,                          // [Hq]
#endif
#if PROFILE
      u64* prof,
#endif
      const __grid_constant__ Info info) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const u32 base = smem_u32(smem);
  const u32 q_full = base + BAR_OFF, q_empty = q_full + 16, k_full = q_empty + 16, k_empty = k_full + 8 * STAGES,
            v_full = k_empty + 8 * STAGES, v_empty = v_full + 8 * STAGES;
  const int wg = __shfl_sync(~0u, threadIdx.x >> 7, 0), lane = threadIdx.x & 31;   // the shuffle keeps wg, and the descriptors, in uniform registers
  if (threadIdx.x == 0) {
    if (base & 1023) asm volatile("trap;");
    for (int i = 0; i < 2; ++i) { bar_init(q_full + 8 * i, 1); bar_init(q_empty + 8 * i, 4 * NWG); }
    for (int i = 0; i < STAGES; ++i) { bar_init(k_full + 8 * i, 1); bar_init(k_empty + 8 * i, 4 * NWG); bar_init(v_full + 8 * i, 1); bar_init(v_empty + 8 * i, 4 * NWG); }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  Scheduler sched;
  sched.round = 0; sched.batch = (int)info.batch; sched.hq = (int)info.hq; sched.seq = (int)info.seq; sched.window = (int)info.window;
  sched.bh = sched.batch * sched.hq; sched.m_tiles = (sched.seq + BM - 1) / BM;
#if VARLEN
  sched.cu = cu;
#else
  sched.cu = 0;
#endif
  Tile t;
  int s = 0; u32 ph = 0;                          // ring position of K and V
  int qb = 0; u32 qph = 0;

  if (wg == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(REGS_LOAD));
    if (threadIdx.x == 0) {
      const int group = (int)(info.hq / info.hkv);
      while (sched.next(t)) {
#if VARLEN
        const int b = 0;
#else
        const int b = t.b;
#endif
        bar_wait(q_empty + 8 * qb, qph ^ 1);
        bar_expect(q_full + 8 * qb, Q_BYTES);
        #pragma unroll
        for (int w = 0; w < NWG; ++w)
          #pragma unroll
          for (int c = 0; c < HALVES; ++c)
            tma_load(base + qb * Q_BYTES + w * Q_WG + c * 8192, &map_q, q_full + 8 * qb, c * 64, t.h, t.row0 + t.m * BM + w * 64, b);
        if (++qb == 2) { qb = 0; qph ^= 1; }
        const int hk = t.h / group;
        for (int n = t.last; n >= t.first; --n) {
          const u32 kd = base + KV_OFF + s * KV_BYTES, vd = kd + STAGES * KV_BYTES;
          bar_wait(k_empty + 8 * s, ph ^ 1);
          bar_expect(k_full + 8 * s, KV_BYTES);
          #pragma unroll
          for (int c = 0; c < HALVES; ++c) tma_load(kd + c * (BN * 128), &map_k, k_full + 8 * s, c * 64, hk, t.row0 + n * BN, b);
          bar_wait(v_empty + 8 * s, ph ^ 1);
          bar_expect(v_full + 8 * s, KV_BYTES);
          #pragma unroll
          for (int c = 0; c < HALVES; ++c) tma_load(vd + c * (BN * 128), &map_v, v_full + 8 * s, c * 64, hk, t.row0 + n * BN, b);
          if (++s == STAGES) { s = 0; ph ^= 1; }
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(REGS_MATH));
    const int w = wg - 1, warp = (threadIdx.x >> 5) & 3;
    const float c = __uint_as_float((u32)info.scale) * LOG2E;    // scores in units of log2
    const u64 dq0 = desc_k(base + w * Q_WG), dk0 = desc_k(base + KV_OFF), dv0 = desc_mn(base + KV_OFF + STAGES * KV_BYTES, BN * 128);
    float sc[64], acc[HD / 2];                    // scores (then probabilities) and output of 64 rows: fragments of wgmma
    u32 p[32];                                    // probabilities as bf16 pairs: the A fragments of the second product
    float m0, m1, l0, l1;                         // running maximum (log2 units) and this thread's part of the sum, rows r and r + 8
    float f0 = 1.f, f1 = 1.f; bool rescale = false;
    int pending = -1;                             // Q buffer whose last reader is the output store
    if (PINGPONG && w == NWG - 1) named_arrive(1, 256);   // warpgroup 0 goes first
#if PROFILE
    u64 c_all = clock64(), blocks = 0, t_all; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t_all));
#endif
    auto turn = [&]() { if (PINGPONG) named_sync(1 + w, 256); };
    auto pass = [&]() { if (PINGPONG) named_arrive(1 + (w + 1 == NWG ? 0 : w + 1), 256); };
    auto qk = [&](int st) {
      const u64 a = dq0 + (u64)(qb * (Q_BYTES >> 4)), b = dk0 + (u64)(st * (KV_BYTES >> 4));
      wg_fence();
      wgmma_ss0<0, 0>(sc, a, b);
      #pragma unroll
      for (int k = 1; k < HD / 16; ++k) wgmma_ss<0, 0>(sc, a + (k >> 2) * (8192 >> 4) + (k & 3) * 2, b + (k >> 2) * (BN * 128 >> 4) + (k & 3) * 2);
      wg_commit();
    };
    auto pv = [&](int st, int add) {
      const u64 b = dv0 + (u64)(st * (KV_BYTES >> 4));
      wg_fence();
      #pragma unroll
      for (int k = 0; k < BN / 16; ++k) wgmma_rs<1>(acc, p[4 * k], p[4 * k + 1], p[4 * k + 2], p[4 * k + 3], b + k * (2048 >> 4), k | add);
      wg_commit();
    };
    // probabilities in place of the scores; the maximum is only raised when it would grow by more than 2^8, so that the
    // output is seldom rescaled (the final division makes any reference value exact)
    auto softmax = [&](int n) {
      const int row = t.m * BM + w * 64 + warp * 16 + (lane >> 2);
      const int lo = t.m * BM + w * 64;
      if (n * BN + BN - 1 > lo) {
        #pragma unroll
        for (int j = 0; j < 64; ++j) { const int key = n * BN + (j >> 2) * 8 + (lane & 3) * 2 + (j & 1); if (key > row + ((j >> 1) & 1) * 8) sc[j] = -__int_as_float(0x7f800000); }
      }
#if WINDOW
      if (n * BN <= lo + 63 - sched.window) {
        #pragma unroll
        for (int j = 0; j < 64; ++j) { const int key = n * BN + (j >> 2) * 8 + (lane & 3) * 2 + (j & 1); if (key <= row + ((j >> 1) & 1) * 8 - sched.window) sc[j] = -__int_as_float(0x7f800000); }
      }
#endif
      float x0 = fmaxf(sc[0], sc[1]), x1 = fmaxf(sc[2], sc[3]);
      #pragma unroll
      for (int j = 1; j < 16; ++j) { x0 = fmaxf(x0, fmaxf(sc[4 * j], sc[4 * j + 1])); x1 = fmaxf(x1, fmaxf(sc[4 * j + 2], sc[4 * j + 3])); }
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
      for (int j = 0; j < 16; ++j) {
        sc[4 * j] = ex2(fmaf(sc[4 * j], c, -n0)); sc[4 * j + 1] = ex2(fmaf(sc[4 * j + 1], c, -n0));
        sc[4 * j + 2] = ex2(fmaf(sc[4 * j + 2], c, -n1)); sc[4 * j + 3] = ex2(fmaf(sc[4 * j + 3], c, -n1));
        s0 += sc[4 * j] + sc[4 * j + 1]; s1 += sc[4 * j + 2] + sc[4 * j + 3];
      }
      l0 = l0 * f0 + s0; l1 = l1 * f1 + s1;
    };
    auto to_p = [&]() {
      #pragma unroll
      for (int j = 0; j < 32; ++j) p[j] = pack_bf16(sc[2 * j], sc[2 * j + 1]);
    };
    auto step = [&]() { if (++s == STAGES) { s = 0; ph ^= 1; } };
    while (sched.next(t)) {
      m0 = m1 = -1e30f; l0 = l1 = 0.f;
      bar_wait(q_full + 8 * qb, qph);
      bar_wait(k_full + 8 * s, ph);
      turn();
      qk(s);
      pass();
      wg_wait<0>();
      if (lane == 0) bar_arrive(k_empty + 8 * s);
      softmax(t.last);
      to_p();
      if (pending >= 0) {                         // the previous tile's output has left its Q buffer by now
        if (lane == 0) { bulk_wait_read(); bar_arrive(q_empty + 8 * pending); }
        __syncwarp();
      }
      int vs = s, add = 0; u32 vph = ph;
      step();
      #pragma unroll 1
      for (int n = t.last - 1; n >= t.first; --n) {
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
          for (int j = 0; j < HD / 8; ++j) { acc[4 * j] *= f0; acc[4 * j + 1] *= f0; acc[4 * j + 2] *= f1; acc[4 * j + 3] *= f1; }
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
#if SINK
      { const float z = sink[t.h] * LOG2E, y0 = fmaxf(m0, z), y1 = fmaxf(m1, z);
        e0 = ex2(m0 - y0); e1 = ex2(m1 - y1); l0 = l0 * e0 + ex2(z - y0); l1 = l1 * e1 + ex2(z - y1); m0 = y0; m1 = y1; }
#endif
      const int row = t.m * BM + w * 64 + warp * 16, rows = t.len - row;
      {
        const int r = row + (lane >> 2);
#if VARLEN
        float* q = lse + (u64)t.h * info.total + t.row0 + r;
#else
        float* q = lse + (u64)(t.b * sched.hq + t.h) * sched.seq + r;
#endif
        if ((lane & 3) == 0) {
          if (r < t.len) q[0] = (m0 + lg2(l0)) * 0.6931471805599453f;
          if (r + 8 < t.len) q[8] = (m1 + lg2(l1)) * 0.6931471805599453f;
        }
      }
      e0 /= l0; e1 /= l1;
      wg_wait<0>();
      if (lane == 0) bar_arrive(v_empty + 8 * vs);
      named_sync(8 + w, 128);                     // all four warps are past their last read of this warpgroup's Q
      #pragma unroll
      for (int ch = 0; ch < HALVES; ++ch) {
        u32 v[16];
        #pragma unroll
        for (int j = 0; j < 8; ++j) { const int i = ch * 32 + 4 * j; v[2 * j] = pack_bf16(acc[i] * e0, acc[i + 1] * e0); v[2 * j + 1] = pack_bf16(acc[i + 2] * e1, acc[i + 3] * e1); }
        const u32 dst = base + qb * Q_BYTES + w * Q_WG + ch * 8192 + warp * 2048, r = lane & 15, hi = lane >> 4;
        #pragma unroll
        for (int j = 0; j < 4; ++j) st_matrix(dst + r * 128 + (((2 * j + hi) ^ (r & 7)) << 4), v + 4 * j);
      }
      fence_async();
      __syncwarp();
      #pragma unroll
      for (int ch = 0; ch < HALVES; ++ch) {
        const u32 src = base + qb * Q_BYTES + w * Q_WG + ch * 8192 + warp * 2048;
#if VARLEN
        const int b = 0;
#else
        const int b = t.b;
#endif
        if (rows >= 16) { if (lane == 0) tma_store(&map_o, src, ch * 64, t.h, t.row0 + row, b); }
        else if (rows > 0) copy_rows(src, o + ((u64)(b * sched.seq + t.row0 + row) * sched.hq + t.h) * HD + ch * 64, (u64)sched.hq * HD, rows, lane);
      }
      if (lane == 0) bulk_commit();
      __syncwarp();
      pending = qb;
      if (++qb == 2) { qb = 0; qph ^= 1; }
#if PROFILE
      blocks += t.last - t.first + 1;
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

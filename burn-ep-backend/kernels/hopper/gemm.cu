// a consumer warp hands a stage back to every block that fills it
__device__ __forceinline__ void release(u32 bar, int lane) {
#if CLUSTER == 2
  if (lane < 2) bar_arrive_remote(bar, lane);
#else
  if (lane == 0) bar_arrive(bar);
#endif
}

// ---- operand boxes ----------------------------------------------------------------------------------------------------
// half i (64 rows of the tile) of A, k block at kx
template <bool MC> __device__ __forceinline__ void load_a(u32 sa, const TensorMap* m, u32 bar, const Tile& t, int kx, int i) {
  const u32 dst = sa + i * (A_BYTES / 2);
#if WGRAD
  load_rows<MC>(dst, m, bar, t.m0 + i * 64, kx, t.k1);
#else
  tma_load_2d<MC>(dst, m, bar, kx, t.row0 + i * 64);
#endif
}
// half i of B: BN/2 columns, or all columns of 32 rows (MN-major, BN 192). EPI 1: gate rows, then up rows, `f` further on
template <bool MC> __device__ __forceinline__ void load_b(u32 sb, const TensorMap* m, u32 bar, const Tile& t, int kx, int i, int f) {
#if BT
  #pragma unroll
  for (int q = 0; q < (B_BOX_K == 64 ? BN / 128 : BN / 64); ++q) {
    const int j = B_BOX_K == 64 ? i * (BN / 128) + q : q, kr = B_BOX_K == 64 ? 0 : i * 32;
    const u32 dst = sb + j * 8192 + kr * 128;
#if WGRAD
    load_rows<MC>(dst, m, bar, t.col0 + j * 64, kx + kr, t.k1);
#else
    tma_load_3d<MC>(dst, m, bar, t.col0 + j * 64, kx + kr, t.group);
#endif
  }
#else
  tma_load_3d<MC>(sb + i * (B_BYTES / 2), m, bar, kx, t.col0 + i * (EPI == 1 ? f : BN / 2), t.group);
#endif
}

// ---- kernel -------------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(384, 1)
#if CLUSTER == 2
__cluster_dims__(2, 1, 1)
#endif
ENTRY(const __grid_constant__ TensorMap map_a,    // [rows, K] box 64 x 64; WGRAD: ragged view of [rows, M], box 1 x 1 x 64 x 64; unused if gathered
      const __grid_constant__ TensorMap map_b,    // [groups, N, K] box 1 x BN/2 x 64; B_MN: [groups, K, N] box 1 x B_BOX_K x 64; WGRAD: ragged [rows, N] box 1 x 1 x B_BOX_K x 64
      const __grid_constant__ TensorMap map_d,    // [rows, N] ([groups M, N]), box 16 x 128 bytes; EPI: [rows, halves, columns], box 16 x 1 x 64
#if EPI
      const __grid_constant__ TensorMap map_h,    // like map_d
#endif
#if BACKWARD
      const __grid_constant__ TensorMap map_p,    // like map_d
#endif
      const unsigned short* a, const unsigned short* b, unsigned char* d,
#if EPI
      unsigned char* h,
#endif
#if BACKWARD
      const unsigned char*,
#endif
      const int* offsets,
#if GATHER
      const int* slots,
#endif
#if BIAS
      const float* bias,
#endif
#if WEIGHTED
      const float* w, float* dw,
#endif
#if DYN
      u32* counter,
#endif
#if PROFILE
      u64* prof,                                  // per block: cycles, ns, k blocks
#endif
      const __grid_constant__ Info info) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const u32 base = smem_u32(smem);
  const u32 full = base + BAR_OFF, empty = full + 8 * STAGES;
  int* tab = (int*)(smem + TAB_OFF);
  const int wg = threadIdx.x >> 7, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int n = (int)info.n;
#if CLUSTER == 2
  const u32 rank = cluster_rank();
#else
  const u32 rank = 0;
#endif
  if (threadIdx.x == 0) {
    if (base & 1023) asm volatile("trap;");
    for (int s = 0; s < STAGES; ++s) {
      bar_init(full + 8 * s, FULL_COUNT);                // producer's arrival; the data is counted in bytes
      bar_init(empty + 8 * s, 8 * CLUSTER);              // one lane of each consumer warp of every block that reads or shares it
    }
#if BACKWARD
    for (int i = 0; i < 8; ++i) bar_init(base + BAR_OFF + 64 + 8 * i, 1);
#endif
#if DYN
    for (int i = 0; i < QUEUE; ++i) {
      bar_init(base + QUEUE_OFF + 8 * i, 1);
      bar_init(base + QUEUE_OFF + 8 * (QUEUE + i), CLUSTER * (8 + (GATHER ? 4 : 1)));   // one lane of each warp that reads the queue
    }
#endif
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if (warp == 4) {                                       // prefix sums of the units of all groups
    int sum = 0;
    const int ct = (n + COLS - 1) / COLS;
    if (lane == 0) tab[0] = 0;
    for (int g0 = 0; g0 < (int)info.groups; g0 += 32) {
      int g = g0 + lane, u = 0;
      if (g < (int)info.groups) {
        const int count = offsets[g + 1] - offsets[g];
#if WGRAD
        u = ACC && count == 0 ? 0 : units_of(((int)info.m + BM - 1) / BM, ct);
#else
        u = units_of((count + BM - 1) / BM, ct);
#endif
      }
      for (int o = 1; o < 32; o <<= 1) { int v = __shfl_up_sync(~0u, u, o); if (lane >= o) u += v; }
      if (g < (int)info.groups) tab[g + 1] = sum + u;
      sum += __shfl_sync(~0u, u, 31);
    }
  }
  __syncthreads();
#if CLUSTER == 2
  cluster_sync();                                        // the peer's barriers exist before anything is sent to them
#endif
  Scheduler sched;
  sched.unit = (int)(blockIdx.x / CLUSTER); sched.step = (int)(gridDim.x / CLUSTER); sched.group = 0; sched.rank = rank;
  sched.raster = (int)info.raster; sched.col_tiles = (n + COLS - 1) / COLS; sched.groups = (int)info.groups;
  sched.m = (int)info.m; sched.k = (int)info.k; sched.tab = tab; sched.off = offsets;
#if DYN
  sched.counter = counter; sched.queue = base + QUEUE_OFF; sched.seq = 0; sched.drawn = 0;
#endif
  const int role = threadIdx.x ? READER : rank ? LOADER : LEADER;
  Tile t;
  // Ring position: stage s and phase bit ph. A fresh mbarrier is in phase 0, so waiting for parity 1 returns at once:
  // producers wait on `empty` with ph ^ 1 (the first lap passes), consumers on `full` with ph.
  int s = 0; u32 ph = 0;

  if (wg == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(REGS_LOAD));
#if !GATHER
    if (threadIdx.x == 0) {
      for (bool ok = sched.locate_unit(t, role); ok; ok = sched.next(t, role)) {
        for (int kx = t.k0; kx < t.k1; kx += BK) {
          const u32 sa = base + s * STAGE_BYTES, sb = sa + A_BYTES, bar = full + 8 * s;
          bar_wait(empty + 8 * s, ph ^ 1);
          bar_expect(bar, STAGE_BYTES);
#if CLUSTER == 2
          if (t.share_a) {
            load_a<true>(sa, &map_a, bar, t, kx, rank);
            load_b<false>(sb, &map_b, bar, t, kx, 0, n); load_b<false>(sb, &map_b, bar, t, kx, 1, n);
          } else {
            load_a<false>(sa, &map_a, bar, t, kx, 0); load_a<false>(sa, &map_a, bar, t, kx, 1);
            load_b<true>(sb, &map_b, bar, t, kx, rank, n);
          }
#else
          load_a<false>(sa, &map_a, bar, t, kx, 0); load_a<false>(sa, &map_a, bar, t, kx, 1);
          load_b<false>(sb, &map_b, bar, t, kx, 0, n); load_b<false>(sb, &map_b, bar, t, kx, 1, n);
#endif
          if (++s == STAGES) { s = 0; ph ^= 1; }
        }
      }
    }
#else
    // All 128 threads fetch rows of the gathered operand with cp.async (16 bytes each, 8 neighbouring lanes per 128-byte
    // row), writing the same swizzle that TMA would: 16-byte chunk c of row r goes to chunk c ^ (r & 7). Thread t owns
    // chunk t % 8 of rows t/8 + 16 i. Its arrival on `full` is asynchronous: it happens when its copies have landed
    // (noinc: it is one of the FULL_COUNT expected arrivals). cp.async writes through the generic proxy and wgmma reads
    // through the async proxy, so the consumer fences after its wait.
    const int chunk = threadIdx.x & 7, r0 = threadIdx.x >> 3, top_k = (int)info.top_k;
    const u32 dst0 = (u32)(r0 * 128 + ((chunk ^ (r0 & 7)) << 4));
#if WGRAD
    for (bool ok = sched.locate_unit(t, role); ok; ok = sched.next(t, role)) {
      int src[4];
      #pragma unroll
      for (int i = 0; i < 4; ++i) { const int r = t.k0 + r0 + 16 * i; src[i] = r < t.k1 ? __ldg(slots + r) / top_k : -1; }
      for (int kx = t.k0; kx < t.k1; kx += BK) {
        const u32 sa = base + s * STAGE_BYTES, sb = sa + A_BYTES, bar = full + 8 * s;
        int nxt[4];                                      // the next block's rows, fetched behind this one's copies
        #pragma unroll
        for (int i = 0; i < 4; ++i) { const int r = kx + BK + r0 + 16 * i; nxt[i] = r < t.k1 ? __ldg(slots + r) / top_k : -1; }
        bar_wait(empty + 8 * s, ph ^ 1);
        if (threadIdx.x == 0) {
          bar_expect(bar, A_BYTES);
          load_a<false>(sa, &map_a, bar, t, kx, 0); load_a<false>(sa, &map_a, bar, t, kx, 1);
        }
        const int col = t.col0 + chunk * 8;
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
          const unsigned short* p = b + (u64)(src[i] < 0 ? 0 : src[i]) * info.ld + col;
          #pragma unroll
          for (int j = 0; j < BN / 64; ++j) {
            const u32 bytes = (src[i] >= 0 && col + j * 64 < n) ? 16 : 0;   // 0: the destination is zero-filled
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(sb + dst0 + i * 2048 + j * 8192), "l"(bytes ? p + j * 64 : b), "r"(bytes) : "memory");
          }
          src[i] = nxt[i];
        }
        asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" :: "r"(bar) : "memory");
        if (++s == STAGES) { s = 0; ph ^= 1; }
      }
    }
#else
    for (bool ok = sched.locate_unit(t, role); ok; ok = sched.next(t, role)) {
      int src[8];
      #pragma unroll
      for (int i = 0; i < 8; ++i) { int r = t.row0 + r0 + 16 * i; src[i] = r < t.row_end ? __ldg(slots + r) / top_k : -1; }
      for (int kx = 0; kx < t.k1; kx += BK) {
        const u32 sa = base + s * STAGE_BYTES, sb = sa + A_BYTES, bar = full + 8 * s;
        bar_wait(empty + 8 * s, ph ^ 1);
        if (threadIdx.x == 0) {
          bar_expect(bar, B_BYTES);
#if CLUSTER == 2
          if (!t.share_a) load_b<true>(sb, &map_b, bar, t, kx, rank, n);
          else
#endif
          { load_b<false>(sb, &map_b, bar, t, kx, 0, n); load_b<false>(sb, &map_b, bar, t, kx, 1, n); }
        }
        const int kc = kx + chunk * 8;
        #pragma unroll
        for (int i = 0; i < 8; ++i) {
          u32 bytes = (src[i] >= 0 && kc < t.k1) ? 16 : 0;
          const unsigned short* p = bytes ? a + (u64)src[i] * info.ld + kc : a;
          asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(sa + dst0 + i * 2048), "l"(p), "r"(bytes) : "memory");
        }
        asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" :: "r"(bar) : "memory");
        if (++s == STAGES) { s = 0; ph ^= 1; }
      }
    }
#endif
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
#if DYN
    if (role == LEADER) {                                     // the last cluster to draw past the end resets the counter
      __threadfence();
      if (atomicAdd(counter + 1, 1u) == (u32)sched.step - 1) { atomicExch(counter, 0u); atomicExch(counter + 1, 0u); }
    }
#endif
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(REGS_MATH));
    const int w8 = warp - 4;                             // consumer warp 0..7: rows 16 w8 .. 16 w8 + 15 of the tile
    const u64 desc_a = smem_desc(base + (u32)(wg - 1) * (A_BYTES / 2), A_MN), desc_b = smem_desc(base + A_BYTES, BT);
    Writer out;
    out.slab = base + STAGES * STAGE_BYTES + (u32)w8 * (OUT_BUFS * OUT_SLAB);
    out.map = &map_d; out.d = d; out.n = n; out.lane = lane; out.buf = 0; out.rows = 0;
#if EPI
    out.map_h = &map_h; out.h = h; out.alpha = __uint_as_float((u32)info.alpha); out.limit = __uint_as_float((u32)info.limit);
#endif
#if BIAS
    out.bias = bias;
#endif
#if BACKWARD
    out.map_p = &map_p; out.parity = 0; out.bar = base + BAR_OFF + 64 + 8 * w8;
#endif
#if WEIGHTED
    out.slots = slots; out.w = w; out.dw = dw;
#endif
    float acc[BN / 2];
    u32 pend[PEND];                                      // the finished tile (bf16 pairs, or fp32), waiting to be stored
#if PROFILE
    u64 c_all = clock64(), t_all, blocks = 0;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t_all));
#endif
    bool more = sched.locate_unit(t, READER);
    for (;;) {
      if (!more || t.row_end - t.row0 <= (wg - 1) * 64) {  // the end, or a short last tile of which no row is ours:
        #pragma unroll
        for (int p = 0; p < PHASES; ++p) out.phase(pend, p);
        if (!more) break;
        out.rows = 0;
        for (int kx = t.k0; kx < t.k1; kx += BK) {       // pass the stages on, leave the tensor cores to the other warpgroup
          bar_wait(full + 8 * s, ph);
          release(empty + 8 * s, lane);
          if (++s == STAGES) { s = 0; ph ^= 1; }
        }
        more = sched.next(t, READER);
        continue;
      }
      const int row = t.row0 + w8 * 16, rows = t.row_end - row, col0 = t.col0;
#if BIAS
      const int group = t.group;
#endif
      const int k_blocks = (t.k1 - t.k0 + BK - 1) / BK;
#if PROFILE
      blocks += k_blocks;
#endif
      int prev = 0, kb = 0;
      auto step = [&]() {
        bar_wait(full + 8 * s, ph);
#if GATHER
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
        const u64 da = desc_a + (u64)(s * (STAGE_BYTES >> 4)), db = desc_b + (u64)(s * (STAGE_BYTES >> 4));
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        #pragma unroll
        for (int j = 0; j < BK / 16; ++j) wgmma(acc, da + STEP_A * j, db + STEP_B * j, kb | j);   // the first product of a tile overwrites
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        if (kb > 0) {                                    // the previous block's products are done: hand its stage back
          asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
          release(empty + 8 * prev, lane);
        }
        prev = s;
        if (++s == STAGES) { s = 0; ph ^= 1; }
        ++kb;
      };
      // Deferred epilogue: the finished tile leaves in chunks behind the first k blocks of the next tile, so the tensor
      // cores do not wait for it.
      const int gap = min(max(k_blocks / PHASES, 1), SPREAD);          // k blocks between phases
      #pragma unroll
      for (int p = 0; p < PHASES; ++p) {
#if SPREAD > 1
        for (int i = 0; i < gap; ++i)
#endif
        if (kb < k_blocks) step();
        out.phase(pend, p);
      }
      while (kb < k_blocks) step();
      more = sched.next(t, READER);                              // hidden behind the last products
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      if (kb) release(empty + 8 * prev, lane);
      // An empty group gives zeros. Mask and `and` are opaque: seeing the integer view of an accumulator, the compiler kept
      // the accumulators in integer registers, with moves in front of every wgmma, and serialised them.
      u32 mask = WGRAD && kb == 0 ? 0u : ~0u;
      asm volatile("mov.b32 %0, %0;" : "+r"(mask));
      #pragma unroll
      for (int i = 0; i < PEND; ++i) {
#if F32
        asm("{\n.reg .b32 t;\nmov.b32 t, %1;\nand.b32 %0, t, %2;\n}\n" : "=r"(pend[i]) : "f"(acc[i]), "r"(mask));
#else
        pend[i] = pack_bf16(acc[2 * i], acc[2 * i + 1]) & (WGRAD ? mask : ~0u);
#endif
      }
      out.row = row; out.rows = rows; out.col0 = col0;
#if BIAS
      out.group = group;
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
#if CLUSTER == 2
  __syncwarp();
  cluster_sync();                                        // no block leaves while the peer may still signal or fill its memory
#endif
}

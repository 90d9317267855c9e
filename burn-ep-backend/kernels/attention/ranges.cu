// ---- which keys each query row sees ---------------------------------------------------------------------------------------
// One block per batch row turns causality, window, documents and padding into the arrays of Ranges. A row that sees nothing
// has lo = FAR, hi = 0, which no bound of a group notices except that the group counts as partly hidden.
#define FAR 0x3fffffff

__device__ __forceinline__ int warp_min(int v) {
  for (int s = 16; s; s >>= 1) v = min(v, __shfl_xor_sync(~0u, v, s));
  return v;
}
__device__ __forceinline__ int warp_max(int v) { return -warp_min(-v); }

extern "C" __global__ void __launch_bounds__(1024)
attn_ranges(const int* doc_start,                 // [B, Sq] if info.doc
            const void* key_visible,              // [B, Skv], info.visible bytes each (0: all are visible)
            int* lo, int* hi, int4* bounds, int2* steps, u32* keys,
            const __grid_constant__ Info info) {
  __shared__ int first_key, last_key;
  const int b = (int)blockIdx.x, lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5, warps = (int)blockDim.x >> 5;
  const int sq = (int)info.sq, skv = (int)info.skv, window = (int)info.window, past = skv - sq, groups = row_groups(info), blocks = key_blocks(info);
  const int* doc = doc_start + (u64)b * sq;
  if (threadIdx.x == 0) { first_key = FAR; last_key = -1; }
  __syncthreads();
  for (int w = warp; w < blocks * 4; w += warps) {
    const int j = w * 32 + lane;
    bool seen = j < skv;
    if (seen && info.visible == 1) seen = ((const unsigned char*)key_visible)[(u64)b * skv + j] != 0;
    if (seen && info.visible == 4) seen = ((const u32*)key_visible)[(u64)b * skv + j] != 0;
    const u32 bits = __ballot_sync(~0u, seen);
    if (lane == 0) {
      keys[(u64)b * blocks * 4 + w] = bits;
      if (bits) { atomicMin(&first_key, w * 32 + __ffs((int)bits) - 1); atomicMax(&last_key, w * 32 + 31 - __clz((int)bits)); }
    }
  }
  __syncthreads();
  for (int g = warp; g < groups; g += warps) {
    int min_lo = FAR, max_lo = 0, min_hi = FAR, max_hi = 0;
    for (int i = g * 64 + lane; i < g * 64 + 64; i += 32) {
      const u64 at = (u64)b * groups * 64 + i;
      if (i >= sq) { lo[at] = 0; hi[at] = 0; continue; }
      const int row = i + past;
      int l = first_key, h = last_key + 1;
      if (info.doc) l = max(l, doc[i]);
      if (window) l = max(l, row - window + 1);
      if (info.causal) h = min(h, row + 1);
      else if (info.doc) {                        // keys of later documents start after this row
        int x = max(i + 1, 0), y = sq;            // the first row of the next document lies in x ..= y
        while (x < y) { const int z = (x + y) / 2; if (doc[z] > row) y = z; else x = z + 1; }
        h = min(h, x + past);
      }
      if (l >= h) { l = FAR; h = 0; }
      lo[at] = l; hi[at] = h;
      min_lo = min(min_lo, l); max_lo = max(max_lo, l); min_hi = min(min_hi, h); max_hi = max(max_hi, h);
    }
    min_lo = warp_min(min_lo); max_lo = warp_max(max_lo); min_hi = warp_min(min_hi); max_hi = warp_max(max_hi);
    if (lane == 0) bounds[(u64)b * groups + g] = make_int4(min_lo, max_lo, min_hi, max_hi);
  }
  __syncthreads();
  for (int n = warp; n < blocks; n += warps) {
    int first = FAR, last = -1;
    for (int g = lane; g < groups; g += 32) {
      const int4 r = bounds[(u64)b * groups + g];
      if (r.x < n * BN + BN && r.w > n * BN) { first = min(first, g); last = g; }
    }
    first = warp_min(first); last = warp_max(last);
    // the backward walks at least one group, in which then everything is hidden
    if (last < 0) first = last = min(max((n * BN - past) / 64, 0), groups - 1);
    if (lane == 0) steps[(u64)b * blocks + n] = make_int2(first, last);
  }
}

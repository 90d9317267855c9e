// ---- backward, before and after the main kernel -----------------------------------------------------------------------------
// nl and delta of every query row, zeros for the workspace and the tile counter. A warp takes STAT_ROWS rows of one head at a time,
// HDV / 8 lanes a row: four loads of O and four of dO are in flight in each lane, and the statistics leave 32 bytes or more at once.
#define LANES (HDV / 8)
#define PASS (32 / LANES)                         // rows of one load
#define STAT_ROWS (4 * PASS)
extern "C" __global__ void __launch_bounds__(256)
attn_bwd_pre(const half16* o, const half16* d_o, const float* lse, float* nl, float* delta, uint4* zero, int* counter,
             const __grid_constant__ Info info) {
  const u32 tid = blockIdx.x * 256 + threadIdx.x, step = gridDim.x * 256, hq = (u32)info.hq, sq = (u32)info.sq, dv = (u32)info.dv;
  if (tid == 0) *counter = 0;
  for (u64 i = tid; i < info.zeros; i += step) zero[i] = make_uint4(0, 0, 0, 0);
  const u32 lane = threadIdx.x & 31, sub = lane / LANES, at = lane % LANES * 8;
  const u32 padded = (sq + 63) / 64 * 64, parts = padded / STAT_ROWS, all = (u32)info.batch * parts * hq;
  for (u32 x = tid / 32; x < all; x += step / 32) {
    const u32 h = x % hq, y = x / hq, i0 = y % parts * STAT_ROWS, b = y / parts;
    uint4 u[4], v[4];
    #pragma unroll
    for (int p = 0; p < 4; ++p) {
      const u32 i = i0 + p * PASS + sub;
      const u64 off = (((u64)b * sq + i) * hq + h) * dv + at;
      const bool real = i < sq && at < dv;
      u[p] = real ? *(const uint4*)(o + off) : make_uint4(0, 0, 0, 0);
      v[p] = real ? *(const uint4*)(d_o + off) : make_uint4(0, 0, 0, 0);
    }
    float mine = 0.f;                             // lane r of the first STAT_ROWS ends with the sum of row r
    #pragma unroll
    for (int p = 0; p < 4; ++p) {
      const u32 uu[4] = {u[p].x, u[p].y, u[p].z, u[p].w}, vv[4] = {v[p].x, v[p].y, v[p].z, v[p].w};
      float a = 0.f;
      #pragma unroll
      for (int z = 0; z < 4; ++z) { a = fmaf(low(uu[z]), low(vv[z]), a); a = fmaf(high(uu[z]), high(vv[z]), a); }
      #pragma unroll
      for (int s = LANES / 2; s; s >>= 1) a += __shfl_xor_sync(~0u, a, s);
      const float sum = __shfl_sync(~0u, a, (int)(lane % PASS * LANES));
      if (lane / PASS == p) mine = sum;
    }
    if (lane < STAT_ROWS) {
      const u32 i = i0 + lane;
      const u64 row = (u64)b * hq + h;
      const float e = i < sq ? lse[row * sq + i] : MINUS_INF;
      delta[row * padded + i] = mine;
      nl[row * padded + i] = e == MINUS_INF ? MINUS_INF : -LOG2E * e;      // a row that sees nothing has no probabilities
    }
  }
}

// one block per 64-row tile of W columns: fragment order fp32 to rows of `dim` 16-bit floats, times f
template <int W> __device__ __forceinline__ void convert(const float* src, half16* dst, u64 stride, int dim, int rows, float f, unsigned char* sm) {
  const int t = threadIdx.x;
  #pragma unroll 16
  for (int x = t; x < 16 * W; x += 128) {
    const float4 v = *(const float4*)(src + x * 4);
    const int lane = x & 31, j = (x >> 5) % (W / 8), warp = (x >> 5) / (W / 8), r = warp * 16 + (lane >> 2);
    u32* p = (u32*)(sm + r * (W * 2 + 16) + j * 16 + (lane & 3) * 4);
    p[0] = pack(v.x * f, v.y * f);
    p[8 * (W * 2 + 16) / 4] = pack(v.z * f, v.w * f);
  }
  __syncthreads();
  for (int x = t; x < 64 * (W / 8); x += 128) {
    const int r = x / (W / 8), ch = x % (W / 8);
    if (r < rows && ch * 8 < dim) *(uint4*)(dst + (u64)r * stride + ch * 8) = *(const uint4*)(sm + r * (W * 2 + 16) + ch * 16);
  }
}
extern "C" __global__ void __launch_bounds__(128)
attn_bwd_post(const float* ws, half16* oq, half16* ok, half16* ov, const __grid_constant__ Info info) {
  __shared__ __align__(16) unsigned char sm[64 * (HDK * 2 + 16)];
  const int hq = (int)info.hq, hkv = (int)info.hkv, all = hq + 2 * hkv, qg = row_groups(info), kg = key_groups(info), most = max(qg, kg);
  const int x = (int)(blockIdx.x % all), i = (int)(blockIdx.x / all % most), b = (int)(blockIdx.x / all / most);
  const bool query = x < hq, value = x >= hq + hkv;
  const int heads = query ? hq : hkv, h = query ? x : value ? x - hq - hkv : x - hq, groups = query ? qg : kg;
  const int dim = (int)(value ? info.dv : info.dk), len = (int)(query ? info.sq : info.skv);
  if (i >= groups) return;
  const u64 tile = tile_of(b, h, heads, groups, i);
  half16* dst = (query ? oq : value ? ov : ok) + (((u64)b * len + i * 64) * heads + h) * dim;
  const u64 stride = (u64)heads * dim;
  const int rows = min(64, len - i * 64);
  const float scale = __uint_as_float((u32)info.scale);
  if (value) convert<HDV>(ws + dv_start(info) + tile * (64 * HDV), dst, stride, dim, rows, 1.f, sm);
  else convert<HDK>(ws + (query ? 0 : dk_start(info)) + tile * (64 * HDK), dst, stride, dim, rows, scale, sm);
}

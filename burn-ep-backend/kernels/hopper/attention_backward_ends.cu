// ---- backward, before and after the main kernel -----------------------------------------------------------------------------
// nl and delta of every query row (HDV / 8 lanes a row), zeros for the workspace and the tile counter
extern "C" __global__ void __launch_bounds__(256)
attn_bwd_pre(const half16* o, const half16* d_o, const float* lse, float* nl, float* delta, uint4* zero, int* counter,
             const __grid_constant__ Info info) {
  const u32 tid = blockIdx.x * 256 + threadIdx.x, step = gridDim.x * 256, per = HDV / 8, hq = (u32)info.hq, dv = (u32)info.dv;
  if (tid == 0) *counter = 0;
  for (u64 i = tid; i < info.zeros; i += step) zero[i] = make_uint4(0, 0, 0, 0);
  const u32 sq = (u32)info.sq, padded = (sq + 63) / 64 * 64, rows = (u32)info.batch * padded * hq;
  for (u32 r = tid / per, l = tid % per; r < (rows + 31) / 32 * 32; r += step / per) {   // whole warps
    const u32 h = r % hq, i = r / hq % padded, b = r / hq / padded;
    const bool in = r < rows, real = in && i < sq;
    float a = 0.f;
    if (real && l * 8 < dv) {
      const u64 off = (((u64)b * sq + i) * hq + h) * dv + l * 8;
      const uint4 u = *(const uint4*)(o + off), v = *(const uint4*)(d_o + off);
      const u32 uu[4] = {u.x, u.y, u.z, u.w}, vv[4] = {v.x, v.y, v.z, v.w};
      #pragma unroll
      for (int z = 0; z < 4; ++z) { a = fmaf(low(uu[z]), low(vv[z]), a); a = fmaf(high(uu[z]), high(vv[z]), a); }
    }
    #pragma unroll
    for (int s = per / 2; s; s >>= 1) a += __shfl_xor_sync(~0u, a, s);
    if (in && l == 0) {
      const float x = real ? lse[((u64)b * hq + h) * sq + i] : MINUS_INF;
      const u64 dst = ((u64)b * hq + h) * padded + i;
      delta[dst] = a;
      nl[dst] = x == MINUS_INF ? MINUS_INF : -LOG2E * x;      // a row that sees nothing has no probabilities
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

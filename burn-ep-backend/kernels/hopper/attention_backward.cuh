// ---- backward, what its kernels share -------------------------------------------------------------------------------------
// Kernels: attn_bwd_pre (delta, zeros), attn_bwd (attention_backward.cu, or attention_backward_latent.cu), attn_bwd_post
// (fp32 sums to 16 bits).
// Gradients are summed in fp32 workspaces stored tile by tile (64 rows x W = HDK or HDV columns) in the order of the wgmma
// fragments, so that a warp adds 512 contiguous bytes with one red.global.add.v4.f32:
//   float index inside a tile = ((warp * (W / 8) + j) * 32 + lane) * 4 + i   for accumulator register 4 j + i
// nl = -log2(e) * LSE and delta are padded to 64 rows per sequence (nl = -inf there, so that the probability is 0).
#define MINUS_INF (-__int_as_float(0x7f800000))

__device__ __forceinline__ int key_groups(const Info& info) { return ((int)info.skv + 63) / 64; }
// index of tile i of one head, whose rows make `groups` tiles
__device__ __forceinline__ u64 tile_of(int b, int h, int heads, int groups, int i) { return (u64)(b * heads + h) * groups + i; }
// workspace: [dQ | dK | dV], zeroed by the first kernel where several blocks add (dK and dV: if query heads share a key head)
__device__ __forceinline__ u64 dk_start(const Info& info) { return info.batch * info.hq * row_groups(info) * (64 * HDK); }
__device__ __forceinline__ u64 dv_start(const Info& info) { return dk_start(info) + info.batch * info.hkv * key_groups(info) * (64 * HDK); }

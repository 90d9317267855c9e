// Flash attention for Hopper (sm_90a), bf16 or fp16, forward and backward: TMA + mbarrier + wgmma, warp-specialised, persistent.
//   Q [B, Sq, Hq, Dk]   K [B, Skv, Hkv, Dk]   V [B, Skv, Hkv, Dv]   O [B, Sq, Hq, Dv]   LSE [B, Hq, Sq] fp32 (natural log)
//   Hq a multiple of Hkv; query head h reads K/V head h / (Hq / Hkv). Skv >= Sq >= 1, scale > 0.
// The sources compiled together are this file, attention_ptx.cuh, attention_wgmma.cuh and the parts that hold the wanted
// kernels; no header is needed. The host puts these defines in front:
//   HDK, HDV   head sizes of a tile, multiples of 64: at least Dk and Dv. TMA fills the columns behind the real ones with zeros
//              and drops them when it stores, so every size that is a multiple of 8 fits some tile.
//   FP16 0|1   fp16 instead of bf16
//   MASKED 0|1 0: causal and nothing else (Sq = Skv). 1: each query row sees a range of keys, and of those the visible ones;
//              attn_ranges (attention_ranges.cu) makes both from causality, window, documents and padding
//   REGS_LOAD, REGS_MATH (setmaxnreg), STAGES and what the parts name.
// Q, K and V may have any strides that TMA takes (multiples of 16 bytes, dense columns); all other tensors are dense.
// Query rows that see no key get zeros and LSE = -inf.
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short half16;                              // storage only
struct alignas(64) TensorMap { u64 opaque[16]; };           // CUtensorMap
// by-value scalars; scale = bits of a float, window = 0 for none, zeros = uint4s to clear
struct Info { u64 batch, sq, skv, hq, hkv, dk, dv, scale, causal, window, doc, visible, sink, zeros; };
#define BN 128                                              // keys per block
#define LOG2E 1.4426950408889634f

__device__ __forceinline__ int row_groups(const Info& info) { return ((int)info.sq + 63) / 64; }
__device__ __forceinline__ int key_blocks(const Info& info) { return ((int)info.skv + BN - 1) / BN; }

// What attn_ranges leaves for the other kernels. Rows are padded to groups of 64, keys to blocks of BN.
struct Ranges {
  const int* lo; const int* hi;                             // [B, groups 64]: row i sees keys lo <= j < hi
  const int4* bounds;                                       // [B, groups]: min lo, max lo, min hi, max hi of 64 rows
  const int2* steps;                                        // [B, blocks]: first and last group with a row that sees a key
  const uint4* keys;                                        // [B, blocks]: a bit per key, 1 = visible
};

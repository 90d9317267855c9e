// Flash attention: types and tables that its kernels share.
//   Q [B, Sq, Hq, Dk]   K [B, Skv, Hkv, Dk]   V [B, Skv, Hkv, Dv]   O [B, Sq, Hq, Dv]   LSE [B, Hq, Sq] fp32 (natural log)
//   Hq a multiple of Hkv; query head h reads K/V head h / (Hq / Hkv). Skv >= Sq >= 1.
// Query rows that see no key get zeros and LSE = -inf. No header is needed: the sources are pasted together for NVRTC.
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short half16;                              // storage only
// by-value scalars; scale = bits of a float, window = 0 for none, zeros = uint4s to clear
struct Info { u64 batch, sq, skv, hq, hkv, dk, dv, scale, causal, window, doc, visible, sink, zeros; };
#define BN 128                                              // keys per block of the tables
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

// Flash attention for Hopper (sm_90a), bf16 or fp16, forward and backward: TMA + mbarrier + wgmma, warp-specialised, persistent.
// scale > 0.
// The sources compiled together are attention/types.cuh, this file, attention_ptx.cuh, attention_wgmma.cuh and the parts that
// hold the wanted kernels. The host puts these defines in front:
//   HDK, HDV   head sizes of a tile, multiples of 64: at least Dk and Dv. TMA fills the columns behind the real ones with zeros
//              and drops them when it stores, so every size that is a multiple of 8 fits some tile.
//   FP16 0|1   fp16 instead of bf16
//   MASKED 0|1|2 0: causal and nothing else (Sq = Skv). 1: each query row sees a range of keys, and of those the visible ones;
//              attn_ranges (attention/ranges.cu) makes both from causality, window, documents and padding. 2: causal with a
//              window and nothing else (Sq = Skv), in the kernels for small windows
//   REGS_LOAD, REGS_MATH (setmaxnreg), STAGES and what the parts name.
// Q, K and V may have any strides that TMA takes (multiples of 16 bytes, dense columns); all other tensors are dense.
struct alignas(64) TensorMap { u64 opaque[16]; };           // CUtensorMap

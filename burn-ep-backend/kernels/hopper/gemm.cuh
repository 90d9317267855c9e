// bf16 GEMM for Hopper (sm_90a), the products of a mixture-of-experts layer: TMA + mbarrier + wgmma, warp-specialised,
// persistent. Groups e = rows [off[e], off[e+1]) of the token matrix, off on the device, any sizes, empty ones allowed.
//   WGRAD 0, B_MN 0 : D[r, N]    = A[r, K] * B[e, N, K]^T                     forward
//   WGRAD 0, B_MN 1 : D[r, N]    = A[r, K] * B[e, K, N]                       input gradient (weights as stored)
//   WGRAD 1         : D[e, M, N] = sum over rows r of group e of A[r, M]^T * B[r, N]   weight gradient
// Dense products are the case of one group. No header is needed; compile with NVRTC for sm_90a, defines in front:
//   WGRAD B_MN GATHER 0|1   BN 128|192|256   STAGES   CLUSTER 1|2   OUT_BUFS 1|2   F32 0|1   ACC 0|1   EPI 0..6
//   BIAS 0|1   WEIGHTED 0|1   DYN 0|1   SPREAD 1..   PROFILE 0|1   ENTRY
//   GATHER: row r of the token operand is row slots[r] / top_k of the given matrix (WGRAD 0: A, WGRAD 1: B, then CLUSTER
//           must be 1)
//   F32   : D is fp32 (BN <= 192: the finished tile waits in registers), else bf16
//   ACC   : D += result (every element of D is touched by one block; empty groups of WGRAD are left alone)
//   EPI   : fused activation of the experts and its backward, see gemm_experts.cuh. OUT_BUFS 2
//   BIAS  : EPI 1..3 add bias[e, column] before the activation
//   WEIGHTED: EPI 4..6 scale by the routing weight and give its gradient
//   DYN   : units of work are handed out by an atomic counter (else in a fixed stride): groups of unequal size make tiles of
//           unequal length. `counter` = two u32, zero before the first launch, zero again after each; not shared by launches that overlap
//   SPREAD: at most so many k blocks between two phases of the deferred store
// Constraints: 16-byte rows (bf16 widths % 8 == 0; with EPI also F % 8 == 0); D and H dense; F32 needs N % 4 == 0.
// Rows of D outside every group are not touched. Grid: one block per multiprocessor (a multiple of CLUSTER).
// Shared memory: STAGES * (128 + BN) * 128 + OUT_BUFS * 16384 + 256 + 4 * (groups + 1) bytes, dynamic.
//
// Block = 384 threads: warpgroup 0 loads, warpgroups 1 and 2 multiply. Block tile 128 x BN x 64; each consumer warpgroup owns
// 64 rows and all BN columns. With CLUSTER 2 the blocks of a cluster work on neighbouring tiles, one operand by TMA multicast:
//   mode 0 (M pair): same columns, row tiles 2p and 2p+1; each block fetches half of the B tile for both
//   mode 1 (N pair): the odd last row tile of a group, column tiles 2q and 2q+1; each fetches half of the A tile for both
typedef unsigned int u32;
typedef unsigned long long u64;
struct alignas(64) TensorMap { u64 opaque[16]; };           // CUtensorMap
// By-value scalars. m: rows of D per group (WGRAD). n: columns of the product; F with EPI 1 (the product has 2 F). ld: row
// stride of the gathered operand. alpha, limit: bits of the numbers of the clamped SwiGLU.
struct Info { u64 groups, m, n, k, raster, ld, top_k, alpha, limit; };

#define BM 128
#define BK 64
#define A_MN WGRAD
#define BT (WGRAD || B_MN)                      // B is MN-major
#define A_BYTES (BM * BK * 2)
#define B_BYTES (BN * BK * 2)
#define STAGE_BYTES (A_BYTES + B_BYTES)
#define B_BOX_K (BN % 128 ? 32 : 64)            // rows of one MN-major box of B (64 columns): halves by columns, or by rows for BN 192
#define COLS (EPI == 1 ? BN / 2 : BN)           // columns that a tile advances: EPI 1 takes BN / 2 gate and as many up columns
#define BACKWARD (EPI >= 4)
#define OUT_SLAB 2048                           // 16 rows x 128 bytes, one per warp and buffer
#define OUT_BYTES (8 * OUT_BUFS * OUT_SLAB)
#define BAR_OFF (STAGES * STAGE_BYTES + OUT_BYTES)
#define QUEUE 4                                 // DYN: slots of the queue of units
#define QUEUE_OFF (BAR_OFF + 128)               // full and empty barriers, then the slots
#define TAB_OFF (BAR_OFF + 256)                 // unit prefix sums of the groups, int[groups + 1]
#define PEND (F32 ? BN / 2 : BN / 4)            // 32-bit registers of a finished tile
#define CHUNKS (PEND / 16)                      // a chunk is 16 of them: 128 bytes of columns
#define WRAP 0x40000000                         // ragged maps: see load_rows
#if GATHER
#define REGS_LOAD 56
#define REGS_MATH 224
#define FULL_COUNT (1 + 128)                    // TMA thread (bytes of the other operand) + asynchronous arrival of each loading thread
#else
#define REGS_LOAD 40
#define REGS_MATH 232
#define FULL_COUNT 1
#endif


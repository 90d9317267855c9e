// Causal flash attention for Hopper (sm_90a), bf16, forward and backward: TMA + mbarrier + wgmma, warp-specialised, persistent.
//   Q, O, dO, dQ [B, S, Hq, D]   K, V, dK, dV [B, S, Hkv, D]   LSE [B, Hq, S] fp32 (natural log)   D = 64 or 128
//   Hq a multiple of Hkv; query head h reads K/V head h / (Hq / Hkv). Any S >= 1. scale > 0.
// No header is needed; compile with NVRTC for sm_90a. The host puts these defines in front:
//   FORWARD 1, BACKWARD 0            forward, kernel ENTRY
//   FORWARD 0, BACKWARD 1            main backward kernel ENTRY
//   FORWARD 0, BACKWARD 2            attn_bwd_pre and attn_bwd_post
//   HD 64|128   VARLEN 0|1   WINDOW 0|1   PROFILE 0|1   REGS_LOAD, REGS_MATH (setmaxnreg)
//   forward:  NWG 2|3 (consumer warpgroups, 64 query rows each)  STAGES (K/V ring)  PINGPONG 0|1  SLACK (log2)  SINK 0|1
//   backward: QSTAGES, STAGES (rings of Q and of dO)  BULK 0|1|2 (dQ added by red.global.v4 | by bulk reduce from shared
//             memory | not at all, for timing only)  CHUNKS (head groups scheduled together, must divide B Hkv)
// Measured best: forward D 128: NWG 2, STAGES 2, 24/240; D 64: NWG 3, STAGES 4, 32/160; PINGPONG 1, SLACK 8.
//   backward D 128: QSTAGES 3, STAGES 2, BULK 1, 24/240; D 64: QSTAGES 4, STAGES 3, BULK 0, 40/232; CHUNKS 1.
// VARLEN: documents packed one after the other in [1, T, H, D]; cu[documents + 1] on the device, Info.batch = documents,
//   Info.seq = a bound on their length (it only sets the number of tiles that are looked at), Info.total = T, LSE [Hq, T].
//   Rows behind the last document are not written; they must not hold NaN or infinity (a
//   probability of 0 multiplies them; for the same reason a NaN in one document can reach the end of the one before).
// WINDOW: a query sees the last Info.window keys, itself included. SINK: a logit per query head that takes part in the
//   softmax sum only; the backward needs nothing more than the LSE that contains it. The gradient of the sink itself,
//   -sum over rows of exp(sink - LSE) * delta, is not computed here.
// Grid: forward and main backward one block per multiprocessor; the result does not depend on it (dQ, and dK and dV of
//   grouped heads, are summed by fp32 atomics in any order: not bit-reproducible).
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short bf16;                                // storage only
struct alignas(64) TensorMap { u64 opaque[16]; };           // CUtensorMap
struct Info { u64 batch, seq, hq, hkv, scale, window, total, zeros; };    // by-value scalars; scale = bits of a float

// ---- PTX wrappers -------------------------------------------------------------------------------------------------
__device__ __forceinline__ u32 smem_u32(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void bar_init(u32 bar, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(bar), "r"(count) : "memory"); }
__device__ __forceinline__ void bar_expect(u32 bar, u32 bytes) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(bar), "r"(bytes) : "memory"); }
__device__ __forceinline__ void bar_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(bar) : "memory"); }
__device__ __forceinline__ void bar_wait(u32 bar, u32 parity) {
  asm volatile("{\n.reg .pred p;\nW:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra D;\nbra W;\nD:\n}\n" :: "r"(bar), "r"(parity) : "memory"); }
__device__ __forceinline__ void named_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory"); }
__device__ __forceinline__ void named_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" :: "r"(id), "r"(threads) : "memory"); }
// coordinates: column in the head, head, token, batch
__device__ __forceinline__ void tma_load(u32 dst, const TensorMap* m, u32 bar, int x, int h, int s, int b) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];"
    :: "r"(dst), "l"(m), "r"(bar), "r"(x), "r"(h), "r"(s), "r"(b) : "memory"); }
__device__ __forceinline__ void tma_store(const TensorMap* m, u32 src, int x, int h, int s, int b) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" :: "l"(m), "r"(src), "r"(x), "r"(h), "r"(s), "r"(b) : "memory"); }
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ __forceinline__ void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ u32 pack_bf16(float lo, float hi) { u32 r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo)); return r; }
__device__ __forceinline__ float ex2(float x) { float r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
__device__ __forceinline__ float lg2(float x) { float r; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
__device__ __forceinline__ void st_matrix(u32 addr, const u32* v) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" :: "r"(addr), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory"); }
__device__ __forceinline__ void wg_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wg_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wg_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory"); }

// Shared-memory matrix descriptors, 128-byte swizzle; every tile is stored as slabs of 64 columns (128 bytes) x rows.
//   K-major operand (the row is the reduction): 8 rows x 128 bytes = 1024 apart; a step of 16 along K adds 32 bytes,
//     the next 64 columns are the next slab.
//   MN-major operand (the rows of the tile are the reduction, transposed by the instruction): the stride field is the
//     distance of 8 reduction rows (1024), the leading field the distance of the next 64 MN columns (one slab); a step
//     of 16 along K adds 16 rows = 2048 bytes.
__device__ __forceinline__ u64 desc_k(u32 addr) { return (u64)((addr & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62); }
__device__ __forceinline__ u64 desc_mn(u32 addr, u32 slab) { return (u64)((addr & 0x3FFFF) >> 4) | ((u64)(slab >> 4) << 16) | (64ull << 32) | (1ull << 62); }

#define F4(i) "+f"(d[i]), "+f"(d[i+1]), "+f"(d[i+2]), "+f"(d[i+3])
#define F16(i) F4(i), F4(i+4), F4(i+8), F4(i+12)
#define Z4(i) "=f"(d[i]), "=f"(d[i+1]), "=f"(d[i+2]), "=f"(d[i+3])
#define Z16(i) Z4(i), Z4(i+4), Z4(i+8), Z4(i+12)
// _ss: A and B from shared memory, _rs: A from registers; TA, TB = 1 for an MN-major operand. The first product of a sum
// (_ss0) only writes its accumulators: as an input the old values would keep 16 to 64 registers alive for nothing.
template <int TA, int TB> __device__ __forceinline__ void wgmma_ss0(float (&d)[16], u64 da, u64 db) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
    "%16, %17, 0, 1, 1, %18, %19;" : Z16(0) : "l"(da), "l"(db), "n"(TA), "n"(TB)); }
template <int TA, int TB> __device__ __forceinline__ void wgmma_ss(float (&d)[16], u64 da, u64 db) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
    "%16, %17, 1, 1, 1, %18, %19;" : F16(0) : "l"(da), "l"(db), "n"(TA), "n"(TB)); }
template <int TA, int TB> __device__ __forceinline__ void wgmma_ss0(float (&d)[32], u64 da, u64 db) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
    "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
    "%32, %33, 0, 1, 1, %34, %35;" : Z16(0), Z16(16) : "l"(da), "l"(db), "n"(TA), "n"(TB)); }
template <int TA, int TB> __device__ __forceinline__ void wgmma_ss(float (&d)[32], u64 da, u64 db) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
    "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
    "%32, %33, 1, 1, 1, %34, %35;" : F16(0), F16(16) : "l"(da), "l"(db), "n"(TA), "n"(TB)); }
template <int TB> __device__ __forceinline__ void wgmma_rs(float (&d)[32], u32 a0, u32 a1, u32 a2, u32 a3, u64 db, int acc) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
    "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
    "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
    "{%32,%33,%34,%35}, %36, p, 1, 1, %38;\n}\n" : F16(0), F16(16) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(db), "r"(acc), "n"(TB)); }
template <int TA, int TB> __device__ __forceinline__ void wgmma_ss0(float (&d)[64], u64 da, u64 db) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
    "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
    "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "
    "%64, %65, 0, 1, 1, %66, %67;" : Z16(0), Z16(16), Z16(32), Z16(48) : "l"(da), "l"(db), "n"(TA), "n"(TB)); }
template <int TA, int TB> __device__ __forceinline__ void wgmma_ss(float (&d)[64], u64 da, u64 db) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
    "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
    "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "
    "%64, %65, 1, 1, 1, %66, %67;" : F16(0), F16(16), F16(32), F16(48) : "l"(da), "l"(db), "n"(TA), "n"(TB)); }
template <int TB> __device__ __forceinline__ void wgmma_rs(float (&d)[64], u32 a0, u32 a1, u32 a2, u32 a3, u64 db, int acc) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
    "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
    "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
    "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "
    "{%64,%65,%66,%67}, %68, p, 1, 1, %70;\n}\n" : F16(0), F16(16), F16(32), F16(48) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(db), "r"(acc), "n"(TB)); }

// one warp stores 16 rows of one 64-column slab from its swizzled copy, 16 bytes a lane
__device__ __forceinline__ void copy_rows(u32 slab, bf16* d, u64 stride, int rows, int lane) {
  const int ch = lane & 7;
  #pragma unroll 1
  for (int r = lane >> 3; r < rows; r += 4) {
    u32 x, y, z, w;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x), "=r"(y), "=r"(z), "=r"(w) : "r"(slab + r * 128 + ((ch ^ (r & 7)) << 4)) : "memory");
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" :: "l"(d + (u64)r * stride + ch * 8), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
  }
}

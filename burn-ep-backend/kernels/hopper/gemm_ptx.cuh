// ---- PTX wrappers -------------------------------------------------------------------------------------------------
__device__ __forceinline__ u32 smem_u32(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void bar_init(u32 bar, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(bar), "r"(count) : "memory"); }
__device__ __forceinline__ void bar_expect(u32 bar, u32 bytes) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(bar), "r"(bytes) : "memory"); }
__device__ __forceinline__ void bar_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(bar) : "memory"); }
// No `.release.cluster`: it costs a MEMBAR.GPU per arrival, and the arrival only says that wgmma has finished reading.
__device__ __forceinline__ void bar_arrive_remote(u32 bar, u32 cta) {
  asm volatile("{\n.reg .b32 r;\nmapa.shared::cluster.u32 r, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [r];\n}\n" :: "r"(bar), "r"(cta) : "memory"); }
// value -> shared memory of block `cta`, counted as 4 bytes on that block's barrier
__device__ __forceinline__ void store_remote(u32 addr, u32 value, u32 bar, u32 cta) {
  asm volatile("{\n.reg .b32 a, b;\nmapa.shared::cluster.u32 a, %0, %3;\nmapa.shared::cluster.u32 b, %2, %3;\nst.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [a], %1, [b];\n}\n"
    :: "r"(addr), "r"(value), "r"(bar), "r"(cta) : "memory"); }
__device__ __forceinline__ void bar_wait(u32 bar, u32 parity) {
  asm volatile("{\n.reg .pred p;\nW:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra D;\nbra W;\nD:\n}\n" :: "r"(bar), "r"(parity) : "memory"); }
// MC: the box goes to the same place in both blocks of the cluster
template <bool MC> __device__ __forceinline__ void tma_load_2d(u32 dst, const TensorMap* m, u32 bar, int x, int y) {
  if (MC) asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;"
    :: "r"(dst), "l"(m), "r"(bar), "r"(x), "r"(y), "h"((unsigned short)3) : "memory");
  else asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
    :: "r"(dst), "l"(m), "r"(bar), "r"(x), "r"(y) : "memory"); }
template <bool MC> __device__ __forceinline__ void tma_load_3d(u32 dst, const TensorMap* m, u32 bar, int x, int y, int z) {
  if (MC) asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;"
    :: "r"(dst), "l"(m), "r"(bar), "r"(x), "r"(y), "r"(z), "h"((unsigned short)3) : "memory");
  else asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
    :: "r"(dst), "l"(m), "r"(bar), "r"(x), "r"(y), "r"(z) : "memory"); }
// Box of rows [row, ...) of a group that ends at `end`, rows past the end read as zeros, through ONE map for all groups.
// The map views the matrix (row stride S bytes) as [2^31 - 1][rows + 1][2^30][columns] with strides 2^34 - S, S, S. The
// innermost row coordinate x = 2^30 - (end - row) leaves its dimension exactly at the group's end, so TMA zero-fills there;
// y = end and z = 2^30 put the address right again: x S + end S + 2^30 (2^34 - S) = row S + 2^64, and addresses wrap at 2^64.
template <bool MC> __device__ __forceinline__ void load_rows(u32 dst, const TensorMap* m, u32 bar, int col, int row, int end) {
  const int x = WRAP - (end - row);
  if (MC) asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], %7;"
    :: "r"(dst), "l"(m), "r"(bar), "r"(col), "r"(x), "r"(end), "r"(WRAP), "h"((unsigned short)3) : "memory");
  else asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];"
    :: "r"(dst), "l"(m), "r"(bar), "r"(col), "r"(x), "r"(end), "r"(WRAP) : "memory"); }
__device__ __forceinline__ void tma_store_2d(const TensorMap* m, u32 src, int x, int y) {
#if ACC
  asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%0, {%2, %3}], [%1];" :: "l"(m), "r"(src), "r"(x), "r"(y) : "memory");
#else
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" :: "l"(m), "r"(src), "r"(x), "r"(y) : "memory");
#endif
}
__device__ __forceinline__ void tma_store_3d(const TensorMap* m, u32 src, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" :: "l"(m), "r"(src), "r"(x), "r"(y), "r"(z) : "memory"); }
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// all but the newest N groups of bulk stores have read their shared memory
template <int N> __device__ __forceinline__ void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(N) : "memory"); }
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ u32 pack_bf16(float lo, float hi) { u32 r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo)); return r; }
__device__ __forceinline__ float bf_lo(u32 v) { return __uint_as_float(v << 16); }
__device__ __forceinline__ float bf_hi(u32 v) { return __uint_as_float(v & 0xffff0000u); }
__device__ __forceinline__ void st_matrix(u32 addr, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" :: "r"(addr), "r"(a), "r"(b), "r"(c), "r"(d) : "memory"); }
__device__ __forceinline__ void ld_matrix(u32 addr, u32& a, u32& b, u32& c, u32& d) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(addr) : "memory"); }
// one warp copies (or adds) up to 16 rows x 128 bytes from its swizzled slab to the output, 16 bytes a lane; ld and cols in 16-byte units
__device__ __forceinline__ void copy_rows(u32 slab, uint4* d, int ld, int cols, int rows, int lane) {
  const int ch = lane & 7;
  #pragma unroll 1
  for (int r = lane >> 3; r < 16; r += 4) {
    u32 v[4];
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(slab + r * 128 + ((ch ^ (r & 7)) << 4)) : "memory");
    if (r < rows && ch < cols) {
      uint4* p = d + (u64)r * ld + ch;
#if ACC
      uint4 old = *p; u32 o[4] = {old.x, old.y, old.z, old.w};
      #pragma unroll
      for (int i = 0; i < 4; ++i) v[i] = F32 ? __float_as_uint(__uint_as_float(v[i]) + __uint_as_float(o[i])) : pack_bf16(bf_lo(v[i]) + bf_lo(o[i]), bf_hi(v[i]) + bf_hi(o[i]));
#endif
      *p = make_uint4(v[0], v[1], v[2], v[3]);
    }
  }
}
__device__ __forceinline__ u32 cluster_rank() { u32 r; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Shared-memory matrix descriptors, 128-byte swizzle (bits 62-63 = 1), base offset 0 (every tile starts on a 1024-byte boundary).
// K-major : rows of 64 k; stride offset (bits 32-45) = 8 rows = 1024 bytes, leading offset unused. 16 further k: + 32 bytes.
// MN-major: rows are k, 64 elements of M or N each; stride offset = 8 k = 1024 bytes, leading offset (bits 16-29) = from one
//           block of 64 M or N to the next = 64 k x 128 bytes = 8192. 16 further k: + 2048 bytes.
__device__ __forceinline__ u64 smem_desc(u32 addr, bool mn) { return (u64)((addr & 0x3FFFF) >> 4) | ((mn ? 512ull : 1ull) << 16) | (64ull << 32) | (1ull << 62); }
#define STEP_A (A_MN ? 128 : 2)
#define STEP_B (BT ? 128 : 2)

#define F4(i) "+f"(d[i]), "+f"(d[i+1]), "+f"(d[i+2]), "+f"(d[i+3])
#define F16(i) F4(i), F4(i+4), F4(i+8), F4(i+12)
#if BN == 128
__device__ __forceinline__ void wgmma(float (&d)[64], u64 da, u64 db, int acc) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
    "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
    "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
    "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63},"
    " %64, %65, p, 1, 1, %67, %68;\n}\n"
    : F16(0), F16(16), F16(32), F16(48)
    : "l"(da), "l"(db), "r"(acc), "n"(A_MN), "n"(BT));
}
#elif BN == 192
__device__ __forceinline__ void wgmma(float (&d)[96], u64 da, u64 db, int acc) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %98, 0;\n"
    "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {"
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
    "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
    "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"
    "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"
    "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95},"
    " %96, %97, p, 1, 1, %99, %100;\n}\n"
    : F16(0), F16(16), F16(32), F16(48), F16(64), F16(80)
    : "l"(da), "l"(db), "r"(acc), "n"(A_MN), "n"(BT));
}
#elif BN == 256
__device__ __forceinline__ void wgmma(float (&d)[128], u64 da, u64 db, int acc) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
    "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
    "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
    "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"
    "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"
    "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,"
    "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,"
    "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127},"
    " %128, %129, p, 1, 1, %131, %132;\n}\n"
    : F16(0), F16(16), F16(32), F16(48), F16(64), F16(80), F16(96), F16(112)
    : "l"(da), "l"(db), "r"(acc), "n"(A_MN), "n"(BT));
}
#endif

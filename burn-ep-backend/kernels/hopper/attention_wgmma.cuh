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
  asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32." MMA_TYPES " {"
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
    "%16, %17, 0, 1, 1, %18, %19;" : Z16(0) : "l"(da), "l"(db), "n"(TA), "n"(TB)); }
template <int TA, int TB> __device__ __forceinline__ void wgmma_ss(float (&d)[16], u64 da, u64 db) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32." MMA_TYPES " {"
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
    "%16, %17, 1, 1, 1, %18, %19;" : F16(0) : "l"(da), "l"(db), "n"(TA), "n"(TB)); }
template <int TA, int TB> __device__ __forceinline__ void wgmma_ss0(float (&d)[32], u64 da, u64 db) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." MMA_TYPES " {"
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
    "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
    "%32, %33, 0, 1, 1, %34, %35;" : Z16(0), Z16(16) : "l"(da), "l"(db), "n"(TA), "n"(TB)); }
template <int TA, int TB> __device__ __forceinline__ void wgmma_ss(float (&d)[32], u64 da, u64 db) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." MMA_TYPES " {"
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
    "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
    "%32, %33, 1, 1, 1, %34, %35;" : F16(0), F16(16) : "l"(da), "l"(db), "n"(TA), "n"(TB)); }
template <int TB> __device__ __forceinline__ void wgmma_rs(float (&d)[32], u32 a0, u32 a1, u32 a2, u32 a3, u64 db, int acc) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
    "wgmma.mma_async.sync.aligned.m64n64k16.f32." MMA_TYPES " {"
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
    "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
    "{%32,%33,%34,%35}, %36, p, 1, 1, %38;\n}\n" : F16(0), F16(16) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(db), "r"(acc), "n"(TB)); }
template <int TA, int TB> __device__ __forceinline__ void wgmma_ss0(float (&d)[64], u64 da, u64 db) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." MMA_TYPES " {"
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
    "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
    "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "
    "%64, %65, 0, 1, 1, %66, %67;" : Z16(0), Z16(16), Z16(32), Z16(48) : "l"(da), "l"(db), "n"(TA), "n"(TB)); }
template <int TA, int TB> __device__ __forceinline__ void wgmma_ss(float (&d)[64], u64 da, u64 db) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." MMA_TYPES " {"
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
    "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
    "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "
    "%64, %65, 1, 1, 1, %66, %67;" : F16(0), F16(16), F16(32), F16(48) : "l"(da), "l"(db), "n"(TA), "n"(TB)); }
template <int TB> __device__ __forceinline__ void wgmma_rs(float (&d)[64], u32 a0, u32 a1, u32 a2, u32 a3, u64 db, int acc) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
    "wgmma.mma_async.sync.aligned.m64n128k16.f32." MMA_TYPES " {"
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
    "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
    "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "
    "{%64,%65,%66,%67}, %68, p, 1, 1, %70;\n}\n" : F16(0), F16(16), F16(32), F16(48) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(db), "r"(acc), "n"(TB)); }
template <int TA, int TB> __device__ __forceinline__ void wgmma_ss0(float (&d)[96], u64 da, u64 db) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n192k16.f32." MMA_TYPES " {"
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
    "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
    "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"
    "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"
    "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95}, "
    "%96, %97, 0, 1, 1, %98, %99;" : Z16(0), Z16(16), Z16(32), Z16(48), Z16(64), Z16(80) : "l"(da), "l"(db), "n"(TA), "n"(TB)); }
template <int TA, int TB> __device__ __forceinline__ void wgmma_ss(float (&d)[96], u64 da, u64 db) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n192k16.f32." MMA_TYPES " {"
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
    "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
    "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"
    "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"
    "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95}, "
    "%96, %97, 1, 1, 1, %98, %99;" : F16(0), F16(16), F16(32), F16(48), F16(64), F16(80) : "l"(da), "l"(db), "n"(TA), "n"(TB)); }
template <int TB> __device__ __forceinline__ void wgmma_rs(float (&d)[96], u32 a0, u32 a1, u32 a2, u32 a3, u64 db, int acc) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %101, 0;\n"
    "wgmma.mma_async.sync.aligned.m64n192k16.f32." MMA_TYPES " {"
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
    "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
    "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"
    "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"
    "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95}, "
    "{%96,%97,%98,%99}, %100, p, 1, 1, %102;\n}\n" : F16(0), F16(16), F16(32), F16(48), F16(64), F16(80) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(db), "r"(acc), "n"(TB)); }

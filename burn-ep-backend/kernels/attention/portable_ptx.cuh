// Flash attention for any GPU of compute capability 8.0 or later: instructions. ELEM 0: fp32, 1: bf16, 2: fp16.
#if ELEM == 0
typedef float T;
__device__ __forceinline__ float widen(T v) { return v; }
__device__ __forceinline__ T narrow(float v) { return v; }
#else
typedef half16 T;
#if ELEM == 1
#define MMA_TYPES "bf16.bf16"
__device__ __forceinline__ u32 pack(float lo, float hi) { u32 r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo)); return r; }
__device__ __forceinline__ float widen(T v) { return __uint_as_float((u32)v << 16); }
#else
#define MMA_TYPES "f16.f16"
__device__ __forceinline__ u32 pack(float lo, float hi) { u32 r; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo)); return r; }
__device__ __forceinline__ float widen(T v) { float r; asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(v)); return r; }
#endif
__device__ __forceinline__ T narrow(float v) { return (T)pack(v, 0.f); }
// d[16 x 8] += a[16 x 16] b[16 x 8]
__device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." MMA_TYPES ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
    : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1)); }
// four 8 x 8 matrices, lane l gives row l % 8 of matrix l / 8; _t: transposed
__device__ __forceinline__ void ld_matrix(u32 (&v)[4], const T* p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"((u32)__cvta_generic_to_shared(p)) : "memory"); }
__device__ __forceinline__ void ld_matrix_t(u32 (&v)[4], const T* p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"((u32)__cvta_generic_to_shared(p)) : "memory"); }
#endif
// 16 bytes to shared memory in the background, zeros unless `real`
__device__ __forceinline__ void copy16(T* dst, const T* src, bool real) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"((u32)__cvta_generic_to_shared(dst)), "l"(src), "r"(real ? 16 : 0) : "memory"); }
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void copy_wait() { asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"); }

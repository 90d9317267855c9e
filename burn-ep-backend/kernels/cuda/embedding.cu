// Rows of a table by index, and the gradient of the table without floating-point atomics.
//   KIND 0  gather : out[t] = table[ids[t]]; an index outside the table gives zeros
//   KIND 1  rank   : order[position of t] = t, the stable order by index, as the count of smaller keys (index, t)
//   KIND 2  sum    : for each run of equal indices in that order, grad_table[index] = sum of grad[t], fp32, t ascending.
//                    Rows without an index are not touched: fill the table with zeros before.
//   KIND 3  zero   : fills the table
struct Info { u64 tokens, vocab, width; };

__device__ __forceinline__ long long at(const Index* ids, u64 t) { return (long long)ids[t]; }

#if KIND == 0
#define THREADS 256
// one warp per row and step
extern "C" __global__ void __launch_bounds__(THREADS) ENTRY(const Elem* table, const Index* ids, Elem* out, const __grid_constant__ Info info) {
  const int lane = threadIdx.x & 31, vectors = (int)(info.width / VEC);
  const u64 step = (u64)gridDim.x * (THREADS / 32);
  for (u64 t = (u64)blockIdx.x * (THREADS / 32) + (threadIdx.x >> 5); t < info.tokens; t += step) {
    const long long id = at(ids, t);
    const bool inside = id >= 0 && id < (long long)info.vocab;
    const Elem* src = table + (inside ? (u64)id : 0) * info.width;
    Elem* dst = out + t * info.width;
    if (info.width % VEC == 0) {
      for (int v = lane; v < vectors; v += 32)
        reinterpret_cast<Pack*>(dst)[v] = inside ? reinterpret_cast<const Pack*>(src)[v] : Pack{{0u, 0u, 0u, 0u}};
    } else {
      for (u64 c = lane; c < info.width; c += 32) dst[c] = inside ? src[c] : from_f32(0.0f);
    }
  }
}
#elif KIND == 1
#define THREADS 256
// one thread per token; keys of all tokens pass through shared memory
extern "C" __global__ void __launch_bounds__(THREADS) ENTRY(const Index* ids, int* order, const __grid_constant__ Info info) {
  __shared__ long long keys[THREADS];
  const u64 t = (u64)blockIdx.x * THREADS + threadIdx.x, n = info.tokens;
  const long long mine = t < n ? at(ids, t) : 0;
  u32 smaller = 0;
  for (u64 first = 0; first < n; first += THREADS) {
    __syncthreads();
    if (first + threadIdx.x < n) keys[threadIdx.x] = at(ids, first + threadIdx.x);
    __syncthreads();
    const int count = (int)(n - first < THREADS ? n - first : THREADS);
    // ties go to the earlier token: all of an earlier tile, none of a later one
    const int own = first + THREADS <= t ? count : first > t ? 0 : (int)(t - first);
    for (int i = 0; i < count; ++i) smaller += keys[i] < mine || (keys[i] == mine && i < own);
  }
  if (t < n) order[smaller] = (int)t;
}
#elif KIND == 2
#define THREADS 128
// one block per position in the order and slice of THREADS * VEC columns; blocks that do not start a run leave
extern "C" __global__ void __launch_bounds__(THREADS) ENTRY(const Elem* grad, const Index* ids, const int* order, Elem* table, const __grid_constant__ Info info) {
  __shared__ int run[THREADS];
  const u64 slices = (info.width + THREADS * VEC - 1) / (THREADS * VEC);
  const u64 start = blockIdx.x / slices, col = (blockIdx.x % slices) * THREADS * VEC + threadIdx.x * VEC;
  const long long id = at(ids, order[start]);
  if (id < 0 || id >= (long long)info.vocab || (start > 0 && at(ids, order[start - 1]) == id)) return;
  const int lanes = col >= info.width ? 0 : info.width - col < VEC ? (int)(info.width - col) : VEC;
  const bool whole = lanes == VEC && info.width % VEC == 0;
  float sum[VEC];
  #pragma unroll
  for (int i = 0; i < VEC; ++i) sum[i] = 0.0f;
  for (u64 first = start;; first += THREADS) {           // the tokens of the run, THREADS at a time
    const u64 p = first + threadIdx.x;
    const int t = p < info.tokens ? order[p] : 0;
    run[threadIdx.x] = t;
    const int count = __syncthreads_count(p < info.tokens && at(ids, t) == id);   // sorted: the run is a prefix
    if (whole) {
      #pragma unroll 8
      for (int j = 0; j < count; ++j) {
        float e[VEC];
        unpack(*reinterpret_cast<const Pack*>(grad + (u64)run[j] * info.width + col), e);
        #pragma unroll
        for (int i = 0; i < VEC; ++i) sum[i] += e[i];
      }
    } else {
      for (int j = 0; j < count; ++j)
        for (int i = 0; i < VEC; ++i) if (i < lanes) sum[i] += to_f32(grad[(u64)run[j] * info.width + col + i]);
    }
    if (count < THREADS) break;
    __syncthreads();
  }
  Elem* out = table + (u64)id * info.width + col;
  if (whole) *reinterpret_cast<Pack*>(out) = pack(sum);
  else {
    #pragma unroll
    for (int i = 0; i < VEC; ++i) if (i < lanes) out[i] = from_f32(sum[i]);
  }
}
#else
#define THREADS 512
extern "C" __global__ void __launch_bounds__(THREADS) ENTRY(Elem* table, const __grid_constant__ Info info) {
  const u64 n = info.vocab * info.width, vectors = n / VEC, step = (u64)gridDim.x * THREADS, first = (u64)blockIdx.x * THREADS + threadIdx.x;
  for (u64 v = first; v < vectors; v += step) reinterpret_cast<Pack*>(table)[v] = Pack{{0u, 0u, 0u, 0u}};
  for (u64 i = vectors * VEC + first; i < n; i += step) table[i] = from_f32(0.0f);
}
#endif

// Exchange of byte blocks between GPUs of one host through buffers that all of them can write (opened by CUDA IPC).
//
// Every rank has an arena: a header of flags, a table of counts for each half, and two halves for data. Operation number `seq`
// (from 1) uses half seq & 1. Three launches:
//   announce   writes this rank's counts to every arena and raises a flag there, then waits for the flags of all ranks
//   push       copies this rank's blocks to where they belong in every other arena, then raises a second flag there
//   collect    waits for the second flags of all ranks and copies what arrived to the destination
//
// A half is written again two operations later. By then its owner has copied it out: the writer has seen the owner's flags of the
// operation between, which the owner raises after its collect. Flags are written with release and read with acquire semantics
// at system scope. A wait ends when the host raises `abort`, when its time is over, or when a rank reports trouble in `status`.

typedef unsigned long long u64;
typedef unsigned int u32;

#define MAX_RANKS 16
// Arena, in bytes: flags of counts, flags of data (one 64-byte line for each rank), counts of both halves.
#define FLAG_COUNTS(r) ((r) * 64)
#define FLAG_DATA(r) (1024 + (r) * 64)
#define COUNTS(half, from) (2048 + ((half) * MAX_RANKS + (from)) * MAX_RANKS * 8)
#define DATA 8192

struct Info {
  u64 seq, rank, world, capacity, limit_ns;
  u64 control;           // host memory: [0] abort, [1] status
  u64 unit;              // bytes that every block is a multiple of: 16, 8, 4, 2 or 1
  u64 dst_stride;        // bytes between the blocks of two senders in the destination; 0: one behind the other
  u64 dst_offset;        // added to it
  u64 expected;          // bytes that arrive, or ~0 where the host does not know
  u64 arena[MAX_RANKS];
  u64 bytes[MAX_RANKS];  // for each rank
  u64 offset[MAX_RANKS]; // where they begin in the source
};

__device__ __forceinline__ u64 load_acquire(const u64* p) {
  u64 v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void store_release(u64* p, u64 v) { asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }
__device__ __forceinline__ u64 now() {
  u64 t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}
__device__ __forceinline__ volatile u64* control(const Info& info) { return (volatile u64*)info.control; }

// Trouble of the first kind wins; 1: no sign of `rank`, 2: `rank` receives more than fits, 3: another number of bytes than expected.
__device__ void report(const Info& info, u64 code, u64 rank) {
  volatile u64* status = control(info) + 1;
  if (*status == 0) {
    *status = code | rank << 8 | info.seq << 16;
    __threadfence_system();
  }
}
__device__ __forceinline__ bool given_up(const Info& info) { return control(info)[0] != 0 || control(info)[1] != 0; }

// Waits for a flag to reach seq; false when the exchange is given up.
__device__ bool wait_for(const Info& info, const u64* flag, u64 rank) {
  u64 start = now();
  for (u32 look = 0; load_acquire(flag) < info.seq; ++look) {
    if ((look & 63) == 63) {
      if (given_up(info)) return false;
      if (now() - start > info.limit_ns) {
        report(info, 1, rank);
        return false;
      }
      __nanosleep(200);
    }
  }
  return true;
}

__device__ __forceinline__ u64 count(const Info& info, u64 from, u64 to) {
  return *(volatile u64*)(info.arena[info.rank] + COUNTS(info.seq & 1, from) + to * 8);
}
__device__ __forceinline__ u64 data(const Info& info, u64 rank) { return info.arena[rank] + DATA + (info.seq & 1) * info.capacity; }

template <typename T> __device__ void copy(u64 to, u64 from, u64 bytes) {
  T* out = (T*)to;
  const T* in = (const T*)from;
  u64 n = bytes / sizeof(T), step = (u64)gridDim.x * blockDim.x, i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  for (; i + 3 * step < n; i += 4 * step) {
    T a = __ldcg(in + i), b = __ldcg(in + i + step), c = __ldcg(in + i + 2 * step), d = __ldcg(in + i + 3 * step);
    out[i] = a;
    out[i + step] = b;
    out[i + 2 * step] = c;
    out[i + 3 * step] = d;
  }
  for (; i < n; i += step) out[i] = __ldcg(in + i);
}
__device__ void copy_units(const Info& info, u64 to, u64 from, u64 bytes) {
  switch (info.unit) {
    case 16: copy<uint4>(to, from, bytes); break;
    case 8: copy<u64>(to, from, bytes); break;
    case 4: copy<u32>(to, from, bytes); break;
    case 2: copy<unsigned short>(to, from, bytes); break;
    default: copy<unsigned char>(to, from, bytes);
  }
}

#if KIND == 0
// One block of at least MAX_RANKS threads.
extern "C" __global__ void ENTRY(const __grid_constant__ Info info) {
  u64 peer = threadIdx.x;
  if (peer >= info.world) return;
  u64* row = (u64*)(info.arena[peer] + COUNTS(info.seq & 1, info.rank));
  for (u64 to = 0; to < info.world; ++to) row[to] = info.bytes[to];
  __threadfence_system();
  store_release((u64*)(info.arena[peer] + FLAG_COUNTS(info.rank)), info.seq);
  wait_for(info, (const u64*)(info.arena[info.rank] + FLAG_COUNTS(peer)), peer);
}
#elif KIND == 1
// `done` counts blocks over all launches of the same grid.
extern "C" __global__ void ENTRY(const u64* source, u64* done, const __grid_constant__ Info info) {
  __shared__ bool stop;
  if (threadIdx.x == 0) {
    stop = given_up(info);
    // Every rank sees the same counts and comes to the same verdict.
    for (u64 to = 0; to < info.world && !stop; ++to) {
      u64 total = 0;
      for (u64 from = 0; from < info.world; ++from) total += count(info, from, to);
      if (total > info.capacity) {
        report(info, 2, to);
        stop = true;
      }
    }
  }
  __syncthreads();
  if (stop) return;
  for (u64 turn = 0; turn < info.world; ++turn) {
    // Each rank begins with another peer, so that no link carries everything at once.
    u64 to = (info.rank + turn) % info.world, at = 0;
    for (u64 from = 0; from < info.rank; ++from) at += count(info, from, to);
    copy_units(info, data(info, to) + at, (u64)source + info.offset[to], info.bytes[to]);
  }
  __threadfence_system();
  __syncthreads();
  __shared__ bool last;
  if (threadIdx.x == 0) last = (atomicAdd(done, 1ull) + 1) % gridDim.x == 0;
  __syncthreads();
  if (last && threadIdx.x < info.world) {
    __threadfence_system();
    store_release((u64*)(info.arena[threadIdx.x] + FLAG_DATA(info.rank)), info.seq);
  }
}
#elif KIND == 2
extern "C" __global__ void ENTRY(u64* destination, const __grid_constant__ Info info) {
  __shared__ bool go;
  if (threadIdx.x == 0) go = !given_up(info);
  __syncthreads();
  if (!go) return;
  if (threadIdx.x < info.world && !wait_for(info, (const u64*)(info.arena[info.rank] + FLAG_DATA(threadIdx.x)), threadIdx.x)) go = false;
  __syncthreads();
  if (!go) return;
  u64 total = 0;
  for (u64 from = 0; from < info.world; ++from) total += count(info, from, info.rank);
  if (info.expected != ~0ull && total != info.expected) {
    if (threadIdx.x == 0) report(info, 3, info.rank);
    return;
  }
  u64 base = (u64)destination + info.dst_offset;
  if (info.dst_stride == 0) {
    copy_units(info, base, data(info, info.rank), total);
    return;
  }
  for (u64 from = 0, at = 0; from < info.world; ++from) {
    copy_units(info, base + from * info.dst_stride, data(info, info.rank) + at, count(info, from, info.rank));
    at += count(info, from, info.rank);
  }
}
#else
// out[i] = parts[0][i] + parts[1][i] + .., in the order of the ranks.
struct Sum { u64 ranks, count, offset; };
extern "C" __global__ void ENTRY(const REAL* parts, REAL* out, const __grid_constant__ Sum info) {
  for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < info.count; i += (u64)gridDim.x * blockDim.x) {
    REAL sum = parts[i];
    for (u64 rank = 1; rank < info.ranks; ++rank) sum += parts[rank * info.count + i];
    out[info.offset + i] = sum;
  }
}
#endif

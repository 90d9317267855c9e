// Walks over the chunks and replaces what each adds by the state before it (`ADJOINT` 0) or by the adjoint of the state after it
// (`ADJOINT` 1, backwards). A thread owns LANES numbers of a state and reads AHEAD chunks before it overwrites them.
#define AHEAD 4
extern "C" __global__ void __launch_bounds__(256)
ssd_pass(const float* tables, float* states,
#if INITIAL
         const float* initial,       // [B, H, P, N]
#endif
#if !ADJOINT
         float* final_state,         // [B, H, P, N]
#endif
         const __grid_constant__ Info info) {
  constexpr int ITEMS = P * N / LANES;
  const u64 item = (u64)blockIdx.x * 256 + threadIdx.x;
  if (item >= info.batch * HEADS * ITEMS) return;
  const u64 at = item % ITEMS * LANES, pair = item / ITEMS, batch = pair / HEADS, head = pair % HEADS;
  const int chunks = (int)info.chunks;
  Floats state = {};
#if INITIAL
  state = *(const Floats*)(initial + pair * (P * N) + at);
#endif
  const int step = ADJOINT ? -HEADS : HEADS;
  long long index = (long long)(batch * chunks + (ADJOINT ? chunks - 1 : 0)) * HEADS + head;
  for (int n = 0; n < chunks; n += AHEAD) {
    Floats added[AHEAD];
    float keep[AHEAD];
#pragma unroll
    for (int k = 0; k < AHEAD; ++k)
      if (n + k < chunks) {
        const long long here = index + k * step;
        added[k] = *(const Floats*)(states + here * (P * N) + at);
        keep[k] = tables[(here * TABLES + ENTRY) * Q + Q - 1];
      }
#pragma unroll
    for (int k = 0; k < AHEAD; ++k)
      if (n + k < chunks) {
        *(Floats*)(states + (index + k * step) * (P * N) + at) = state;
#pragma unroll
        for (int i = 0; i < LANES; ++i) state.v[i] = keep[k] * state.v[i] + added[k].v[i];
      }
    index += AHEAD * step;
  }
#if !ADJOINT
  *(Floats*)(final_state + pair * (P * N) + at) = state;
#endif
}

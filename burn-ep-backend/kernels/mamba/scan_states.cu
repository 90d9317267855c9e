// What a chunk adds to the state at its end (`ADJOINT` 0: sum_j exit_j delta_j x_j B_j^T), or to the adjoint of the state before it
// (`ADJOINT` 1: sum_i entry_i dy_i C_i^T).
extern "C" __global__ void __launch_bounds__(256)
ssd_states(const T* x, const T* b,   // ADJOINT: dy, C
           const float* tables, float* states, const __grid_constant__ Info info) {
  extern __shared__ __align__(1024) unsigned char smem[];
  Word* x_s = (Word*)smem;                         // [64, P_ROW], weighted
  T* b_s = (T*)(x_s + Q * P_ROW);                  // [64, N_ROW]
  const Place p = place(info, blockIdx.x, HEADS);
#if ADJOINT
  const u64 x_batch = info.dy_batch, x_token = info.dy_token, b_batch = info.c_batch, b_token = info.c_token;
#else
  const u64 x_batch = info.x_batch, x_token = info.x_token, b_batch = info.b_batch, b_token = info.b_token;
#endif
  const float* table = tables + chunk_head(info, p, p.head) * (TABLES * Q);
  x += p.batch * x_batch + p.token * x_token + p.head * P;
  load_rows<N, NN, 256>(b_s, N_ROW, b + p.batch * b_batch + p.token * b_token + p.head / REPEAT * N, b_token, p.valid);
#pragma unroll 4
  for (int i = threadIdx.x; i < Q * PP; i += 256) {
    const int r = i / PP, c = i % PP;
#if ADJOINT
    const float weight = table[ENTRY * Q + r];
#else
    const float weight = table[EXIT * Q + r] * table[DELTA * Q + r];
#endif
    x_s[r * P_ROW + c] = pack(r < p.valid && c < P ? weight * to_float(x[r * x_token + c]) : 0.f);
  }
  __syncthreads();

  // blocks of 16 x 32, dealt to the warps
  constexpr int ACROSS = (NN + 31) / 32;
  const int lane = threadIdx.x & 31, g = lane >> 2, t = 2 * (lane & 3);
  states += chunk_head(info, p, p.head) * (P * N);
  for (int block = threadIdx.x >> 5; block < PP / 16 * ACROSS; block += 8) {
    const int row = block / ACROSS * 16, column = block % ACROSS * 32;
    float d[4][4];
    clear(d);
    product(d, columns(x_s, P_ROW), row, columns(b_s, N_ROW), column, min(4, (NN - column) / 8), Q);
#pragma unroll
    for (int f = 0; f < 4; ++f)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int r = row + g + e / 2 * 8, c = column + 8 * f + t + e % 2;
        if (r < P && c < N) states[r * N + c] = d[f][e];
      }
  }
}

// y of one chunk and head. Eight warps: four by rows of 16 tokens, two by columns.
#define WARPS 8
#define ACROSS (WARPS / 4)
extern "C" __global__ void __launch_bounds__(32 * WARPS, 2)
ssd_output(const T* x, const T* b, const T* c, const float* skip, const float* tables, const int* first, const float* states, T* y,
           const __grid_constant__ Info info) {
  extern __shared__ __align__(1024) unsigned char smem[];
  Word* state_s = (Word*)smem;                     // [P, N_ROW]
  Word* mix_s = state_s + PP * N_ROW;              // [64, Q_ROW]
  T* b_s = (T*)(mix_s + Q * Q_ROW);                // [64, N_ROW]
  T* c_s = b_s + Q * N_ROW;                        // [64, N_ROW]
  T* x_s = c_s + Q * N_ROW;                        // [64, P_ROW]
  float* table_s = (float*)(x_s + Q * P_ROW);      // DELTA, CUM, ENTRY
  int* first_s = (int*)(table_s + 3 * Q);
  const Place p = place(info, blockIdx.x, HEADS);
  const int group = p.head / REPEAT;
  const u64 index = chunk_head(info, p, p.head);
  load_rows<N, NN, 32 * WARPS>(c_s, N_ROW, c + p.batch * info.c_batch + p.token * info.c_token + group * N, info.c_token, p.valid);
  load_rows<N, NN, 32 * WARPS>(b_s, N_ROW, b + p.batch * info.b_batch + p.token * info.b_token + group * N, info.b_token, p.valid);
  load_rows<P, PP, 32 * WARPS>(x_s, P_ROW, x + p.batch * info.x_batch + p.token * info.x_token + p.head * P, info.x_token, p.valid);
  states += index * (P * N);
#pragma unroll 4
  for (int i = threadIdx.x; i < PP * NN / LANES; i += 32 * WARPS) {
    const int r = i / (NN / LANES), n = i % (NN / LANES) * LANES;
    Floats from = {};
    if (r < P && n < N) from = *(const Floats*)(states + r * N + n);
    Words to;
#pragma unroll
    for (int e = 0; e < LANES; ++e) to.v[e] = pack(from.v[e]);
    *(Words*)(state_s + r * N_ROW + n) = to;
  }
  for (int i = threadIdx.x; i < 3 * Q; i += 32 * WARPS) table_s[i] = tables[index * (TABLES * Q) + i];
  for (int i = threadIdx.x; i < Q; i += 32 * WARPS) first_s[i] = first[((u64)p.batch * info.chunks + p.chunk) * Q + i];
  __syncthreads();

  const int lane = threadIdx.x & 31, g = lane >> 2, t = 2 * (lane & 3), warp = threadIdx.x >> 5;
  const int row = warp % 4 * 16, across = warp / 4;
  const float *delta_s = table_s + DELTA * Q, *cum_s = table_s + CUM * Q, *entry_s = table_s + ENTRY * Q;
  {
    constexpr int BLOCKS = Q / 8 / ACROSS;
    float mix[BLOCKS][4];
    clear(mix);
    product(mix, rows(c_s, N_ROW), row, rows(b_s, N_ROW), across * BLOCKS * 8, BLOCKS, NN);
#pragma unroll
    for (int f = 0; f < BLOCKS; ++f)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = row + g + e / 2 * 8, j = (across * BLOCKS + f) * 8 + t + e % 2;
        const bool seen = j <= i && j >= first_s[i];
        mix_s[i * Q_ROW + j] = pack(seen ? mix[f][e] * expf(cum_s[i] - cum_s[j]) * delta_s[j] : 0.f);
      }
  }
  constexpr int BLOCKS = (PP / 8 + ACROSS - 1) / ACROSS;
  const int column = across * BLOCKS * 8, count = min(BLOCKS, (PP - column) / 8);
  float out[BLOCKS][4];
  clear(out);
  product(out, rows(c_s, N_ROW), row, rows(state_s, N_ROW), column, count, NN);
#pragma unroll
  for (int f = 0; f < BLOCKS; ++f)
#pragma unroll
    for (int e = 0; e < 4; ++e) out[f][e] *= entry_s[row + g + e / 2 * 8];
  __syncthreads();
  product(out, rows(mix_s, Q_ROW), row, columns(x_s, P_ROW), column, count, Q);

  const float d = skip[p.head];
  y += (((u64)p.batch * info.seq + p.token) * HEADS + p.head) * P;
#pragma unroll
  for (int f = 0; f < BLOCKS; ++f)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int i = row + g + e / 2 * 8, n = column + 8 * f + t + e % 2;
      if (f < count && i < p.valid && n < P) store(y + (u64)i * (HEADS * P) + n, out[f][e] + d * to_float(x_s[i * P_ROW + n]));
    }
}

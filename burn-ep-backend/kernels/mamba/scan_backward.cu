// Gradients of one chunk and HEADS_PER_BLOCK heads of one group; the gradients of B and C are summed over these heads in registers.
// Sixteen warps: four by rows of 16 tokens, four by columns. S is the state before the chunk, E the adjoint of the state after it.
//
//   W_ij  = decay_ij delta_j dy_i . x_j          decay_ij = exp(cum_i - cum_j) where i sees j, else 0
//   dU_j  = exit_j B_j E^T + sum_i decay_ij (C_i . B_j) dy_i
//   dC_i  = entry_i dy_i S + sum_j W_ij B_j      dB_j = exit_j delta_j x_j E + sum_i W_ij C_i
//   dx_j  = delta_j dU_j + D dy_j
//
// The step s_t = A delta_t decays everything that crosses it, so ds_t sums four parts without cancellation: inputs j < t read at
// i >= t (W_ij C_i . B_j); the state before the chunk read at i >= t (`entered`); inputs j < t that reach the chunk end
// (`leaving`); the state before the chunk that does (`through`). Then d delta_t = x_t . dU_t + A ds_t and dA = sum_t delta_t ds_t.
#define WARPS 16
#define ACROSS (WARPS / 4)
#define THREADS (32 * WARPS)
#define W_ROW (Q + 1)
#define SEGMENTS (THREADS / Q)       // threads that share a row or column of W
#define SPLITS (REPEAT / HEADS_PER_BLOCK)
#if HEADS_PER_BLOCK == REPEAT
typedef T Sum;
#else
typedef float Sum;
#endif

// Sum over the lanes behind this one, and over those before it.
__device__ __forceinline__ float sum_behind(float v, int lane) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) { const float o = __shfl_down_sync(~0u, v, d); if (lane + d < 32) v += o; }
  v = __shfl_down_sync(~0u, v, 1);
  return lane < 31 ? v : 0.f;
}
__device__ __forceinline__ float sum_before(float v, int lane) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) { const float o = __shfl_up_sync(~0u, v, d); if (lane >= d) v += o; }
  v = __shfl_up_sync(~0u, v, 1);
  return lane > 0 ? v : 0.f;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
ssd_backward(const T* dy, const T* x, const T* b, const T* c, const float* a_log, const float* skip, const float* tables, const int* first,
             const float* states, const float* adjoints,
             T* dx, DT_T* ddt, Sum* db, Sum* dc,   // db, dc: [SPLITS, B, S, G, N]
             float* head_sums,                     // [B * chunks, 3, H]: A_log, D, dt_bias
             const __grid_constant__ Info info) {
  extern __shared__ __align__(1024) unsigned char smem[];
  Word* state_s = (Word*)smem;                     // [P, N_ROW]: S, then E
  Word* mix_s = state_s + PP * N_ROW;              // [64, Q_ROW]: decay_ij C_i . B_j, at the end the sum of W
  T* b_s = (T*)(mix_s + Q * Q_ROW);                // [64, N_ROW]
  T* c_s = b_s + Q * N_ROW;                        // [64, N_ROW]
  T* x_s = c_s + Q * N_ROW;                        // [64, P_ROW]
  T* dy_s = x_s + Q * P_ROW;                       // [64, P_ROW]
  float* cross_s = (float*)(dy_s + Q * P_ROW);     // [64, W_ROW]: W_ij C_i . B_j, then its sums over j < t
  float* table_s = cross_s + Q * W_ROW;            // [TABLES, 64]
  float* crossing_s = table_s + TABLES * Q;        // [64]
  float* entered_s = crossing_s + Q;               // [ACROSS, 64]
  float* leaving_s = entered_s + ACROSS * Q;       // [ACROSS, 64]
  float* x_du_s = leaving_s + ACROSS * Q;          // [ACROSS, 64]
  float* warp_s = x_du_s + ACROSS * Q;             // [2, WARPS]: <E, S>, dy . x
  int* first_s = (int*)(warp_s + 2 * WARPS);       // [64]

  const Place p = place(info, blockIdx.x, GROUPS * SPLITS);
  const int group = p.head / SPLITS, part = p.head % SPLITS;
  const int tid = threadIdx.x, lane = tid & 31, g = lane >> 2, t = 2 * (lane & 3), warp = tid >> 5;
  const int row = warp % 4 * 16, across = warp / 4;
  // columns of this warp in products of width 64, P and N
  constexpr int Q_BLOCKS = Q / 8 / ACROSS, P_BLOCKS = (PP / 8 + ACROSS - 1) / ACROSS, N_BLOCKS = (NN / 8 + ACROSS - 1) / ACROSS;
  const int q_column = across * Q_BLOCKS * 8, p_column = across * P_BLOCKS * 8, n_column = across * N_BLOCKS * 8;
  const int p_count = min(P_BLOCKS, (PP - p_column) / 8), n_count = min(N_BLOCKS, (NN - n_column) / 8);
  const float *delta_s = table_s + DELTA * Q, *cum_s = table_s + CUM * Q, *entry_s = table_s + ENTRY * Q, *exit_s = table_s + EXIT * Q;
  const u64 chunk = (u64)p.batch * info.chunks + p.chunk, token = p.batch * info.seq + p.token;

  load_rows<N, NN, THREADS>(b_s, N_ROW, b + p.batch * info.b_batch + p.token * info.b_token + group * N, info.b_token, p.valid);
  load_rows<N, NN, THREADS>(c_s, N_ROW, c + p.batch * info.c_batch + p.token * info.c_token + group * N, info.c_token, p.valid);
  for (int i = tid; i < Q; i += THREADS) first_s[i] = first[chunk * Q + i];
  __syncthreads();
  float bc[Q_BLOCKS][4], weights[Q_BLOCKS][4], db_sum[N_BLOCKS][4], dc_sum[N_BLOCKS][4];
  clear(bc); clear(weights); clear(db_sum); clear(dc_sum);
  product(bc, rows(c_s, N_ROW), row, rows(b_s, N_ROW), q_column, Q_BLOCKS, NN);

  for (int head = group * REPEAT + part * HEADS_PER_BLOCK, end = head + HEADS_PER_BLOCK; head < end; ++head) {
    const u64 index = chunk * HEADS + head;
    const float *before = states + index * (P * N), *after = adjoints + index * (P * N);
    __syncthreads();                               // the last head has been read
    load_rows<P, PP, THREADS>(x_s, P_ROW, x + p.batch * info.x_batch + p.token * info.x_token + head * P, info.x_token, p.valid);
    load_rows<P, PP, THREADS>(dy_s, P_ROW, dy + p.batch * info.dy_batch + p.token * info.dy_token + head * P, info.dy_token, p.valid);
    for (int i = tid; i < TABLES * Q; i += THREADS) table_s[i] = tables[index * (TABLES * Q) + i];
#pragma unroll 4
    for (int i = tid; i < PP * NN / LANES; i += THREADS) {
      const int r = i / (NN / LANES), n = i % (NN / LANES) * LANES;
      Floats from = {};
      if (r < P && n < N) from = *(const Floats*)(before + r * N + n);
      Words to;
#pragma unroll
      for (int e = 0; e < LANES; ++e) to.v[e] = pack(from.v[e]);
      *(Words*)(state_s + r * N_ROW + n) = to;
    }
    __syncthreads();

    float values[Q_BLOCKS][4];
    clear(values);
    product(values, rows(dy_s, P_ROW), row, rows(x_s, P_ROW), q_column, Q_BLOCKS, PP);
#pragma unroll
    for (int f = 0; f < Q_BLOCKS; ++f)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = row + g + e / 2 * 8, j = q_column + 8 * f + t + e % 2;
        const float decay = j <= i && j >= first_s[i] ? expf(cum_s[i] - cum_s[j]) : 0.f;
        const float weight = values[f][e] * decay * delta_s[j];
        weights[f][e] += weight;
        cross_s[i * W_ROW + j] = weight * bc[f][e];
        mix_s[i * Q_ROW + j] = pack(bc[f][e] * decay);
      }
    {
      float from_state[N_BLOCKS][4], entered[2] = {0.f, 0.f};
      clear(from_state);
      product(from_state, rows(dy_s, P_ROW), row, columns(state_s, N_ROW), n_column, n_count, PP);
#pragma unroll
      for (int f = 0; f < N_BLOCKS; ++f)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (f >= n_count) continue;
          const int i = row + g + e / 2 * 8;
          const float value = entry_s[i] * from_state[f][e];
          dc_sum[f][e] += value;
          entered[e / 2] += value * to_float(c_s[i * N_ROW + n_column + 8 * f + t + e % 2]);
        }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float sum = quad_sum(entered[half]);
        if (t == 0) entered_s[across * Q + row + g + 8 * half] = sum;
      }
    }
    __syncthreads();

    // E takes the place of S, piece by piece
    float through = 0.f;
#pragma unroll 4
    for (int i = tid; i < PP * NN / LANES; i += THREADS) {
      const int r = i / (NN / LANES), n = i % (NN / LANES) * LANES;
      Floats from = {};
      if (r < P && n < N) from = *(const Floats*)(after + r * N + n);
      Words* to = (Words*)(state_s + r * N_ROW + n);
#pragma unroll
      for (int e = 0; e < LANES; ++e) {
        through += unpack(to->v[e]) * from.v[e];
        to->v[e] = pack(from.v[e]);
      }
    }
    // sums of every row of W over j < t, then of every column t over i >= t
    {
      const int i = tid / SEGMENTS, segment = tid % SEGMENTS;
      float* part_s = cross_s + i * W_ROW + segment * (Q / SEGMENTS);
      float own[Q / SEGMENTS], sum = 0.f;
#pragma unroll
      for (int j = 0; j < Q / SEGMENTS; ++j) { own[j] = part_s[j]; sum += own[j]; }
      float earlier = sum;
#pragma unroll
      for (int d = 1; d < SEGMENTS; d *= 2) { const float o = __shfl_up_sync(~0u, earlier, d, SEGMENTS); if (segment >= d) earlier += o; }
      earlier = __shfl_up_sync(~0u, earlier, 1, SEGMENTS);
      if (segment == 0) earlier = 0.f;
#pragma unroll
      for (int j = 0; j < Q / SEGMENTS; ++j) { part_s[j] = earlier; earlier += own[j]; }
    }
    __syncthreads();
    {
      const int column = tid / SEGMENTS, segment = tid % SEGMENTS;
      float sum = 0.f;
#pragma unroll
      for (int r = 0; r < Q / SEGMENTS; ++r) {
        const int i = segment * (Q / SEGMENTS) + r;
        sum += i >= column ? cross_s[i * W_ROW + column] : 0.f;
      }
#pragma unroll
      for (int d = 1; d < SEGMENTS; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
      if (segment == 0) crossing_s[column] = sum;
    }

    float skipped = 0.f;
    {
      float du[P_BLOCKS][4], leaving[2] = {0.f, 0.f}, x_du[2] = {0.f, 0.f};
      clear(du);
      product(du, rows(b_s, N_ROW), row, rows(state_s, N_ROW), p_column, p_count, NN);
#pragma unroll
      for (int f = 0; f < P_BLOCKS; ++f)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (f >= p_count) continue;
          const int j = row + g + e / 2 * 8;
          du[f][e] *= exit_s[j];
          leaving[e / 2] += delta_s[j] * to_float(x_s[j * P_ROW + p_column + 8 * f + t + e % 2]) * du[f][e];
        }
      product(du, columns(mix_s, Q_ROW), row, columns(dy_s, P_ROW), p_column, p_count, Q);
      const float d = skip[head];
      T* out = dx + (token * HEADS + head) * P;
#pragma unroll
      for (int f = 0; f < P_BLOCKS; ++f)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int j = row + g + e / 2 * 8, n = p_column + 8 * f + t + e % 2;
          if (f >= p_count) continue;
          const float own_x = to_float(x_s[j * P_ROW + n]), own_dy = to_float(dy_s[j * P_ROW + n]);
          x_du[e / 2] += own_x * du[f][e];
          skipped += own_dy * own_x;
          if (j < p.valid && n < P) store(out + (u64)j * (HEADS * P) + n, delta_s[j] * du[f][e] + d * own_dy);
        }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float left = quad_sum(leaving[half]), dot = quad_sum(x_du[half]);
        if (t == 0) {
          leaving_s[across * Q + row + g + 8 * half] = left;
          x_du_s[across * Q + row + g + 8 * half] = dot;
        }
      }
    }
    {
      float from_end[N_BLOCKS][4];
      clear(from_end);
      product(from_end, rows(x_s, P_ROW), row, columns(state_s, N_ROW), n_column, n_count, PP);
#pragma unroll
      for (int f = 0; f < N_BLOCKS; ++f)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int j = row + g + e / 2 * 8;
          db_sum[f][e] += exit_s[j] * delta_s[j] * from_end[f][e];
        }
    }
    through = warp_sum(through);
    skipped = warp_sum(skipped);
    if (lane == 0) {
      warp_s[warp] = through;
      warp_s[WARPS + warp] = skipped;
    }
    __syncthreads();

    if (warp == 0) {                               // lane l has tokens 2 l and 2 l + 1
      float entered[2] = {0.f, 0.f}, leaving[2] = {0.f, 0.f}, x_du[2] = {0.f, 0.f};
#pragma unroll
      for (int k = 0; k < ACROSS; ++k)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int at = k * Q + 2 * lane + e;
          entered[e] += entered_s[at];
          leaving[e] += leaving_s[at];
          x_du[e] += x_du_s[at];
        }
      const float all_through = warp_sum(lane < WARPS ? warp_s[lane] : 0.f) * entry_s[Q - 1];
      const float all_skipped = warp_sum(lane < WARPS ? warp_s[WARPS + lane] : 0.f);
      const float later = sum_behind(entered[0] + entered[1], lane), earlier = sum_before(leaving[0] + leaving[1], lane);
      const float a = -expf(a_log[head]);
      float a_sum = 0.f, bias_sum = 0.f;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int i = 2 * lane + e;
        const float ds = crossing_s[i] + all_through + later + (e == 0 ? entered[0] + entered[1] : entered[1]) + earlier +
                         (e == 0 ? 0.f : leaving[0]);
        const float d_dt = (x_du[e] + a * ds) * table_s[SLOPE * Q + i];
        a_sum += delta_s[i] * ds;
        bias_sum += d_dt;
        if (i < p.valid) store(ddt + (token + i) * HEADS + head, d_dt);
      }
      a_sum = warp_sum(a_sum);
      bias_sum = warp_sum(bias_sum);
      if (lane == 0) {
        float* out = head_sums + chunk * (3 * HEADS) + head;
        out[0] = a * a_sum;
        out[HEADS] = all_skipped;
        out[2 * HEADS] = bias_sum;
      }
    }
  }

  __syncthreads();
#pragma unroll
  for (int f = 0; f < Q_BLOCKS; ++f)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      mix_s[(row + g + e / 2 * 8) * Q_ROW + q_column + 8 * f + t + e % 2] = pack(weights[f][e]);
  __syncthreads();
  product(dc_sum, rows(mix_s, Q_ROW), row, columns(b_s, N_ROW), n_column, n_count, Q);
  product(db_sum, columns(mix_s, Q_ROW), row, columns(c_s, N_ROW), n_column, n_count, Q);
  const u64 offset = (((u64)part * info.batch * info.seq + token) * GROUPS + group) * N;
#pragma unroll
  for (int f = 0; f < N_BLOCKS; ++f)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int i = row + g + e / 2 * 8, n = n_column + 8 * f + t + e % 2;
      if (f >= n_count || i >= p.valid || n >= N) continue;
      store(db + offset + (u64)i * (GROUPS * N) + n, db_sum[f][e]);
      store(dc + offset + (u64)i * (GROUPS * N) + n, dc_sum[f][e]);
    }
}

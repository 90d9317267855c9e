// Tables of a chunk: step sizes, decays and what sees what. A block has 64 threads for each of 4 heads.
extern "C" __global__ void __launch_bounds__(256)
ssd_steps(const DT_T* dt, const float* a_log, const float* dt_bias,
#if PACKED
          const DOC_T* doc_start,
#endif
          float* tables,             // [B, chunks, H, TABLES, 64]
          int* first,                // [B, chunks, 64]: first token of the chunk that token i sees
          const __grid_constant__ Info info) {
  const Place p = place(info, blockIdx.x, (HEADS + 3) / 4);
  const int i = threadIdx.x % Q, local = threadIdx.x / Q, head = p.head * 4 + local;
  const bool live = head < HEADS;
  __shared__ float sums[2][4][Q];
  __shared__ int starts[Q];

  // a start behind the token itself is not valid; it is read as a document of its own
  const int last = min(i, p.valid - 1);
  long long doc = 0;
#if PACKED
  doc = (long long)doc_start[p.batch * info.seq + p.token + last];
  doc = max(0ll, min(doc, (long long)p.token + last));
#endif
  const bool carried = doc < max(1ll, (long long)p.token);
  const int start = (int)max(0ll, doc - (long long)p.token);
  if (local == 0) {
    starts[i] = start;
    if (p.head == 0) first[((u64)p.batch * info.chunks + p.chunk) * Q + i] = start;
  }

  float delta = 0.f, slope = 0.f, sum = 0.f;
  if (live && i < p.valid) {
    const float before = to_float(dt[p.batch * info.dt_batch + (p.token + i) * info.dt_token + head]) + dt_bias[head];
    const float softplus = fmaxf(before, 0.f) + log1pf(expf(-fabsf(before)));
    const float low = __uint_as_float((u32)info.dt_min), high = __uint_as_float((u32)info.dt_max);
    delta = fminf(fmaxf(softplus, low), high);
    slope = softplus < low || softplus > high ? 0.f : 1.f / (1.f + expf(-before));
    sum = -expf(a_log[head]) * delta;
  }
  // running sum from the start of the document: what lies d to the left is added unless it is older
  sums[0][local][i] = sum;
  __syncthreads();
  int from = 0;
  for (int d = 1; d < Q; d *= 2) {
    if (i - d >= start) sum += sums[from][local][i - d];
    sums[from ^= 1][local][i] = sum;
    __syncthreads();
  }
  if (!live) return;
  float* out = tables + chunk_head(info, p, head) * (TABLES * Q) + i;
  out[DELTA * Q] = delta;
  out[CUM * Q] = sum;
  out[ENTRY * Q] = carried ? expf(sum) : 0.f;
  out[EXIT * Q] = i >= starts[Q - 1] ? expf(sums[from][local][Q - 1] - sum) : 0.f;
  out[SLOPE * Q] = slope;
}

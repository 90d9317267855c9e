// Depthwise causal convolution: a thread walks along the tokens of a run with VEC channels and the last rows in registers, BATCH
// rows at a time so that their loads are in flight together. Neighbouring threads have neighbouring channels.
//
// Defines: T_BF16, VEC, TAPS; HAS_BIAS, HAS_HISTORY, PACKED, SILU; W_T, BIAS_T, HISTORY_T (types), DOC_T.
#define BEFORE (TAPS - 1)            // rows that a token sees before its own
#define BATCH 4
#define UNITS 128

struct Info {
  u64 seq, channels, runs, run, slabs;
  u64 x_batch, x_token, grad_batch, grad_token;
};
struct __align__(VEC * sizeof(T)) Vector { T v[VEC]; };
struct __align__(VEC * 4) Floats { float v[VEC]; };

// Channels and tokens of a thread.
struct Walk { bool live; u32 channel, slab, batch; long long start, end; };
__device__ __forceinline__ Walk walk(const Info& info) {
  const u32 blocks = (u32)((info.channels / VEC + UNITS - 1) / UNITS);
  Walk w;
  w.channel = (blockIdx.x % blocks * UNITS + threadIdx.x) * VEC;
  w.live = w.channel < info.channels;
  w.slab = blockIdx.x / blocks;
  w.batch = w.slab / (u32)info.runs;
  w.start = (long long)(w.slab % (u32)info.runs) * (long long)info.run;
  w.end = min(w.start + (long long)info.run, (long long)info.seq);
  return w;
}

// Whether token t sees the row `lag` before it.
__device__ __forceinline__ bool sees(long long t, int lag, long long doc) { return doc <= 0 || t >= doc + lag; }
__device__ __forceinline__ float sigmoid(float v) { return __fdividef(1.f, 1.f + __expf(-v)); }
__device__ __forceinline__ float rounded(float v) {
  T narrow;
  store(&narrow, v);
  return to_float(narrow);
}
__device__ __forceinline__ void widen(float (&to)[VEC], const T* from) {
  const Vector v = *(const Vector*)from;
#pragma unroll
  for (int i = 0; i < VEC; ++i) to[i] = to_float(v.v[i]);
}
__device__ __forceinline__ void put(T* to, const float (&from)[VEC]) {
  Vector v;
#pragma unroll
  for (int i = 0; i < VEC; ++i) store(&v.v[i], from[i]);
  *(Vector*)to = v;
}

// The taps of the thread's channels and the bias.
struct Weights { float tap[TAPS][VEC], bias[VEC]; };
__device__ __forceinline__ Weights load_weights(const W_T* weight, const BIAS_T* bias, u32 channel) {
  Weights w;
#pragma unroll
  for (int i = 0; i < VEC; ++i) {
#pragma unroll
    for (int j = 0; j < TAPS; ++j) w.tap[j][i] = to_float(weight[(u64)(channel + i) * TAPS + j]);
    w.bias[i] = HAS_BIAS ? to_float(bias[channel + i]) : 0.f;
  }
  return w;
}

// Sum over the taps of the token whose own row is rows[BEFORE + n], rounded as the output of a convolution is.
template <int R>
__device__ __forceinline__ void convolve(float (&sum)[VEC], const Weights& w, const float (&rows)[R][VEC], int n, long long t, long long doc) {
#pragma unroll
  for (int i = 0; i < VEC; ++i) sum[i] = w.bias[i];
#pragma unroll
  for (int j = 0; j < TAPS; ++j)
    if (sees(t, BEFORE - j, doc))
#pragma unroll
      for (int i = 0; i < VEC; ++i) sum[i] += w.tap[j][i] * rows[n + j][i];
#pragma unroll
  for (int i = 0; i < VEC; ++i) sum[i] = rounded(sum[i]);
}

// rows[0 .. BEFORE] of a walk that starts at `start`: x, before the row the history or zero.
template <int R, class H>
__device__ __forceinline__ void load_before(float (&rows)[R][VEC], const T* x, const H* history, const Walk& w, u64 channels, u64 stride) {
#pragma unroll
  for (int j = 0; j < BEFORE; ++j) {
    const long long t = w.start + j - BEFORE;
    if (t >= 0) widen(rows[j], x + t * stride);
    else
#pragma unroll
      for (int i = 0; i < VEC; ++i) rows[j][i] = HAS_HISTORY ? to_float(history[((u64)w.batch * BEFORE + BEFORE + t) * channels + w.channel + i]) : 0.f;
  }
}

#if PASS == 0
extern "C" __global__ void __launch_bounds__(UNITS)
conv1d_forward(const T* x, const W_T* weight, const BIAS_T* bias, const HISTORY_T* history, const DOC_T* doc_start, T* out,
               const __grid_constant__ Info info) {
  const Walk w = walk(info);
  if (!w.live) return;
  x += w.batch * info.x_batch + w.channel;
  out += w.batch * info.seq * info.channels + w.channel;
  doc_start += w.batch * info.seq;
  const Weights weights = load_weights(weight, bias, w.channel);
  float rows[BEFORE + BATCH][VEC];
  load_before(rows, x, history, w, info.channels, info.x_token);
  for (long long t0 = w.start; t0 < w.end; t0 += BATCH) {
    long long doc[BATCH];
#pragma unroll
    for (int n = 0; n < BATCH; ++n) {
      const long long t = min(t0 + n, w.end - 1);
      widen(rows[BEFORE + n], x + t * info.x_token);
      doc[n] = PACKED ? (long long)doc_start[t] : 0;
    }
#pragma unroll
    for (int n = 0; n < BATCH; ++n) {
      if (t0 + n >= w.end) continue;
      float value[VEC];
      convolve(value, weights, rows, n, t0 + n, doc[n]);
#if SILU
#pragma unroll
      for (int i = 0; i < VEC; ++i) value[i] *= sigmoid(value[i]);
#endif
      put(out + (t0 + n) * info.channels, value);
    }
#pragma unroll
    for (int j = 0; j < BEFORE; ++j)
#pragma unroll
      for (int i = 0; i < VEC; ++i) rows[j][i] = rows[j + BATCH][i];
  }
}
#elif PASS == 1
// A thread walks BEFORE rows past its run, because these pull on the last rows of the run. The gradients of weight and bias count
// the rows of the run only: parts [slab, TAPS (then the bias), C].
extern "C" __global__ void __launch_bounds__(UNITS)
conv1d_backward(const T* grad, const T* x, const W_T* weight, const BIAS_T* bias, const DOC_T* doc_start, T* grad_x, float* parts,
                const __grid_constant__ Info info) {
  const Walk w = walk(info);
  if (!w.live) return;
  x += w.batch * info.x_batch + w.channel;
  grad += w.batch * info.grad_batch + w.channel;
  grad_x += w.batch * info.seq * info.channels + w.channel;
  doc_start += w.batch * info.seq;
  const Weights weights = load_weights(weight, bias, w.channel);
  const long long stop = w.end + BEFORE, seq = (long long)info.seq;
  // pulled[l]: gradient so far of the row l before the token; sums: gradients of the taps
  float rows[BEFORE + BATCH][VEC], pulled[TAPS][VEC] = {}, sums[TAPS][VEC] = {}, bias_sum[VEC] = {};
  load_before(rows, x, x, w, info.channels, info.x_token);
  for (long long t0 = w.start; t0 < stop; t0 += BATCH) {
    long long doc[BATCH];
    float g[BATCH][VEC];
#pragma unroll
    for (int n = 0; n < BATCH; ++n) {
      const long long t = min(t0 + n, seq - 1);
      widen(rows[BEFORE + n], x + t * info.x_token);
      widen(g[n], grad + t * info.grad_token);
      doc[n] = PACKED ? (long long)doc_start[t] : 0;
    }
#pragma unroll
    for (int n = 0; n < BATCH; ++n) {
      const long long t = t0 + n;
      if (t >= stop) continue;
      if (t < seq) {
#if SILU
        float value[VEC];
        convolve(value, weights, rows, n, t, doc[n]);
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
          const float s = sigmoid(value[i]);
          g[n][i] *= s * (1.f + value[i] * (1.f - s));
        }
#endif
        const bool own = t < w.end;
#pragma unroll
        for (int j = 0; j < TAPS; ++j)
          if (sees(t, BEFORE - j, doc[n]))
#pragma unroll
            for (int i = 0; i < VEC; ++i) {
              pulled[BEFORE - j][i] += weights.tap[j][i] * g[n][i];
              if (own) sums[j][i] += g[n][i] * rows[n + j][i];
            }
#pragma unroll
        for (int i = 0; i < VEC; ++i)
          if (own) bias_sum[i] += g[n][i];
      }
      // nothing after t reads the row BEFORE rows back
      if (t >= w.start + BEFORE) put(grad_x + (t - BEFORE) * info.channels, pulled[BEFORE]);
#pragma unroll
      for (int l = BEFORE; l > 0; --l)
#pragma unroll
        for (int i = 0; i < VEC; ++i) pulled[l][i] = pulled[l - 1][i];
#pragma unroll
      for (int i = 0; i < VEC; ++i) pulled[0][i] = 0.f;
    }
#pragma unroll
    for (int j = 0; j < BEFORE; ++j)
#pragma unroll
      for (int i = 0; i < VEC; ++i) rows[j][i] = rows[j + BATCH][i];
  }
  parts += (u64)w.slab * (TAPS + 1) * info.channels + w.channel;
#pragma unroll
  for (int j = 0; j <= TAPS; ++j) {
    Floats v;
#pragma unroll
    for (int i = 0; i < VEC; ++i) v.v[i] = j < TAPS ? sums[min(j, TAPS - 1)][i] : bias_sum[i];
    *(Floats*)(parts + j * info.channels) = v;
  }
}
#else
// Sums of the parts in order: weight [C, TAPS] and bias [C].
extern "C" __global__ void __launch_bounds__(UNITS)
conv1d_sums(const float* parts, W_T* weight, BIAS_T* bias, const __grid_constant__ Info info) {
  const u64 item = (u64)blockIdx.x * UNITS + threadIdx.x, channel = item % info.channels, tap = item / info.channels;
  if (tap > TAPS) return;
  float sum = 0.f;
#pragma unroll 8
  for (u64 n = 0; n < info.slabs; ++n) sum += parts[(n * (TAPS + 1) + tap) * info.channels + channel];
  if (tap < TAPS) store(weight + channel * TAPS + tap, sum);
  else if (HAS_BIAS) store(bias + channel, sum);
}
#endif

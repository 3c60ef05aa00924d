// Everything between the projections of a gated-delta layer for 1 to TM tokens (mlx_linattn/ops/delta_mixer.py):
//
//   [q | k | v] = silu(conv(qkv));  q = l2(q) Dk^-1/2;  k = l2(k);  a = gate(a, A_log, dt_bias);  b = scale sigmoid(b)
//   S = a * S;  S = S + k (x) b (v - S^T k);  o = S^T q;  y = rms_norm(o) * norm_weight * act(z)
//
// Layout   qkv [B, T, C], C = 2 Hk Dk + Hv Dv, of YT; a [B, T, Hv] or, with VECTOR, [B, T, Hv Dk]; b [B, T, Hv];
//          z, y [B, T, Hv Dv]; a is read with DECAYS (1 without) and z with OPENS (no gate without); conv_weight [C, K]; A_log [Hv]; dt_bias [Hv] or [Hv Dk]; norm_weight [Dv];
//          window [B, K - 1, C] of YT; state [B, Hv, Dv, Dk] float32; lengths [B], shape [1] = (T), int32;
//          constants [3] = (eps of the norm, lower bound of the gate, scale of beta) float32.
//          new_window and new_state as the inputs, or with EVERY [B, T, ...]: after each token. Row-contiguous.
// Work     A threadgroup is one value head of one row of the batch. Its threads first convolve a channel each, then a
//          SIMD-group normalises a query or key, then LANES lanes own a row of the state in registers, Dk / LANES
//          numbers loaded four at a time, for THREADS / LANES rows at a time; last a SIMD-group normalises a token's o.
// Memory   4 TM (2 Dk + Dv + 1 + Dk with VECTOR, 1 without) bytes of threadgroup memory, at most 32 KB.
// Grid     (THREADS * B * Hv, 1, 1), threadgroup (THREADS, 1, 1).
// Limits   T <= TM; Dk and Dv multiples of 32, at most 256; Dv LANES a multiple of THREADS; Hv a multiple of Hk.
// Padding  tokens from lengths[b] on change neither window nor state; their y is 0.
#include <metal_stdlib>
using namespace metal;

typedef metal::vec<float, 4> Four;

METAL_FUNC float sigmoid_of(float x) { return 1.0f / (1.0f + metal::exp(-x)); }

// log(1 + e^x) with no digit lost where e^x is small: log(u) / (u - 1) cancels the rounding of u = 1 + e.
METAL_FUNC float softplus_of(float x) {
  const float e = metal::exp(-metal::abs(x)), u = 1.0f + e;
  return metal::max(x, 0.0f) + (u == 1.0f ? e : metal::log(u) * (e / (u - 1.0f)));
}

METAL_FUNC float decay_of(float a, float A_log, float dt_bias, bool bounded, float lower_bound) {
  const float rate = metal::exp(A_log), shifted = a + dt_bias;
  return bounded ? metal::exp(lower_bound * sigmoid_of(rate * shifted)) : metal::exp(-rate * softplus_of(shifted));
}

template <typename YT, int Dk, int Dv, int Hk, int Hv, int K, int TM, int THREADS, int LANES,
          bool DECAYS, bool VECTOR, bool BOUNDED, bool OPENS, bool SIGMOID, bool EVERY>
[[kernel]] void delta_step(
    const device YT* qkv [[buffer(0)]],
    const device YT* a [[buffer(1)]],
    const device YT* b [[buffer(2)]],
    const device YT* z [[buffer(3)]],
    const device YT* conv_weight [[buffer(4)]],
    const device float* A_log [[buffer(5)]],
    const device float* dt_bias [[buffer(6)]],
    const device float* norm_weight [[buffer(7)]],
    const device YT* window [[buffer(8)]],
    const device float* state [[buffer(9)]],
    const device int* lengths [[buffer(10)]],
    const device int* shape [[buffer(11)]],
    const device float* constants [[buffer(12)]],
    device YT* y [[buffer(13)]],
    device YT* new_window [[buffer(14)]],
    device float* new_state [[buffer(15)]],
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
    uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
    uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]]) {
  constexpr int C = 2 * Hk * Dk + Hv * Dv;
  constexpr int ROWS = THREADS / LANES, PASSES = Dv / ROWS;
  constexpr int N = Dk / (4 * LANES);  // float4 pieces of a row in a lane
  constexpr int GATES = VECTOR ? Dk : 1;
  threadgroup Four queries[TM * Dk / 4];
  threadgroup Four keys[TM * Dk / 4];
  threadgroup Four decays[(TM * GATES + 3) / 4];
  threadgroup float values[TM * Dv];  // later the outputs: each is written by the one lane that read its value
  threadgroup float betas[TM];
  threadgroup float* q = (threadgroup float*)queries;
  threadgroup float* k = (threadgroup float*)keys;
  threadgroup float* decay = (threadgroup float*)decays;

  const int head = threadgroup_position_in_grid.x, row = head / Hv, hv = head % Hv, hk = hv / (Hv / Hk);
  const int tid = thread_index_in_threadgroup, lane = thread_index_in_simdgroup, group = simdgroup_index_in_threadgroup;
  const int T = shape[0], real = metal::min(int(lengths[row]), T);
  const size_t token = size_t(row) * T;

  // The first rows of the state are asked for before anything else: the convolution hides the wait.
  const int piece = tid % LANES;
  const size_t matrix = size_t(head) * Dv * Dk;
  const int first = (tid / LANES) * Dk + piece * 4;  // where this lane starts in a matrix
  Four s[N];
  #pragma unroll
  for (int i = 0; i < N; ++i) s[i] = *(const device Four*)(state + matrix + first + i * 4 * LANES);

  for (int c = tid; c < 2 * Dk + Dv; c += THREADS) {
    const bool is_q = c < Dk, is_k = !is_q && c < 2 * Dk;
    const int channel = is_q ? hk * Dk + c : is_k ? Hk * Dk + hk * Dk + c - Dk : 2 * Hk * Dk + hv * Dv + c - 2 * Dk;
    const bool owner = !(is_q || is_k) || hv % (Hv / Hk) == 0;  // one of the heads that share a key writes its window
    float taps[K], past[K];
    #pragma unroll
    for (int i = 0; i < K; ++i) taps[i] = float(conv_weight[channel * K + i]);
    #pragma unroll
    for (int i = 0; i < K - 1; ++i) past[i] = float(window[(size_t(row) * (K - 1) + i) * C + channel]);
    for (int t = 0; t < T; ++t) {
      if (t < real) {
        past[K - 1] = float(qkv[(token + t) * C + channel]);
        float sum = 0.0f;
        #pragma unroll
        for (int i = 0; i < K; ++i) sum += past[i] * taps[i];
        sum *= sigmoid_of(sum);
        if (is_q) q[t * Dk + c] = sum;
        else if (is_k) k[t * Dk + c - Dk] = sum;
        else values[t * Dv + c - 2 * Dk] = sum;
        #pragma unroll
        for (int i = 0; i < K - 1; ++i) past[i] = past[i + 1];
      }
      if (owner && (EVERY || t == T - 1))
        #pragma unroll
        for (int i = 0; i < K - 1; ++i)
          new_window[((EVERY ? token + t : size_t(row)) * (K - 1) + i) * C + channel] = YT(past[i]);
    }
  }
  for (int i = tid; i < real * GATES; i += THREADS) {
    const int g = VECTOR ? hv * Dk + i % GATES : hv;
    decay[i] = 1.0f;
    if (DECAYS) {
      const float raw = float(a[(token + i / GATES) * Hv * GATES + g]);
      decay[i] = decay_of(raw, float(A_log[hv]), float(dt_bias[g]), BOUNDED, constants[1]);
    }
  }
  if (tid < real) betas[tid] = constants[2] * sigmoid_of(float(b[(token + tid) * Hv + hv]));
  threadgroup_barrier(mem_flags::mem_threadgroup);

  for (int job = group; job < 2 * real; job += THREADS / 32) {
    threadgroup float* x = (job % 2 ? k : q) + job / 2 * Dk;
    float sum = 0.0f;
    #pragma unroll
    for (int i = 0; i < Dk / 32; ++i) sum += x[i * 32 + lane] * x[i * 32 + lane];
    sum = metal::rsqrt(simd_sum(sum) + 1e-6f) * (job % 2 ? 1.0f : metal::rsqrt(float(Dk)));
    #pragma unroll
    for (int i = 0; i < Dk / 32; ++i) x[i * 32 + lane] *= sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  #pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) {
    const int channel = pass * ROWS + tid / LANES;
    const int at = first + pass * ROWS * Dk;
    Four next[N];  // asked for before these rows are worked on: a store below would hold the loads back
    if (pass + 1 < PASSES)
      #pragma unroll
      for (int i = 0; i < N; ++i) next[i] = *(const device Four*)(state + matrix + at + ROWS * Dk + i * 4 * LANES);
    for (int t = 0; t < (EVERY ? T : real); ++t) {
      if (t < real) {
        // -(v - S^T k), summed over the row's lanes
        float rest = piece == 0 ? -values[t * Dv + channel] : 0.0f, out = 0.0f;
        #pragma unroll
        for (int i = 0; i < N; ++i) {
          const Four key = keys[(t * Dk) / 4 + i * LANES + piece];
          #pragma unroll
          for (int c = 0; c < 4; ++c) {
            s[i][c] *= decay[t * GATES + (VECTOR ? (i * LANES + piece) * 4 + c : 0)];
            rest += s[i][c] * key[c];
          }
        }
        #pragma unroll
        for (ushort m = 1; m < LANES; m <<= 1) rest += simd_shuffle_xor(rest, m);
        const float write = -betas[t] * rest;
        #pragma unroll
        for (int i = 0; i < N; ++i) {
          const Four key = keys[(t * Dk) / 4 + i * LANES + piece];
          const Four query = queries[(t * Dk) / 4 + i * LANES + piece];
          #pragma unroll
          for (int c = 0; c < 4; ++c) {
            s[i][c] += key[c] * write;
            out += s[i][c] * query[c];
          }
        }
        #pragma unroll
        for (ushort m = 1; m < LANES; m <<= 1) out += simd_shuffle_xor(out, m);
        if (piece == 0) values[t * Dv + channel] = out;
      }
      if (EVERY)
        #pragma unroll
        for (int i = 0; i < N; ++i)
          *(device Four*)(new_state + ((token + t) * Hv + hv) * Dv * Dk + at + i * 4 * LANES) = s[i];
    }
    if (!EVERY)
      #pragma unroll
      for (int i = 0; i < N; ++i) *(device Four*)(new_state + matrix + at + i * 4 * LANES) = s[i];
    if (pass + 1 < PASSES)
      #pragma unroll
      for (int i = 0; i < N; ++i) s[i] = next[i];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  for (int t = group; t < T; t += THREADS / 32) {
    const size_t out = ((token + t) * Hv + hv) * Dv;
    float sum = 0.0f;
    if (t < real)
      #pragma unroll
      for (int i = 0; i < Dv / 32; ++i) sum += values[t * Dv + i * 32 + lane] * values[t * Dv + i * 32 + lane];
    sum = metal::rsqrt(simd_sum(sum) / float(Dv) + constants[0]);
    #pragma unroll
    for (int i = 0; i < Dv / 32; ++i) {
      const int d = i * 32 + lane;
      const float gate = OPENS ? float(z[out + d]) : 0.0f;
      const float open = OPENS ? (SIGMOID ? 1.0f : gate) * sigmoid_of(gate) : 1.0f;
      y[out + d] = t < real ? YT(values[t * Dv + d] * sum * float(norm_weight[d]) * open) : YT(0.0f);
    }
  }
}

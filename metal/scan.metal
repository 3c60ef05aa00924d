// Recurrences with one number of state per channel (mlx_linattn/ops/scan.py).
#include <metal_stdlib>
using namespace metal;

// h_t = decay_t * h_{t-1} + update_t
//
// Layout   decay [B, T, W]; update, h [B, T, W] of UT; state, new_state [B, W] float32; lengths [B],
//          shape [2] = (T, W), int32. Row-contiguous.
// Work     a threadgroup owns 32 channels, a lane each. Its GROUPS SIMD-groups take TOKENS tokens each, side by side:
//          each first runs its tokens from zero, which are then in registers, learns from the others' products and ends
//          where it starts, and runs again for the outputs; then the next GROUPS * TOKENS tokens.
// Grid     (32 * GROUPS, ceil(W / 32), B), threadgroup (32 * GROUPS, 1, 1).
// Padding  tokens from lengths[b] on change no state; their h repeats it.
template <typename UT, int GROUPS, int TOKENS>
[[kernel]] void diagonal_scan(
    const device float* decay [[buffer(0)]],
    const device UT* update [[buffer(1)]],
    const device float* state [[buffer(2)]],
    const device int* lengths [[buffer(3)]],
    const device int* shape [[buffer(4)]],
    device UT* h [[buffer(5)]],
    device float* new_state [[buffer(6)]],
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
    uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float products[GROUPS * 32];
  threadgroup float ends[GROUPS * 32];
  const int T = shape[0], W = shape[1], b = threadgroup_position_in_grid.z;
  const int lane = thread_index_in_simdgroup, group = simdgroup_index_in_threadgroup;
  const int w = threadgroup_position_in_grid.y * 32 + lane;
  const bool mine = w < W;
  const int real = metal::min(int(lengths[b]), T);
  const size_t first = size_t(b) * T * W + w;
  float start = mine ? float(state[b * W + w]) : 0.0f;
  for (int t0 = 0; t0 < T; t0 += GROUPS * TOKENS) {
    float a[TOKENS], u[TOKENS], product = 1.0f, end = 0.0f;
    #pragma unroll
    for (int i = 0; i < TOKENS; ++i) {
      const int t = t0 + group * TOKENS + i;
      const bool counts = mine && t < real;
      a[i] = counts ? float(decay[first + size_t(t) * W]) : 1.0f;
      u[i] = counts ? float(update[first + size_t(t) * W]) : 0.0f;
    }
    if (GROUPS > 1) {
      #pragma unroll
      for (int i = 0; i < TOKENS; ++i) {
        product *= a[i];
        end = a[i] * end + u[i];
      }
      products[group * 32 + lane] = product;
      ends[group * 32 + lane] = end;
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    float now = start;
    #pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
      if (g == group) now = start;
      if (GROUPS > 1) start = products[g * 32 + lane] * start + ends[g * 32 + lane];
    }
    #pragma unroll
    for (int i = 0; i < TOKENS; ++i) {
      const int t = t0 + group * TOKENS + i;
      now = a[i] * now + u[i];
      if (mine && t < T) h[first + size_t(t) * W] = UT(now);
    }
    if (GROUPS > 1) threadgroup_barrier(mem_flags::mem_threadgroup);
    else start = now;
  }
  if (mine && group == 0) new_state[b * W + w] = start;
}

// h_t = exp(delta_t A) h_{t-1} + delta_t x_t B_t,  y_t = C_t . h_t + D x_t
//
// Layout   x, y [B, T, inner] of XT; delta [B, T, inner]; A [inner, N]; B, C [B, T, N]; D [inner], read with SKIP;
//          state, new_state [B, inner, N] float32; lengths [B], shape [2] = (T, inner), int32. Row-contiguous.
// Work     a threadgroup owns 32 channels; LANES lanes share a channel's N numbers of state, which stay in registers.
//          TOKENS tokens at a time are staged in threadgroup memory, 8 TOKENS (N + 48) bytes of it.
// Grid     (32 * LANES, ceil(inner / 32), B), threadgroup (32 * LANES, 1, 1).
// Limits   N a multiple of LANES; 8 TOKENS (N + 48) <= 32 KB.
// Padding  tokens from lengths[b] on change no state.
template <typename XT, int N, int LANES, int TOKENS, bool SKIP>
[[kernel]] void selective_scan(
    const device XT* x [[buffer(0)]],
    const device float* delta [[buffer(1)]],
    const device float* A [[buffer(2)]],
    const device XT* B [[buffer(3)]],
    const device XT* C [[buffer(4)]],
    const device float* D [[buffer(5)]],
    const device float* state [[buffer(6)]],
    const device int* lengths [[buffer(7)]],
    const device int* shape [[buffer(8)]],
    device XT* y [[buffer(9)]],
    device float* new_state [[buffer(10)]],
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
    uint thread_index_in_threadgroup [[thread_index_in_threadgroup]]) {
  constexpr int THREADS = 32 * LANES, EACH = N / LANES;
  threadgroup float steps[TOKENS * 32];
  threadgroup float inputs[TOKENS * 32];
  threadgroup float outputs[TOKENS * 32];
  threadgroup float writes[TOKENS * N];
  threadgroup float reads[TOKENS * N];
  const int T = shape[0], inner = shape[1], b = threadgroup_position_in_grid.z, tid = thread_index_in_threadgroup;
  const int c = tid / LANES, piece = tid % LANES;
  const int channel0 = threadgroup_position_in_grid.y * 32, channel = channel0 + c;
  const bool mine = channel < inner;
  const int real = metal::min(int(lengths[b]), T);
  float rate[EACH], s[EACH];
  #pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int n = i * LANES + piece;
    rate[i] = mine ? float(A[channel * N + n]) * 1.44269504f : 0.0f;
    s[i] = mine ? float(state[(size_t(b) * inner + channel) * N + n]) : 0.0f;
  }
  for (int t0 = 0; t0 < T; t0 += TOKENS) {
    for (int i = tid; i < TOKENS * 32; i += THREADS) {
      const int t = t0 + i / 32, d = channel0 + i % 32;
      const size_t at = (size_t(b) * T + t) * inner + d;
      const bool counts = t < T && d < inner;
      steps[i] = counts && t < real ? float(delta[at]) : 0.0f;
      inputs[i] = counts ? float(x[at]) : 0.0f;
    }
    for (int i = tid; i < TOKENS * N; i += THREADS) {
      const size_t at = (size_t(b) * T + t0) * N + i;
      const bool counts = t0 + i / N < T;
      writes[i] = counts ? float(B[at]) : 0.0f;
      reads[i] = counts ? float(C[at]) : 0.0f;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int t = 0; t < metal::min(TOKENS, T - t0); ++t) {
      const float step = steps[t * 32 + c], added = step * inputs[t * 32 + c];
      float out = 0.0f;
      #pragma unroll
      for (int i = 0; i < EACH; ++i) {
        const int n = t * N + i * LANES + piece;
        s[i] = metal::exp2(step * rate[i]) * s[i] + added * writes[n];
        out += s[i] * reads[n];
      }
      #pragma unroll
      for (ushort m = 1; m < LANES; m <<= 1) out += simd_shuffle_xor(out, m);
      if (piece == 0) outputs[t * 32 + c] = out;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = tid; i < TOKENS * 32; i += THREADS) {
      const int t = t0 + i / 32, d = channel0 + i % 32;
      if (t < T && d < inner)
        y[(size_t(b) * T + t) * inner + d] = XT(outputs[i] + (SKIP ? float(D[SKIP ? d : 0]) * inputs[i] : 0.0f));
    }
  }
  if (mine)
    #pragma unroll
    for (int i = 0; i < EACH; ++i)
      new_state[(size_t(b) * inner + channel) * N + i * LANES + piece] = s[i];
}

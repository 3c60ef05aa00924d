// Causal depthwise convolution with the inputs before it (mlx_linattn/ops/conv.py):
//
//   y_t = act(sum_i weight[:, i] x_{t-K+1+i} + bias)
//
// Layout   x, y [B, T, C] of YT; weight [C, K]; bias [C], read with BIAS; window, new_window [B, K - 1, C] of YT;
//          lengths [B], shape [2] = (T, C), int32. Row-contiguous.
// Work     a thread owns TOKENS tokens of a channel; the thread of the first tokens also writes the channel's window.
// Grid     (C rounded up to 32 n, ceil(T / TOKENS), B), threadgroup (32 n, 1, 1).
// Padding  the window holds the last K - 1 inputs before lengths[b]; every y is computed.
#include <metal_stdlib>
using namespace metal;

template <typename YT, int K, int TOKENS, bool BIAS, bool SILU>
[[kernel]] void short_conv(
    const device YT* x [[buffer(0)]],
    const device YT* weight [[buffer(1)]],
    const device YT* bias [[buffer(2)]],
    const device YT* window [[buffer(3)]],
    const device int* lengths [[buffer(4)]],
    const device int* shape [[buffer(5)]],
    device YT* y [[buffer(6)]],
    device YT* new_window [[buffer(7)]],
    uint3 thread_position_in_grid [[thread_position_in_grid]]) {
  const int c = thread_position_in_grid.x, start = thread_position_in_grid.y * TOKENS, b = thread_position_in_grid.z;
  const int T = shape[0], C = shape[1];
  if (c < C) {
    auto xp = x + size_t(b) * T * C + c;
    auto wp = window + size_t(b) * (K - 1) * C + c;
    float taps[K], past[K];
    #pragma unroll
    for (int i = 0; i < K; ++i) taps[i] = float(weight[c * K + i]);
    #pragma unroll
    for (int i = 0; i < K - 1; ++i) {
      const int t = start - (K - 1) + i;
      past[i] = t < 0 ? float(wp[(t + K - 1) * C]) : float(xp[size_t(t) * C]);
    }
    const float shift = BIAS ? float(bias[BIAS ? c : 0]) : 0.0f;
    for (int t = start; t < metal::min(start + TOKENS, T); ++t) {
      past[K - 1] = float(xp[size_t(t) * C]);
      float sum = shift;
      #pragma unroll
      for (int i = 0; i < K; ++i) sum += past[i] * taps[i];
      if (SILU) sum /= 1.0f + metal::exp(-sum);
      y[(size_t(b) * T + t) * C + c] = YT(sum);
      #pragma unroll
      for (int i = 0; i < K - 1; ++i) past[i] = past[i + 1];
    }
    if (start == 0) {
      const int real = metal::min(int(lengths[b]), T);
      for (int i = 0; i < K - 1; ++i) {
        const int t = real - (K - 1) + i;
        new_window[(size_t(b) * (K - 1) + i) * C + c] = t < 0 ? wp[(t + K - 1) * C] : xp[size_t(t) * C];
      }
    }
  }
}

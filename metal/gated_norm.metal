// The two gated norms (mlx_linattn/ops/norm.py), with BEFORE the gate inside the norm:
//
//   norm_then_gate   y = x / rms(x) * weight * act(gate)                       act = silu, or with SIGMOID sigmoid
//   gate_then_norm   y = x' / rms(x') * weight,  x' = x * silu(gate)           the mean over each of `groups` parts
//
// Layout   x, gate, y [rows, D] of XT, GT, XT; weight [parts, D] float32; row r uses weight's row r % parts;
//          constants [1] = (eps). Row-contiguous.
// Work     GROUPS SIMD-groups are one row; where that is one, a threadgroup may hold several rows.
// Grid     (32 * GROUPS, rows, 1), threadgroup (32 * GROUPS, n, 1), n = 1 unless GROUPS is 1.
#include <metal_stdlib>
using namespace metal;

template <typename XT, int D, int PARTS, int GROUPS, bool BEFORE, bool SIGMOID>
[[kernel]] void gated_norm(
    const device XT* x [[buffer(0)]],
    const device XT* gate [[buffer(1)]],
    const device float* weight [[buffer(2)]],
    const device float* constants [[buffer(3)]],
    device XT* y [[buffer(4)]],
    uint3 thread_position_in_grid [[thread_position_in_grid]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
    uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]]) {
  constexpr int THREADS = 32 * GROUPS, N = (D + THREADS - 1) / THREADS;
  threadgroup float sums[GROUPS];
  const int row = thread_position_in_grid.y, tid = thread_position_in_grid.x;
  const size_t first = size_t(row) * D;
  const int part = row % PARTS * D;
  float value[N], open[N], sum = 0.0f;
  #pragma unroll
  for (int i = 0; i < N; ++i) {
    const int d = i * THREADS + tid;
    value[i] = d < D ? float(x[first + d]) : 0.0f;
    const float g = d < D ? float(gate[first + d]) : 0.0f;
    open[i] = (SIGMOID ? 1.0f : g) / (1.0f + metal::exp(-g));
    if (BEFORE) value[i] *= open[i];
    sum += value[i] * value[i];
  }
  sum = simd_sum(sum);
  if (GROUPS > 1) {
    if (thread_index_in_simdgroup == 0) sums[simdgroup_index_in_threadgroup] = sum;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    sum = 0.0f;
    #pragma unroll
    for (int i = 0; i < GROUPS; ++i) sum += sums[i];
  }
  const float scale = metal::rsqrt(sum / float(D) + constants[0]);
  #pragma unroll
  for (int i = 0; i < N; ++i) {
    const int d = i * THREADS + tid;
    if (d < D) y[first + d] = XT(value[i] * scale * float(weight[part + d]) * (BEFORE ? 1.0f : open[i]));
  }
}

// The matrix-state recurrence, one token after another (mlx_linattn/ops/reference.py: recurrence):
//
//   S_t = a_t * S_{t-1} + k_t (x) b_t (v_t - d (a_t * S_{t-1})^T k_t)          o_t = S_t^T q_t
//
// Layout   q, k [B, T, Hk, Dk] of KT; v, o [B, T, Hv, Dv] of VT; decay [B, T, Hv] or, with VECTOR, [B, T, Hv, Dk];
//          beta [B, T, Hv]; state [B, Hv, Dv, Dk]; all three float32. lengths [B], shape [1] = (T); int32. Row-contiguous.
// Work     LANES lanes own one row of the state (one value channel) in registers, Dk / LANES numbers each, loaded four
//          at a time; a SIMD-group owns 32 / LANES rows.
// Grid     (32, Dv / (32 / LANES), B * Hv), threadgroup (32, n, 1).
// Limits   Dk a multiple of 4 LANES and at most 256; Dv a multiple of 32 / LANES; Hv a multiple of Hk.
// Padding  tokens from lengths[b] on change no state; their o is 0.
#include <metal_stdlib>
using namespace metal;

template <typename KT, typename VT, int Dk, int Dv, int Hk, int Hv, int LANES, bool VECTOR, bool DELTA>
[[kernel]] void recurrence(
    const device KT* q [[buffer(0)]],
    const device KT* k [[buffer(1)]],
    const device VT* v [[buffer(2)]],
    const device float* decay [[buffer(3)]],
    const device float* beta [[buffer(4)]],
    const device float* state [[buffer(5)]],
    const device int* lengths [[buffer(6)]],
    const device int* shape [[buffer(7)]],
    device VT* o [[buffer(8)]],
    device float* new_state [[buffer(9)]],
    uint3 thread_position_in_grid [[thread_position_in_grid]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]]) {
  constexpr int ROWS = 32 / LANES;       // rows of the state in a SIMD-group
  constexpr int N = Dk / (4 * LANES);    // float4 pieces of a row in a lane
  const int head = thread_position_in_grid.z, b = head / Hv, hv = head % Hv, hk = hv / (Hv / Hk);
  const int lane = thread_index_in_simdgroup, piece = lane % LANES;
  const int row = thread_position_in_grid.y * ROWS + lane / LANES;
  const int T = shape[0], real = metal::min(int(lengths[b]), T);
  const size_t token = size_t(b) * T;
  // `auto`: MLX puts an array of fewer than 8 elements into constant memory.
  auto kp = k + (token * Hk + hk) * Dk + piece * 4;
  auto qp = q + (token * Hk + hk) * Dk + piece * 4;
  auto vp = v + (token * Hv + hv) * Dv + row;
  auto ap = decay + (token * Hv + hv) * (VECTOR ? Dk : 1) + (VECTOR ? piece * 4 : 0);
  auto bp = beta + token * Hv + hv;
  device VT* op = o + (token * Hv + hv) * Dv + row;
  const size_t at = (size_t(head) * Dv + row) * Dk + piece * 4;

  metal::vec<float, 4> s[N];
  #pragma unroll
  for (int i = 0; i < N; ++i) s[i] = *(const device metal::vec<float, 4>*)(state + at + i * 4 * LANES);
  for (int t = 0; t < real; ++t) {
    float recalled = 0.0f, out = 0.0f;
    metal::vec<KT, 4> key[N], query[N];
    #pragma unroll
    for (int i = 0; i < N; ++i) {
      key[i] = *(const device metal::vec<KT, 4>*)(kp + i * 4 * LANES);
      query[i] = *(const device metal::vec<KT, 4>*)(qp + i * 4 * LANES);
    }
    const float a = ap[0];
    #pragma unroll
    for (int i = 0; i < N; ++i)
      #pragma unroll
      for (int c = 0; c < 4; ++c) {
        s[i][c] *= VECTOR ? float(ap[i * 4 * LANES + c]) : a;
        if (DELTA) recalled += s[i][c] * float(key[i][c]);
      }
    if (DELTA)
      #pragma unroll
      for (ushort m = 1; m < LANES; m <<= 1) recalled += simd_shuffle_xor(recalled, m);
    const float write = bp[0] * (float(vp[0]) - recalled);
    #pragma unroll
    for (int i = 0; i < N; ++i)
      #pragma unroll
      for (int c = 0; c < 4; ++c) {
        s[i][c] += float(key[i][c]) * write;
        out += s[i][c] * float(query[i][c]);
      }
    #pragma unroll
    for (ushort m = 1; m < LANES; m <<= 1) out += simd_shuffle_xor(out, m);
    if (piece == 0) op[0] = VT(out);
    qp += Hk * Dk;
    kp += Hk * Dk;
    vp += Hv * Dv;
    op += Hv * Dv;
    bp += Hv;
    ap += VECTOR ? Hv * Dk : Hv;
  }
  if (piece == 0)
    for (int t = real; t < T; ++t, op += Hv * Dv) op[0] = VT(0.0f);
  #pragma unroll
  for (int i = 0; i < N; ++i) *(device metal::vec<float, 4>*)(new_state + at + i * 4 * LANES) = s[i];
}

// The matrix-state recurrence on NVIDIA tensor cores: chunked.metal's maths in two kernels (sm_80 and later).
//
// tensor_core_prepare works on all chunks at once. For each chunk of C tokens and each value head it writes
//   T = (I + A)^-1 diag(b) and M, the products of decays P and Z, and k and q in the form in which they are multiplied.
// tensor_core walks the chunks:  W = T (V - (P * K) S),  O = (P * Q) S + M W,  S <- P_C * S + (Z * K)^T W.
// Its warps share nothing: each keeps 16 value rows of S (transposed: Dv x Dk) in registers and uses them directly as the
// left operand of the next product, so the state never leaves the registers of its warp.
//
// Exactness: an operand x is two bfloat16, high(x) and low(x) = x - high(x): 16 bits of mantissa at the price of a TF32
// product. bfloat16 keys and queries under a scalar decay are exact already and have no low part. Sums are float32, and T
// comes from forward substitution in float32.
//
// Layout   as recurrence.metal, and between the kernels, for each head and chunk:
//          solved [4, C, C]: T high, T low, M high, M low.   operands [PARTS, C, Dk], per key head with a scalar decay and
//          per value head with VECTOR: K high, Q high, K low, Q low, Z * K high, Z * K low; with VECTOR, K and Q are P * K
//          and P * Q.   decays: P and Z [2, C], or with VECTOR P_C [Dk].
// PARTS    0 for bfloat16 keys and a scalar decay (nothing is written), 4 for other keys, 6 with VECTOR.
// Segments both work on the `count` tokens from `start` on, a multiple of C: shape = (T, start, count). All inputs are of T
//          tokens, o of count. It bounds the memory between the kernels.
// Grid     tensor_core_prepare: blocks (N, Hv, B) of 128.   tensor_core: blocks (1, Dv / (16 WARPS), B * Hv) of 32 WARPS.
// Limits   Dk 32, 64, 96 or 128; Dv a multiple of 32; C 32 or 64 (32 with VECTOR).
// Padding  tokens from lengths[b] on change no state; their o is 0.
#include "tensor_core.h"

template <typename KT, typename VT, int Dk, int Dv, int Hk, int Hv, int C, int PARTS, int WARPS, bool VECTOR, bool DELTA>
__global__ void tensor_core(
    const KT* q, const KT* k, const VT* v, const float* beta, const float* state, const bf16* solved,
    const bf16* operands, const float* decays, const int* lengths, const int* shape, VT* o, float* new_state) {
  constexpr int ROW = Dk + PAD, SQUARE = C + PAD, NK = Dk / 16, ND = Dk / 8, M = C / 16, NT = 32 * WARPS;
  constexpr int ARRAYS = PARTS ? PARTS : 2, COLUMNS = 16 * WARPS, VROW = COLUMNS + 16 / sizeof(VT);
  constexpr int SCALES = VECTOR ? Dk : 2 * C;
  constexpr int BYTES = ARRAYS * C * ROW * 2 + 4 * C * SQUARE * 2 + C * VROW * sizeof(VT) + (SCALES + C) * 4;  // of one stage
  constexpr bool LOW = PARTS != 0;
  extern __shared__ __align__(16) unsigned char memory[];
  const int head = blockIdx.z, b = head / Hv, hv = head % Hv, hk = hv / (Hv / Hk);
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3;
  const int start = shape[1], count = shape[2], N = (count + C - 1) / C;
  const int real = metal::clamp(int(lengths[b]) - start, 0, count);
  const int column = blockIdx.y * COLUMNS;  // of the block; a warp owns 16 of them
  const size_t token = size_t(b) * shape[0] + start;
  const KT* kp = k + (token * Hk + hk) * Dk;
  const KT* qp = q + (token * Hk + hk) * Dk;
  const VT* vp = v + (token * Hv + hv) * Dv + column;
  const float* bp = beta + token * Hv + hv;
  VT* op = o + (size_t(b) * count * Hv + hv) * Dv + column;

  auto fetch = [&](int chunk) {
    unsigned char* base = memory + (chunk & 1) * BYTES;
    bf16* tiles = (bf16*)base;
    bf16* squares = tiles + ARRAYS * C * ROW;
    VT* values = (VT*)(squares + 4 * C * SQUARE);
    float* scales = (float*)(values + C * VROW);
    const int t0 = chunk * C;
    // A thread copies the same columns of every few rows: the offsets are then constants.
    constexpr int WIDE = Dk / 8, ROWS = NT / WIDE, SHORT = C / 8, SQUARES = NT / SHORT;
    const int row = tid / WIDE, d = tid % WIDE * 8;
    if (row < ROWS) {
      bf16* to = tiles + row * ROW + d;
      if (LOW) {
        const size_t place = VECTOR ? head : b * Hk + hk;
        const bf16* from = operands + ((place * N + chunk) * PARTS * C + row) * Dk + d;
        #pragma unroll
        for (int i = 0; i < PARTS * C; i += ROWS)
          if (row + i < PARTS * C) copy16(to + i * ROW, from + i * Dk, true);
      } else {
        const size_t at = size_t(t0 + row) * (Hk * Dk) + d;
        #pragma unroll
        for (int i = 0; i < C; i += ROWS) {
          if (row + i >= C) break;
          const bool valid = t0 + row + i < real;
          copy16(to + i * ROW, valid ? kp + at + i * (Hk * Dk) : kp, valid);
          copy16(to + (C + i) * ROW, valid ? qp + at + i * (Hk * Dk) : qp, valid);
        }
      }
    }
    const int line = tid / SHORT, column8 = tid % SHORT * 8;
    const bf16* from = solved + ((size_t(head) * N + chunk) * 4 * C + line) * C + column8;
    #pragma unroll
    for (int i = DELTA ? 0 : 2 * C; i < 4 * C; i += SQUARES)
      copy16(squares + (line + i) * SQUARE + column8, from + i * C, true);
    constexpr int PER = 16 / sizeof(VT);
    for (int e = tid * PER; e < C * COLUMNS; e += NT * PER) {
      const int i = e / COLUMNS, d = e % COLUMNS;
      const bool valid = t0 + i < real;
      copy16(values + i * VROW + d, vp + (valid ? size_t(t0 + i) * (Hv * Dv) + d : 0), valid);
    }
    for (int e = tid * 4; e < SCALES; e += NT * 4) copy16(scales + e, decays + (size_t(head) * N + chunk) * SCALES + e, true);
    if (!DELTA)
      for (int i = tid; i < C; i += NT) scales[SCALES + i] = t0 + i < real ? bp[size_t(t0 + i) * Hv] : 0.0f;
    asm volatile("cp.async.commit_group;" ::: "memory");
  };

  // S transposed: row = value column (g and g + 8 of this warp's 16), column = key channel.
  float S[ND][4];
  const size_t at = (size_t(head) * Dv + column + warp * 16 + g) * Dk + 2 * t;
  #pragma unroll
  for (int d = 0; d < ND; ++d)
    #pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float2 s = *(const float2*)(state + at + h * 8 * Dk + d * 8);
      S[d][2 * h] = s.x;
      S[d][2 * h + 1] = s.y;
    }

  const int chunks = (real + C - 1) / C;
  if (chunks) fetch(0);
  for (int chunk = 0; chunk < chunks; ++chunk) {
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();
    if (chunk + 1 < chunks) fetch(chunk + 1);
    unsigned char* base = memory + (chunk & 1) * BYTES;
    const bf16* tiles = (const bf16*)base;
    const bf16* squares = tiles + ARRAYS * C * ROW;
    VT* values = (VT*)(squares + 4 * C * SQUARE);
    const float* scales = (const float*)(values + C * VROW);
    const int t0 = chunk * C;
    // A lane's row and column in ldmatrix's four 8x8 blocks, plain and transposed.
    const int lr = (lane / 16) * 8 + lane % 8, lc = ((lane / 8) % 2) * 8;
    const int tr = ((lane / 8) % 2) * 8 + lane % 8, tc = (lane / 16) * 8;
    const bf16* own = tiles + lr * ROW + lc;

    float w[2 * M][4], out[2 * M][4];
    #pragma unroll
    for (int m = 0; m < 2 * M; ++m)
      #pragma unroll
      for (int c = 0; c < 4; ++c) w[m][c] = out[m][c] = 0.0f;
    #pragma unroll
    for (int d = 0; d < NK; ++d) {
      uint high[4], low[4], x[M][4], y[M][4];
      #pragma unroll
      for (int c = 0; c < 4; ++c) split(S[2 * d + (c >> 1)][(c & 1) * 2], S[2 * d + (c >> 1)][(c & 1) * 2 + 1], high[c], low[c]);
      #pragma unroll
      for (int m = 0; m < M; ++m) {
        if (DELTA) load4(x[m], own + m * 16 * ROW + d * 16);
        load4(y[m], own + (C + m * 16) * ROW + d * 16);
      }
      #pragma unroll
      for (int m = 0; m < M; ++m) {
        if (DELTA) products(w[2 * m], w[2 * m + 1], high, x[m]);
        products(out[2 * m], out[2 * m + 1], high, y[m]);
      }
      #pragma unroll
      for (int m = 0; m < M; ++m) {
        if (DELTA) products(w[2 * m], w[2 * m + 1], low, x[m]);
        products(out[2 * m], out[2 * m + 1], low, y[m]);
      }
      if (LOW) {
        #pragma unroll
        for (int m = 0; m < M; ++m) {
          if (DELTA) load4(x[m], own + (2 * C + m * 16) * ROW + d * 16);
          load4(y[m], own + (3 * C + m * 16) * ROW + d * 16);
          if (DELTA) products(w[2 * m], w[2 * m + 1], high, x[m]);
          products(out[2 * m], out[2 * m + 1], high, y[m]);
        }
      }
    }
    uint high[M][4], low[M][4];
    #pragma unroll
    for (int m = 0; m < 2 * M; ++m)
      #pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int i = m * 8 + 2 * t;
        const VT* value = values + i * VROW + warp * 16 + g + 8 * h;
        float2 p = {1, 1};
        if (!VECTOR) p = *(const float2*)(scales + i);
        out[m][2 * h] *= p.x;
        out[m][2 * h + 1] *= p.y;
        const float x = float(value[0]), y = float(value[VROW]);
        if (DELTA) {
          split(x - p.x * w[m][2 * h], y - p.y * w[m][2 * h + 1], high[m / 2][(m % 2) * 2 + h], low[m / 2][(m % 2) * 2 + h]);
          w[m][2 * h] = w[m][2 * h + 1] = 0.0f;
        } else {
          w[m][2 * h] = x * scales[SCALES + i];
          w[m][2 * h + 1] = y * scales[SCALES + i + 1];
        }
      }
    if (DELTA)
      #pragma unroll
      for (int m = 0; m < M; ++m)
        #pragma unroll
        for (int j = 0; j <= m; ++j) {
          uint x[4], y[4];
          load4(x, squares + (m * 16 + lr) * SQUARE + j * 16 + lc);
          load4(y, squares + (C + m * 16 + lr) * SQUARE + j * 16 + lc);
          products(w[2 * m], w[2 * m + 1], high[j], x);
          products(w[2 * m], w[2 * m + 1], low[j], x);
          products(w[2 * m], w[2 * m + 1], high[j], y);
        }
    #pragma unroll
    for (int m = 0; m < 2 * M; ++m)
      #pragma unroll
      for (int h = 0; h < 2; ++h)
        split(w[m][2 * h], w[m][2 * h + 1], high[m / 2][(m % 2) * 2 + h], low[m / 2][(m % 2) * 2 + h]);
    #pragma unroll
    for (int m = 0; m < M; ++m)
      #pragma unroll
      for (int j = 0; j <= m; ++j) {
        uint x[4], y[4];
        load4(x, squares + (2 * C + m * 16 + lr) * SQUARE + j * 16 + lc);
        load4(y, squares + (3 * C + m * 16 + lr) * SQUARE + j * 16 + lc);
        products(out[2 * m], out[2 * m + 1], high[j], x);
        products(out[2 * m], out[2 * m + 1], low[j], x);
        products(out[2 * m], out[2 * m + 1], high[j], y);
      }
    // This warp's outputs take the place of its values, and go out in rows of 16.
    __syncwarp();
    #pragma unroll
    for (int m = 0; m < 2 * M; ++m)
      #pragma unroll
      for (int c = 0; c < 4; ++c)
        values[(m * 8 + 2 * t + (c & 1)) * VROW + warp * 16 + g + 8 * (c >> 1)] = VT(out[m][c]);
    __syncwarp();
    constexpr int PER = 16 / sizeof(VT), LANES = 16 / PER;  // lanes that write one row
    #pragma unroll
    for (int i = lane / LANES; i < C; i += 32 / LANES)
      if (t0 + i < real) {
        const int d = warp * 16 + (lane % LANES) * PER;
        *(uint4*)(op + size_t(t0 + i) * (Hv * Dv) + d) = *(const uint4*)(values + i * VROW + d);
      }
    if (!VECTOR)
      #pragma unroll
      for (int m = 0; m < 2 * M; ++m)
        #pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float2 z = *(const float2*)(scales + C + m * 8 + 2 * t);
          split(z.x * w[m][2 * h], z.y * w[m][2 * h + 1], high[m / 2][(m % 2) * 2 + h], low[m / 2][(m % 2) * 2 + h]);
        }
    #pragma unroll
    for (int d = 0; d < ND; ++d) {
      float2 p;
      if (VECTOR) p = *(const float2*)(scales + d * 8 + 2 * t);
      else p.x = p.y = scales[C - 1];
      #pragma unroll
      for (int c = 0; c < 4; ++c) S[d][c] *= c & 1 ? p.y : p.x;
    }
    const bf16* last = tiles + (VECTOR ? 4 * C : 0) * ROW + tr * ROW + tc;
    #pragma unroll
    for (int j = 0; j < M; ++j)
      #pragma unroll
      for (int d = 0; d < NK; ++d) {
        uint x[4];
        load4_transposed(x, last + j * 16 * ROW + d * 16);
        products(S[2 * d], S[2 * d + 1], high[j], x);
        products(S[2 * d], S[2 * d + 1], low[j], x);
        if (LOW) {
          load4_transposed(x, last + ((VECTOR ? C : 2 * C) + j * 16) * ROW + d * 16);
          products(S[2 * d], S[2 * d + 1], high[j], x);
        }
      }
  }
  for (int i = real + warp; i < count; i += WARPS)
    for (int d = lane; d < COLUMNS; d += 32) op[size_t(i) * (Hv * Dv) + d] = VT(0.0f);
  #pragma unroll
  for (int d = 0; d < ND; ++d)
    #pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float2 s = {S[d][2 * h], S[d][2 * h + 1]};
      *(float2*)(new_state + at + h * 8 * Dk + d * 8) = s;
    }
}

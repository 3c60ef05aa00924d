// The matrix-state recurrence in chunks of C tokens, with 8x8 matrices (mlx_linattn/ops/chunked.py, where the maths is
// written out; it must equal mlx_linattn/ops/reference.py: recurrence):
//
//   A_ij = b_i <k_i, D_ij * k_j> (i > j)    M_ij = <q_i, D_ij * k_j> (i >= j)    D_ij = product of decays over j < l <= i
//   (I + A) W = b (V - (P * K) S)           O = (P * Q) S + M W                  S <- P_C * S + (Z * K)^T W
//
// Without DELTA, W = b V and there is no A. Every decay is a product of linear decays of at most C tokens: no logarithm,
// no division, exact for decays of 0. (I + A) is solved in blocks: the diagonal 8x8 blocks are inverted from 4x4 ones, the
// rest is forward substitution on the right-hand side. A longer Neumann series loses digits when keys repeat and b is near 2.
//
// Layout   as recurrence.metal.   TT: type of k and q in threadgroup memory, KT or float; float with VECTOR.
// Work     a threadgroup is 4 SIMD-groups; each owns 8 value columns and keeps its Dk x 8 of the state in registers.
// Grid     (128, Dv / 32, B * Hv), threadgroup (128, 1, 1).
// Limits   Dk and Dv multiples of 32, Dk at most 256; C = 8, 16 or 32; threadgroup memory at most 32 KB
//          (kernels.py: chunk_for); Hv a multiple of Hk.
// Padding  tokens from lengths[b] on change no state; their o is 0.
#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;

template <typename KT, typename VT, typename TT, int Dk, int Dv, int Hk, int Hv, int C, bool VECTOR, bool DELTA>
[[kernel]] void chunked(
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
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
    uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
    uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]]) {
  constexpr int NB = C / 8, ND = Dk / 8, NT = 128;
  constexpr int LANES = NT / C, PER = Dk / LANES;  // of a row of keys, where a row is worked on by LANES threads
  const int head = threadgroup_position_in_grid.z, b = head / Hv, hv = head % Hv, hk = hv / (Hv / Hk);
  const int tid = thread_index_in_threadgroup, lane = thread_index_in_simdgroup, sg = simdgroup_index_in_threadgroup;
  const int column = (threadgroup_position_in_grid.y * 4 + sg) * 8;
  const int T = shape[0], real = metal::min(int(lengths[b]), T);
  // The elements of an 8x8 matrix that this lane holds: row fm, columns fn and fn + 1.
  const int quad = lane / 4, fm = (quad & 4) + (lane / 2) % 4, fn = (quad & 2) * 2 + (lane % 2) * 2;

  threadgroup TT keys[C * Dk];                      // k; with VECTOR, later P * k (Z * k without DELTA)
  threadgroup TT queries[C * Dk];                   // q; with VECTOR, later P * q
  threadgroup float gates[VECTOR ? C * Dk : C];     // decays; with VECTOR and DELTA, later Z * k
  threadgroup float lower[DELTA ? C * C : 1];       // -A; then the inverses of I + A in the diagonal blocks
  threadgroup float attend[C * C];                  // M
  threadgroup float strength[C];
  threadgroup float before[C];                      // P of a scalar decay
  threadgroup float after[C];                       // Z of a scalar decay
  threadgroup float total[VECTOR ? Dk : 1];         // P_C of a vector decay

  const size_t token = size_t(b) * T;
  auto qp = q + (token * Hk + hk) * Dk;
  auto kp = k + (token * Hk + hk) * Dk;
  auto vp = v + (token * Hv + hv) * Dv + column;
  auto ap = decay + (token * Hv + hv) * (VECTOR ? Dk : 1);
  auto bp = beta + token * Hv + hv;
  device VT* op = o + (token * Hv + hv) * Dv + column;
  const size_t at = (size_t(head) * Dv + column) * Dk;

  simdgroup_matrix<float, 8, 8> S[ND];
  #pragma unroll
  for (int d = 0; d < ND; ++d) simdgroup_load(S[d], state + at + d * 8, Dk, ulong2(0, 0), true);

  for (int t0 = 0; t0 < real; t0 += C) {
    const int n = metal::min(real - t0, C);  // tokens of this chunk; the others are k = q = 0, decay 1, beta 0
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (tid < C) {
      strength[tid] = tid < n ? bp[tid * Hv] : 0.0f;
      if (!VECTOR) gates[tid] = tid < n ? ap[tid * Hv] : 1.0f;
    }
    for (int e = tid * 4; e < C * Dk; e += NT * 4) {
      const int i = e / Dk, d = e % Dk;
      metal::vec<KT, 4> key, query;
      if (i < n) {
        key = *(const device metal::vec<KT, 4>*)(kp + size_t(i) * (Hk * Dk) + d);
        query = *(const device metal::vec<KT, 4>*)(qp + size_t(i) * (Hk * Dk) + d);
      }
      #pragma unroll
      for (int c = 0; c < 4; ++c) {
        keys[e + c] = i < n ? TT(key[c]) : TT(0.0f);
        queries[e + c] = i < n ? TT(query[c]) : TT(0.0f);
        if (VECTOR) gates[e + c] = i < n ? ap[size_t(i) * (Hv * Dk) + d + c] : 1.0f;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    if (!VECTOR) {
      if (tid < C) {
        float p = 1.0f;
        for (int i = 0; i <= tid; ++i) p *= gates[i];
        before[tid] = p;
        p = 1.0f;
        for (int i = C - 1; i > tid; --i) p *= gates[i];
        after[tid] = p;
      }
      constexpr int BLOCKS = NB * (NB + 1) / 2;  // on and below the diagonal: of Q K^T, then of K K^T
      for (int job = sg; job < (DELTA ? 2 : 1) * BLOCKS; job += 4) {
        const bool own = job >= BLOCKS;
        int I = 0, J = own ? job - BLOCKS : job;
        while (J > I) {
          J -= I + 1;
          ++I;
        }
        simdgroup_matrix<float, 8, 8> dots = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        #pragma unroll
        for (int d = 0; d < ND; ++d) {
          simdgroup_matrix<TT, 8, 8> x, y;
          if (own) simdgroup_load(x, keys + I * 8 * Dk + d * 8, Dk);
          else simdgroup_load(x, queries + I * 8 * Dk + d * 8, Dk);
          simdgroup_load(y, keys + J * 8 * Dk + d * 8, Dk, ulong2(0, 0), true);
          simdgroup_multiply_accumulate(dots, x, y, dots);
        }
        const int i = I * 8 + fm;
        #pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int j = J * 8 + fn + c;
          float p = 1.0f;
          for (int l = j + 1; l <= i; ++l) p *= gates[l];
          const float w = p * dots.thread_elements()[c];
          if (!own) attend[i * C + j] = i >= j ? w : 0.0f;
          else if (DELTA) lower[i * C + j] = i > j ? -strength[i] * w : 0.0f;
        }
      }
    } else {
      // LANES threads walk from token j to the end of the chunk and carry D_ij * k_j.
      const int j = tid / LANES, l = tid % LANES;
      float carried[PER];
      #pragma unroll
      for (int c = 0; c < PER; ++c) carried[c] = float(keys[j * Dk + l + LANES * c]);
      for (int i = 0; i < C; ++i) {
        float a = 0.0f, m = 0.0f;
        if (i >= j) {
          #pragma unroll
          for (int c = 0; c < PER; ++c) {
            const int d = i * Dk + l + LANES * c;
            if (i > j) carried[c] *= gates[VECTOR ? d : 0];
            if (DELTA) a += carried[c] * float(keys[d]);
            m += carried[c] * float(queries[d]);
          }
        }
        #pragma unroll
        for (ushort s = 1; s < LANES; s <<= 1) {
          if (DELTA) a += simd_shuffle_xor(a, s);
          m += simd_shuffle_xor(m, s);
        }
        if (l == 0) {
          attend[i * C + j] = i >= j ? m : 0.0f;
          if (DELTA) lower[i * C + j] = i > j ? -strength[i] * a : 0.0f;
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (int d = tid; d < Dk; d += NT) {
        float p = 1.0f;
        for (int i = 0; i < C; ++i) {
          p *= gates[VECTOR ? i * Dk + d : 0];
          if (DELTA) keys[i * Dk + d] = TT(p * float(keys[i * Dk + d]));
          queries[i * Dk + d] = TT(p * float(queries[i * Dk + d]));
        }
        total[VECTOR ? d : 0] = p;
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      #pragma unroll
      for (int c = 0; c < PER; ++c) {
        const int e = j * Dk + l + LANES * c;
        if (DELTA) gates[VECTOR ? e : 0] = carried[c];
        else keys[e] = TT(carried[c]);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    if (DELTA) {
      for (int I = sg; I < NB; I += 4) {
        // With N = -A = E + F, E in the two diagonal 4x4 blocks: R = (I + E)(I + E^2) inverts I - E, and R + R F R I - N.
        simdgroup_matrix<float, 8, 8> N, F, square, inverse;
        simdgroup_load(N, lower + I * 8 * C + I * 8, C);
        #pragma unroll
        for (int c = 0; c < 2; ++c) {
          const bool near = fm / 4 == fn / 4;
          F.thread_elements()[c] = near ? 0.0f : N.thread_elements()[c];
          N.thread_elements()[c] = near ? N.thread_elements()[c] : 0.0f;
          inverse.thread_elements()[c] = N.thread_elements()[c] + (fm == fn + c ? 1.0f : 0.0f);
        }
        simdgroup_multiply(square, N, N);
        simdgroup_multiply_accumulate(inverse, inverse, square, inverse);
        simdgroup_multiply(F, F, inverse);
        simdgroup_multiply_accumulate(inverse, inverse, F, inverse);
        simdgroup_store(inverse, lower + I * 8 * C + I * 8, C);
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }

    simdgroup_matrix<float, 8, 8> W[NB], X, Y;
    #pragma unroll
    for (int I = 0; I < NB; ++I) {
      simdgroup_matrix<float, 8, 8> seen = make_filled_simdgroup_matrix<float, 8, 8>(0.0f), out = seen;
      #pragma unroll
      for (int d = 0; d < ND; ++d) {
        simdgroup_matrix<TT, 8, 8> x;
        if (DELTA) {
          simdgroup_load(x, keys + I * 8 * Dk + d * 8, Dk);
          simdgroup_multiply_accumulate(seen, x, S[d], seen);
        }
        simdgroup_load(x, queries + I * 8 * Dk + d * 8, Dk);
        simdgroup_multiply_accumulate(out, x, S[d], out);
      }
      const int i = I * 8 + fm;
      const float p = VECTOR ? 1.0f : before[i];
      const size_t row = size_t(i) * (Hv * Dv) + fn;
      #pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float value = i < n ? float(vp[row + c]) : 0.0f;
        X.thread_elements()[c] = strength[i] * (DELTA ? value - p * seen.thread_elements()[c] : value);
        out.thread_elements()[c] *= p;
      }
      if (DELTA) {
        #pragma unroll
        for (int J = 0; J < I; ++J) {
          simdgroup_load(Y, lower + I * 8 * C + J * 8, C);
          simdgroup_multiply_accumulate(X, Y, W[J], X);
        }
        simdgroup_load(Y, lower + I * 8 * C + I * 8, C);
        simdgroup_multiply(W[I], Y, X);
      } else {
        W[I] = X;
      }
      #pragma unroll
      for (int J = 0; J <= I; ++J) {
        simdgroup_load(Y, attend + I * 8 * C + J * 8, C);
        simdgroup_multiply_accumulate(out, Y, W[J], out);
      }
      if (i < n) {
        op[row] = VT(out.thread_elements()[0]);
        op[row + 1] = VT(out.thread_elements()[1]);
      }
    }
    if (!VECTOR)
      #pragma unroll
      for (int I = 0; I < NB; ++I) {
        W[I].thread_elements()[0] *= after[I * 8 + fm];
        W[I].thread_elements()[1] *= after[I * 8 + fm];
      }
    #pragma unroll
    for (int d = 0; d < ND; ++d) {
      const float p = VECTOR ? total[VECTOR ? d * 8 + fm : 0] : before[C - 1];
      S[d].thread_elements()[0] *= p;
      S[d].thread_elements()[1] *= p;
      #pragma unroll
      for (int I = 0; I < NB; ++I) {
        if (VECTOR && DELTA) {
          simdgroup_load(Y, gates + (VECTOR ? I * 8 * Dk + d * 8 : 0), Dk, ulong2(0, 0), true);
          simdgroup_multiply_accumulate(S[d], Y, W[I], S[d]);
        } else {
          simdgroup_matrix<TT, 8, 8> x;
          simdgroup_load(x, keys + I * 8 * Dk + d * 8, Dk, ulong2(0, 0), true);
          simdgroup_multiply_accumulate(S[d], x, W[I], S[d]);
        }
      }
    }
    qp += C * Hk * Dk;
    kp += C * Hk * Dk;
    vp += C * Hv * Dv;
    op += C * Hv * Dv;
    ap += C * Hv * (VECTOR ? Dk : 1);
    bp += C * Hv;
  }
  op = o + (token * Hv + hv) * Dv + column;
  for (int t = real + lane / 8; t < T; t += 4) op[size_t(t) * (Hv * Dv) + lane % 8] = VT(0.0f);
  #pragma unroll
  for (int d = 0; d < ND; ++d) simdgroup_store(S[d], new_state + at + d * 8, Dk, ulong2(0, 0), true);
}

// The first of the two kernels that tensor_core.cu describes: everything of a chunk that does not need the state.
#include "tensor_core.h"

template <typename KT, int Dk, int Hk, int Hv, int C, int PARTS, bool VECTOR, bool DELTA>
__global__ void tensor_core_prepare(
    const KT* q, const KT* k, const float* decay, const float* beta, const int* lengths, const int* shape,
    bf16* solved, bf16* operands, float* decays) {
  constexpr int ROW = Dk + PAD, NT = 128, TRIANGLE = C + 4;
  const int chunk = blockIdx.x, hv = blockIdx.y, b = blockIdx.z, hk = hv / (Hv / Hk), N = gridDim.x;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3;
  const int T = shape[0], t0 = shape[1] + chunk * C, n = metal::min(metal::min(int(lengths[b]), T) - t0, C);
  extern __shared__ __align__(16) unsigned char memory[];
  float* lower = (float*)memory;          // [C][TRIANGLE]: D, then A
  float* strength = lower + C * TRIANGLE;
  float* alpha = strength + C;
  bf16* tiles = (bf16*)(alpha + C);       // scalar decay: K high, Q high, K low, Q low [C][ROW]
  float* rows = (float*)tiles;            // vector decay: k, q, decay [C][Dk]
  const size_t token = size_t(b) * T + t0, place = (size_t(b) * Hv + hv) * N + chunk;
  const KT* kp = k + (token * Hk + hk) * Dk;
  const KT* qp = q + (token * Hk + hk) * Dk;
  bf16* out = solved + place * 4 * C * C;

  if (tid < C) {
    strength[tid] = tid < n ? beta[(token + tid) * Hv + hv] : 0.0f;
    if (!VECTOR) alpha[tid] = tid < n ? decay[(token + tid) * Hv + hv] : 1.0f;
  }
  for (int e = tid * 4; e < C * Dk; e += NT * 4) {
    const int i = e / Dk, d = e % Dk;
    float x[4] = {0, 0, 0, 0}, y[4] = {0, 0, 0, 0};
    if (i < n) {
      const metal::vec<KT, 4> key = *(const metal::vec<KT, 4>*)(kp + size_t(i) * (Hk * Dk) + d);
      const metal::vec<KT, 4> query = *(const metal::vec<KT, 4>*)(qp + size_t(i) * (Hk * Dk) + d);
      #pragma unroll
      for (int c = 0; c < 4; ++c) {
        x[c] = float(key[c]);
        y[c] = float(query[c]);
      }
    }
    if (VECTOR) {
      const float4 one = {1, 1, 1, 1};
      *(float4*)(rows + e) = *(float4*)x;
      *(float4*)(rows + C * Dk + e) = *(float4*)y;
      *(float4*)(rows + 2 * C * Dk + e) = i < n ? *(const float4*)(decay + ((token + i) * Hv + hv) * Dk + d) : one;
    } else {
      uint2 high, low;
      split(x[0], x[1], high.x, low.x);
      split(x[2], x[3], high.y, low.y);
      *(uint2*)(tiles + i * ROW + d) = high;
      if (PARTS) *(uint2*)(tiles + (2 * C + i) * ROW + d) = low;
      split(y[0], y[1], high.x, low.x);
      split(y[2], y[3], high.y, low.y);
      *(uint2*)(tiles + (C + i) * ROW + d) = high;
      if (PARTS) *(uint2*)(tiles + (3 * C + i) * ROW + d) = low;
    }
  }
  __syncthreads();

  if (!VECTOR) {
    if (tid < C) {  // D_ij, down the column j of this thread
      float p = 1.0f;
      for (int i = 0; i < C; ++i) {
        if (i > tid) p *= alpha[i];
        lower[i * TRIANGLE + tid] = i >= tid ? p : 0.0f;
      }
      decays[(place * 2 + 1) * C + tid] = p;  // Z: the decays after each token
    } else if (tid == C) {
      float p = 1.0f;
      for (int i = 0; i < C; ++i) {
        p *= alpha[i];
        decays[place * 2 * C + i] = p;
      }
    }
    if (PARTS && hv % (Hv / Hk) == 0) {
      bf16* to = operands + ((size_t(b) * Hk + hk) * N + chunk) * PARTS * C * Dk;
      for (int e = tid * 8; e < PARTS * C * Dk; e += NT * 8)
        *(uint4*)(to + e) = *(const uint4*)(tiles + e / Dk * ROW + e % Dk);
    }
    __syncthreads();
    // Q K^T first, since K K^T takes the place of D. A job is 16 rows.
    constexpr int JOBS = C / 16;
    float dots[(JOBS + 3) / 4][C / 8][4];
    #pragma unroll
    for (int kind = 1; kind >= (DELTA ? 0 : 1); --kind) {
      #pragma unroll
      for (int part = 0; part < (JOBS + 3) / 4; ++part) {
        const int job = part * 4 + warp;
        if (job >= JOBS) break;
        const bf16* left = tiles + (kind * C + job * 16 + lane % 16) * ROW + (lane / 16) * 8;
        const bf16* right = tiles + ((lane / 16) * 8 + lane % 8) * ROW + ((lane / 8) % 2) * 8;
        #pragma unroll
        for (int m = 0; m < C / 8; ++m)
          #pragma unroll
          for (int c = 0; c < 4; ++c) dots[part][m][c] = 0.0f;
        #pragma unroll
        for (int d = 0; d < Dk; d += 16) {
          uint x[4], y[4], w[4], z[4];
          load4(x, left + d);
          if (PARTS) load4(y, left + 2 * C * ROW + d);
          #pragma unroll
          for (int m = 0; m < C / 16; ++m) {
            load4(w, right + m * 16 * ROW + d);
            products(dots[part][2 * m], dots[part][2 * m + 1], x, w);
            if (PARTS) {
              load4(z, right + (2 * C + m * 16) * ROW + d);
              products(dots[part][2 * m], dots[part][2 * m + 1], y, w);
              products(dots[part][2 * m], dots[part][2 * m + 1], x, z);
            }
          }
        }
        #pragma unroll
        for (int m = 0; m < C / 8; ++m)
          #pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int i = job * 16 + g + 8 * h, j = m * 8 + 2 * t;
            float* p = lower + i * TRIANGLE + j;
            if (kind) {
              uint high, low;
              split(p[0] * dots[part][m][2 * h], p[1] * dots[part][m][2 * h + 1], high, low);
              *(uint*)(out + 2 * C * C + i * C + j) = high;
              *(uint*)(out + 3 * C * C + i * C + j) = low;
            } else {
              p[0] *= strength[i] * dots[part][m][2 * h];
              p[1] *= strength[i] * dots[part][m][2 * h + 1];
            }
          }
      }
    }
  } else {
    // LANES threads walk from token j to the end of the chunk and carry D_ij * k_j.
    constexpr int LANES = NT / C, PER = Dk / LANES;
    const int j = tid / LANES, l = tid % LANES;
    float carried[PER];
    bf16* to = operands + place * PARTS * C * Dk;
    #pragma unroll
    for (int c = 0; c < PER; c += 4) *(float4*)&carried[c] = *(const float4*)(rows + j * Dk + c * LANES + l * 4);
    for (int i = 0; i < C; ++i) {
      float a[4] = {0, 0, 0, 0}, m[4] = {0, 0, 0, 0};
      if (i >= j)
        #pragma unroll
        for (int c = 0; c < PER; c += 4) {
          const int e = i * Dk + c * LANES + l * 4;
          float x[4], y[4], p[4];
          *(float4*)x = *(const float4*)(rows + e);
          *(float4*)y = *(const float4*)(rows + C * Dk + e);
          *(float4*)p = *(const float4*)(rows + 2 * C * Dk + e);
          #pragma unroll
          for (int f = 0; f < 4; ++f) {
            if (i > j) carried[c + f] *= p[f];
            if (DELTA) a[f] += carried[c + f] * x[f];
            m[f] += carried[c + f] * y[f];
          }
        }
      float dot = (a[0] + a[1]) + (a[2] + a[3]), seen = (m[0] + m[1]) + (m[2] + m[3]);
      #pragma unroll
      for (int s = 1; s < LANES; s <<= 1) {
        if (DELTA) dot += __shfl_xor_sync(~0u, dot, s);
        seen += __shfl_xor_sync(~0u, seen, s);
      }
      if (l == 0) {
        if (DELTA) lower[i * TRIANGLE + j] = i > j ? strength[i] * dot : 0.0f;
        const bf16 high = __float2bfloat16_rn(seen);
        out[2 * C * C + i * C + j] = high;
        out[3 * C * C + i * C + j] = __float2bfloat16_rn(seen - __bfloat162float(high));
      }
    }
    #pragma unroll
    for (int c = 0; c < PER; c += 4) {
      uint2 high, low;
      split(carried[c], carried[c + 1], high.x, low.x);
      split(carried[c + 2], carried[c + 3], high.y, low.y);
      *(uint2*)(to + (4 * C + j) * Dk + c * LANES + l * 4) = high;
      *(uint2*)(to + (5 * C + j) * Dk + c * LANES + l * 4) = low;
    }
    for (int d = (NT - 1 - tid) * 2; d < Dk; d += NT * 2) {  // by the warps that had the shortest walk
      float2 p = {1, 1};
      for (int i = 0; i < C; ++i) {
        const float2 a = *(const float2*)(rows + (2 * C + i) * Dk + d);
        const float2 x = *(const float2*)(rows + i * Dk + d), y = *(const float2*)(rows + (C + i) * Dk + d);
        p.x *= a.x;
        p.y *= a.y;
        uint high, low;
        split(p.x * x.x, p.y * x.y, high, low);
        *(uint*)(to + i * Dk + d) = high;
        *(uint*)(to + (2 * C + i) * Dk + d) = low;
        split(p.x * y.x, p.y * y.y, high, low);
        *(uint*)(to + (C + i) * Dk + d) = high;
        *(uint*)(to + (3 * C + i) * Dk + d) = low;
      }
      *(float2*)(decays + place * Dk + d) = p;
    }
  }
  if (!DELTA) return;
  __syncthreads();
  if (tid < C) {  // forward substitution of one column of the identity
    float x[C];
    const float s = strength[tid];
    #pragma unroll
    for (int i = 0; i < C; ++i) {
      float sum[4] = {i == tid ? 1.0f : 0.0f, 0.0f, 0.0f, 0.0f};
      #pragma unroll
      for (int j = 0; j < i; j += 4) {
        const float4 a = *(const float4*)(lower + i * TRIANGLE + j);
        sum[0] -= a.x * x[j];
        if (j + 1 < i) sum[1] -= a.y * x[j + 1];
        if (j + 2 < i) sum[2] -= a.z * x[j + 2];
        if (j + 3 < i) sum[3] -= a.w * x[j + 3];
      }
      x[i] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
      const float value = s * x[i];
      const bf16 high = __float2bfloat16_rn(value);
      out[i * C + tid] = high;
      out[C * C + i * C + tid] = __float2bfloat16_rn(value - __bfloat162float(high));
    }
  }
}

// The Metal words that the kernel bodies use, as CUDA: the same text then runs through mx.fast.cuda_kernel.
// Included before a body that the loader stripped of address-space words. A SIMD-group is a warp.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#ifdef __CUDACC_RTC__
typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned long ulong;
#endif
typedef unsigned char uchar;
typedef __half half;
typedef __nv_bfloat16 bfloat;
typedef __nv_bfloat16 bfloat16_t;
typedef __half float16_t;
#define METAL_FUNC static __device__ __forceinline__
#define METAL_LANE ((threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) & 31)
namespace metal {
struct mem_flags { enum E { mem_none, mem_device, mem_threadgroup }; };
METAL_FUNC void threadgroup_barrier(mem_flags::E) { __syncthreads(); }
METAL_FUNC void simdgroup_barrier(mem_flags::E) { __syncwarp(); }
template <class T> METAL_FUNC T simd_shuffle(T v, ushort l) { return __shfl_sync(~0u, v, l); }
template <class T> METAL_FUNC T simd_broadcast(T v, ushort l) { return __shfl_sync(~0u, v, l); }
template <class T> METAL_FUNC T simd_shuffle_xor(T v, ushort m) { return __shfl_xor_sync(~0u, v, m); }
template <class T> METAL_FUNC T simd_shuffle_down(T v, ushort d) { return __shfl_down_sync(~0u, v, d); }
template <class T> METAL_FUNC T simd_shuffle_up(T v, ushort d) { return __shfl_up_sync(~0u, v, d); }
template <class T> METAL_FUNC T simd_sum(T v) {
  for (int m = 1; m < 32; m <<= 1) v += __shfl_xor_sync(~0u, v, m);
  return v;
}
template <class T> METAL_FUNC T simd_max(T v) {
  for (int m = 1; m < 32; m <<= 1) {
    const T o = __shfl_xor_sync(~0u, v, m);
    v = o > v ? o : v;
  }
  return v;
}
template <class T> METAL_FUNC T simd_min(T v) {
  for (int m = 1; m < 32; m <<= 1) {
    const T o = __shfl_xor_sync(~0u, v, m);
    v = o < v ? o : v;
  }
  return v;
}
template <class T> METAL_FUNC T simd_prefix_inclusive_sum(T v) {
  for (uint d = 1; d < 32; d <<= 1) {
    const T o = __shfl_up_sync(~0u, v, d);
    if (METAL_LANE >= d) v += o;
  }
  return v;
}
template <class T> METAL_FUNC T simd_prefix_inclusive_product(T v) {
  for (uint d = 1; d < 32; d <<= 1) {
    const T o = __shfl_up_sync(~0u, v, d);
    if (METAL_LANE >= d) v *= o;
  }
  return v;
}
#define METAL_F1(n, e) METAL_FUNC float n(float x) { return e; }
#define METAL_MATHS METAL_F1(exp, ::expf(x)) METAL_F1(exp2, ::exp2f(x)) METAL_F1(log, ::logf(x)) METAL_F1(log2, ::log2f(x)) \
  METAL_F1(sqrt, ::sqrtf(x)) METAL_F1(rsqrt, ::rsqrtf(x)) METAL_F1(tanh, ::tanhf(x))
METAL_MATHS METAL_F1(abs, ::fabsf(x)) METAL_F1(fabs, ::fabsf(x)) METAL_F1(floor, ::floorf(x))
namespace fast { METAL_F1(exp, __expf(x)) METAL_F1(exp2, ::exp2f(x)) METAL_F1(log, __logf(x)) METAL_F1(rsqrt, ::rsqrtf(x)) }
namespace precise { METAL_MATHS }
template <class T> METAL_FUNC T max(T a, T b) { return a > b ? a : b; }
template <class T> METAL_FUNC T min(T a, T b) { return a < b ? a : b; }
template <class T> METAL_FUNC T clamp(T x, T a, T b) { return min(max(x, a), b); }
template <class T> METAL_FUNC T select(T a, T b, bool c) { return c ? b : a; }
METAL_FUNC float fma(float a, float b, float c) { return fmaf(a, b, c); }
METAL_FUNC float pow(float a, float b) { return powf(a, b); }
template <class T, int N> struct alignas(sizeof(T) * N) vec {
  T v[N];
  __device__ T& operator[](int i) { return v[i]; }
  __device__ const T& operator[](int i) const { return v[i]; }
};
struct ulong_pair {
  ulong x, y;
  __device__ ulong_pair(ulong a, ulong b) : x(a), y(b) {}
};
// Lane l holds (fm, fn) and (fm, fn + 1) of an 8x8 matrix, as on Apple GPUs.
template <class T, int C, int R> struct simdgroup_matrix {
  vec<T, 2> e;
  __device__ vec<T, 2>& thread_elements() { return e; }
  METAL_FUNC void coord(int& m, int& n) {
    const int l = METAL_LANE, q = l / 4;
    m = (q & 4) + (l / 2) % 4;
    n = (q & 2) * 2 + (l % 2) * 2;
  }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
METAL_FUNC int matrix_lane(int m, int n) { return ((n >> 1) & 1) | ((m & 3) << 1) | (((n >> 2) & 1) << 3) | (((m >> 2) & 1) << 4); }
template <class T, int C, int R = C> METAL_FUNC simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T v) {
  simdgroup_matrix<T, C, R> m;
  m.e[0] = m.e[1] = v;
  return m;
}
template <class T, class P>
METAL_FUNC void simdgroup_load(simdgroup_matrix<T, 8, 8>& d, const P* s, ulong ld = 8, ulong_pair o = ulong_pair(0, 0), bool tr = false) {
  int m, n;
  d.coord(m, n);
  s += o.y * ld + o.x;
  d.e[0] = T(float(tr ? s[n * ld + m] : s[m * ld + n]));
  d.e[1] = T(float(tr ? s[(n + 1) * ld + m] : s[m * ld + n + 1]));
}
template <class T, class P>
METAL_FUNC void simdgroup_store(simdgroup_matrix<T, 8, 8> d, P* s, ulong ld = 8, ulong_pair o = ulong_pair(0, 0), bool tr = false) {
  int m, n;
  d.coord(m, n);
  s += o.y * ld + o.x;
  (tr ? s[n * ld + m] : s[m * ld + n]) = P(float(d.e[0]));
  (tr ? s[(n + 1) * ld + m] : s[m * ld + n + 1]) = P(float(d.e[1]));
}
template <class D, class A, class B, class C>
METAL_FUNC void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a, simdgroup_matrix<B, 8, 8> b, simdgroup_matrix<C, 8, 8> c) {
  int m, n;
  d.coord(m, n);
  float x = float(c.e[0]), y = float(c.e[1]);
  const float a0 = float(a.e[0]), a1 = float(a.e[1]), b0 = float(b.e[0]), b1 = float(b.e[1]);
#pragma unroll
  for (int k = 0; k < 8; k++) {
    const float w = __shfl_sync(~0u, (k & 1) ? a1 : a0, matrix_lane(m, k));
    const int from = matrix_lane(k, n);
    x += w * __shfl_sync(~0u, b0, from);
    y += w * __shfl_sync(~0u, b1, from);
  }
  d.e[0] = D(x);
  d.e[1] = D(y);
}
template <class D, class A, class B>
METAL_FUNC void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a, simdgroup_matrix<B, 8, 8> b) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<float, 8>(0.0f));
}
}  // namespace metal
using namespace metal;
#define ulong2 ulong_pair
#define METAL_POSITIONS \
  const uint3 thread_position_in_threadgroup = threadIdx, threadgroup_position_in_grid = blockIdx; \
  const dim3 threads_per_threadgroup = blockDim, threadgroups_per_grid = gridDim; \
  const uint3 thread_position_in_grid = make_uint3(blockIdx.x * blockDim.x + threadIdx.x, blockIdx.y * blockDim.y + threadIdx.y, blockIdx.z * blockDim.z + threadIdx.z); \
  const uint thread_index_in_threadgroup = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z), thread_index_in_simdgroup = thread_index_in_threadgroup & 31, \
  simdgroup_index_in_threadgroup = thread_index_in_threadgroup >> 5, simdgroups_per_threadgroup = (blockDim.x * blockDim.y * blockDim.z + 31) / 32, threads_per_simdgroup = 32;

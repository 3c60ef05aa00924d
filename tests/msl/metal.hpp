// The part of the Metal Shading Language that the kernels use, for g++ and clang++ (MSL specification, sections 2, 4 and 6).
#pragma once
#include <cmath>
#include <type_traits>

#include "runtime.hpp"

// ---- scalars
typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned char uchar;
typedef unsigned long ulong;
#if defined(__aarch64__) && !defined(__clang__)
typedef __fp16 half;
#else
typedef _Float16 half;
#endif

#ifdef MSL_LINT
typedef __bf16 bfloat;
#else
struct bfloat {
  uint16_t b;
  bfloat() = default;
  template <class U, class = std::enable_if_t<std::is_arithmetic_v<U> || std::is_same_v<U, half>>>
  explicit bfloat(U v) { *this = rounded(float(v)); }  // MSL has no implicit float -> bfloat
  static bfloat rounded(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    bfloat r;
    if ((u & 0x7fffffffu) > 0x7f800000u) r.b = uint16_t((u >> 16) | 0x40);
    else r.b = uint16_t((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
    return r;
  }
  operator float() const {
    const uint32_t u = uint32_t(b) << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
  }
  bfloat& operator+=(bfloat o) { return *this = rounded(float(*this) + float(o)); }
  bfloat& operator*=(bfloat o) { return *this = rounded(float(*this) * float(o)); }
};
inline bfloat operator+(bfloat a, bfloat c) { return bfloat::rounded(float(a) + float(c)); }
inline bfloat operator-(bfloat a, bfloat c) { return bfloat::rounded(float(a) - float(c)); }
inline bfloat operator*(bfloat a, bfloat c) { return bfloat::rounded(float(a) * float(c)); }
inline bfloat operator/(bfloat a, bfloat c) { return bfloat::rounded(float(a) / float(c)); }
inline bfloat operator-(bfloat a) { return bfloat::rounded(-float(a)); }
#endif
typedef bfloat bfloat16_t;
typedef half float16_t;

// ---- vectors
namespace metal {
#ifdef MSL_LINT  // clang's vectors, since a class cannot be assigned to in another address space
template <class T, int N> using vec = T __attribute__((ext_vector_type(N)));
#else
template <class T, int N> struct vec;
#define MSL_INDEX T& operator[](int i) { return v[i]; } const T& operator[](int i) const { return v[i]; }
template <class T> struct alignas(2 * sizeof(T)) vec<T, 2> {
  union { struct { T x, y; }; T v[2]; };
  vec() = default;
  vec(T s) : x(s), y(s) {}
  vec(T a, T c) : x(a), y(c) {}
  template <class U> explicit vec(const vec<U, 2>& o) : x(T(o.x)), y(T(o.y)) {}
  MSL_INDEX
};
template <class T> struct vec<T, 3> {
  union { struct { T x, y, z; }; T v[3]; };
  vec() = default;
  vec(T s) : x(s), y(s), z(s) {}
  vec(T a, T c, T d) : x(a), y(c), z(d) {}
  MSL_INDEX
};
template <class T> struct alignas(4 * sizeof(T)) vec<T, 4> {
  union { struct { T x, y, z, w; }; T v[4]; };
  vec() = default;
  vec(T s) : x(s), y(s), z(s), w(s) {}
  vec(T a, T c, T d, T e) : x(a), y(c), z(d), w(e) {}
  template <class U> explicit vec(const vec<U, 4>& o) : x(T(o.x)), y(T(o.y)), z(T(o.z)), w(T(o.w)) {}
  MSL_INDEX
};
#define MSL_OPERATOR(OP)                                                                                          \
  template <class T, int N> inline vec<T, N> operator OP(vec<T, N> a, const vec<T, N>& b) {                       \
    for (int i = 0; i < N; i++) a[i] = a[i] OP b[i];                                                              \
    return a;                                                                                                     \
  }                                                                                                               \
  template <class T, int N, class S, class = std::enable_if_t<std::is_convertible_v<S, T>>>                       \
  inline vec<T, N> operator OP(vec<T, N> a, S b) {                                                                \
    for (int i = 0; i < N; i++) a[i] = a[i] OP T(b);                                                              \
    return a;                                                                                                     \
  }                                                                                                               \
  template <class T, int N, class S, class = std::enable_if_t<std::is_convertible_v<S, T>>>                       \
  inline vec<T, N> operator OP(S b, vec<T, N> a) {                                                                \
    for (int i = 0; i < N; i++) a[i] = T(b) OP a[i];                                                              \
    return a;                                                                                                     \
  }                                                                                                               \
  template <class T, int N, class B> inline vec<T, N>& operator OP##=(vec<T, N>& a, const B& b) { return a = a OP b; }
MSL_OPERATOR(+) MSL_OPERATOR(-) MSL_OPERATOR(*) MSL_OPERATOR(/)
template <class T, int N> inline T dot(const vec<T, N>& a, const vec<T, N>& b) {
  T s = a[0] * b[0];
  for (int i = 1; i < N; i++) s += a[i] * b[i];
  return s;
}
#endif
}  // namespace metal
#define MSL_VECTORS(T) typedef metal::vec<T, 2> T##2; typedef metal::vec<T, 3> T##3; typedef metal::vec<T, 4> T##4;
MSL_VECTORS(float) MSL_VECTORS(half) MSL_VECTORS(int) MSL_VECTORS(uint) MSL_VECTORS(short) MSL_VECTORS(ushort)
MSL_VECTORS(bfloat)
#ifdef MSL_LINT
struct ulong2 { ulong x, y; ulong2(ulong a) : x(a), y(a) {} ulong2(ulong a, ulong b) : x(a), y(b) {} };
#else
MSL_VECTORS(ulong)
inline uint3 msl_uint3(msl_rt::Size3 s) { return uint3(s.x, s.y, s.z); }
#endif

// ---- barriers and SIMD-groups. Each call carries its source line, by which divergent calls are told apart.
#define METAL_FUNC inline __attribute__((always_inline))
#define MSL_LINE int line = __builtin_LINE()
namespace metal {
enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
inline mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }
inline void threadgroup_barrier(mem_flags, MSL_LINE) {
  auto& w = *msl_rt::W;
  msl_rt::rendezvous(w.threadgroup, 0, 1, line, [&](int) {
    if (w.threadgroup.alive != w.count) msl_rt::die("divergent barrier: some threads ended without it", line);
  });
}
inline void simdgroup_barrier(mem_flags, MSL_LINE) {
  auto& f = msl_rt::me();
  msl_rt::rendezvous(*f.simdgroup, f.lane, 2, line, [](int) {});
}

template <class T> inline T msl_poison() { T t; memset(&t, 0xff, sizeof t); return t; }
// Every living lane brings v; `read(lane, get)` computes this lane's result, where get(l, out) says whether lane l took part.
template <class T, class F> inline auto msl_exchange(T v, int op, int line, F&& read) {
  using namespace msl_rt;
  static_assert(sizeof(T) <= 32, "");
  auto& f = me();
  Group& g = *f.simdgroup;
  memcpy(g.slot[g.generation & 1][f.lane], &v, sizeof(T));
  const int p = rendezvous(g, f.lane, op, line, [](int) {});
  auto get = [&](int l, T& o) {
    if (l < 0 || l > 31 || !(g.mask[p] >> l & 1)) return false;
    memcpy(&o, g.slot[p][l], sizeof(T));
    return true;
  };
  return read(f.lane, get);
}
// A shuffle from a lane that is off the end or ended returns poison, so that using it is seen.
#define MSL_SHUFFLE(NAME, OP, FROM)                                                                       \
  template <class T> inline T NAME(T v, ushort n, MSL_LINE) {                                             \
    return msl_exchange(v, OP, line, [&](int lane, auto get) { (void)lane; T o; return get(FROM, o) ? o : msl_poison<T>(); }); \
  }
MSL_SHUFFLE(simd_shuffle, 3, n) MSL_SHUFFLE(simd_shuffle_xor, 4, lane ^ n) MSL_SHUFFLE(simd_shuffle_down, 5, lane + n)
MSL_SHUFFLE(simd_shuffle_up, 6, lane - n) MSL_SHUFFLE(simd_broadcast, 7, n)
template <class T> inline T simd_broadcast_first(T v, MSL_LINE) {
  return msl_exchange(v, 8, line, [&](int, auto get) { T o; for (int l = 0; l < 32; l++) if (get(l, o)) break; return o; });
}
template <class T, class F> inline T msl_reduce(T v, T identity, int op, int line, F&& f) {
  return msl_exchange(v, op, line, [&](int, auto get) {
    T a[32];
    for (int l = 0; l < 32; l++) { T o; a[l] = get(l, o) ? o : identity; }
    for (int s = 1; s < 32; s <<= 1) { T b[32]; for (int l = 0; l < 32; l++) b[l] = f(a[l], a[l ^ s]); memcpy(a, b, sizeof a); }
    return a[0];
  });
}
template <class T> inline T simd_sum(T v, MSL_LINE) { return msl_reduce(v, T(0), 9, line, [](T a, T b) { return T(a + b); }); }
template <class T> inline T simd_product(T v, MSL_LINE) { return msl_reduce(v, T(1), 10, line, [](T a, T b) { return T(a * b); }); }
template <class T> inline T simd_max(T v, MSL_LINE) { return msl_reduce(v, v, 11, line, [](T a, T b) { return a > b ? a : b; }); }
template <class T> inline T simd_min(T v, MSL_LINE) { return msl_reduce(v, v, 12, line, [](T a, T b) { return a < b ? a : b; }); }
template <class T> inline T simd_prefix_inclusive_sum(T v, MSL_LINE) {
  return msl_exchange(v, 13, line, [&](int lane, auto get) { T s(0), o; for (int l = 0; l <= lane; l++) if (get(l, o)) s = T(s + o); return s; });
}
template <class T> inline T simd_prefix_exclusive_sum(T v, MSL_LINE) {
  return msl_exchange(v, 14, line, [&](int lane, auto get) { T s(0), o; for (int l = 0; l < lane; l++) if (get(l, o)) s = T(s + o); return s; });
}
template <class T> inline T simd_prefix_inclusive_product(T v, MSL_LINE) {
  return msl_exchange(v, 18, line, [&](int lane, auto get) { T s(1), o; for (int l = 0; l <= lane; l++) if (get(l, o)) s = T(s * o); return s; });
}
inline bool simd_any(bool v, MSL_LINE) { return msl_exchange(v, 15, line, [&](int, auto get) { bool o; for (int l = 0; l < 32; l++) if (get(l, o) && o) return true; return false; }); }
inline bool simd_all(bool v, MSL_LINE) { return msl_exchange(v, 16, line, [&](int, auto get) { bool o; for (int l = 0; l < 32; l++) if (get(l, o) && !o) return false; return true; }); }

// ---- 8x8 matrices. Lane l holds row fm, columns fn and fn + 1: the map that MLX's own kernels rely on.
template <class T, int C, int R> struct simdgroup_matrix {
  static_assert(C == 8 && R == 8, "8x8 only");
  vec<T, 2> e;
  simdgroup_matrix() { e = vec<T, 2>(msl_poison<T>()); }
  explicit simdgroup_matrix(T d) { int m, n; coord(msl_rt::me().lane, m, n); e.x = m == n ? d : T(0); e.y = m == n + 1 ? d : T(0); }
  vec<T, 2>& thread_elements() { return e; }
  static void coord(int l, int& fm, int& fn) { const int q = l / 4; fm = (q & 4) + (l / 2) % 4; fn = (q & 2) * 2 + (l % 2) * 2; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
template <class T, int C, int R = C> inline simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T v) {
  simdgroup_matrix<T, C, R> m;
  m.e = vec<T, 2>(v);
  return m;
}
template <class T, class P> inline void simdgroup_load(simdgroup_matrix<T, 8, 8>& d, const P* s, ulong ld = 8, ulong2 o = ulong2(0), bool tr = false) {
  int m, n;
  d.coord(msl_rt::me().lane, m, n);
  s += o.y * ld + o.x;
  d.e.x = T(tr ? s[n * ld + m] : s[m * ld + n]);
  d.e.y = T(tr ? s[(n + 1) * ld + m] : s[m * ld + n + 1]);
}
template <class T, class P> inline void simdgroup_store(simdgroup_matrix<T, 8, 8> d, P* s, ulong ld = 8, ulong2 o = ulong2(0), bool tr = false) {
  int m, n;
  d.coord(msl_rt::me().lane, m, n);
  s += o.y * ld + o.x;
  (tr ? s[n * ld + m] : s[m * ld + n]) = P(d.e.x);
  (tr ? s[(n + 1) * ld + m] : s[m * ld + n + 1]) = P(d.e.y);
}
template <class D, class A, class B, class C>
inline void msl_product(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a, const simdgroup_matrix<B, 8, 8>& b, const simdgroup_matrix<C, 8, 8>* c, int line) {
  using namespace msl_rt;
  auto& f = me();
  Group& g = *f.simdgroup;
  const float in[6] = {float(a.e.x), float(a.e.y), float(b.e.x), float(b.e.y), c ? float(c->e.x) : 0.f, c ? float(c->e.y) : 0.f};
  memcpy(g.slot[g.generation & 1][f.lane], in, sizeof in);
  const int p = rendezvous(g, f.lane, 17, line, [&](int p) {
    if (g.mask[p] != 0xffffffffu) die("simdgroup_matrix operation with inactive lanes", line);
    float x[8][8], y[8][8], (&r)[64] = g.product[p];
    for (int l = 0; l < 32; l++) {
      const float* s = (const float*)g.slot[p][l];
      int m, n;
      d.coord(l, m, n);
      x[m][n] = s[0], x[m][n + 1] = s[1], y[m][n] = s[2], y[m][n + 1] = s[3], r[m * 8 + n] = s[4], r[m * 8 + n + 1] = s[5];
    }
    for (int m = 0; m < 8; m++)
      for (int k = 0; k < 8; k++)
        for (int n = 0; n < 8; n++) r[m * 8 + n] += x[m][k] * y[k][n];
  });
  int m, n;
  d.coord(f.lane, m, n);
  d.e.x = D(g.product[p][m * 8 + n]);
  d.e.y = D(g.product[p][m * 8 + n + 1]);
}
template <class D, class A, class B, class C> inline void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a, const simdgroup_matrix<B, 8, 8>& b, const simdgroup_matrix<C, 8, 8>& c, MSL_LINE) { msl_product(d, a, b, &c, line); }
template <class D, class A, class B> inline void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a, const simdgroup_matrix<B, 8, 8>& b, MSL_LINE) { msl_product(d, a, b, (const simdgroup_matrix<D, 8, 8>*)nullptr, line); }

// ---- maths
#define MSL_F1(n, e) inline float n(float x) { return e; }
#define MSL_MATHS MSL_F1(exp, ::expf(x)) MSL_F1(exp2, ::exp2f(x)) MSL_F1(log, ::logf(x)) MSL_F1(log2, ::log2f(x)) MSL_F1(sqrt, ::sqrtf(x)) MSL_F1(rsqrt, 1.0f / ::sqrtf(x)) MSL_F1(tanh, ::tanhf(x)) MSL_F1(sin, ::sinf(x)) MSL_F1(cos, ::cosf(x))
MSL_MATHS
MSL_F1(abs, ::fabsf(x)) MSL_F1(fabs, ::fabsf(x)) MSL_F1(floor, ::floorf(x))
inline bool isnan(float x) { return std::isnan(x); }
namespace fast { MSL_MATHS }
namespace precise { MSL_MATHS }
inline float fma(float a, float b, float c) { return ::fmaf(a, b, c); }
inline float pow(float a, float b) { return ::powf(a, b); }
template <class T> inline T max(T a, T b) { return a > b ? a : b; }
template <class T> inline T min(T a, T b) { return a < b ? a : b; }
template <class T> inline T clamp(T x, T a, T b) { return min(max(x, a), b); }
template <class T> inline T select(T a, T b, bool c) { return c ? b : a; }
template <class D, class S> inline D as_type(S s) { static_assert(sizeof(D) == sizeof(S), ""); D d; memcpy(&d, &s, sizeof d); return d; }
template <bool B> using bool_constant = std::integral_constant<bool, B>;
using std::conditional_t; using std::false_type; using std::is_same_v; using std::true_type;
}  // namespace metal

// ---- words of the language. `threadgroup T name[N];` is rewritten to MSL_THREADGROUP(T, name, [N]) before compiling.
#define __METAL_VERSION__ 400
#ifdef MSL_LINT  // clang's own address spaces, so that a missing or wrong qualifier does not compile
#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#define MSL_THREADGROUP(T, name, dims) static threadgroup T name dims;
#else
#define device
#define constant
#define threadgroup
#define MSL_THREADGROUP(T, name, dims)                \
  typedef T msl_type_##name dims;                     \
  msl_type_##name& name = *reinterpret_cast<msl_type_##name*>(msl_rt::threadgroup_array(__LINE__ * 64 + sizeof(#name), sizeof(msl_type_##name)));
#endif
#define thread
#define kernel

using metal::as_type;
using namespace metal;

// Vectors of QUIRE_LANES floats in plain C++ (compiler vector types, no intrinsics). Included by files that are compiled
// once for each instruction set with -DQUIRE_ISA=NAME -DQUIRE_LANES=N; all of it is local to them.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#define QUIRE_JOIN2(a, b) a##b
#define QUIRE_JOIN(a, b) QUIRE_JOIN2(a, b)

namespace quire {
namespace {

constexpr int W = QUIRE_LANES;
typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef uint16_t vh __attribute__((vector_size(W * 2)));
typedef float v4 __attribute__((vector_size(16)));
typedef uint16_t bf16;

constexpr float NONE = -std::numeric_limits<float>::infinity();

#if defined(__has_builtin) && !defined(QUIRE_NO_SHUFFLEVECTOR)
#if __has_builtin(__builtin_shufflevector)
#define QUIRE_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#endif
#endif
#ifndef QUIRE_SHUFFLE
#define QUIRE_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (vi){__VA_ARGS__})
#endif

// ------------------------------------------------------------------------------------------------ vectors

inline vf load(const float* p) { vf x; std::memcpy(&x, p, sizeof x); return x; }
inline void store(float* p, vf x) { std::memcpy(p, &x, sizeof x); }
inline vf load(const bf16* p) {
  vh x; std::memcpy(&x, p, sizeof x);
  const vi wide = __builtin_convertvector(x, vi) << 16;
  vf out; std::memcpy(&out, &wide, sizeof out);
  return out;
}
template <class E> inline vf load_part(const E* p, int count) {
  E x[W] = {};
  std::memcpy(x, p, count * sizeof(E));
  return load(x);
}
inline vf fill(float x) { return x - vf{}; }  // a broadcast; -0.0 stays what it is
inline vf larger(vf a, vf b) { return a > b ? a : b; }
inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { const uint32_t bits = uint32_t(x) << 16; float y; std::memcpy(&y, &bits, 4); return y; }
inline void convert(float x, float& y) { y = x; }
inline void convert(float x, bf16& y) {  // to nearest, ties to even; NaN stays NaN
  uint32_t bits; std::memcpy(&bits, &x, 4);
  y = x != x ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline v4 fold(vf x) {
  v4 parts[W / 4];
  std::memcpy(parts, &x, sizeof x);
  v4 sum = parts[0];
  for (int i = 1; i < W / 4; ++i) sum += parts[i];
  return sum;
}
inline float sum(vf x) { const v4 s = fold(x); return (s[0] + s[2]) + (s[1] + s[3]); }
inline float highest(vf x) {
  v4 parts[W / 4];
  std::memcpy(parts, &x, sizeof x);
  v4 most = parts[0];
  for (int i = 1; i < W / 4; ++i) most = parts[i] > most ? parts[i] : most;
  const float a = most[0] > most[1] ? most[0] : most[1], b = most[2] > most[3] ? most[2] : most[3];
  return a > b ? a : b;
}
inline vf mix_low(vf a, vf b) {  // in each 4 lanes: a0 b0 a1 b1
#if QUIRE_LANES == 4
  return QUIRE_SHUFFLE(a, b, 0, 4, 1, 5);
#elif QUIRE_LANES == 8
  return QUIRE_SHUFFLE(a, b, 0, 8, 1, 9, 4, 12, 5, 13);
#else
  return QUIRE_SHUFFLE(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
#endif
}
inline vf mix_high(vf a, vf b) {  // a2 b2 a3 b3
#if QUIRE_LANES == 4
  return QUIRE_SHUFFLE(a, b, 2, 6, 3, 7);
#elif QUIRE_LANES == 8
  return QUIRE_SHUFFLE(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
#else
  return QUIRE_SHUFFLE(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
#endif
}
inline vf pair_low(vf a, vf b) {  // a0 a1 b0 b1
#if QUIRE_LANES == 4
  return QUIRE_SHUFFLE(a, b, 0, 1, 4, 5);
#elif QUIRE_LANES == 8
  return QUIRE_SHUFFLE(a, b, 0, 1, 8, 9, 4, 5, 12, 13);
#else
  return QUIRE_SHUFFLE(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
#endif
}
inline vf pair_high(vf a, vf b) {  // a2 a3 b2 b3
#if QUIRE_LANES == 4
  return QUIRE_SHUFFLE(a, b, 2, 3, 6, 7);
#elif QUIRE_LANES == 8
  return QUIRE_SHUFFLE(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
#else
  return QUIRE_SHUFFLE(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
#endif
}
inline v4 sum4(vf a, vf b, vf c, vf d) {  // the four sums
  const vf ab = mix_low(a, b) + mix_high(a, b), cd = mix_low(c, d) + mix_high(c, d);
  return fold(pair_low(ab, cd) + pair_high(ab, cd));
}

// e^x to 2 units in the last place (Cephes' expf polynomial); 0 below -87.3, infinity above 88.3, NaN stays NaN.
inline vf exponential(vf x) {
  const vf given = x;
  x = x < fill(-87.3f) ? fill(-87.3f) : x;
  x = x > fill(88.3f) ? fill(88.3f) : x;
  const vf shifted = x * 1.44269504f + 12582912.f;  // 1.5 * 2^23: the integer nearest lies in the low bits
  const vf n = shifted - 12582912.f;
  vf r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  vf y = fill(1.9875691500e-4f);
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * (r * r) + r + 1.f;
  vi bits; std::memcpy(&bits, &shifted, sizeof bits);
  bits = ((bits - 0x4b400000) + 127) << 23;
  vf power; std::memcpy(&power, &bits, sizeof power);
  y = y * power;
  y = given > fill(88.3f) ? fill(-NONE) : y;
  return given < fill(-87.3f) ? vf{} : y;
}
inline vf hyperbolic_tangent(vf x) {  // Cephes' tanhf
  const vf size = x < vf{} ? -x : x, z = x * x;
  vf y = fill(-5.70498872745e-3f);
  y = y * z + 2.06390887954e-2f;
  y = y * z - 5.37397155531e-2f;
  y = y * z + 1.33314422036e-1f;
  y = y * z - 3.33332819422e-1f;
  const vf small = y * z * x + x;
  const vf big = 1.f - 2.f / (exponential(size + size) + 1.f);
  return size < fill(0.625f) ? small : (x < vf{} ? -big : big);
}

inline int round_up(int n, int unit) { return (n + unit - 1) / unit * unit; }

}  // namespace
}  // namespace quire

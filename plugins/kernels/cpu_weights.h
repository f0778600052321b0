// Panels of weights in fewer bits than float32 where nothing is lost: every weight comes out as the value that went in (of
// a zero in 4 or 8 bits, the sign may be another).
//
//   4 bits   d * q + m, q in [0, 15], for blocks of 32 inputs of a column with float16 d and m: what Q4_0 and Q4_1 store
//   8 bits   d * q, q in [-127, 127], for such blocks: Q8_0
//   16 bits  bfloat16, as most checkpoints are published
//
// A product d * q of a float16 and so small an integer is exact in float32 and the sum is rounded once, so that it does not
// matter whether the compiler fuses them. Included by cpu_layers.cpp.
#pragma once

#include "cpu_ops.h"
#include "cpu_vector.h"

#include <algorithm>

#if QUIRE_LANES > 4
#include <immintrin.h>  // for float16 alone
#endif

namespace quire {
namespace {

constexpr int VECTORS = W == 16 ? 3 : 2, PANEL = VECTORS * W;  // a panel is a few vectors wide
constexpr int64_t BLOCK = 32;                                  // inputs that share one d and m
constexpr int64_t FOUR_BITS = PANEL * (BLOCK / 2 + 4), EIGHT_BITS = PANEL * (BLOCK + 2);  // bytes of a block of a panel

// ------------------------------------------------------------------------------------------------ float16

inline float half_to_float(uint16_t half) {
  const uint32_t bits = uint32_t(half & 0x7fff) << 13;
  float size; std::memcpy(&size, &bits, 4);
  return (half & 0x8000 ? -size : size) * 0x1p112f;
}
inline uint16_t float_to_half(float x) {  // to nearest; what is too large becomes something that is not x
  uint32_t bits; std::memcpy(&bits, &x, 4);
  const float size = std::min(std::abs(x), 65504.f) * 0x1p-112f;
  uint32_t small; std::memcpy(&small, &size, 4);
  return uint16_t((bits >> 16 & 0x8000) | (small + 0xfff + (small >> 13 & 1)) >> 13);
}
inline vf as_floats(vi x) { vf out; std::memcpy(&out, &x, sizeof out); return out; }
inline vf load_halves(const char* p) {
#if QUIRE_LANES == 16
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif QUIRE_LANES == 8
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  vh x; std::memcpy(&x, p, sizeof x);
  const vi wide = __builtin_convertvector(x, vi), size = (wide & 0x7fff) << 13;
  const vf usual = as_floats(size + (112 << 23)), tiny = as_floats(size + (113 << 23)) - fill(0x1p-14f);
  const vf out = size < (1 << 23) ? tiny : usual;  // without a subnormal float on the way: some flush them
  return (wide & 0x8000) != 0 ? -out : out;
#endif
}

// ------------------------------------------------------------------------------------------------ in

// Whether all of w[BLOCK] lie on the grid d * q + m, and their q.
inline bool on(const float* w, float unit, float offset, uint8_t* q) {
  for (int i = 0; i < BLOCK; ++i) {
    const float place = unit != 0 ? std::nearbyint((w[i] - offset) / unit) : 0.f;
    if (!(place >= 0 && place <= 15) || unit * place + offset != w[i]) return false;
    q[i] = uint8_t(place);
  }
  return true;
}

// A grid on which all of w[BLOCK] lie, or false. They are tried from the widest down, from the least value up and from the
// largest down (Q4_0 counts so where its scale is negative); that of a file is nearly always among the first two.
inline bool on_grid(const float* w, uint16_t& d, uint16_t& m, uint8_t* q) {
  const auto [low, high] = std::minmax_element(w, w + BLOCK);
  const float least = *low, most = *high;
  for (int steps = 15; steps >= 1; --steps) {
    for (int first = 0; first + steps <= 15; ++first) {
      for (const float end : {least, most}) {
        d = float_to_half((end == least ? most - least : least - most) / float(steps));
        const float unit = half_to_float(d);
        m = float_to_half(end - float(first) * unit);
        if (on(w, unit, half_to_float(m), q)) return true;
      }
    }
  }
  return false;
}
inline bool on_symmetric_grid(const float* w, uint16_t& d, int8_t* q) {
  float most = 0;
  for (int i = 0; i < BLOCK; ++i) most = std::max(most, std::abs(w[i]));
  for (int steps = 127; steps >= 1; --steps) {
    d = float_to_half(most / float(steps));
    const float unit = half_to_float(d);
    int i = 0;
    for (; i < BLOCK; ++i) {
      const float place = unit > 0 ? std::nearbyint(w[i] / unit) : 0.f;
      if (!(std::abs(place) <= 127) || unit * place != w[i]) break;
      q[i] = int8_t(place);
    }
    if (i == BLOCK) return true;
  }
  return false;
}

// One panel of weight [n <= PANEL, k] in the form `bits`, with zeros behind column n; false if something would be lost.
// Floats of a panel lie row by row; of what is smaller, an int32 of a column holds 2, 4 or 8 rows.
bool pack(const float* weight, int64_t weight_row, char* panel, int bits, int64_t n, int64_t k) {
  const auto put = [panel](int64_t at, auto value) { std::memcpy(panel + at, &value, sizeof value); };
  for (int64_t j = 0; j < PANEL; ++j) {
    const float* column = weight + j * weight_row;
    if (bits == 32) {
      for (int64_t i = 0; i < k; ++i) put((i * PANEL + j) * 4, j < n ? column[i] : 0.f);
    } else if (bits == 16) {
      for (int64_t i = 0; i < (k + 7) / 8 * 8; ++i) {
        bf16 half = 0;
        if (j < n && i < k) convert(column[i], half);
        if (j < n && i < k && to_float(half) != column[i]) return false;
        put((i / 2 * PANEL + j) * 4 + i % 2 * 2, half);
      }
    } else {
      constexpr float zeros[BLOCK] = {};
      for (int64_t b = 0; b < k / BLOCK; ++b) {
        const float* from = j < n ? column + b * BLOCK : zeros;
        uint16_t d = 0, m = 0;
        if (bits == 4) {
          uint8_t q[BLOCK];
          if (!on_grid(from, d, m, q)) return false;
          const int64_t at = b * FOUR_BITS;
          put(at + j * 2, d), put(at + PANEL * 2 + j * 2, m);
          for (int64_t g = 0; g < BLOCK / 8; ++g) {
            uint32_t eight = 0;
            for (int i = 0; i < 8; ++i) eight |= uint32_t(q[g * 8 + i]) << 4 * i;
            put(at + PANEL * 4 + (g * PANEL + j) * 4, eight);
          }
        } else {
          int8_t q[BLOCK];
          if (!on_symmetric_grid(from, d, q)) return false;
          const int64_t at = b * EIGHT_BITS;
          put(at + j * 2, d);
          for (int64_t i = 0; i < BLOCK; ++i) put(at + PANEL * 2 + (i / 4 * PANEL + j) * 4 + i % 4, q[i]);
        }
      }
    }
  }
  return true;
}

// ------------------------------------------------------------------------------------------------ out

constexpr int64_t FETCH = 4096;  // bytes from what is expanded to what is fetched meanwhile

inline vi load_ints(const char* p) { vi x; std::memcpy(&x, p, sizeof x); return x; }

// Readers of one block of a panel, ROWS rows of which TOGETHER lie in an int32: open() it, then at() gives W columns of a
// row. What is cut out of an int32 is converted where it lies, and d takes back the power of two that is too much: nothing
// is rounded.
struct Bits4 {
  static constexpr int64_t ROWS = BLOCK, TOGETHER = 8, BYTES = FOUR_BITS;
  vf d[VECTORS][4], m[VECTORS];
  const char* from;
  inline void open(const char* block) {
    from = block + PANEL * 4;
    for (int c = 0; c < VECTORS; ++c) {
      d[c][0] = load_halves(block + c * W * 2), m[c] = load_halves(block + (PANEL + c * W) * 2);
      for (int i = 1; i < 4; ++i) d[c][i] = d[c][i - 1] * 0x1p-4f;
    }
  }
  inline vf at(int64_t together, int i, int c) const {
    const vi eight = load_ints(from + (together * PANEL + c * W) * 4), four = i < 4 ? eight : eight >> 16;
    return d[c][i % 4] * __builtin_convertvector(four & 15 << i % 4 * 4, vf) + m[c];
  }
};
struct Bits8 {
  static constexpr int64_t ROWS = BLOCK, TOGETHER = 4, BYTES = EIGHT_BITS;
  vf d[VECTORS];
  const char* from;
  inline void open(const char* block) {
    from = block + PANEL * 2;
    for (int c = 0; c < VECTORS; ++c) d[c] = load_halves(block + c * W * 2) * 0x1p-24f;
  }
  inline vf at(int64_t together, int i, int c) const {
    const vi four = load_ints(from + (together * PANEL + c * W) * 4) << 24 - 8 * i;
    return d[c] * __builtin_convertvector(i ? four & -(1 << 24) : four, vf);
  }
};
struct Bits16 {
  static constexpr int64_t ROWS = 8, TOGETHER = 2, BYTES = PANEL * ROWS * 2;
  const char* from;
  inline void open(const char* block) { from = block; }
  inline vf at(int64_t together, int i, int c) const {
    const vi two = load_ints(from + (together * PANEL + c * W) * 4);
    return as_floats(i ? two & -(1 << 16) : two << 16);
  }
};

template <class Bits> inline void fetch_block(const char* at) {
  for (int64_t i = 0; i < Bits::BYTES; i += 64) __builtin_prefetch(at + FETCH + i, 0, 2);
}

// Rows [begin, begin + count) of a panel as floats [count, PANEL].
template <class Bits> void expand(const char* panel, int64_t begin, int64_t count, float* to) {
  const char* from = panel + begin / Bits::ROWS * Bits::BYTES;
  for (int64_t row = 0; row < count; row += Bits::ROWS, from += Bits::BYTES, to += Bits::ROWS * PANEL) {
    Bits block;
    block.open(from);
    for (int c = 0; c < VECTORS; ++c)
      for (int64_t t = 0; t < Bits::ROWS / Bits::TOGETHER; ++t)
        for (int i = 0; i < Bits::TOGETHER; ++i)
          store(to + (t * Bits::TOGETHER + i) * PANEL + c * W, block.at(t, i, c));
  }
}

// sums[M][PANEL] = x[M][k] * panel, for so few rows that the floats need not be written down.
template <int M, class Bits> void multiply_few(const float* x, int64_t x_row, const char* panel, int64_t k, float* sums) {
  vf s[M][VECTORS] = {};
  for (int64_t begin = 0; begin < k; begin += Bits::ROWS, panel += Bits::BYTES) {
    Bits block;
    fetch_block<Bits>(panel);
    block.open(panel);
    for (int64_t t = 0; t < Bits::ROWS / Bits::TOGETHER; ++t, x += Bits::TOGETHER) {
      for (int i = 0; i < Bits::TOGETHER; ++i) {
        if (Bits::ROWS < BLOCK && begin + t * Bits::TOGETHER + i >= k) break;
        for (int c = 0; c < VECTORS; ++c) {
          const vf right = block.at(t, i, c);
          for (int m = 0; m < M; ++m) s[m][c] += fill(x[m * x_row + i]) * right;
        }
      }
    }
  }
  for (int m = 0; m < M; ++m)
    for (int c = 0; c < VECTORS; ++c) store(sums + m * PANEL + c * W, s[m][c]);
}

}  // namespace
}  // namespace quire

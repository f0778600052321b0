// Attention over a paged cache, and the small operations of a decoder layer, on one thread. Compiled once for each
// instruction set with -DQUIRE_ISA=NAME -DQUIRE_LANES=N: plain C++ with vector types of N floats, no intrinsics.
//
// Rules that all functions keep: rows of the cache are addressed through the block table, and only positions that exist
// are read; a last, partly filled group of four keys reads its last valid key again and masks the score.

#include "cpu_ops.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

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

constexpr int KEYS = 32;        // keys in a decode tile
constexpr int WIDE = 64;        // keys in a prefill tile
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
  float lanes[W]; store(lanes, x);
  float most = lanes[0];
  for (int i = 1; i < W; ++i) most = lanes[i] > most ? lanes[i] : most;
  return most;
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

// e^x to 2 units in the last place (Cephes' expf polynomial); 0 below -87.3, NaN stays NaN.
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

// Room for one thread's tiles, grown once.
float* scratch(int which, size_t floats) {
  thread_local std::vector<float> buffers[8];
  auto& buffer = buffers[which];
  if (buffer.size() < floats + 16) buffer.resize(floats + 16);
  const auto at = reinterpret_cast<uintptr_t>(buffer.data());
  return buffer.data() + (64 - at % 64) % 64 / 4;
}

// Addresses of the rows of positions begin .. begin + count of a sequence, key head 0; then the last one again up to `padded`.
template <class E>
void rows_of(const E* cache, int64_t block, int64_t slot, const int32_t* table, int block_size, int begin, int count,
             int padded, const E** rows) {
  int index = begin / block_size, offset = begin - index * block_size;
  for (int i = 0; i < count;) {
    const E* row = cache + int64_t(table[index]) * block + int64_t(offset) * slot;
    const int here = std::min(count - i, block_size - offset);
    for (int j = 0; j < here; ++j, row += slot) rows[i + j] = row;
    i += here, ++index, offset = 0;
  }
  for (int i = count; i < padded; ++i) rows[i] = rows[count - 1];
}

// Hands out the heads of coming rows in memory order, to be fetched between the arithmetic: a burst of fetches would wait
// for free line buffers, and a pattern in memory order lets the hardware's own prefetching run ahead.
template <class E> struct Ahead {
  const E* const* rows;
  int64_t first, head;  // elements to the first key head, and from one to the next
  int heads, count;
  int row = 0, part = 0;
  const E* take(const E* otherwise) {
    if (row >= count) return otherwise;
    const E* at = rows[row] + first + part * head;
    if (++part == heads) part = 0, ++row;
    return at;
  }
};
template <class E> constexpr int PER_LINE = 64 / int(sizeof(E));  // elements in a cache line
constexpr int FETCH = 2;  // into the second-level cache: measured 10 % faster than into the first, where buffers are few

// ------------------------------------------------------------------------------------------------ decode

// scores[g][t] = q[g] . k[t] of four keys, for G query heads of one key head: each key is loaded once for all of them.
template <int G, class E>
inline void score(const float* q, int q_row, const E* const* keys, int64_t head, int dim, float* scores,
                  Ahead<E>& ahead) {
  const int whole = dim / W * W, rest = dim - whole;
  const E *k[4], *fetched[4];
  for (int j = 0; j < 4; ++j) k[j] = keys[j] + head;
  for (int j = 0; j < 4; ++j) fetched[j] = ahead.take(k[j]);
  vf sums[G][4];
  for (int g = 0; g < G; ++g)
    for (int j = 0; j < 4; ++j) sums[g][j] = vf{};
  for (int d = 0; d < whole; d += W) {
    if (d % PER_LINE<E> == 0)
      for (int j = 0; j < 4; ++j) __builtin_prefetch(fetched[j] + d, 0, FETCH);
    vf part[4];
    for (int j = 0; j < 4; ++j) part[j] = load(k[j] + d);
    for (int g = 0; g < G; ++g) {
      const vf query = load(q + g * q_row + d);
      for (int j = 0; j < 4; ++j) sums[g][j] += query * part[j];
    }
  }
  if (rest) {
    for (int j = 0; j < 4; ++j) {
      const vf part = load_part(k[j] + whole, rest);
      for (int g = 0; g < G; ++g) sums[g][j] += load(q + g * q_row + whole) * part;
    }
  }
  for (int g = 0; g < G; ++g) {
    const v4 four = sum4(sums[g][0], sums[g][1], sums[g][2], sums[g][3]);
    std::memcpy(scores + g * KEYS, &four, sizeof four);
  }
}

// acc[g] = acc[g] * keep[g] + sum over t of weights[g][t] * v[t], for columns d .. d + C vectors.
template <int G, int C, bool PART, class E>
inline void weigh_columns(float* acc, int acc_row, const float* keep, const float* weights, const E* const* values,
                          int64_t head, int count, int d, int rest, Ahead<E> ahead) {
  vf sums[G][C];
  for (int g = 0; g < G; ++g)
    for (int c = 0; c < C; ++c) sums[g][c] = load(acc + g * acc_row + d + c * W) * keep[g];
  for (int t = 0; t < count; ++t) {
    const E* v = values[t] + head + d;
    const E* fetched = ahead.take(v - d) + d;
    for (int e = 0; e < C * W; e += PER_LINE<E>) __builtin_prefetch(fetched + e, 0, FETCH);
    vf weight[G];
    for (int g = 0; g < G; ++g) weight[g] = fill(weights[g * KEYS + t]);
    for (int c = 0; c < C; ++c) {
      const vf part = PART ? load_part(v, rest) : load(v + c * W);
      for (int g = 0; g < G; ++g) sums[g][c] += part * weight[g];
    }
  }
  for (int g = 0; g < G; ++g)
    for (int c = 0; c < C; ++c) store(acc + g * acc_row + d + c * W, sums[g][c]);
}

template <int G, class E>
void weigh(float* acc, int acc_row, const float* keep, const float* weights, const E* const* values, int64_t head,
           int count, int dim, const Ahead<E>& ahead) {
#define QUIRE_COLUMNS(C, PART, REST) \
  weigh_columns<G, C, PART>(acc, acc_row, keep, weights, values, head, count, d, REST, ahead)
  const int whole = dim / W * W;
  int d = 0;
  for (; d + 4 * W <= whole; d += 4 * W) QUIRE_COLUMNS(4, false, 0);
  for (; d + W <= whole; d += W) QUIRE_COLUMNS(1, false, 0);
  if (d < dim) QUIRE_COLUMNS(1, true, dim - d);
#undef QUIRE_COLUMNS
}

// Scores [rows][ROW] of `count` keys become weights, by each row's largest score so far; `keep` rescales what was summed before.
template <int ROW>
void soften(float* scores, int rows, int count, float soft_cap, float* most, float* total, float* keep) {
  const int padded = round_up(count, W);
  for (int r = 0; r < rows; ++r) {
    float* row = scores + r * ROW;
    for (int t = count; t < padded; ++t) row[t] = NONE;
    vf peak = fill(NONE);
    for (int t = 0; t < padded; t += W) {
      vf x = load(row + t);
      if (soft_cap > 0) {
        x = x > fill(NONE) ? hyperbolic_tangent(x / soft_cap) * soft_cap : x;
        store(row + t, x);
      }
      peak = larger(x, peak);
    }
    const float before = most[r], now = std::max(before, highest(peak));
    const float origin = now == NONE ? 0.f : now;
    vf added = {};
    for (int t = 0; t < padded; t += W) {
      const vf weight = exponential(load(row + t) - origin);
      store(row + t, weight);
      added += weight;
    }
    keep[r] = before == NONE ? 0.f : std::exp(before - origin);
    total[r] = total[r] * keep[r] + sum(added);
    most[r] = now;
  }
}

template <class E> void decode_item(const Layer& c, const Item& item) {
  const int group = c.heads / c.kv_heads, num_heads = item.head_end - item.head_begin, rows = num_heads * group;
  const int dim = c.dim, wide = round_up(dim, W), first_row = item.head_begin * group;
  float* q = scratch(0, size_t(rows) * wide);
  float* acc = scratch(1, size_t(rows) * wide);
  float* scores = scratch(2, size_t(rows) * KEYS);
  float* state = scratch(3, size_t(rows) * 3);
  float *most = state, *total = state + rows, *keep = state + 2 * rows;
  const float* from = c.q + item.query_begin * c.q_token + first_row * c.q_head;
  for (int r = 0; r < rows; ++r) {
    for (int d = 0; d < dim; ++d) q[r * wide + d] = from[r * c.q_head + d] * c.scale;
    for (int d = dim; d < wide; ++d) q[r * wide + d] = 0;
    most[r] = NONE, total[r] = 0;
  }
  std::memset(acc, 0, size_t(rows) * wide * sizeof(float));

  const int32_t* table = c.tables + item.sequence * c.table_stride;
  const E *k_cache = static_cast<const E*>(c.k_cache), *v_cache = static_cast<const E*>(c.v_cache);
  const E *keys[KEYS], *values[KEYS], *next[KEYS];
  for (int begin = item.key_begin; begin < item.key_end; begin += KEYS) {
    const int count = std::min(KEYS, item.key_end - begin), after = std::min(KEYS, item.key_end - begin - count);
    if (begin == item.key_begin) {
      rows_of(k_cache, c.k_block, c.k_slot, table, c.block_size, begin, count, round_up(count, 4), keys);
    } else {
      std::memcpy(keys, next, sizeof keys);
    }
    rows_of(v_cache, c.v_block, c.v_slot, table, c.block_size, begin, count, count, values);
    if (after) {
      rows_of(k_cache, c.k_block, c.k_slot, table, c.block_size, begin + count, after, round_up(after, 4), next);
    }
    // the values are fetched while the keys are multiplied, the next keys while the values are summed
    const int64_t first_k = item.head_begin * c.k_head, first_v = item.head_begin * c.v_head;
    Ahead<E> to_sum{values, first_v, c.v_head, num_heads, count}, none{values, 0, 0, 0, 0};
    for (int t = 0; t < count; t += 4) {
      for (int h = 0; h < num_heads; ++h) {
        for (int g = 0; g < group;) {
          const int r = h * group + g, left = group - g;
          Ahead<E>& ahead = g ? none : to_sum;
#define QUIRE_SCORE(G) \
  score<G>(q + r * wide, wide, keys + t, first_k + h * c.k_head, dim, scores + r * KEYS + t, ahead), g += G
          if (left >= 4 && left != 5 && left != 6) QUIRE_SCORE(4);
          else if (left >= 3) QUIRE_SCORE(3);
          else if (left == 2) QUIRE_SCORE(2);
          else QUIRE_SCORE(1);
        }
      }
    }
    soften<KEYS>(scores, rows, count, c.soft_cap, most, total, keep);
    for (int h = 0; h < num_heads; ++h) {
      const int taken = h * count;
      const Ahead<E> to_score{next, first_k, c.k_head, num_heads, after, taken / num_heads, taken % num_heads};
      for (int g = 0; g < group;) {
        const int r = h * group + g, left = group - g;
        const Ahead<E>& ahead = g ? none : to_score;
#define QUIRE_WEIGH(G) \
  weigh<G>(acc + r * wide, wide, keep + r, scores + r * KEYS, values, first_v + h * c.v_head, count, dim, ahead), g += G
        if (left >= 4 && left != 5 && left != 6) QUIRE_WEIGH(4);
        else if (left >= 3) QUIRE_WEIGH(3);
        else if (left == 2) QUIRE_WEIGH(2);
        else QUIRE_WEIGH(1);
      }
    }
  }

  if (item.part < 0) {
    float* out = c.out + (int64_t(item.query_begin) * c.heads + first_row) * dim;
    for (int r = 0; r < rows; ++r) {
      const float share = 1.f / total[r];
      for (int d = 0; d < dim; ++d) out[r * dim + d] = acc[r * wide + d] * share;
    }
    return;
  }
  float* part = c.partials + int64_t(item.part) * c.heads * (dim + 2);
  for (int r = 0; r < rows; ++r, part += dim + 2) {
    std::memcpy(part, acc + r * wide, dim * sizeof(float));
    part[dim] = most[r], part[dim + 1] = total[r];
  }
}

// The parts of one output, in their order, so that the sum does not depend on who finished when.
void merge(const Layer& c, const Item& item) {
  const int group = c.heads / c.kv_heads, rows = (item.head_end - item.head_begin) * group, dim = c.dim;
  const int64_t row_floats = dim + 2, part_floats = c.heads * row_floats;
  const float* parts = c.partials + item.first_part * part_floats;
  float* out = c.out + (int64_t(item.query_begin) * c.heads + item.head_begin * group) * dim;
  for (int r = 0; r < rows; ++r, parts += row_floats, out += dim) {
    float most = NONE, total = 0;
    for (int p = 0; p < item.num_parts; ++p) most = std::max(most, parts[p * part_floats + dim]);
    for (int d = 0; d < dim; ++d) out[d] = 0;
    for (int p = 0; p < item.num_parts; ++p) {
      const float* part = parts + p * part_floats;
      const float weight = std::exp(part[dim] - most);
      total += weight * part[dim + 1];
      for (int d = 0; d < dim; ++d) out[d] += weight * part[d];
    }
    const float share = 1.f / total;
    for (int d = 0; d < dim; ++d) out[d] *= share;
  }
}

// ------------------------------------------------------------------------------------------------ prefill

// c[M][C vectors] (+)= a[M][depth] * b[depth][C vectors]
template <int M, int C>
inline void multiply_tile(const float* a, int a_row, const float* b, int b_row, int depth, float* c, int c_row,
                          const float* keep) {
  vf sums[M][C];
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < C; ++n) sums[m][n] = keep ? load(c + m * c_row + n * W) * keep[m] : vf{};
  for (int k = 0; k < depth; ++k) {
    vf right[C];
    for (int n = 0; n < C; ++n) right[n] = load(b + k * b_row + n * W);
    for (int m = 0; m < M; ++m) {
      const float left = a[m * a_row + k];
      for (int n = 0; n < C; ++n) sums[m][n] += right[n] * left;
    }
  }
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < C; ++n) store(c + m * c_row + n * W, sums[m][n]);
}
template <int C>
void multiply_columns(const float* a, int a_row, const float* b, int b_row, int rows, int depth, float* c, int c_row,
                      const float* keep) {
  constexpr int M = W == 4 ? 4 : 6;
  int m = 0;
  for (; m + M <= rows; m += M)
    multiply_tile<M, C>(a + m * a_row, a_row, b, b_row, depth, c + m * c_row, c_row, keep ? keep + m : nullptr);
  for (; m < rows; ++m)
    multiply_tile<1, C>(a + m * a_row, a_row, b, b_row, depth, c + m * c_row, c_row, keep ? keep + m : nullptr);
}
// c[rows][columns] = a[rows][depth] * b[depth][columns] (+ c * keep[row]); columns and row lengths are whole vectors.
void multiply(const float* a, int a_row, const float* b, int b_row, int rows, int columns, int depth, float* c,
              int c_row, const float* keep) {
  constexpr int C = W == 16 ? 4 : 2;
  int n = 0;
  for (; n + C * W <= columns; n += C * W) multiply_columns<C>(a, a_row, b + n, b_row, rows, depth, c + n, c_row, keep);
  for (; n < columns; n += W) multiply_columns<1>(a, a_row, b + n, b_row, rows, depth, c + n, c_row, keep);
}

template <class E> void prefill_item(const Layer& c, const Item& item) {
  const int group = c.heads / c.kv_heads, dim = c.dim, wide = round_up(dim, W);
  const int tokens = item.query_end - item.query_begin, rows = tokens * group;
  const int length = c.kv_lens[item.sequence];
  const int first = length - (c.query_start[item.sequence + 1] - item.query_begin);  // position of the first query
  float* q = scratch(0, size_t(rows) * wide);
  float* acc = scratch(1, size_t(rows) * wide);
  float* scores = scratch(2, size_t(rows) * WIDE);
  float* state = scratch(3, size_t(rows) * 3);
  float* keys = scratch(4, size_t(wide) * WIDE);    // [dim][WIDE]
  float* values = scratch(5, size_t(wide) * WIDE);  // [WIDE][wide]
  float *most = state, *total = state + rows, *keep = state + 2 * rows;
  for (int h = item.head_begin; h < item.head_end; ++h) {
    for (int r = 0; r < rows; ++r) {
      const float* from = c.q + (item.query_begin + r / group) * c.q_token + (h * group + r % group) * c.q_head;
      for (int d = 0; d < dim; ++d) q[r * wide + d] = from[d] * c.scale;
      most[r] = NONE, total[r] = 0;
    }
    std::memset(acc, 0, size_t(rows) * wide * sizeof(float));
    const int start = c.window ? std::max(0, first - c.window + 1) : 0, end = first + tokens;
    const int32_t* table = c.tables + item.sequence * c.table_stride;
    for (int begin = start; begin < end; begin += WIDE) {
      const int count = std::min(WIDE, end - begin), padded = round_up(count, W);
      const E* row[WIDE];
      rows_of(static_cast<const E*>(c.k_cache), c.k_block, c.k_slot, table, c.block_size, begin, count, count, row);
      for (int t = 0; t < count; ++t) {
        const E* from = row[t] + h * c.k_head;
        for (int d = 0; d < dim; ++d) keys[d * WIDE + t] = to_float(from[d]);
      }
      for (int d = 0; d < dim; ++d)
        for (int t = count; t < padded; ++t) keys[d * WIDE + t] = 0;
      rows_of(static_cast<const E*>(c.v_cache), c.v_block, c.v_slot, table, c.block_size, begin, count, count, row);
      for (int t = 0; t < count; ++t) {
        const E* from = row[t] + h * c.v_head;
        for (int d = 0; d < dim; ++d) values[t * wide + d] = to_float(from[d]);
        for (int d = dim; d < wide; ++d) values[t * wide + d] = 0;
      }
      multiply(q, wide, keys, WIDE, rows, padded, dim, scores, WIDE, nullptr);
      if (begin + count - 1 > first || (c.window && begin <= first + tokens - 1 - c.window)) {
        for (int r = 0; r < rows; ++r) {
          const int position = first + r / group;
          const int seen_from = c.window ? std::max(0, position - c.window + 1 - begin) : 0;
          const int seen_to = std::min(count, position + 1 - begin);
          for (int t = 0; t < std::min(seen_from, count); ++t) scores[r * WIDE + t] = NONE;
          for (int t = std::max(0, seen_to); t < count; ++t) scores[r * WIDE + t] = NONE;
        }
      }
      soften<WIDE>(scores, rows, count, c.soft_cap, most, total, keep);
      multiply(scores, WIDE, values, wide, rows, wide, count, acc, wide, keep);
    }
    for (int r = 0; r < rows; ++r) {
      float* out = c.out + (int64_t(item.query_begin + r / group) * c.heads + h * group + r % group) * dim;
      const float share = 1.f / total[r];
      for (int d = 0; d < dim; ++d) out[d] = acc[r * wide + d] * share;
    }
  }
}

template <class E> void store_rows(const Layer& c, const Store& s, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    if (s.slots[t] < 0) continue;
    const int64_t block = s.slots[t] / c.block_size, offset = s.slots[t] % c.block_size;
    E* k = static_cast<E*>(c.k_cache) + block * c.k_block + offset * c.k_slot;
    E* v = static_cast<E*>(c.v_cache) + block * c.v_block + offset * c.v_slot;
    for (int h = 0; h < c.kv_heads; ++h) {
      const float *from_k = s.k + t * s.k_token + h * s.k_head, *from_v = s.v + t * s.v_token + h * s.v_head;
      for (int d = 0; d < c.dim; ++d) convert(from_k[d], k[h * c.k_head + d]);
      for (int d = 0; d < c.dim; ++d) convert(from_v[d], v[h * c.v_head + d]);
    }
  }
}

void store_any(const Layer& c, const Store& s, int64_t begin, int64_t end) {
  c.half ? store_rows<bf16>(c, s, begin, end) : store_rows<float>(c, s, begin, end);
}
void decode_any(const Layer& c, const Item& item) {
  c.half ? decode_item<bf16>(c, item) : decode_item<float>(c, item);
}
void prefill_any(const Layer& c, const Item& item) {
  c.half ? prefill_item<bf16>(c, item) : prefill_item<float>(c, item);
}

// ------------------------------------------------------------------------------------------------ small operations

void norm(const float* x, int64_t x_row, float* residual, const float* weight, float eps, float* out, int64_t rows,
          int64_t width) {
  const int64_t whole = width / W * W;
  for (int64_t r = 0; r < rows; ++r, out += width) {
    const float* from = x + r * x_row;
    if (residual) {
      float* sums = residual + r * width;
      for (int64_t d = 0; d < whole; d += W) store(sums + d, load(sums + d) + load(from + d));
      for (int64_t d = whole; d < width; ++d) sums[d] += from[d];
      from = sums;
    }
    vf squares[2] = {};
    int64_t d = 0;
    for (; d + 2 * W <= whole; d += 2 * W)
      for (int i = 0; i < 2; ++i) squares[i] += load(from + d + i * W) * load(from + d + i * W);
    for (; d < whole; d += W) squares[0] += load(from + d) * load(from + d);
    float total = sum(squares[0] + squares[1]);
    for (; d < width; ++d) total += from[d] * from[d];
    const float factor = 1.f / std::sqrt(total / float(width) + eps);
    for (d = 0; d < whole; d += W) store(out + d, load(from + d) * factor * load(weight + d));
    for (; d < width; ++d) out[d] = from[d] * factor * weight[d];
  }
}

void silu_mul(const float* x, float* out, int64_t rows, int64_t width) {
  for (int64_t r = 0; r < rows; ++r, x += 2 * width, out += width) {
    int64_t d = 0;
    for (; d + W <= width; d += W) {
      const vf gate = load(x + d);
      store(out + d, gate / (1.f + exponential(-gate)) * load(x + width + d));
    }
    if (d < width) {
      const int rest = int(width - d);
      const vf gate = load_part(x + d, rest), y = gate / (1.f + exponential(-gate)) * load_part(x + width + d, rest);
      std::memcpy(out + d, &y, rest * sizeof(float));
    }
  }
}

void rotate(float* x, int64_t x_row, const float* cos, const float* sin, int64_t rows, int64_t heads, int64_t dim) {
  const int64_t half = dim / 2;
  for (int64_t r = 0; r < rows; ++r, cos += dim, sin += dim) {
    for (int64_t h = 0; h < heads; ++h) {
      float *low = x + r * x_row + h * dim, *high = low + half;
      int64_t d = 0;
      for (; d + W <= half; d += W) {
        const vf a = load(low + d), b = load(high + d);
        store(low + d, a * load(cos + d) - b * load(sin + d));
        store(high + d, b * load(cos + half + d) + a * load(sin + half + d));
      }
      for (; d < half; ++d) {
        const float a = low[d], b = high[d];
        low[d] = a * cos[d] - b * sin[d];
        high[d] = b * cos[half + d] + a * sin[half + d];
      }
    }
  }
}

void largest(const float* x, int64_t* index, float* value, int64_t rows, int64_t width) {
  for (int64_t r = 0; r < rows; ++r, x += width) {
    vf peak = fill(NONE), unordered = {};
    int64_t d = 0;
    for (; d + W <= width; d += W) {
      const vf y = load(x + d);
      peak = larger(y, peak);
      unordered = y != y ? fill(1.f) : unordered;
    }
    float most = highest(peak), bad = sum(unordered);
    for (; d < width; ++d) {
      most = std::max(most, x[d]);
      bad += x[d] != x[d];
    }
    int64_t at = 0;
    if (bad == 0)
      while (at < width && x[at] != most) ++at;
    index[r] = at;
    value[r] = bad == 0 ? most : std::numeric_limits<float>::quiet_NaN();
  }
}

}  // namespace

const Functions& QUIRE_JOIN(functions_, QUIRE_ISA)() {
  static const Functions all = {W, store_any, decode_any, prefill_any, merge, norm, silu_mul, rotate, largest};
  return all;
}

}  // namespace quire

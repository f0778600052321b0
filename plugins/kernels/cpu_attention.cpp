// Attention over a paged cache, one piece on one thread. Compiled once for each instruction set (cpu_vector.h).
//
// Rules that all functions keep: rows of the cache are addressed through the block table, and only positions that exist
// are read; a last, partly filled group of four keys reads its last valid key again and masks the score.

#include "cpu_ops.h"
#include "cpu_vector.h"

#include <algorithm>
#include <vector>

namespace quire {
namespace {

constexpr int KEYS = 32;  // keys in a decode tile
constexpr int WIDE = 64;  // keys in a prefill tile

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

// Scores [rows][ROW] of `count` keys become weights, by each row's largest score; `keep` rescales earlier sums (whole vectors).
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
    keep[r] = most[r], most[r] = std::max(most[r], highest(peak));
  }
  for (int r = 0; r < rows; r += W)  // a finite origin: nothing seen before gives 0
    store(keep + r, exponential(load(keep + r) - larger(load(most + r), fill(std::numeric_limits<float>::lowest()))));
  for (int r = 0; r < rows; ++r) {
    float* row = scores + r * ROW;
    const float origin = most[r] == NONE ? 0.f : most[r];
    vf added = {};
    for (int t = 0; t < padded; t += W) {
      const vf weight = exponential(load(row + t) - origin);
      store(row + t, weight);
      added += weight;
    }
    total[r] = total[r] * keep[r] + sum(added);
  }
}

// Keys in an item's tiles: equal ones, so that the last is not too short to fetch what follows.
int tile_of(const Item& item) {
  const int keys = item.key_end - item.key_begin, tiles = (keys + KEYS - 1) / KEYS;
  return round_up((keys + tiles - 1) / tiles, 4);
}

// `following`: the item that this thread takes next, or null; its first keys are fetched with this one's last values.
template <class E> void decode_item(const Layer& c, const Item& item, const Item* following) {
  const int group = c.heads / c.kv_heads, num_heads = item.head_end - item.head_begin, rows = num_heads * group;
  const int dim = c.dim, wide = round_up(dim, W), first_row = item.head_begin * group;
  float* q = scratch(0, size_t(rows) * wide);
  float* acc = scratch(1, size_t(rows) * wide);
  float* scores = scratch(2, size_t(rows) * KEYS);
  float* state = scratch(3, size_t(round_up(rows, W)) * 3);
  float *most = state, *total = state + round_up(rows, W), *keep = total + round_up(rows, W);
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
  const int64_t first_k = item.head_begin * c.k_head, first_v = item.head_begin * c.v_head;
  const int tile = tile_of(item);
  for (int begin = item.key_begin; begin < item.key_end; begin += tile) {
    const int count = std::min(tile, item.key_end - begin);
    int after = std::min(tile, item.key_end - begin - count), next_heads = num_heads;
    int64_t next_k = first_k;
    rows_of(k_cache, c.k_block, c.k_slot, table, c.block_size, begin, count, round_up(count, 4), keys);
    rows_of(v_cache, c.v_block, c.v_slot, table, c.block_size, begin, count, count, values);
    if (after) {
      rows_of(k_cache, c.k_block, c.k_slot, table, c.block_size, begin + count, after, after, next);
    } else if (following) {
      after = std::min(tile_of(*following), following->key_end - following->key_begin);
      next_k = following->head_begin * c.k_head, next_heads = following->head_end - following->head_begin;
      const int32_t* theirs = c.tables + following->sequence * c.table_stride;
      rows_of(k_cache, c.k_block, c.k_slot, theirs, c.block_size, following->key_begin, after, after, next);
    }
    // the values are fetched while the keys are multiplied, the next keys while the values are summed
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
      const Ahead<E> to_score{next, next_k, c.k_head, next_heads, after, taken / next_heads, taken % next_heads};
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
  float* state = scratch(3, size_t(round_up(rows, W)) * 3);
  float* keys = scratch(4, size_t(wide) * WIDE);    // [dim][WIDE]
  float* values = scratch(5, size_t(wide) * WIDE);  // [WIDE][wide]
  float *most = state, *total = state + round_up(rows, W), *keep = total + round_up(rows, W);
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
void decode_any(const Layer& c, const Item& item, const Item* following) {
  c.half ? decode_item<bf16>(c, item, following) : decode_item<float>(c, item, following);
}
void prefill_any(const Layer& c, const Item& item) {
  c.half ? prefill_item<bf16>(c, item) : prefill_item<float>(c, item);
}

}  // namespace

const AttentionFunctions& QUIRE_JOIN(attention_, QUIRE_ISA)() {
  static const AttentionFunctions all = {W, store_any, decode_any, prefill_any, merge};
  return all;
}

}  // namespace quire

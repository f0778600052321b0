// Linear layers and the small operations of a decoder layer, on one thread. Compiled once for each instruction set
// (cpu_vector.h).

#include "cpu_ops.h"
#include "cpu_vector.h"
#include "cpu_weights.h"

#include <algorithm>

namespace quire {
namespace {

// ------------------------------------------------------------------------------------------------ small operations

void norm(const float* x, int64_t x_row, const float* weight, float eps, float* out, int64_t rows, int64_t width) {
  const int64_t whole = width / W * W;
  for (int64_t r = 0; r < rows; ++r, out += width) {
    const float* from = x + r * x_row;
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

// ------------------------------------------------------------------------------------------------ linear layers

// Weights [N, K] are kept as panels [N / PANEL, K, PANEL]: a panel is read from its first to its last float.
constexpr int MOST_ROWS = W == 16 ? 8 : 6;  // of x in registers at once, with the panel's row and one broadcast
constexpr int FEW_ROWS = W == 16 ? 4 : 2;   // multiplied with weights of fewer bits as they come, without a copy of them
constexpr int MOST_SUMS = 128;              // rows of x whose sums are kept

int64_t panel_bytes(int bits, int64_t k) {
  if (bits == 32) return k * PANEL * 4;
  if (bits == 16) return k > 7 ? (k + 7) / 8 * 8 * PANEL * 2 : 0;  // of fewer rows it would be no smaller
  return k % BLOCK ? 0 : k / BLOCK * (bits == 4 ? FOUR_BITS : EIGHT_BITS);
}

// Where x has more rows than fit into registers, a panel is multiplied chunk by chunk, all rows with each: the first rows
// read the chunk from memory, the others find it in the first-level cache, and meanwhile the next chunk is fetched, a part
// with each row of weights, so that memory and arithmetic overlap. Few rows read a panel once, and fetch AHEAD rows on.
constexpr int64_t CHUNK = W == 16 ? 64 : 256, AHEAD = W == 16 ? 13 : 256;  // rows of a panel
constexpr int LINE = W == 4 ? 8 : 16;  // floats from one fetch to the next
constexpr int FAR = 2;                 // fetches go into the second-level cache

// sums[M][PANEL] (+)= x[M][k] * weights[k][PANEL]; fetches EACH lines of [fetch, end) with every row of the weights
template <int M, int EACH>
void multiply_chunk(const float* x, int64_t x_row, const float* weights, int64_t k, bool first, float* sums,
                    const float* fetch, const float* end) {
  vf s[M][VECTORS];
  for (int m = 0; m < M; ++m)
    for (int c = 0; c < VECTORS; ++c) s[m][c] = first ? vf{} : load(sums + m * PANEL + c * W);
  const float* rows[(M + 2) / 3];  // every third row; the two behind it are at one and two strides
  for (int m = 0; m < M; m += 3) rows[m / 3] = x + m * x_row;
  for (int64_t i = 0; i < k; ++i, weights += PANEL) {
    if (M > 2 && fetch < end) {
      for (int c = 0; c < EACH; ++c) __builtin_prefetch(fetch + c * LINE, 0, FAR);
      fetch += EACH * LINE;
    }
    vf right[VECTORS];
    for (int c = 0; c < VECTORS; ++c) right[c] = load(weights + c * W);
    for (int m = 0; m < M; ++m) {
      const vf left = fill(rows[m / 3][(m % 3) * x_row]);
      for (int c = 0; c < VECTORS; ++c) s[m][c] += left * right[c];
    }
    if (M <= 2) {  // with so little to compute, fetches and a branch before the loads hold them up
      for (int c = 0; c < EACH; ++c) __builtin_prefetch(fetch + c * LINE, 0, FAR);
      fetch += fetch < end ? EACH * LINE : 0;
    }
    for (int m = 0; m < M; m += 3) ++rows[m / 3];
  }
  for (int m = 0; m < M; ++m)
    for (int c = 0; c < VECTORS; ++c) store(sums + m * PANEL + c * W, s[m][c]);
}

template <int M, int EACH>
void multiply_rows(int64_t m, const float* x, int64_t x_row, const float* weights, int64_t k, bool first, float* sums,
                   const float* fetch, const float* end) {
  if constexpr (M > 0) {
    if (m == M) return multiply_chunk<M, EACH>(x, x_row, weights, k, first, sums, fetch, end);
    multiply_rows<M - 1, EACH>(m, x, x_row, weights, k, first, sums, fetch, end);
  }
}

// out[rows][columns of one panel] (+)= sums[rows][PANEL] + bias
void finish(const float* sums, int64_t rows, const Panel& panel, bool add, float* out, int64_t out_row) {
  if (panel.columns < PANEL) {
    for (int64_t r = 0; r < rows; ++r, out += out_row, sums += PANEL)
      for (int64_t j = 0; j < panel.columns; ++j)
        out[j] = (add ? out[j] : 0) + sums[j] + (panel.bias ? panel.bias[j] : 0);
    return;
  }
  vf bias[VECTORS] = {};
  if (panel.bias)
    for (int c = 0; c < VECTORS; ++c) bias[c] = load(panel.bias + c * W);
  for (int64_t r = 0; r < rows; ++r, out += out_row, sums += PANEL) {
    vf total[VECTORS];
    for (int c = 0; c < VECTORS; ++c) total[c] = load(sums + c * W) + bias[c];
    for (int c = 0; c < VECTORS; ++c) store(out + c * W, add ? load(out + c * W) + total[c] : total[c]);
  }
}

// sums[rows][PANEL] = x[rows][k] * panel, in equal groups of at most MOST_ROWS rows
void multiply(const float* x, int64_t x_row, int64_t rows, const Panel& panel, float* sums) {
  constexpr int WHOLE = PANEL / LINE;  // lines in a row of the panel
  const int64_t groups = (rows + MOST_ROWS - 1) / MOST_ROWS, k = panel.k;
  const auto run = groups == 1 ? multiply_rows<MOST_ROWS, WHOLE>
                   : groups < WHOLE ? multiply_rows<MOST_ROWS, (WHOLE + 1) / 2> : multiply_rows<MOST_ROWS, 1>;
  const auto* floats = reinterpret_cast<const float*>(panel.at);
  const bool goes_on = reinterpret_cast<const float*>(panel.next) == floats + k * PANEL;
  const int64_t chunk = groups == 1 ? k : CHUNK;
  for (int64_t begin = 0; begin < k; begin += chunk) {
    const int64_t count = std::min(chunk, k - begin), left = k - begin - count;
    const float *weights = floats + begin * PANEL, *fetch = weights + (groups == 1 ? AHEAD : count) * PANEL;
    int64_t lines = std::min(chunk, left ? left : goes_on ? k : 0) * PANEL / LINE;
    if (groups == 1) lines = std::max<int64_t>(0, k - (goes_on ? 0 : AHEAD)) * PANEL / LINE;
    for (int64_t g = 0, done = 0; g < groups; ++g) {
      const int64_t m = (rows - done + groups - g - 1) / (groups - g);
      run(m, x + done * x_row + begin, x_row, weights, count, begin == 0, sums + done * PANEL,
          fetch + lines * g / groups * LINE, fetch + lines * (g + 1) / groups * LINE);
      done += m;
    }
  }
}

template <int M, class Bits>
void multiply_few_rows(int64_t m, const float* x, int64_t x_row, const char* panel, int64_t k, float* sums) {
  if constexpr (M > 0) {
    if (m == M) return multiply_few<M, Bits>(x, x_row, panel, k, sums);
    multiply_few_rows<M - 1, Bits>(m, x, x_row, panel, k, sums);
  }
}

// The same for weights of fewer bits: they become floats chunk by chunk, once for all rows.
template <class Bits> void multiply_compact(const float* x, int64_t x_row, int64_t rows, const Panel& panel, float* sums) {
  if (rows <= FEW_ROWS) return multiply_few_rows<FEW_ROWS, Bits>(rows, x, x_row, panel.at, panel.k, sums);
  constexpr int64_t ROW = Bits::BYTES / Bits::ROWS, EACH = (ROW + 63) / 64;  // bytes, and lines to fetch with a row
  alignas(64) float floats[CHUNK * PANEL];  // they stay in the first-level cache
  const int64_t groups = (rows + MOST_ROWS - 1) / MOST_ROWS, k = panel.k;
  const auto run = groups == 1 ? multiply_rows<MOST_ROWS, EACH> : multiply_rows<MOST_ROWS, 1>;
  for (int64_t begin = 0; begin < k; begin += CHUNK) {
    const int64_t count = std::min(CHUNK, k - begin), end = begin + count;
    expand<Bits>(panel.at, begin, count, floats);
    const auto* fetch = reinterpret_cast<const float*>(end < k ? panel.at + end * ROW : panel.next);
    const int64_t lines = fetch ? std::min(CHUNK, end < k ? k - end : k) * ROW / 64 : 0;
    for (int64_t g = 0, done = 0; g < groups; ++g) {
      const int64_t m = (rows - done + groups - g - 1) / (groups - g);
      run(m, x + done * x_row + begin, x_row, floats, count, begin == 0, sums + done * PANEL,
          fetch + lines * g / groups * 16, fetch + lines * (g + 1) / groups * 16);
      done += m;
    }
  }
}

// out[rows][columns of one panel] (+)= x[rows][k] * panel + bias
void linear(const float* x, int64_t x_row, int64_t rows, const Panel& panel, bool add, float* out, int64_t out_row) {
  alignas(64) float sums[MOST_SUMS * PANEL];
  const auto run = panel.bits == 32  ? multiply
                   : panel.bits == 16 ? multiply_compact<Bits16>
                   : panel.bits == 8  ? multiply_compact<Bits8>
                                      : multiply_compact<Bits4>;
  const int64_t parts = (rows + MOST_SUMS - 1) / MOST_SUMS;
  for (int64_t p = 0; p < parts; ++p) {
    const int64_t begin = rows * p / parts, count = rows * (p + 1) / parts - begin;
    run(x + begin * x_row, x_row, count, panel, sums);
    finish(sums, count, panel, add, out + begin * out_row, out_row);
  }
}

// ------------------------------------------------------------------------------------------------ memory

double add_up(const float* x, int64_t count) {
  vf sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * W <= count; i += 4 * W) {
    for (int c = 0; c < 4 * W; c += LINE) __builtin_prefetch(x + i + 512 + c, 0, FAR);
    for (int c = 0; c < 4; ++c) sums[c] += load(x + i + c * W);
  }
  double total = sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (; i < count; ++i) total += x[i];
  return total;
}

double add_rows(const float* x, const int32_t* order, int64_t begin, int64_t end, int64_t width) {
  constexpr int64_t FAR_AHEAD = 6144;  // floats: with 512 the first lines of each row came late
  double total = 0;
  for (int64_t r = begin; r < end; ++r) {
    const float* row = x + order[r] * width;
    vf sums[4] = {};
    int64_t i = 0;
    for (; i + 4 * W <= width; i += 4 * W) {
      const int64_t coming = r + (i + FAR_AHEAD) / width;
      const float* fetch = coming < end ? x + order[coming] * width + (i + FAR_AHEAD) % width : row;
      for (int c = 0; c < 4 * W; c += LINE) __builtin_prefetch(fetch + c, 0, FAR);
      for (int c = 0; c < 4; ++c) sums[c] += load(row + i + c * W);
    }
    total += sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; i < width; ++i) total += row[i];
  }
  return total;
}

}  // namespace

const LayerFunctions& QUIRE_JOIN(layers_, QUIRE_ISA)() {
  static const LayerFunctions all = {PANEL, panel_bytes, pack, linear, norm, silu_mul, rotate, add_up, add_rows};
  return all;
}

}  // namespace quire

// Linear layers and the small operations of a decoder layer, on one thread. Compiled once for each instruction set
// (cpu_vector.h).

#include "cpu_ops.h"
#include "cpu_vector.h"

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

// Weights [N, K] are kept as panels [N / PANEL, K, PANEL]: a panel is read from its first to its last float, and each
// float meets all rows of x. A sum over K is always taken in the same order, so that a row's result does not depend on how
// many rows it came with.
constexpr int VECTORS = 2, PANEL = VECTORS * W;  // a panel is two vectors wide
constexpr int MOST_ROWS = W == 16 ? 12 : 6;      // of x in registers at once, with the panel's row and one broadcast

void pack(const float* weight, int64_t weight_row, float* panels, int64_t n, int64_t k) {
  for (int64_t first = 0; first < n; first += PANEL, panels += k * PANEL) {
    for (int64_t i = 0; i < k; ++i)
      for (int64_t j = 0; j < PANEL; ++j)
        panels[i * PANEL + j] = first + j < n ? weight[(first + j) * weight_row + i] : 0;
  }
}

constexpr int AHEAD = 256;  // rows of a panel that are fetched before they are needed: 16, 64 and 128 were slower from 8 rows on

template <int M>
void multiply_panel(const float* x, int64_t x_row, const float* panel, int64_t k, const float* bias, bool add, float* out,
                    int64_t out_row, int64_t columns) {
  vf sums[M][VECTORS];
  for (int m = 0; m < M; ++m)
    for (int c = 0; c < VECTORS; ++c) sums[m][c] = vf{};
  const float* rows[(M + 2) / 3];  // every third row; the two behind it are at one and two strides
  for (int m = 0; m < M; m += 3) rows[m / 3] = x + m * x_row;
  for (int64_t i = 0; i < k; ++i, panel += PANEL) {
    for (int c = 0; c < PANEL; c += 16) __builtin_prefetch(panel + AHEAD * PANEL + c, 0, 2);
    vf right[VECTORS];
    for (int c = 0; c < VECTORS; ++c) right[c] = load(panel + c * W);
    for (int m = 0; m < M; ++m) {
      const vf left = fill(rows[m / 3][(m % 3) * x_row]);
      for (int c = 0; c < VECTORS; ++c) sums[m][c] += left * right[c];
    }
    for (int m = 0; m < M; m += 3) ++rows[m / 3];
  }
  for (int m = 0; m < M; ++m, out += out_row) {
    float line[PANEL];
    for (int c = 0; c < VECTORS; ++c) store(line + c * W, sums[m][c]);
    for (int64_t j = 0; j < columns; ++j) out[j] = (add ? out[j] : 0) + line[j] + (bias ? bias[j] : 0);
  }
}

template <int M>
void multiply_rows(int64_t m, const float* x, int64_t x_row, const float* panel, int64_t k, const float* bias, bool add,
                   float* out, int64_t out_row, int64_t columns) {
  if constexpr (M > 0) {
    if (m == M) return multiply_panel<M>(x, x_row, panel, k, bias, add, out, out_row, columns);
    multiply_rows<M - 1>(m, x, x_row, panel, k, bias, add, out, out_row, columns);
  }
}

// out[rows][columns of one panel] (+)= x[rows][k] * panel + bias, in equal groups of at most MOST_ROWS rows
void linear(const float* x, int64_t x_row, int64_t rows, const float* panel, int64_t k, const float* bias, bool add,
            float* out, int64_t out_row, int64_t columns) {
  const int64_t groups = (rows + MOST_ROWS - 1) / MOST_ROWS;
  for (int64_t g = 0, done = 0; g < groups; ++g) {
    const int64_t m = (rows - done + groups - g - 1) / (groups - g);
    multiply_rows<MOST_ROWS>(m, x + done * x_row, x_row, panel, k, bias, add, out + done * out_row, out_row, columns);
    done += m;
  }
}

}  // namespace

const LayerFunctions& QUIRE_JOIN(layers_, QUIRE_ISA)() {
  static const LayerFunctions all = {PANEL, pack, linear, norm, silu_mul, rotate};
  return all;
}

}  // namespace quire

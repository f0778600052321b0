// Steps of a decoder layer on torch tensors: checked here, done by the build of the arithmetic that was chosen.
#pragma once

#include "cpu_ops.h"
#include "cpu_threads.h"

#include <ATen/core/Tensor.h>
#include <torch/library.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <vector>

namespace quire {
namespace {

// What was chosen, for the one translation unit that includes this.
const AttentionFunctions* chosen = &attention_generic();
const LayerFunctions* layers = &layers_generic();

// "auto" takes the widest that this processor runs; gives the name taken. Head sizes that do not fill a vector take the next.
std::string use_instructions(const std::string& name) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");  // and with it F16C
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
  if (avx512 && (name == "auto" || name == "avx512")) return chosen = &attention_avx512(), layers = &layers_avx512(), "avx512";
  if (avx2 && (name == "auto" || name == "avx2")) return chosen = &attention_avx2(), layers = &layers_avx2(), "avx2";
#endif
  TORCH_CHECK(name == "auto" || name == "generic", "this processor or this build does not run ", name);
  chosen = &attention_generic(), layers = &layers_generic();
  return "generic";
}

const AttentionFunctions& fitting(int64_t dim) {
#if defined(__x86_64__)
  if (chosen->lanes == 16 && dim % 16) return attention_avx2();
#endif
  return *chosen;
}

void check_index(const at::Tensor& x, int64_t dims, const char* name) {
  TORCH_CHECK(x.scalar_type() == at::kInt && x.dim() == dims && (x.size(-1) < 2 || x.stride(-1) == 1), name,
              " must be int32 with ", dims, " dimensions, the last of stride 1");
}
void check_float(const at::Tensor& x, int64_t dims, const char* name) {
  TORCH_CHECK(x.scalar_type() == at::kFloat && x.dim() == dims && x.stride(-1) == 1, name, " must be float32 with ",
              dims, " dimensions, the last of stride 1");
}
void check_bytes(const at::Tensor& x, int64_t dims, const char* name) {
  TORCH_CHECK(x.scalar_type() == at::kByte && x.dim() == dims && x.is_contiguous(), name, " must be contiguous uint8 with ",
              dims, " dimensions");
}

constexpr int64_t PIECE = 4096;  // floats in a piece of a small operation

// work(begin, end) for pieces of the rows; `width` floats are touched in each
template <class Work> Step by_rows(int64_t rows, int64_t width, const Work& work) {
  const int64_t each = std::max<int64_t>(1, PIECE / std::max<int64_t>(1, width));
  return {(rows + each - 1) / each, rows * width,
          [=](int64_t i, int64_t) { work(i * each, std::min(rows, i * each + each)); }};
}

// out = x / rms(x) * weight; the rows of x may lie apart.
Step norm_step(const at::Tensor& x, const at::Tensor& weight, double eps, const at::Tensor& out) {
  check_float(x, 2, "x"), check_float(out, 2, "out"), check_float(weight, 1, "weight");
  const int64_t rows = x.size(0), width = x.size(1), x_row = x.stride(0);
  TORCH_CHECK(out.sizes() == x.sizes() && out.is_contiguous() && weight.size(0) == width, "norm: shapes differ");
  const auto *from = x.const_data_ptr<float>(), *scale = weight.const_data_ptr<float>();
  auto* to = out.mutable_data_ptr<float>();
  return by_rows(rows, width, [=](int64_t a, int64_t b) {
    layers->norm(from + a * x_row, x_row, scale, float(eps), to + a * width, b - a, width);
  });
}

// Bits of a weight in panels of `bytes` bytes.
int bits_of(int64_t bytes, int64_t k) {
  for (const int bits : {32, 16, 8, 4})
    if (bytes && bytes == layers->panel_bytes(bits, k)) return bits;
  TORCH_CHECK(false, "panels of ", bytes, " bytes are no weights of ", k, " inputs for the instructions in use");
}

// Bytes of x that stay in a core's second-level cache while panel after panel is multiplied by them.
int64_t row_bytes() {
#if defined(_SC_LEVEL2_CACHE_SIZE)
  static const int64_t found = sysconf(_SC_LEVEL2_CACHE_SIZE);
#else
  constexpr int64_t found = 0;
#endif
  return (found > 0 ? std::max<int64_t>(found, 1 << 18) : 1 << 20) / 2;
}

// out [T, N] (+)= x [T, K] * panels + bias
Step linear_step(const at::Tensor& x, const at::Tensor& panels, const std::optional<at::Tensor>& bias, bool add,
                 const at::Tensor& out) {
  check_float(x, 2, "x"), check_bytes(panels, 2, "panels"), check_float(out, 2, "out");
  const int64_t rows = x.size(0), k = x.size(1), n = out.size(1), width = layers->panel, bytes = panels.size(1);
  TORCH_CHECK(panels.size(0) == (n + width - 1) / width && out.size(0) == rows && (!bias || bias->size(0) == n),
              "linear: x, panels, bias and out do not fit together");
  const int bits = bits_of(bytes, k);
  const auto* from = x.const_data_ptr<float>();
  const auto* first = reinterpret_cast<const char*>(panels.const_data_ptr<uint8_t>());
  const float* extra = bias ? bias->const_data_ptr<float>() : nullptr;
  auto* to = out.mutable_data_ptr<float>();
  const int64_t x_row = x.stride(0), out_row = out.stride(0), count = panels.size(0);
  const int64_t parts = std::min((rows * k * 4 + row_bytes() - 1) / row_bytes(), rows);  // of the rows, each with all panels
  return {parts * count, n * k, [=](int64_t piece, int64_t next) {
            const int64_t i = piece % count, part = piece / count, begin = rows * part / parts;
            const Panel panel = {first + i * bytes, next < 0 ? nullptr : first + next % count * bytes, bits,
                                 extra ? extra + i * width : nullptr, k, std::min(width, n - i * width)};
            layers->linear(from + begin * x_row, x_row, rows * (part + 1) / parts - begin, panel, add,
                           to + begin * out_row + i * width, out_row);
          }};
}

// out [T, F] = silu(x[:, :F]) * x[:, F:]
Step silu_step(const at::Tensor& x, const at::Tensor& out) {
  check_float(x, 2, "x"), check_float(out, 2, "out");
  const int64_t rows = x.size(0), width = out.size(1);
  TORCH_CHECK(x.size(1) == 2 * width && out.size(0) == rows && x.is_contiguous() && out.is_contiguous(),
              "silu_mul: x must be [T, 2 F] for out [T, F], both contiguous");
  const auto* from = x.const_data_ptr<float>();
  auto* to = out.mutable_data_ptr<float>();
  return by_rows(rows, width * 4, [=](int64_t a, int64_t b) {
    layers->silu_mul(from + a * 2 * width, to + a * width, b - a, width);
  });
}

// Rotates the first `heads` heads of x [T, >= heads * D] in place by cos, sin [T, D].
Step rotate_step(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, int64_t heads) {
  check_float(x, 2, "x"), check_float(cos, 2, "cos"), check_float(sin, 2, "sin");
  const int64_t rows = x.size(0), dim = cos.size(1), x_row = x.stride(0);
  TORCH_CHECK(cos.sizes() == sin.sizes() && cos.is_contiguous() && sin.is_contiguous() && cos.size(0) == rows &&
                  heads * dim <= x.size(1) && dim % 2 == 0,
              "rotate: cos and sin must be contiguous [T, D], x at least heads * D wide");
  auto* at = x.mutable_data_ptr<float>();
  const auto *c = cos.const_data_ptr<float>(), *s = sin.const_data_ptr<float>();
  return by_rows(rows, heads * dim, [=](int64_t a, int64_t b) {
    layers->rotate(at + a * x_row, x_row, c + a * dim, s + a * dim, b - a, heads, dim);
  });
}

}  // namespace
}  // namespace quire

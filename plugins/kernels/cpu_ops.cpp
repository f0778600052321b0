// The torch operators `quire_cpu::*`: argument checks, the work list of a step, and the threads. Arithmetic is in
// cpu_attention.cpp and cpu_layers.cpp; which build of it runs is chosen once, by what this processor has.

#include "cpu_ops.h"
#include "cpu_threads.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <vector>

namespace quire {
namespace {

const AttentionFunctions* chosen = &attention_generic();
const LayerFunctions* layers = &layers_generic();

constexpr int64_t PART_KEYS = 256;      // keys in one decode item, about; a longer sequence is cut into equal parts
constexpr int64_t PREFILL_ROWS = 128;   // query rows (tokens x heads of a group) in one prefill item

// "auto" takes the widest that this processor runs; gives the name taken. Head sizes that do not fill a vector take the next.
std::string use_instructions(const std::string& name) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
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

// ------------------------------------------------------------------------------------------------ attention

// The pieces of a step, costliest first, for all layers with this window: int32 [items, kItemFields] (cpu_ops.h). How a
// sequence is cut depends on its own lengths only, so that its sums do not depend on who shares the batch.
at::Tensor plan(const at::Tensor& query_start, const at::Tensor& kv_lens, int64_t heads, int64_t kv_heads,
                int64_t window) {
  check_index(query_start, 1, "query_start");
  check_index(kv_lens, 1, "kv_lens");
  const auto* starts = query_start.const_data_ptr<int32_t>();
  const auto* lens = kv_lens.const_data_ptr<int32_t>();
  const int64_t group = heads / kv_heads, enough = 2 * at::get_num_threads();
  std::vector<std::pair<int64_t, Item>> items;
  int32_t parts = 0;
  int64_t decode_items = 0;
  const auto cuts = [&](int64_t keys) { return std::max<int64_t>(1, (keys + PART_KEYS - 1) / PART_KEYS); };
  const auto visible = [&](int64_t i) -> int64_t { return window ? std::min<int64_t>(window, lens[i]) : lens[i]; };
  for (int64_t i = 0; i < kv_lens.size(0); ++i)
    if (starts[i + 1] - starts[i] == 1 && lens[i] > 0) decode_items += cuts(visible(i));
  const bool by_head = decode_items && decode_items < enough && kv_heads > 1;
  for (int64_t i = 0; i < kv_lens.size(0); ++i) {
    const int32_t begin = starts[i], end = starts[i + 1], length = lens[i], seq = int32_t(i);
    if (end == begin || length == 0) continue;
    if (end - begin > 1) {
      const int32_t tokens = int32_t(std::max<int64_t>(1, PREFILL_ROWS / group));
      for (int32_t from = begin; from < end; from += tokens) {
        const int32_t to = std::min(from + tokens, end);
        const int64_t keys = window ? std::min<int64_t>(length, window + to - from) : length - (end - to);
        for (int32_t h = 0; h < kv_heads; ++h)
          items.push_back({(to - from) * group * keys, {seq, from, to, 0, length, h, h + 1, -1, 0, 1}});
      }
      continue;
    }
    const int64_t keys = visible(i), num = cuts(keys), first = length - keys;
    const int64_t each = ((keys + num - 1) / num + 15) / 16 * 16, count = (keys + each - 1) / each;
    const int32_t step = by_head && keys * kv_heads > 64 ? 1 : int32_t(kv_heads);
    for (int32_t h = 0; h < kv_heads; h += step) {
      const int32_t first_part = parts;
      for (int64_t n = 0; n < count; ++n) {
        const int32_t part = count > 1 ? parts++ : -1;
        const int64_t from = first + n * each, to = std::min<int64_t>(from + each, length);
        items.push_back({(to - from) * step * group * 4,
                         {seq, begin, end, int32_t(from), int32_t(to), h, h + step, part, first_part, int32_t(count)}});
      }
    }
  }
  std::stable_sort(items.begin(), items.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  at::Tensor out = at::empty({int64_t(items.size()), kItemFields}, query_start.options());
  auto* to = reinterpret_cast<Item*>(out.mutable_data_ptr<int32_t>());
  for (const auto& item : items) *to++ = item.second;
  return out;
}

std::unique_ptr<std::atomic<int>[]> waiting;  // of each output in parts, by its first part: parts that are not done yet
int64_t num_waiting = 0;

void attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& k_cache,
            const at::Tensor& v_cache, const at::Tensor& items, const at::Tensor& slots, const at::Tensor& query_start,
            const at::Tensor& kv_lens, const at::Tensor& tables, const at::Tensor& partials, double scale,
            int64_t window, double soft_cap, const at::Tensor& out) {
  check_float(q, 3, "q"), check_float(k, 3, "k"), check_float(v, 3, "v"), check_float(partials, 1, "partials");
  check_index(items, 2, "items"), check_index(tables, 2, "tables"), check_index(slots, 1, "slots");
  check_float(out, 3, "out");
  const bool half = k_cache.scalar_type() == at::kBFloat16;
  TORCH_CHECK((half || k_cache.scalar_type() == at::kFloat) && v_cache.scalar_type() == k_cache.scalar_type() &&
                  k_cache.dim() == 4 && k_cache.stride(3) == 1 && v_cache.stride(3) == 1,
              "the cache must be float32 or bfloat16 [N, S, H_kv, D], D of stride 1");
  TORCH_CHECK(out.sizes() == q.sizes() && out.is_contiguous(), "out must be contiguous and of q's shape");
  const int64_t tokens = q.size(0), dim = q.size(2), kv_heads = k.size(1);
  TORCH_CHECK(k.sizes() == v.sizes() && k.size(0) == tokens && slots.size(0) == tokens && k.size(2) == dim &&
                  k_cache.size(2) == kv_heads && k_cache.size(3) == dim && q.size(1) % kv_heads == 0,
              "q, k, v, slots and the cache do not fit together");
  Layer layer;
  layer.q = q.const_data_ptr<float>(), layer.q_token = q.stride(0), layer.q_head = q.stride(1);
  layer.out = out.mutable_data_ptr<float>();
  layer.k_cache = k_cache.data_ptr(), layer.v_cache = v_cache.data_ptr();
  layer.k_block = k_cache.stride(0), layer.k_slot = k_cache.stride(1), layer.k_head = k_cache.stride(2);
  layer.v_block = v_cache.stride(0), layer.v_slot = v_cache.stride(1), layer.v_head = v_cache.stride(2);
  layer.tables = tables.const_data_ptr<int32_t>(), layer.table_stride = tables.stride(0);
  layer.query_start = query_start.const_data_ptr<int32_t>(), layer.kv_lens = kv_lens.const_data_ptr<int32_t>();
  layer.partials = partials.mutable_data_ptr<float>();
  layer.block_size = int(k_cache.size(1)), layer.heads = int(q.size(1)), layer.kv_heads = int(kv_heads);
  layer.dim = int(dim), layer.window = int(window), layer.scale = float(scale), layer.soft_cap = float(soft_cap);
  layer.half = half;
  const AttentionFunctions& run = fitting(dim);

  const Store written = {k.const_data_ptr<float>(), v.const_data_ptr<float>(), k.stride(0),  k.stride(1),
                         v.stride(0),               v.stride(1),               slots.const_data_ptr<int32_t>()};
  const int64_t pieces = (tokens + 31) / 32;
  share(pieces, tokens * kv_heads * dim, [&](int64_t i, int64_t) {
    run.store(layer, written, i * 32, std::min(tokens, i * 32 + 32));
  });

  const auto* item = reinterpret_cast<const Item*>(items.const_data_ptr<int32_t>());
  const int64_t count = items.size(0);
  int64_t floats = 0, parts = 0;
  for (int64_t i = 0; i < count; ++i) {
    floats += int64_t(item[i].key_end - item[i].key_begin) * (item[i].head_end - item[i].head_begin) * dim;
    parts = std::max<int64_t>(parts, item[i].part + 1);
  }
  TORCH_CHECK(partials.size(0) >= parts * layer.heads * (dim + 2), "partials are too small");
  if (parts > num_waiting) waiting.reset(new std::atomic<int>[num_waiting = parts]);
  for (int64_t i = 0; i < count; ++i)
    if (item[i].part >= 0) waiting[item[i].first_part].store(item[i].num_parts, std::memory_order_relaxed);
  const auto is_decode = [&](const Item& one) {
    return layer.query_start[one.sequence + 1] - layer.query_start[one.sequence] == 1;
  };
  share(count, floats, [&](int64_t i, int64_t next) {
    const Item& one = item[i];
    if (!is_decode(one)) return run.prefill(layer, one);
    run.decode(layer, one, next >= 0 && is_decode(item[next]) ? item + next : nullptr);
    if (one.part >= 0 && waiting[one.first_part].fetch_sub(1, std::memory_order_acq_rel) == 1) run.merge(layer, one);
  });
}

// ------------------------------------------------------------------------------------------------ decoder layers

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
  const int64_t parts = (rows * k * 4 + row_bytes() - 1) / row_bytes();  // of the rows, each with all panels
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

void norm(const at::Tensor& x, const at::Tensor& weight, double eps, const at::Tensor& out) {
  run_steps({norm_step(x, weight, eps, out)});
}
void linear(const at::Tensor& x, const at::Tensor& panels, const std::optional<at::Tensor>& bias, bool add,
            const at::Tensor& out) {
  run_steps({linear_step(x, panels, bias, add, out)});
}
void silu_mul(const at::Tensor& x, const at::Tensor& out) { run_steps({silu_step(x, out)}); }
void rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, int64_t heads) {
  run_steps({rotate_step(x, cos, sin, heads)});
}

// What lies between the attention of one layer and of the next, with the threads woken once.
//   rest (o, its bias, norm, gate and up, their bias, down, its bias):
//     total += attended * o;  total += silu(gate) * up * down, of norm(total)
//   start (norm, q, k and v, their bias):
//     qkv = norm(total) * qkv, its first `heads` heads rotated
// Either list may be empty. normed [T, hidden], wide [T, 2 F] and active [T, F] are room.
using Weights = c10::List<std::optional<at::Tensor>>;

void between(const at::Tensor& total, const at::Tensor& attended, const Weights& rest, const Weights& start, double eps,
             const at::Tensor& cos, const at::Tensor& sin, int64_t heads, const at::Tensor& normed,
             const at::Tensor& wide, const at::Tensor& active, const at::Tensor& qkv) {
  std::vector<Step> steps;
  if (!rest.empty()) {
    TORCH_CHECK(rest.size() == 7, "rest must be (o, bias, norm, gate and up, bias, down, bias)");
    steps.push_back(linear_step(attended, *rest.get(0), rest.get(1), true, total));
    steps.push_back(norm_step(total, *rest.get(2), eps, normed));
    steps.push_back(linear_step(normed, *rest.get(3), rest.get(4), false, wide));
    steps.push_back(silu_step(wide, active));
    steps.push_back(linear_step(active, *rest.get(5), rest.get(6), true, total));
  }
  if (!start.empty()) {
    TORCH_CHECK(start.size() == 3, "start must be (norm, q, k and v, bias)");
    steps.push_back(norm_step(total, *start.get(0), eps, normed));
    steps.push_back(linear_step(normed, *start.get(1), start.get(2), false, qkv));
    steps.push_back(rotate_step(qkv, cos, sin, heads));
  }
  run_steps(steps);
}

// Panels of a linear layer's weight [N, K] for the instructions chosen now: uint8 [ceil(N / panel_width()), panel_bytes()].
int64_t panel_width() { return layers->panel; }
int64_t panel_bytes(int64_t bits, int64_t k) {
  TORCH_CHECK(bits == 4 || bits == 8 || bits == 16 || bits == 32, "weights are kept in 4, 8, 16 or 32 bits");
  return layers->panel_bytes(int(bits), k);
}

// False: some weight would come out as another one, and `out` is of no use.
bool pack(const at::Tensor& weight, const at::Tensor& out) {
  check_float(weight, 2, "weight"), check_bytes(out, 2, "out");
  const int64_t n = weight.size(0), k = weight.size(1), panel = layers->panel, bytes = out.size(1);
  TORCH_CHECK(out.size(0) == (n + panel - 1) / panel, "pack: out must be [ceil(N / ", panel, "), bytes]");
  const int bits = bits_of(bytes, k);
  const auto* from = weight.const_data_ptr<float>();
  auto* to = reinterpret_cast<char*>(out.mutable_data_ptr<uint8_t>());
  const int64_t row = weight.stride(0);
  std::atomic<bool> exact{true};
  share(out.size(0), n * k, [&](int64_t i, int64_t) {
    if (exact && !layers->pack(from + i * panel * row, row, to + i * bytes, bits, std::min(panel, n - i * panel), k))
      exact = false;
  });
  return exact;
}

// The sum of all floats of x, read at the rate that this machine's memory gives: for benchmarks.
double read_all(const at::Tensor& x) {
  check_float(x, 1, "x");
  const auto* from = x.const_data_ptr<float>();
  const int64_t count = x.size(0), pieces = 64, each = (count + pieces - 1) / pieces;
  std::vector<double> sums(pieces);
  run_steps({{pieces, count, [&](int64_t i, int64_t) {
                const int64_t begin = std::min(count, i * each);
                sums[i] = layers->add_up(from + begin, std::min(each, count - begin));
              }}});
  double total = 0;
  for (double sum : sums) total += sum;
  return total;
}

}  // namespace
}  // namespace quire

TORCH_LIBRARY(quire_cpu, m) {
  m.def("use_instructions(str name) -> str", &quire::use_instructions);
  m.def("plan(Tensor query_start, Tensor kv_lens, int heads, int kv_heads, int window) -> Tensor");
  m.def(
      "attend(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor items, Tensor slots, "
      "Tensor query_start, Tensor kv_lens, Tensor tables, Tensor(c!) partials, float scale, int window, float soft_cap, "
      "Tensor(d!) out) -> ()");
  m.def("panel_width() -> int", &quire::panel_width);
  m.def("panel_bytes(int bits, int k) -> int", &quire::panel_bytes);
  m.def("pack(Tensor weight, Tensor(a!) out) -> bool");
  m.def("linear(Tensor x, Tensor panels, Tensor? bias, bool add, Tensor(a!) out) -> ()");
  m.def(
      "between(Tensor(a!) total, Tensor attended, Tensor?[] rest, Tensor?[] start, float eps, Tensor cos, Tensor sin, "
      "int heads, Tensor(b!) normed, Tensor(c!) wide, Tensor(d!) active, Tensor(e!) qkv) -> ()");
  m.def("read_all(Tensor x) -> float");
  m.def("norm(Tensor x, Tensor weight, float eps, Tensor(a!) out) -> ()");
  m.def("silu_mul(Tensor x, Tensor(a!) out) -> ()");
  m.def("rotate(Tensor(a!) x, Tensor cos, Tensor sin, int heads) -> ()");
}

TORCH_LIBRARY_IMPL(quire_cpu, CPU, m) {
  m.impl("plan", &quire::plan);
  m.impl("attend", &quire::attend);
  m.impl("pack", &quire::pack);
  m.impl("linear", &quire::linear);
  m.impl("between", &quire::between);
  m.impl("read_all", &quire::read_all);
  m.impl("norm", &quire::norm);
  m.impl("silu_mul", &quire::silu_mul);
  m.impl("rotate", &quire::rotate);
}

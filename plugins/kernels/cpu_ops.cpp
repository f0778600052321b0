// The torch operators `quire_cpu::*`. Arithmetic is in cpu_attention.cpp and cpu_layers.cpp; which build of it runs is chosen
// once, by what this processor has. What the threads do is made of steps (cpu_steps.h, cpu_attend.h).

#include "cpu_attend.h"
#include "cpu_steps.h"

namespace quire {
namespace {

void attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& k_cache,
            const at::Tensor& v_cache, const at::Tensor& items, const at::Tensor& slots, const at::Tensor& query_start,
            const at::Tensor& kv_lens, const at::Tensor& tables, const at::Tensor& partials, double scale,
            int64_t window, double soft_cap, const at::Tensor& out) {
  std::atomic<int>* waiting = counters(parts_of(items));
  count_parts(items, waiting);
  std::vector<Step> steps;
  add_attention(steps, q, k, v, k_cache, v_cache, items, {slots, query_start, kv_lens, tables, partials},
                {scale, window, soft_cap}, out, waiting);
  run_steps(steps);
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

using Weights = c10::List<std::optional<at::Tensor>>;

// The room that layers share: normed [T, hidden], wide [T, 2 F], active [T, F], qkv [T, (H + 2 H_kv) D].
struct Rooms {
  const at::Tensor &normed, &wide, &active, &qkv;
};

// qkv = norm(total) * qkv, its first `heads` heads rotated; weights from `at`: norm, q and k and v, their bias
void add_start(std::vector<Step>& steps, const at::Tensor& total, const Weights& weights, int64_t at, double eps,
               const at::Tensor& cos, const at::Tensor& sin, int64_t heads, const Rooms& rooms) {
  steps.push_back(norm_step(total, weights.get(at).value(), eps, rooms.normed));
  steps.push_back(linear_step(rooms.normed, weights.get(at + 1).value(), weights.get(at + 2), false, rooms.qkv));
  steps.push_back(rotate_step(rooms.qkv, cos, sin, heads));
}

// total += attended * o;  total += silu(gate) * up * down, of norm(total); weights from `at`: o, its bias, norm, gate and up,
// their bias, down, its bias
void add_rest(std::vector<Step>& steps, const at::Tensor& total, const at::Tensor& attended, const Weights& weights,
              int64_t at, double eps, const Rooms& rooms) {
  steps.push_back(linear_step(attended, weights.get(at).value(), weights.get(at + 1), true, total));
  steps.push_back(norm_step(total, weights.get(at + 2).value(), eps, rooms.normed));
  steps.push_back(linear_step(rooms.normed, weights.get(at + 3).value(), weights.get(at + 4), false, rooms.wide));
  steps.push_back(silu_step(rooms.wide, rooms.active));
  steps.push_back(linear_step(rooms.active, weights.get(at + 5).value(), weights.get(at + 6), true, total));
}
constexpr int64_t START = 3, REST = 7;  // weights of the two

// What lies between the attention of one layer and of the next, with the threads woken once. Either list may be empty.
void between(const at::Tensor& total, const at::Tensor& attended, const Weights& rest, const Weights& start, double eps,
             const at::Tensor& cos, const at::Tensor& sin, int64_t heads, const at::Tensor& normed,
             const at::Tensor& wide, const at::Tensor& active, const at::Tensor& qkv) {
  TORCH_CHECK(rest.empty() || rest.size() == REST, "rest must be (o, bias, norm, gate and up, bias, down, bias)");
  TORCH_CHECK(start.empty() || start.size() == START, "start must be (norm, q and k and v, bias)");
  std::vector<Step> steps;
  if (!rest.empty()) add_rest(steps, total, attended, rest, 0, eps, {normed, wide, active, qkv});
  if (!start.empty()) add_start(steps, total, start, 0, eps, cos, sin, heads, {normed, wide, active, qkv});
  run_steps(steps);
}

// All layers up to the attention of the last one, whose result is in attended [T, H * D]; the rest of that layer is `between`'s,
// for the rows that are needed. weights: start and rest of each layer in turn. One entry a layer of what attention needs.
void run_layers(const at::Tensor& total, const Weights& weights, double eps, const at::Tensor& cos, const at::Tensor& sin,
               const at::Tensor& normed, const at::Tensor& wide, const at::Tensor& active, const at::Tensor& qkv,
               const at::Tensor& attended, at::TensorList k_caches, at::TensorList v_caches, at::TensorList items,
               at::ArrayRef<double> scales, at::IntArrayRef windows, at::ArrayRef<double> soft_caps,
               const at::Tensor& slots, const at::Tensor& query_start, const at::Tensor& kv_lens,
               const at::Tensor& tables, const at::Tensor& partials) {
  const size_t count = k_caches.size();
  TORCH_CHECK(weights.size() == count * (START + REST) && v_caches.size() == count && items.size() == count &&
                  scales.size() == count && windows.size() == count && soft_caps.size() == count && count > 0,
              "layers: one of everything for each layer");
  const int64_t tokens = total.size(0), dim = k_caches[0].size(3), kv_heads = k_caches[0].size(2);
  const int64_t heads = attended.size(1) / dim;
  const at::Tensor parts = qkv.view({tokens, heads + 2 * kv_heads, dim}), out = attended.view({tokens, heads, dim});
  const at::Tensor q = parts.narrow(1, 0, heads), k = parts.narrow(1, heads, kv_heads),
                   v = parts.narrow(1, heads + kv_heads, kv_heads);
  std::vector<int64_t> first;  // of each layer's counters; layers with the same work list share them
  int64_t num_parts = 0;
  for (size_t l = 0; l < count; ++l) {
    size_t same = 0;
    while (same < l && !items[same].is_same(items[l])) ++same;
    first.push_back(same < l ? first[same] : num_parts);
    if (same == l) num_parts += parts_of(items[l]);
  }
  std::atomic<int>* waiting = counters(num_parts);
  for (size_t l = 0; l < count; ++l) count_parts(items[l], waiting + first[l]);
  const Rooms rooms = {normed, wide, active, qkv};
  std::vector<Step> steps;
  for (size_t l = 0; l < count; ++l) {
    if (l) add_rest(steps, total, attended, weights, (l - 1) * (START + REST) + START, eps, rooms);
    add_start(steps, total, weights, l * (START + REST), eps, cos, sin, heads + kv_heads, rooms);
    add_attention(steps, q, k, v, k_caches[l], v_caches[l], items[l], {slots, query_start, kv_lens, tables, partials},
                  {scales[l], windows[l], soft_caps[l]}, out, waiting + first[l]);
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

// The same for the rows of x [N, width] in this order, as a cache of blocks is read: what order costs.
double read_rows(const at::Tensor& x, const at::Tensor& order) {
  check_float(x, 2, "x"), check_index(order, 1, "order");
  TORCH_CHECK(x.is_contiguous() && x.size(1) > 0, "x must be contiguous [N, width]");
  const auto* from = x.const_data_ptr<float>();
  const auto* rows = order.const_data_ptr<int32_t>();
  const int64_t count = order.size(0), width = x.size(1), pieces = std::min<int64_t>(count, 64);
  for (int64_t r = 0; r < count; ++r) TORCH_CHECK(rows[r] >= 0 && rows[r] < x.size(0), "order names no row: ", rows[r]);
  std::vector<double> sums(pieces);
  run_steps({{pieces, count * width, [&](int64_t i, int64_t) {
                sums[i] = layers->add_rows(from, rows, count * i / pieces, count * (i + 1) / pieces, width);
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
  m.def(
      "layers(Tensor(a!) total, Tensor?[] weights, float eps, Tensor cos, Tensor sin, Tensor(b!) normed, Tensor(c!) wide, "
      "Tensor(d!) active, Tensor(e!) qkv, Tensor(f!) attended, Tensor(g!)[] k_caches, Tensor(h!)[] v_caches, Tensor[] items, "
      "float[] scales, int[] windows, float[] soft_caps, Tensor slots, Tensor query_start, Tensor kv_lens, Tensor tables, "
      "Tensor(i!) partials) -> ()");
  m.def("read_all(Tensor x) -> float");
  m.def("read_rows(Tensor x, Tensor order) -> float");
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
  m.impl("layers", &quire::run_layers);
  m.impl("read_all", &quire::read_all);
  m.impl("read_rows", &quire::read_rows);
  m.impl("norm", &quire::norm);
  m.impl("silu_mul", &quire::silu_mul);
  m.impl("rotate", &quire::rotate);
}

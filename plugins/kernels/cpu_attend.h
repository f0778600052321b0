// Steps of attention over a paged cache: the work list of a step, and what the threads do with it in one layer.
#pragma once

#include "cpu_ops.h"
#include "cpu_steps.h"

#include <ATen/ops/empty.h>

#include <memory>

namespace quire {
namespace {

constexpr int64_t PART_KEYS = 256;      // keys in one decode item, about; a longer sequence is cut into equal parts
constexpr int64_t PREFILL_ROWS = 128;   // query rows (tokens x heads of a group) in one prefill item

// The pieces of a step, costliest first for each thread, for all layers with this window: int32 [items, kItemFields] (cpu_ops.h). How a
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
  const size_t hands = at::get_num_threads();  // dealt out, so that each thread's run of them is as costly
  for (size_t hand = 0; hand < hands; ++hand)
    for (size_t i = hand; i < items.size(); i += hands) *to++ = items[i].second;
  return out;
}

// What a step's batch is to every layer.
struct Lists {
  const at::Tensor &slots, &query_start, &kv_lens, &tables, &partials;
};

// How one layer attends.
struct Manner {
  double scale;
  int64_t window;
  double soft_cap;  // 0: none
};

int64_t parts_of(const at::Tensor& items) {
  check_index(items, 2, "items");
  TORCH_CHECK(items.size(1) == kItemFields && items.is_contiguous(), "items must be contiguous [n, ", kItemFields, "]");
  const auto* item = reinterpret_cast<const Item*>(items.const_data_ptr<int32_t>());
  int64_t parts = 0;
  for (int64_t i = 0; i < items.size(0); ++i) parts = std::max<int64_t>(parts, item[i].part + 1);
  return parts;
}

// Counters of the parts that are not done yet, of each output in parts, by its first part. They belong to the thread that
// calls, until it calls again: two engines of a process do not meet in them.
std::atomic<int>* counters(int64_t count) {
  static thread_local std::unique_ptr<std::atomic<int>[]> all;
  static thread_local int64_t size = 0;
  if (count > size) all.reset(new std::atomic<int>[count]), size = count;
  return all.get();
}
void count_parts(const at::Tensor& items, std::atomic<int>* waiting) {
  const auto* item = reinterpret_cast<const Item*>(items.const_data_ptr<int32_t>());
  for (int64_t i = 0; i < items.size(0); ++i)
    if (item[i].part >= 0) waiting[item[i].first_part].store(item[i].num_parts, std::memory_order_relaxed);
}

// k and v go to their slots, then `out` = attention of q, both [T, H, D]. `waiting` is left as it was for the next layer.
void add_attention(std::vector<Step>& steps, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                   const at::Tensor& k_cache, const at::Tensor& v_cache, const at::Tensor& items, const Lists& lists,
                   const Manner& manner, const at::Tensor& out, std::atomic<int>* waiting) {
  check_float(q, 3, "q"), check_float(k, 3, "k"), check_float(v, 3, "v"), check_float(lists.partials, 1, "partials");
  check_index(lists.tables, 2, "tables"), check_index(lists.slots, 1, "slots"), check_float(out, 3, "out");
  const bool half = k_cache.scalar_type() == at::kBFloat16;
  TORCH_CHECK((half || k_cache.scalar_type() == at::kFloat) && v_cache.scalar_type() == k_cache.scalar_type() &&
                  k_cache.dim() == 4 && k_cache.stride(3) == 1 && v_cache.stride(3) == 1,
              "the cache must be float32 or bfloat16 [N, S, H_kv, D], D of stride 1");
  TORCH_CHECK(out.sizes() == q.sizes() && out.is_contiguous(), "out must be contiguous and of q's shape");
  const int64_t tokens = q.size(0), dim = q.size(2), kv_heads = k.size(1);
  TORCH_CHECK(k.sizes() == v.sizes() && k.size(0) == tokens && lists.slots.size(0) == tokens && k.size(2) == dim &&
                  k_cache.size(2) == kv_heads && k_cache.size(3) == dim && q.size(1) % kv_heads == 0,
              "q, k, v, slots and the cache do not fit together");
  Layer layer;
  layer.q = q.const_data_ptr<float>(), layer.q_token = q.stride(0), layer.q_head = q.stride(1);
  layer.out = out.mutable_data_ptr<float>();
  layer.k_cache = k_cache.data_ptr(), layer.v_cache = v_cache.data_ptr();
  layer.k_block = k_cache.stride(0), layer.k_slot = k_cache.stride(1), layer.k_head = k_cache.stride(2);
  layer.v_block = v_cache.stride(0), layer.v_slot = v_cache.stride(1), layer.v_head = v_cache.stride(2);
  layer.tables = lists.tables.const_data_ptr<int32_t>(), layer.table_stride = lists.tables.stride(0);
  layer.query_start = lists.query_start.const_data_ptr<int32_t>(), layer.kv_lens = lists.kv_lens.const_data_ptr<int32_t>();
  layer.partials = lists.partials.mutable_data_ptr<float>();
  layer.block_size = int(k_cache.size(1)), layer.heads = int(q.size(1)), layer.kv_heads = int(kv_heads);
  layer.dim = int(dim), layer.half = half;
  layer.window = int(manner.window), layer.scale = float(manner.scale), layer.soft_cap = float(manner.soft_cap);
  const AttentionFunctions* run = &fitting(dim);

  const Store written = {k.const_data_ptr<float>(), v.const_data_ptr<float>(), k.stride(0),  k.stride(1),
                         v.stride(0),               v.stride(1),               lists.slots.const_data_ptr<int32_t>()};
  steps.push_back({(tokens + 31) / 32, tokens * kv_heads * dim, [=](int64_t i, int64_t) {
                     run->store(layer, written, i * 32, std::min(tokens, i * 32 + 32));
                   }});

  const auto* item = reinterpret_cast<const Item*>(items.const_data_ptr<int32_t>());
  const int64_t count = items.size(0);
  int64_t floats = 0, parts = 0;
  for (int64_t i = 0; i < count; ++i) {
    floats += int64_t(item[i].key_end - item[i].key_begin) * (item[i].head_end - item[i].head_begin) * dim;
    parts = std::max<int64_t>(parts, item[i].part + 1);
  }
  TORCH_CHECK(lists.partials.size(0) >= parts * layer.heads * (dim + 2), "partials are too small");
  const auto is_decode = [layer](const Item& one) {
    return layer.query_start[one.sequence + 1] - layer.query_start[one.sequence] == 1;
  };
  steps.push_back({count, floats, [=](int64_t i, int64_t next) {
                     const Item& one = item[i];
                     if (!is_decode(one)) return run->prefill(layer, one);
                     run->decode(layer, one, next >= 0 && is_decode(item[next]) ? item + next : nullptr);
                     if (one.part < 0 || waiting[one.first_part].fetch_sub(1, std::memory_order_acq_rel) != 1) return;
                     waiting[one.first_part].store(one.num_parts, std::memory_order_relaxed);
                     run->merge(layer, one);
                   }});
}

}  // namespace
}  // namespace quire

// What the two kinds of translation unit share: cpu_ops.cpp (torch operators, built once) and cpu_attention.cpp and
// cpu_layers.cpp (arithmetic without torch, built once for each instruction set and chosen at run time).
#pragma once

#include <cstdint>

namespace quire {

// A piece of one layer's attention that one thread does: some query tokens of one sequence over some of its keys.
struct Item {
  int32_t sequence;
  int32_t query_begin, query_end;  // packed tokens
  int32_t key_begin, key_end;      // positions in the sequence; a decode item reads exactly these
  int32_t head_begin, head_end;    // key heads
  int32_t part;                    // slot in the partial results, or -1: writes the output itself
  int32_t first_part, num_parts;   // the parts that make up one output, merged by whoever finishes last
};
constexpr int kItemFields = sizeof(Item) / sizeof(int32_t);

// One layer of one step. Strides are in elements and 64 bits wide, as are the offsets made from them.
struct Layer {
  const float* q;  // [T, H, D]
  int64_t q_token, q_head;
  float* out;  // [T, H, D], contiguous
  void *k_cache, *v_cache;  // [N, S, H_kv, D], float or bfloat16; the last stride is 1
  int64_t k_block, k_slot, k_head;
  int64_t v_block, v_slot, v_head;
  const int32_t* tables;  // [B, width]
  int64_t table_stride;
  const int32_t* query_start;  // [B + 1]
  const int32_t* kv_lens;      // [B]
  float* partials;             // [parts, H, D + 2]: sums of weighted values, then the largest score and the sum of weights
  int block_size, heads, kv_heads, dim;
  int window;      // keys visible, the token itself included; 0: all
  float scale, soft_cap;  // soft_cap 0: none
  bool half;       // the cache holds bfloat16
};

// New K and V of packed tokens [begin, end) go to their slots; slot -1 is padding.
struct Store {
  const float *k, *v;  // [T, H_kv, D], last stride 1
  int64_t k_token, k_head, v_token, v_head;
  const int32_t* slots;
};

struct AttentionFunctions {
  int lanes;  // floats in a vector
  void (*store)(const Layer&, const Store&, int64_t begin, int64_t end);
  void (*decode)(const Layer&, const Item&, const Item* following);  // following: this thread's next, or null
  void (*prefill)(const Layer&, const Item&);
  void (*merge)(const Layer&, const Item&);
};

// One panel [k, panel width] of packed weights.
struct Panel {
  const char *at, *next;  // next: the panel that the same thread multiplies after this one, or null
  int bits;               // 32: floats; fewer: cpu_weights.h
  const float* bias;      // of its columns, or null
  int64_t k, columns;
};

struct LayerFunctions {
  int panel;  // columns of a panel of packed weights
  int64_t (*panel_bytes)(int bits, int64_t k);  // 0: weights [n, k] are not kept in so many bits
  // weight [n <= panel, k] to one panel, with zeros behind column n; false if some weight would come out as another
  bool (*pack)(const float* weight, int64_t weight_row, char* panel, int bits, int64_t n, int64_t k);
  // out [rows, columns] (+)= x [rows, k] * one panel + bias
  void (*linear)(const float* x, int64_t x_row, int64_t rows, const Panel& panel, bool add, float* out, int64_t out_row);
  // out = x / rms(x) * weight, for x [rows, width]
  void (*norm)(const float* x, int64_t x_row, const float* weight, float eps, float* out, int64_t rows, int64_t width);
  // out = silu(gate) * up, for x [rows, 2 * width] = (gate, up)
  void (*silu_mul)(const float* x, float* out, int64_t rows, int64_t width);
  // rotates the halves of every head of x [rows, heads, dim] by cos and sin [rows, dim]
  void (*rotate)(float* x, int64_t x_row, const float* cos, const float* sin, int64_t rows, int64_t heads, int64_t dim);
  double (*add_up)(const float* x, int64_t count);
  // of rows order[begin] .. order[end] of x [.., width], in that order
  double (*add_rows)(const float* x, const int32_t* order, int64_t begin, int64_t end, int64_t width);
};

#define QUIRE_DECLARE(ISA)                    \
  const AttentionFunctions& attention_##ISA(); \
  const LayerFunctions& layers_##ISA();
QUIRE_DECLARE(generic)
#if defined(__x86_64__)
QUIRE_DECLARE(avx2)
QUIRE_DECLARE(avx512)
#endif

}  // namespace quire

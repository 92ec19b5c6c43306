// What is compiled once for each instruction set; `kernels()` picks.
#pragma once

#include <cstddef>
#include <cstdint>

#define ALWAYS_INLINE inline __attribute__((always_inline))

namespace native {

/// How the weights of a linear layer are kept in memory.
enum class Format : int32_t {
  kFloat32,
  kBfloat16,
  kBits8,  // affine: q * scale + bias, a scale and a bias for each group of inputs
  kBits4,
};

/// What inputs are before they are multiplied with quantized weights.
enum class Inputs : int32_t {
  kFloats,
  kInt16,  // a group's largest one is 32767
  kInt8,   // and here 127
};

/// Weights `[outputs, inputs]` as the kernel reads them, one panel of outputs after the other.
///
/// A panel holds `columns` outputs side by side, all inputs of them one after the other:
/// - floats: `[inputs][columns]`
/// - 8 bits: for each group of inputs, `[group][columns]` bytes, `columns` scales and as many
///   biases; float16 if that is what they all are, and else float32
/// - 4 bits: the same, a byte holding the values of two successive inputs, the first one low
/// For inputs that are integers bytes are `[..][columns][4]`: those of four successive inputs of an
/// output lie side by side; of 4 bits, the high halves are those of the next four inputs.
struct Panels {
  Format format;
  int num_outputs;
  int num_inputs;
  int group;    // of the quantized formats; inputs are a multiple of it
  int columns;  // of a panel; columns beyond the outputs are zero
  // Quantized: the product and the sum are each rounded to float16's 11 bits; with inputs that are
  // integers only of rows that are looked up.
  bool rounds;
  Inputs inputs;
  bool has_half_parameters;  // scales and biases
  const uint8_t* data;

  ALWAYS_INLINE int num_panels() const { return (num_outputs + columns - 1) / columns; }

  /// Scales and biases of a group.
  ALWAYS_INLINE size_t parameter_bytes() const {
    return 2 * static_cast<size_t>(columns) * (has_half_parameters ? 2 : 4);
  }

  ALWAYS_INLINE size_t panel_bytes() const {
    size_t weights = static_cast<size_t>(num_inputs) * columns;
    size_t parameters = group ? num_inputs / group * parameter_bytes() : 0;
    switch (format) {
      case Format::kFloat32: return weights * 4;
      case Format::kBfloat16: return weights * 2;
      case Format::kBits8: return weights + parameters;
      case Format::kBits4: return weights / 2 + parameters;
    }
    return 0;
  }
};

/// Rows in tiles of nearly equal height.
struct Tiles {
  int num_rows;
  int max_height;

  ALWAYS_INLINE int count() const { return (num_rows + max_height - 1) / max_height; }
  ALWAYS_INLINE int first(int tile) const {
    return static_cast<int>(int64_t{num_rows} * tile / count());
  }
  ALWAYS_INLINE int height(int tile) const { return first(tile + 1) - first(tile); }
  /// The tile that a row is in.
  ALWAYS_INLINE int of(int row) const {
    return static_cast<int>((int64_t{row + 1} * count() - 1) / num_rows);
  }
};

/// Inputs as the kernels read them, the rows of a tile side by side: floats `[tile][input][row]`;
/// or integers `[tile][input / 8][row][8]`, and for each group what one step is worth, and the sum
/// of its steps by that, `[tile][group][row]`.  Of 16 bits the integers of four inputs are in the
/// order 0, 2, 1, 3.
struct Arranged {
  const float* floats;
  const uint8_t* integers;
  const float* scales;
  const float* sums;
};

/// Inputs `[rows, num_inputs]`, outputs `[rows, num_outputs]`.
struct LinearArgs {
  Panels weights;
  const float* bias;      // [num_outputs], or null
  const float* residual;  // added to the outputs, or null
  const float* x;
  float* y;
  int num_rows;
  Arranged arranged = {};  // x
};

/// The highest output of a row: the first of equal ones; not a number if any is none.
struct Highest {
  float value = -__builtin_inff();
  int32_t index = 0;

  ALWAYS_INLINE void see(float other, int32_t at) {
    // False also if one of them is not a number; the first such stays.
    if (other <= value || value != value) return;
    value = other;
    index = at;
  }
};

/// Keys and values of one layer, blocks of `block_size` tokens.
///
/// Of each block and head, keys lie token by token in each of `[key_dim][key_stride]` and values
/// as `[block_size][value_stride]`: both are then read along vectors of the result.
struct PoolLayout {
  int num_heads;
  int block_size;
  int key_dim;
  int value_dim;
  bool is_bf16;
  int columns;  // that the kernels compute at a time, of which the strides are multiples

  ALWAYS_INLINE int key_stride() const { return (block_size + columns - 1) / columns * columns; }
  ALWAYS_INLINE int value_stride() const { return (value_dim + columns - 1) / columns * columns; }
  ALWAYS_INLINE size_t key_floats() const { return static_cast<size_t>(key_dim) * key_stride(); }
  ALWAYS_INLINE size_t value_floats() const {
    return static_cast<size_t>(block_size) * value_stride();
  }
};

/// Query vectors, rows by heads that share a key head, that one call attends: as many rows as make
/// up to TILE, but at least one, which may have MAX_TILE.
constexpr int TILE = 48;
constexpr int MAX_TILE = 128;

struct AttentionArgs {
  PoolLayout pool;
  const void* keys;
  const void* values;
  const float* q;  // [rows, num_query_heads, key_dim]
  float* y;        // [rows, num_query_heads, value_dim]
  int num_query_heads;
  float scale;
  float soft_cap;      // 0 is none
  int window;          // a row sees that many last positions; 0 is all
  const float* sinks;  // [num_query_heads], or null
  int span_blocks;     // whose results are merged into those before them
};

/// Successive rows of one request, for one key head.
struct AttentionPart {
  const int32_t* blocks;  // the request's
  int head;
  int first_row;  // of the step
  int num_rows;
  int first_position;
  int span;  // the one to compute, its result left at `partial`; -1 is all
  float* partial;
  /// The first block, times heads, plus head, that the same thread will probably read next; -1 if
  /// nobody knows.
  int64_t next = -1;
};

struct Kernels {
  const char* name;
  int columns;                 // of a panel
  int max_tile_rows;           // of floats
  int max_tile_rows_integers;  // 0 where they cannot be multiplied
  /// One row `[size]` of a tile; see Arranged.
  void (*arrange)(const float* x, int row, int height, int size, float* floats);
  void (*arrange_int16)(const float* x, int row, int height, int size, int group,
                        uint8_t* integers, float* scales, float* sums);
  void (*arrange_int8)(const float* x, int row, int height, int size, int group,
                       uint8_t* integers, float* scales, float* sums);
  /// One panel; `scratch` has room for `columns` floats of each input.
  void (*linear)(const LinearArgs& args, int panel, float* scratch);
  /// One panel's part in the highest outputs `[rows]`; nothing goes to `y`.
  void (*highest)(const LinearArgs& args, int panel, float* scratch, Highest* rows);
  /// Rows of keys `[num_heads, key_dim]` and values `[num_heads, value_dim]` into the pool's slots.
  void (*write)(const PoolLayout& pool, void* pool_keys, void* pool_values, const int32_t* slots,
                int num_rows, const float* keys, const float* values);
  void (*attend)(const AttentionArgs& args, const AttentionPart& part, float* scratch);
  void (*merge_spans)(const AttentionArgs& args, const AttentionPart& part, int num_spans,
                      float* scratch);
  /// Rows `[size]`: y = x / sqrt(mean(x^2) + eps) * weight; `weight` may be null.
  void (*rms_norm)(const float* x, const float* weight, float eps, int size, float* y);
  /// Rotate the first 2 * half numbers of `[dim]`; a pair is two neighbours, or `half` apart.
  void (*rope)(const float* x, const float* cosines, const float* sines, int half, int dim,
               bool traditional, float* y);
  /// y = gate / (1 + e^-gate) * up
  void (*swiglu)(const float* gate, const float* up, size_t size, float* y);
};

/// The best kernels for this processor; null where it has none of the instruction sets.
const Kernels* kernels();

}  // namespace native

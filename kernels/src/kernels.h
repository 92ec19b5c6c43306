// The kernels: compiled once for each instruction set, selected at run time by `kernels()`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#define ALWAYS_INLINE inline __attribute__((always_inline))

namespace native {

/// How the weights of a linear layer are stored.
enum class Format : int32_t {
  kFloat32,
  kBfloat16,
  kBits8,  // affine: q * scale + bias, a scale and a bias for each group of inputs
  kBits4,
  kMxfp4,  // floats of 4 bits with a power of 2 for each group (OCP microscaling formats, 2023)
};

/// Whether weights are integers with a scale for each group of inputs.
ALWAYS_INLINE constexpr bool is_quantized(Format format) { return format >= Format::kBits8; }
/// Codes of MXFP4 have 5 bits: shifted by more, they would leave their bytes.
constexpr int MAX_SHIFT = 3;

/// Whether two weights share a byte.
ALWAYS_INLINE constexpr bool has_nibbles(Format format) { return format >= Format::kBits4; }

/// How the scales and biases of quantized weights are stored.
enum class ParameterType : int32_t {
  kFloat32,
  kFloat16,     // if all are exact in it
  kCentered,    // float16 scales; each bias is the scale times -Panels::center
  kPowerOfTwo,  // the same, scales being the exponents of powers of 2, a byte each
  kProducts,    // scales and biases are integers of a byte times factors that SUPER groups share
  kCenteredProducts,  // such scales; biases as of kCentered
};

/// Groups that share a float16 factor of their scales and one of their biases, as in GGUF's K types.
constexpr int SUPER = 8;

/// The smallest group of weights; two of these share the scale of inputs of 16 bits.
constexpr int HALF_GROUP = 16;
/// Inputs of 8 bits that share a scale.
constexpr int INT8_GROUP = 16;
/// Inputs that a matrix unit multiplies at a time.
constexpr int UNIT_INPUTS = 32;
/// Bytes behind its packed inputs that may be read, too.
constexpr int UNIT_OVERREAD = 2048;
/// By how much the biases of the exponents of bfloat16 and float16 differ.
constexpr int BFLOAT16_EXPONENT = 112;

/// Twice the floats of MXFP4 plus MXFP4_CENTER: integers that are scaled like affine ones.
constexpr uint8_t MXFP4_CODES[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
constexpr int MXFP4_CENTER = 12;
static_assert(MXFP4_CODES[7] << MAX_SHIFT < 256, "the largest stays within its byte");

/// What inputs are rounded to before they are multiplied with quantized weights.
enum class InputType : int32_t {
  kFloat32,
  kInt16,     // the largest input of a group becomes 32767
  kInt8,      // the largest input of an INT8_GROUP, scaled by channel, becomes 127; of weights of 4 bits
  kBfloat16,  // and so are the dequantized weights
};

/// Weights `[outputs, inputs]` as the kernels read them, one panel of outputs after the other.
///
/// A panel holds `columns` outputs side by side, input by input:
/// - floats: `[inputs][columns]`
/// - 8 bits: for each group of inputs, `[group][columns]` bytes, then `columns` scales and as many
///   biases
/// - 4 bits: the same, but `[group / 4][columns / 2]` words of 32 bits: those of a column, the first
///   of four successive inputs low, and above them those of the column `columns / 2` further on
/// Before all of them are the factors of products, float16, `columns` of the scales and as many of
/// the biases for each SUPER groups.
/// For integer inputs the bytes are `[..][columns][4]`: those of four successive inputs of a column
/// are adjacent; with 4 bits, the high halves belong to the four inputs after these.
struct Panels {
  Format format;
  int num_outputs;
  int num_inputs;
  int group;    // inputs that share a scale and a bias, a divisor of num_inputs; 0 for floats
  int columns;  // of a panel; columns beyond the outputs are zero
  InputType input_type;
  ParameterType parameter_type;
  int center;
  int exponent;  // for InputType::kBfloat16: weights times two to its power are float16
  const uint8_t* data;
  /// For inputs of 8 bits, `[num_inputs]`: an input is divided by two to the power of its
  /// shift before it is rounded, and its weights are shifted to the left.
  const uint8_t* shifts = nullptr;

  ALWAYS_INLINE int num_panels() const { return (num_outputs + columns - 1) / columns; }

  ALWAYS_INLINE bool has_halves() const { return group == HALF_GROUP; }
  /// Inputs that are packed as a group: layers of one input need not have equal groups of weights.
  ALWAYS_INLINE int input_group() const { return has_halves() ? 2 * HALF_GROUP : group; }
  /// Inputs that share a scale once they are integers.
  ALWAYS_INLINE int scale_group() const {
    return input_type == InputType::kInt8 ? INT8_GROUP : input_group();
  }

  /// Bytes that integers of so many inputs of a row take once they are packed.
  ALWAYS_INLINE size_t integer_bytes(size_t count) const {
    return input_type == InputType::kInt8 ? count : 2 * count;
  }

  /// Scales and biases of a group.
  ALWAYS_INLINE size_t parameter_bytes() const {
    switch (parameter_type) {
      case ParameterType::kFloat32: return 8 * static_cast<size_t>(columns);
      case ParameterType::kFloat16: return 4 * static_cast<size_t>(columns);
      case ParameterType::kCentered: return 2 * static_cast<size_t>(columns);
      case ParameterType::kProducts: return 2 * static_cast<size_t>(columns);
      case ParameterType::kPowerOfTwo:
      case ParameterType::kCenteredProducts: return columns;
    }
    return 0;
  }

  /// Factors of scales and biases of SUPER groups.
  ALWAYS_INLINE size_t factor_bytes() const {
    if (parameter_type == ParameterType::kProducts) return 4 * static_cast<size_t>(columns);
    if (parameter_type == ParameterType::kCenteredProducts)
      return 2 * static_cast<size_t>(columns);
    return 0;
  }
  /// Where the first group of a panel is.
  ALWAYS_INLINE size_t first_group() const {
    return group ? num_inputs / group / SUPER * factor_bytes() : 0;
  }

  ALWAYS_INLINE size_t panel_bytes() const {
    size_t weights = static_cast<size_t>(num_inputs) * columns;
    size_t parameters = group ? num_inputs / group * parameter_bytes() + first_group() : 0;
    switch (format) {
      case Format::kFloat32: return weights * 4;
      case Format::kBfloat16: return weights * 2;
      case Format::kBits8: return weights + parameters;
      case Format::kBits4:
      case Format::kMxfp4: return weights / 2 + parameters;
    }
    return 0;
  }
};

/// Whether products with these weights read the same packed inputs.
ALWAYS_INLINE bool are_packed_alike(const Panels& a, const Panels& b) {
  return a.input_type == b.input_type && a.input_group() == b.input_group() &&
         a.shifts == b.shifts && (a.input_type != InputType::kBfloat16 || a.exponent == b.exponent);
}

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

/// Prefetches memory, `part` bytes at each call.
struct Prefetcher {
  const uint8_t* next;
  size_t part;

  ALWAYS_INLINE void advance() {
    for (size_t i = 0; i < part; i += 64) __builtin_prefetch(next + i, 0, 2);
    next += part;
  }
};

/// Inputs as the kernels read them, the rows of a tile interleaved: floats `[tile][input][row]` with,
/// for quantized weights, the sums of each group, `[tile][group][row]`; or integers
/// `[tile][input / 8][row][8]` with, for each group, the scale, the scale times the sum of the
/// integers, and that sum, `[tile][group][row]` each.  16-bit integers of four inputs are in the
/// order 0, 2, 1, 3.  Where weights have groups of HALF_GROUP, there are the sums of these, too.  Scales
/// and sums of integers of 8 bits are those of each INT8_GROUP; only `sums` are of a group.  Of bfloat16 there are only the numbers, `[tile][input / UNIT_INPUTS][row][UNIT_INPUTS]`,
/// in the order of 16-bit integers.
struct PackedInputs {
  float* floats;
  uint8_t* integers;
  float* scales;
  float* sums;
  int32_t* totals;
  float* half_sums;
  int32_t* half_totals;

  /// Without the rows before `row`, the first of a tile, as weights like these read them.
  ALWAYS_INLINE PackedInputs from_row(const Panels& weights, size_t row) const {
    const size_t at = row * weights.num_inputs;
    const size_t scale = scales ? at / weights.scale_group() : 0;
    return {floats ? floats + at : nullptr,
            integers ? integers + weights.integer_bytes(at) : nullptr,
            scales ? scales + scale : nullptr,
            sums ? sums + at / weights.input_group() : nullptr,
            totals ? totals + scale : nullptr,
            half_sums ? half_sums + at / HALF_GROUP : nullptr,
            half_totals ? half_totals + at / HALF_GROUP : nullptr};
  }
};

class Deltas;

/// Inputs `[rows, num_inputs]`, outputs `[rows, num_outputs]`.
struct LinearArgs {
  Panels weights;
  const float* bias;      // [num_outputs], or null
  const float* residual;  // added to the outputs, or null
  const float* x;
  float* y;
  int num_rows;
  PackedInputs packed = {};  // x
  int first_row = 0;         // of these among all rows of the operation
  const Deltas* deltas = nullptr;  // what operations add to the outputs, or null
};

/// The rank of a LowRank is padded to a multiple of this.
constexpr int RANKS = 4;
/// Inputs whose products are a sum of its own.
constexpr int LOW_RANK_INPUTS = 1024;

/// Matrices A `[num_inputs, rank]` and B `[rank, num_outputs]` as the kernels read them, float32 or
/// bfloat16; what is beyond the inputs, the outputs and the rank is zero.
///
/// A is `[rank / RANKS][inputs / columns][RANKS][columns]`, so that sums are along the inputs and a
/// small rank wastes nothing; B is `[outputs / columns][rank / pack][columns][pack]`, where a pack are
/// packed_rows, as in a pool.
struct LowRank {
  int num_inputs;
  int num_outputs;
  int rank;
  int columns;
  bool is_bf16;
  const void* a = nullptr;
  const void* b = nullptr;

  ALWAYS_INLINE int padded_rank() const { return (rank + RANKS - 1) / RANKS * RANKS; }
  ALWAYS_INLINE int padded(int size) const { return (size + columns - 1) / columns * columns; }
  ALWAYS_INLINE size_t number_bytes() const { return is_bf16 ? 2 : 4; }
  ALWAYS_INLINE size_t a_bytes() const {
    return number_bytes() * padded_rank() * padded(num_inputs);
  }
  ALWAYS_INLINE size_t b_bytes() const {
    return number_bytes() * padded_rank() * padded(num_outputs);
  }
  /// Sums of a number of A x.
  ALWAYS_INLINE int num_parts() const {
    return (num_inputs + LOW_RANK_INPUTS - 1) / LOW_RANK_INPUTS;
  }
};

/// The largest output of a row and its index: the first of equal ones; NaN if any output is NaN.
struct ArgMax {
  float value = -__builtin_inff();
  int32_t index = 0;

  ALWAYS_INLINE void update(float other, int32_t at) {
    // The first NaN stays.
    if (other <= value || value != value) return;
    value = other;
    index = at;
  }
};

/// How keys and values are stored.
enum class CacheType : int32_t {
  kFloat32,
  kBfloat16,
  kInt8,  // with a scale, |largest| / 127, for each head and token: no other token changes it
};

/// A power of 2.
constexpr int MAX_ROTATED = 256;

/// Rows of numbers of that many bytes that are interleaved.
ALWAYS_INLINE constexpr int packed_rows(size_t bytes) { return bytes < sizeof(float) ? 2 : 1; }

/// Keys of a group, whose scores become weights of the softmax together.
constexpr int GROUP_KEYS = 128;

/// The memory layout of one layer's keys and values, in blocks of `block_size` tokens.
///
/// For each block and head, keys are transposed, `[key_dim][key_stride]`, and values are
/// `[block_size][value_stride]`: both are then read along vectors of the result.  Of types smaller
/// than a float, two successive rows are interleaved, `[rows / 2][stride][2]`, as instructions
/// multiply them.  Scales follow, a float for each token, `[key_stride]` of the keys and as many of
/// the values.
struct PoolLayout {
  int num_heads;
  int block_size;
  int key_dim;
  int value_dim;
  CacheType type;
  int columns;  // that a kernel computes at a time; strides are multiples of it
  /// Queries and the softmax's weights are rounded to 16 bits, if there are instructions that
  /// multiply these with the stored numbers.
  bool rounds_inputs = false;
  /// There are no values: they are the first `value_dim` numbers of the keys.
  bool is_latent = false;

  ALWAYS_INLINE int key_stride() const { return (block_size + columns - 1) / columns * columns; }
  ALWAYS_INLINE int value_stride() const { return (value_dim + columns - 1) / columns * columns; }
  ALWAYS_INLINE int query_stride() const { return (key_dim + columns - 1) / columns * columns; }
  /// Blocks of a group, and their keys with padding.
  ALWAYS_INLINE int group_blocks() const {
    return key_stride() < GROUP_KEYS ? GROUP_KEYS / key_stride() : 1;
  }
  ALWAYS_INLINE int group_columns() const { return group_blocks() * key_stride(); }
  /// Numbers of so many rows.
  ALWAYS_INLINE size_t rows_size(int rows, int stride) const {
    const int pack = type == CacheType::kFloat32 ? 1 : 2;
    return static_cast<size_t>((rows + pack - 1) / pack * pack) * stride;
  }
  /// Numbers of one block and head.
  ALWAYS_INLINE size_t key_size() const { return rows_size(key_dim, key_stride()); }
  ALWAYS_INLINE size_t value_size() const { return rows_size(block_size, value_stride()); }

  /// Bytes of so many numbers and, if there are any, of their scales.
  ALWAYS_INLINE size_t bytes(size_t size) const {
    switch (type) {
      case CacheType::kFloat32: return size * 4;
      case CacheType::kBfloat16: return size * 2;
      case CacheType::kInt8: return size + key_stride() * sizeof(float);
    }
    return 0;
  }
  /// How many numbers of a query and of a key that becomes integers are rotated together.
  ALWAYS_INLINE int rotated() const {
    const int power = key_dim & -key_dim;
    return type != CacheType::kInt8 ? 1 : power < MAX_ROTATED ? power : MAX_ROTATED;
  }
  ALWAYS_INLINE size_t key_bytes() const { return bytes(key_size()); }
  ALWAYS_INLINE size_t value_bytes() const { return is_latent ? 0 : bytes(value_size()); }
};

/// Query vectors (rows times query heads that share a key head) of one call: as many rows as fit in
/// TILE, or half of it where that would be too few calls, and at least one row, which may have up
/// to MAX_TILE.
constexpr int TILE = 96;
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
  int window;          // how many of the last positions a row attends to; 0 is all
  bool is_chunked;     // of these only those in its own chunk of `window` positions
  const float* sinks;  // [num_query_heads], or null
  int span_blocks;     // blocks of a span; results of successive spans are merged

  /// The first position that a row at this one attends to.
  ALWAYS_INLINE int first_visible(int position) const {
    if (window <= 0) return 0;
    if (is_chunked) return position / window * window;
    return position < window ? 0 : position - window + 1;
  }
};

/// Successive rows of one request, for one key head.
struct AttentionPart {
  const int32_t* blocks;  // the request's block table
  int head;
  int first_row;  // in the step
  int num_rows;
  int first_position;
  int until;  // rows attend to what follows them before this position, too
  int span;   // the span to compute, with its result written to `partial`; -1 is all spans
  float* partial;
  /// Blocks that the same thread will probably read next, for one head.
  const int32_t* next_blocks = nullptr;
  int num_next = 0;
  int next_head = 0;

  /// The last position that a row at this one attends to.
  ALWAYS_INLINE int last_visible(int position) const {
    return position < until ? until - 1 : position;
  }
  ALWAYS_INLINE int last_position() const { return last_visible(first_position + num_rows - 1); }

  /// block * num_heads + head of what is read `distance` blocks after a block, those of this part
  /// ending before `num_blocks`; -1 if unknown.
  ALWAYS_INLINE int64_t ahead(int block, int distance, int num_blocks, int num_heads) const {
    const int at = block + distance - num_blocks;
    if (at < 0) return int64_t{blocks[block + distance]} * num_heads + head;
    return at < num_next ? int64_t{next_blocks[at]} * num_heads + next_head : -1;
  }
};

/// The gated delta rule (Yang et al. 2024): token by token, each row s of a head's state becomes
/// s' + beta (v - s' k) k with s' = decay s, and its output is the dot product with q.  Additive, as
/// in Mamba 2 (Dao and Gu 2024), it becomes s' + beta v k.
///
/// q, k `[requests, tokens, key heads, key_dim]`, v, y `[requests, tokens, heads, value_dim]`, beta
/// `[requests, tokens, heads]`, and states `[requests, heads, value_dim, key_dim]`.
struct DeltaArgs {
  int num_tokens;
  int num_key_heads;  // a divisor of num_heads
  int num_heads;
  int key_dim;
  int value_dim;
  bool is_additive;
  bool has_channels;  // decay has a value a channel, `[requests, tokens, heads, key_dim]`
  const float* q;
  const float* k;
  const float* v;
  const float* decay;
  const float* beta;
  const float* state;  // null is all zero
  float* y;
  float* new_state;
};

/// A causal convolution of each channel by itself: y of a token is the bias plus the products of
/// `num_taps` successive rows of x, the last one its own, with the taps.
struct ConvolutionArgs {
  int num_tokens;  // of a request; x has num_taps - 1 more
  int num_taps;
  int num_channels;
  const float* x;     // [requests, num_taps - 1 + num_tokens, channels]
  const float* taps;  // [num_taps, channels]
  const float* bias;  // [channels], or null
  float* y;           // [requests, num_tokens, channels]
};

/// Values of a head's state that are computed together, side by side: a multiple of all vectors.
constexpr int STATE_COLUMNS = 64;

/// The gated delta rule, as DeltaArgs has it, for some values of a head and successive tokens, on a
/// state `[key_dim][STATE_COLUMNS]`; columns beyond the values are zero.
struct DeltaColumns {
  int num_tokens;
  int key_dim;
  int num_values;  // at most STATE_COLUMNS
  bool is_additive;
  size_t value_stride, output_stride, gate_stride;  // from one token to the next
  const float* q;  // [tokens, key_dim]
  const float* k;  // [tokens, key_dim]
  const float* v;
  const float* decay;
  const float* beta;
  const float* before;  // null is all zero
  float* after;         // may be `before`
  float* y;
  const float* next;  // a state that is read next, or null
};

/// y = the bias plus the sum of rows, each times its tap, or SiLU of that.
struct ConvolvedRows {
  int num_rows;
  int size;
  size_t tap_stride;  // from one row's taps to the next one's
  bool activates;
  const float* const* rows;
  const float* taps;
  const float* bias;  // or null
  float* y;
};

struct Kernels {
  const char* name;
  int columns;  // of a panel
  // What the processor has instructions for.
  // The fewest bits of integers that inputs can be rounded to, 8 or 16; 32 is none.
  int min_input_bits;
  bool multiplies_bfloat16;
  /// Rows of a tile, at most.
  int (*max_tile_rows)(const Panels& weights);
  /// Pack one row `[size]` of a tile; see PackedInputs.
  void (*pack_row)(const float* x, int row, int height, int size, int group,
                   const PackedInputs& to);
  void (*pack_row_int16)(const float* x, int row, int height, int size, int group,
                         const PackedInputs& to);
  void (*pack_row_int8)(const float* x, const uint8_t* shifts, int row, int height, int size,
                        int group, const PackedInputs& to);
  void (*pack_row_bf16)(const float* x, float factor, int row, int height, int size,
                        const PackedInputs& to);
  /// Compute panels [panel, next); `scratch` has space for `columns` floats per input, and for an
  /// int32_t for each HALF_GROUP of every row's inputs, not for both at once.
  void (*linear)(const LinearArgs& args, int panel, int next, float* scratch);
  /// Update each row's largest output with panels [panel, next); does not write to `y`.
  void (*argmax)(const LinearArgs& args, int panel, int next, float* scratch, ArgMax* rows);
  /// inner `[num_rows, padded_rank]` = A x for the inputs of one part of LOW_RANK_INPUTS.
  void (*low_rank_inner)(const LowRank& weights, const float* x, int num_rows, int part,
                         float* inner);
  /// y `[num_rows, num_outputs]` += B inner, for panels [panel, next).
  void (*add_low_rank)(const LowRank& weights, const float* inner, int num_rows, int panel,
                       int next, float* y);
  /// The largest logit of a row `[size]`; NaN if one is NaN.
  float (*largest)(const float* x, int size);
  /// The sum of the weights e^((x - highest) * factor).
  double (*total_weight)(const float* x, int size, float highest, float factor);
  /// The first index from `first` on whose logit is above `floor`, or `size`.
  int (*find_above)(const float* x, int first, int size, float floor);
  /// The index of the token that comes first in a race with its weight as its speed, which is the
  /// probability that it does.  The distances are those of the tokens with this seed; `tokens` are
  /// the ids, or null where an id is the index.
  int (*race)(const float* x, const int32_t* tokens, int size, float highest, float factor,
              uint64_t seed);
  /// Write rows of keys `[num_heads, key_dim]` and values `[num_heads, value_dim]` into slots.
  void (*write)(const PoolLayout& pool, void* pool_keys, void* pool_values, const int32_t* slots,
                int num_rows, const float* keys, const float* values,
                float* scratch);  // [key_dim]
  /// See AttentionPart.
  void (*attend)(const AttentionArgs& args, const AttentionPart& part, float* scratch);
  /// Merge `num_spans` results at `part.partial` into the outputs.
  void (*merge_spans)(const AttentionArgs& args, const AttentionPart& part, int num_spans,
                      float* scratch);
  /// Rows `[size]`: y = x / sqrt(mean(x^2) + eps) * weight; `weight` may be null.
  void (*rms_norm)(const float* x, const float* weight, float eps, int size, float* y);
  /// y = the sum of `count` rows `[size]`, each times its weight.
  void (*weighted_sum)(const float* const* rows, const float* weights, int count, size_t size,
                       float* y);
  /// The same of x less its mean; the bias, which is added, may be null, too.
  void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, int size,
                     float* y);
  /// Rotate the first 2 * half numbers of `[dim]`; a pair is two neighbours, or `half` apart.
  void (*rope)(const float* x, const float* cosines, const float* sines, int half, int dim,
               bool traditional, float* y);
  /// y = gate / (1 + e^-gate) * up; without `up` if that is null.
  void (*swiglu)(const float* gate, const float* up, size_t size, float* y);
  /// y = up / (1 + e^-gate).
  void (*gate)(const float* gate, const float* up, size_t size, float* y);
  /// SwiGLU of gpt-oss: gate at most `limit`, `up` within +-limit, y = gate / (1 + e^(-alpha gate))
  /// * (up + 1).
  void (*clipped_swiglu)(const float* gate, const float* up, float alpha, float limit, size_t size,
                         float* y);
  /// y = gelu(gate) * up, in the tanh form of GELU; without `up` if that is null.
  void (*geglu)(const float* gate, const float* up, size_t size, float* y);
  /// Likewise with GELU as it is defined, max(gate, 0) and its square.
  void (*geglu_erf)(const float* gate, const float* up, size_t size, float* y);
  void (*reglu)(const float* gate, const float* up, size_t size, float* y);
  void (*squared_reglu)(const float* gate, const float* up, size_t size, float* y);
  /// Rows [first, next) of the state of one head of one request, request * num_heads + head, for
  /// all tokens.
  void (*delta_rule)(const DeltaArgs& args, int head, int first, int next);
  /// See DeltaColumns.
  void (*delta_columns)(const DeltaColumns& args);
  /// Channels [first, next) of one row of y.
  void (*convolve)(const ConvolutionArgs& args, int row, int first, int next);
  /// See ConvolvedRows.
  void (*convolve_rows)(const ConvolvedRows& args);
};

/// The kernels of the fastest instruction set that the processor has and that was built; null if there is none.
const Kernels* kernels();

/// Whether weights that one row of 8 bits is multiplied with are prefetched: a Zen 5 reads them faster so,
/// a Zen 4's own prefetching is slowed by it.
extern const bool PREFETCHES_ONE_ROW_INT8;

/// The fastest instruction set of this processor that kernels are written for, if it was not built; else "".
std::string_view missing_isa();

}  // namespace native

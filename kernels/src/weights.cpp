#include "weights.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <utility>

#include "thread_pool.h"

namespace native {

namespace {

/// The float16 that equals x, if there is one.
std::optional<uint16_t> to_fp16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x), mantissa = bits & 0x7fffff;
  const uint16_t sign = bits >> 16 & 0x8000;
  const int exponent = static_cast<int>(bits >> 23 & 255) - 127;
  if (x == 0) return sign;
  if (exponent >= -14 && exponent <= 15 && mantissa % (1 << 13) == 0)
    return sign | (exponent + 15) << 10 | mantissa >> 13;
  // Subnormal: a multiple of 2^-24.
  if (exponent < -24 || exponent >= -14) return std::nullopt;
  const uint32_t whole = mantissa | 0x800000, unit = 1u << (-1 - exponent);
  if (whole % unit != 0) return std::nullopt;
  return sign | whole / unit;
}

float from_fp16(uint16_t half) {
  const float size = std::bit_cast<float>((half & 0x7fffu) << 13) * 0x1p112f;
  return half & 0x8000 ? -size : size;
}

bool are_fp16(const float* numbers, size_t size) {
  return std::all_of(numbers, numbers + size, [](float x) { return to_fp16(x).has_value(); });
}

/// As of GGUF's Q4_0 and Q8_0.
int center_of(const PlainWeights& plain) {
  if (plain.format == Format::kMxfp4) return MXFP4_CENTER;
  return plain.bits > 0 ? 1 << (plain.bits - 1) : 0;
}

/// The largest weight, or a bound of it.
float largest(const PlainWeights& plain) {
  const size_t size =
      static_cast<size_t>(plain.num_matrices) * plain.num_outputs * plain.num_inputs / plain.group;
  constexpr float LARGEST_MXFP4 = 6;
  if (plain.format == Format::kMxfp4)
    return std::ldexp(LARGEST_MXFP4, *std::max_element(plain.exponents, plain.exponents + size) - 127);
  const float top = (1 << plain.bits) - 1;
  float largest = 0;
  for (size_t i = 0; i < size; i++) {
    const float lowest = plain.biases[i], highest = plain.biases[i] + top * plain.scales[i];
    largest = std::max({largest, std::abs(lowest), std::abs(highest)});
  }
  return largest;
}

/// See Panels::exponent.
int exponent_of(const PlainWeights& plain) {
  if (!is_quantized(plain.format)) return BFLOAT16_EXPONENT;
  int exponent = 0;
  const float size = largest(plain);
  if (!(size > 0 && std::isfinite(size))) return 0;
  std::frexp(size, &exponent);
  // Below 2^15; smaller than that by 2^29 would be subnormal.
  return std::clamp(15 - exponent, -126, BFLOAT16_EXPONENT);
}

/// A float16 factor and integers whose products are the scales, or the biases, of SUPER groups.
struct Products {
  uint16_t factor;
  int8_t integers[SUPER];
};

/// The products that are these numbers, if the factor is the largest number by `divisor`.
std::optional<Products> products_by(const float* numbers, float largest, int divisor) {
  const float factor = largest / divisor;
  const std::optional<uint16_t> half = to_fp16(factor);
  if (!half || factor == 0) return std::nullopt;
  Products products{*half, {}};
  for (int i = 0; i < SUPER; i++) {
    const float integer = std::nearbyint(numbers[i] / factor);
    const bool is_byte = integer >= -128 && integer <= 127;
    if (!is_byte || factor * integer != numbers[i]) return std::nullopt;
    products.integers[i] = static_cast<int8_t>(integer);
  }
  return products;
}

/// Exact products that are these numbers, if there are any: a factor and an integer of 8 bits have
/// fewer bits together than a float.
std::optional<Products> as_products(const float* numbers) {
  const float largest = *std::max_element(
      numbers, numbers + SUPER, [](float a, float b) { return std::abs(a) < std::abs(b); });
  if (largest == 0) return Products{};
  // Quantizers make the largest integer, of 6 or 8 bits, as large as it can be.
  if (auto found = products_by(numbers, largest, -128)) return found;
  for (int divisor = 63; divisor > 0; divisor--)
    if (auto found = products_by(numbers, largest, divisor)) return found;
  for (int divisor = 64; divisor < 128; divisor++)
    if (auto found = products_by(numbers, largest, divisor)) return found;
  return std::nullopt;
}

bool are_products(const float* numbers, size_t size) {
  constexpr size_t AT_ONCE = SUPER * 1024;
  std::atomic<bool> are_all{size % SUPER == 0};
  threads().for_each(static_cast<int>((size + AT_ONCE - 1) / AT_ONCE), [&](int part) {
    const size_t end = std::min(size, (part + 1) * AT_ONCE);
    for (size_t i = part * AT_ONCE; i < end && are_all; i += SUPER)
      if (!as_products(numbers + i)) are_all = false;
  });
  return are_all;
}

ParameterType parameter_type(const PlainWeights& plain) {
  if (plain.format == Format::kMxfp4) return ParameterType::kPowerOfTwo;
  const size_t rows = static_cast<size_t>(plain.num_matrices) * plain.num_outputs;
  const size_t of_row = plain.group ? plain.num_inputs / plain.group : 0, size = rows * of_row;
  const float center = center_of(plain);
  const auto is_centered = [=](float scale, float bias) { return bias == -center * scale; };
  const bool are_centered =
      std::equal(plain.scales, plain.scales + size, plain.biases, is_centered);
  if (are_fp16(plain.scales, size)) {
    if (are_centered) return ParameterType::kCentered;
    if (are_fp16(plain.biases, size)) return ParameterType::kFloat16;
  }
  if (of_row % SUPER == 0 && are_products(plain.scales, size)) {
    if (are_centered) return ParameterType::kCenteredProducts;
    if (are_products(plain.biases, size)) return ParameterType::kProducts;
  }
  return ParameterType::kFloat32;
}

Panels layout(const PlainWeights& plain, int columns) {
  return {.format = plain.format,
          .num_outputs = plain.num_outputs,
          .num_inputs = plain.num_inputs,
          .group = plain.group,
          .columns = columns,
          .input_type = plain.input_type,
          .parameter_type = parameter_type(plain),
          .center = center_of(plain),
          .exponent = exponent_of(plain),
          .data = nullptr};
}

/// The first of a matrix's outputs, of all matrices.
size_t first_output(const PlainWeights& plain, int matrix) {
  return static_cast<size_t>(matrix) * plain.num_outputs;
}

template <typename Float>
void pack_floats(const PlainWeights& plain, int columns, int matrix, int panel, uint8_t* target) {
  auto* values =
      static_cast<const Float*>(plain.weights) + first_output(plain, matrix) * plain.num_inputs;
  auto* packed = reinterpret_cast<Float*>(target);
  for (int j = 0; j < columns; j++) {
    const int output = panel * columns + j;
    if (output >= plain.num_outputs) return;  // the memory is zero
    const Float* row = values + static_cast<size_t>(output) * plain.num_inputs;
    for (size_t i = 0; i < static_cast<size_t>(plain.num_inputs); i++)
      packed[i * columns + j] = row[i];
  }
}

/// Value `i` of a row of `bits` each.
uint8_t value(const uint8_t* row, size_t i, int bits) {
  const size_t bit = i * bits;
  const unsigned low = row[bit / 8] >> bit % 8;
  // The next byte, only where the value reaches into it: the last one has none.
  const unsigned high = bit % 8 + bits > 8 ? row[bit / 8 + 1] << (8 - bit % 8) : 0;
  return (low | high) & ((1u << bits) - 1);
}

/// Where the value of an input and a column is stored within a group.
struct ValuePosition {
  size_t byte;
  int shift;  // in bits

  ValuePosition(const Panels& panels, size_t input, size_t column) {
    const size_t columns = panels.columns;
    const bool is_nibble = has_nibbles(panels.format);
    if (panels.input_type == InputType::kFloat32) {
      const size_t place = column % (columns / 2) * 2 + column / (columns / 2);
      byte = is_nibble ? (input / 4 * columns + place) * 2 + input % 4 / 2 : input * columns + column;
      shift = is_nibble ? input % 2 * 4 : 0;
      return;
    }
    const size_t bits = is_nibble ? 4 : 8, per_byte = 8 / bits;
    const size_t per_four = 4 * per_byte;  // inputs that share four bytes
    byte = (input / per_four * columns + column) * 4 + input % 4;
    shift = static_cast<int>(input % per_four / 4 * bits);
  }
};

size_t group_value_bytes(const Panels& panels) {
  const size_t values = static_cast<size_t>(panels.group) * panels.columns;
  return has_nibbles(panels.format) ? values / 2 : values;
}

size_t group_bytes(const Panels& panels) {
  return group_value_bytes(panels) + panels.parameter_bytes();
}

/// Set the factors of a column, and the integers of its groups: of the scales, or behind these of the
/// biases.
void set_products(const Panels& panels, const float* numbers, size_t position, uint8_t* panel) {
  uint8_t* integers = panel + panels.first_group() + group_value_bytes(panels) + position;
  const int num_groups = panels.num_inputs / panels.group;
  for (int g = 0; g < num_groups; g += SUPER) {
    const Products products = *as_products(numbers + g);
    auto* factors = reinterpret_cast<uint16_t*>(panel + g / SUPER * panels.factor_bytes());
    factors[position] = products.factor;
    for (int i = 0; i < SUPER; i++)
      integers[(g + i) * group_bytes(panels)] = static_cast<uint8_t>(products.integers[i]);
  }
}

/// Set the scale and the bias of a column in a group.
void set_parameters(const Panels& panels, const PlainWeights& plain, size_t group, size_t column,
                    uint8_t* parameters) {
  const size_t of_bias = panels.columns + column;
  switch (panels.parameter_type) {
    case ParameterType::kPowerOfTwo: parameters[column] = plain.exponents[group]; break;
    case ParameterType::kCentered:
      reinterpret_cast<uint16_t*>(parameters)[column] = *to_fp16(plain.scales[group]);
      break;
    case ParameterType::kFloat16:
      reinterpret_cast<uint16_t*>(parameters)[column] = *to_fp16(plain.scales[group]);
      reinterpret_cast<uint16_t*>(parameters)[of_bias] = *to_fp16(plain.biases[group]);
      break;
    case ParameterType::kFloat32:
      reinterpret_cast<float*>(parameters)[column] = plain.scales[group];
      reinterpret_cast<float*>(parameters)[of_bias] = plain.biases[group];
      break;
    case ParameterType::kProducts:
    case ParameterType::kCenteredProducts: break;  // set_products does
  }
}

/// The scale and the bias of a column in a group.
std::pair<float, float> parameters_of(const Panels& panels, const uint8_t* panel, size_t group,
                                      size_t column) {
  const uint8_t* parameters =
      panel + panels.first_group() + group * group_bytes(panels) + group_value_bytes(panels);
  const size_t of_bias = panels.columns + column;
  const auto* halves = reinterpret_cast<const uint16_t*>(parameters);
  const auto* floats = reinterpret_cast<const float*>(parameters);
  const auto product = [&](size_t position) {
    const uint8_t* factors = panel + group / SUPER * panels.factor_bytes();
    return from_fp16(reinterpret_cast<const uint16_t*>(factors)[position]) *
           static_cast<int8_t>(parameters[position]);
  };
  const auto centered = [&](float scale) { return std::pair(scale, -panels.center * scale); };
  switch (panels.parameter_type) {
    case ParameterType::kPowerOfTwo:
      return centered(std::bit_cast<float>(uint32_t{parameters[column]} << 23) / 2);
    case ParameterType::kCentered: return centered(from_fp16(halves[column]));
    case ParameterType::kFloat16: return {from_fp16(halves[column]), from_fp16(halves[of_bias])};
    case ParameterType::kFloat32: return {floats[column], floats[of_bias]};
    case ParameterType::kProducts: return {product(column), product(of_bias)};
    case ParameterType::kCenteredProducts: return centered(product(column));
  }
  return {0, 0};
}

/// The nibbles 0 to 7 of a word in the order 0, 4, 1, 5, 2, 6, 3, 7.
uint32_t interleave(uint32_t nibbles) {
  const auto spread = [](uint32_t half) {
    half = (half | half << 8) & 0x00ff00ff;
    return (half | half << 4) & 0x0f0f0f0f;
  };
  return spread(nibbles & 0xffff) | spread(nibbles >> 16) << 4;
}

/// Store the values of a column in a group, `row` being where they begin.
void pack_values(const Panels& panels, const uint8_t* row, size_t column, uint8_t* block) {
  const size_t columns = panels.columns, num_bytes = group_value_bytes(panels) / columns;
  if (panels.input_type == InputType::kFloat32) {
    const size_t per_byte = has_nibbles(panels.format) ? 2 : 1;
    for (size_t i = 0; i < num_bytes; i++)
      block[ValuePosition(panels, i * per_byte, column).byte] = row[i];
    return;
  }
  for (size_t i = 0; i < num_bytes / 4; i++) {
    uint32_t word;
    std::memcpy(&word, row + 4 * i, sizeof(word));
    if (has_nibbles(panels.format)) word = interleave(word);
    std::memcpy(block + (i * columns + column) * 4, &word, sizeof(word));
  }
}

/// The same, of any number of bits; the memory is zero.
void pack_bits(const Panels& panels, const uint8_t* row, size_t first, int bits, size_t column,
               uint8_t* block) {
  for (int i = 0; i < panels.group; i++) {
    const ValuePosition position(panels, i, column);
    block[position.byte] |= value(row, first + i, bits) << position.shift;
  }
}

void pack_quantized(const PlainWeights& plain, const Panels& panels, int matrix, int panel,
                    uint8_t* target) {
  const int num_groups = plain.num_inputs / plain.group;
  const size_t row_bytes = static_cast<size_t>(plain.num_inputs) * plain.bits / 8;
  const bool is_stored_so = plain.bits == (has_nibbles(plain.format) ? 4 : 8);
  for (int j = 0; j < panels.columns; j++) {
    const int own = panel * panels.columns + j;
    if (own >= plain.num_outputs) return;
    const size_t output = first_output(plain, matrix) + own;
    const auto* row = static_cast<const uint8_t*>(plain.weights) + output * row_bytes;
    for (int g = 0; g < num_groups; g++) {
      uint8_t* block = target + panels.first_group() + g * group_bytes(panels);
      if (is_stored_so)
        pack_values(panels, row + g * plain.group * plain.bits / 8, j, block);
      else
        pack_bits(panels, row, g * plain.group, plain.bits, j, block);
      set_parameters(panels, plain, output * num_groups + g, j, block + group_value_bytes(panels));
    }
    if (panels.factor_bytes() > 0)
      set_products(panels, plain.scales + output * num_groups, j, target);
    if (panels.parameter_type == ParameterType::kProducts)
      set_products(panels, plain.biases + output * num_groups, panels.columns + j, target);
  }
}

void pack_panel(const PlainWeights& plain, const Panels& panels, int matrix, int panel,
                uint8_t* target) {
  switch (plain.format) {
    case Format::kFloat32:
      return pack_floats<float>(plain, panels.columns, matrix, panel, target);
    case Format::kBfloat16:
      return pack_floats<uint16_t>(plain, panels.columns, matrix, panel, target);
    default: return pack_quantized(plain, panels, matrix, panel, target);
  }
}

std::atomic<size_t> total_bytes{0};

}  // namespace

PackedWeights::PackedWeights(const PlainWeights& plain, int columns)
    : num_matrices_(plain.num_matrices),
      panels_(layout(plain, columns)),
      memory_(matrix_bytes() * num_matrices_) {
  auto* data = static_cast<uint8_t*>(memory_.data());
  // Panel by panel: the memory is that of the node whose threads write, and later read, this panel.
  threads().for_each(num_matrices_ * panels_.num_panels(), [&](int i) {
    const int matrix = i % num_matrices_, panel = i / num_matrices_;
    pack_panel(plain, panels_, matrix, panel,
               data + matrix * matrix_bytes() + panel * panels_.panel_bytes());
  });
  panels_.data = data;
  total_bytes += memory_.size();
}

PackedWeights::PackedWeights(const Panels& layout, int num_matrices, FilePart part)
    : num_matrices_(num_matrices), panels_(layout), memory_(matrix_bytes() * num_matrices_) {
  read_file(memory_, part);
  panels_.data = static_cast<const uint8_t*>(memory_.data());
  total_bytes += memory_.size();
}

PackedWeights::~PackedWeights() { total_bytes -= memory_.size(); }

bool PackedWeights::can_scale_inputs() const {
  return kernels()->min_input_bits == 8 && has_nibbles(panels_.format) &&
         panels_.input_type != InputType::kFloat32;
}

void PackedWeights::scale_inputs(Shifts shifts) {
  if (!can_scale_inputs()) throw std::invalid_argument("these inputs cannot be scaled");
  if (shifts->size() != static_cast<size_t>(panels_.num_inputs) ||
      *std::max_element(shifts->begin(), shifts->end()) > MAX_SHIFT)
    throw std::invalid_argument("a small shift for each input");
  panels_.input_type = InputType::kInt8;
  panels_.shifts = shifts->data();
  shifts_ = std::move(shifts);
}

bool PackedWeights::can_use_bfloat16() const {
  if (!kernels()->multiplies_bfloat16 || panels_.num_inputs % UNIT_INPUTS != 0) return false;
  const bool has_integers = panels_.input_type == InputType::kInt16;
  return is_quantized(panels_.format) ? has_integers : panels_.format == Format::kBfloat16;
}

void PackedWeights::use_bfloat16(int exponent) {
  if (!can_use_bfloat16() || exponent > panels_.exponent)
    throw std::invalid_argument("these weights cannot become bfloat16");
  panels_.input_type = InputType::kBfloat16;
  panels_.exponent = exponent;
}

size_t PackedWeights::all_bytes() { return total_bytes; }

Panels PackedWeights::panels(int matrix) const {
  Panels of_matrix = panels_;
  of_matrix.data += matrix * matrix_bytes();
  return of_matrix;
}

void PackedWeights::unpack(int output, float* row) const {
  const size_t columns = panels_.columns, j = output % columns;
  const uint8_t* panel = panels_.data + output / columns * panels_.panel_bytes();
  const size_t num_inputs = panels_.num_inputs;
  if (panels_.format == Format::kFloat32) {
    auto* floats = reinterpret_cast<const float*>(panel);
    for (size_t i = 0; i < num_inputs; i++) row[i] = floats[i * columns + j];
  } else if (panels_.format == Format::kBfloat16) {
    auto* halves = reinterpret_cast<const uint16_t*>(panel);
    for (size_t i = 0; i < num_inputs; i++)
      row[i] = std::bit_cast<float>(static_cast<uint32_t>(halves[i * columns + j]) << 16);
  } else {
    for (size_t i = 0; i < num_inputs; i++) row[i] = quantized(panel, i, j);
  }
}

float PackedWeights::quantized(const uint8_t* panel, size_t input, size_t column) const {
  const size_t group = input / panels_.group;
  const uint8_t* block = panel + panels_.first_group() + group * group_bytes(panels_);
  const auto [scale, bias] = parameters_of(panels_, panel, group, column);
  const ValuePosition position(panels_, input % panels_.group, column);
  const int mask = has_nibbles(panels_.format) ? 15 : 255;
  const int q = block[position.byte] >> position.shift & mask;
  return std::fma(static_cast<float>(panels_.format == Format::kMxfp4 ? MXFP4_CODES[q] : q), scale,
                  bias);
}

}  // namespace native

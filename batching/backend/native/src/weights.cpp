#include "weights.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <optional>

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

Panels layout(const PlainWeights& plain, int columns) {
  const size_t num_groups =
      plain.group ? size_t(plain.num_outputs) * (plain.num_inputs / plain.group) : 0;
  return {.format = plain.format,
          .num_outputs = plain.num_outputs,
          .num_inputs = plain.num_inputs,
          .group = plain.group,
          .columns = columns,
          .input_type = plain.input_type,
          .has_fp16_parameters =
              are_fp16(plain.scales, num_groups) && are_fp16(plain.biases, num_groups),
          .data = nullptr};
}

template <typename Float>
void pack_floats(const PlainWeights& plain, int columns, int panel, uint8_t* target) {
  auto* values = static_cast<const Float*>(plain.weights);
  auto* packed = reinterpret_cast<Float*>(target);
  for (int j = 0; j < columns; j++) {
    const int output = panel * columns + j;
    if (output >= plain.num_outputs) return;  // the memory is zero
    const Float* row = values + static_cast<size_t>(output) * plain.num_inputs;
    for (size_t i = 0; i < static_cast<size_t>(plain.num_inputs); i++)
      packed[i * columns + j] = row[i];
  }
}

/// Value `i` of a row of words, least significant bits first.
template <int BITS>
uint8_t value(const uint32_t* row, int i) {
  constexpr int PER_WORD = 32 / BITS;
  return row[i / PER_WORD] >> (i % PER_WORD * BITS) & ((1u << BITS) - 1);
}

/// Where the value of an input and a column is stored within a group.
struct ValuePosition {
  size_t byte;
  int shift;  // in bits

  ValuePosition(const Panels& panels, size_t input, size_t column) {
    const size_t bits = panels.format == Format::kBits4 ? 4 : 8, per_byte = 8 / bits;
    if (panels.input_type == InputType::kFloat32) {
      byte = input / per_byte * panels.columns + column;
      shift = static_cast<int>(input % per_byte * bits);
      return;
    }
    const size_t per_four = 4 * per_byte;  // inputs that share four bytes
    byte = (input / per_four * panels.columns + column) * 4 + input % 4;
    shift = static_cast<int>(input % per_four / 4 * bits);
  }
};

size_t group_value_bytes(const Panels& panels) {
  const size_t values = static_cast<size_t>(panels.group) * panels.columns;
  return panels.format == Format::kBits4 ? values / 2 : values;
}

size_t group_bytes(const Panels& panels) {
  return group_value_bytes(panels) + panels.parameter_bytes();
}

/// Set scale or bias `at` of a group.
void set_parameter(const Panels& panels, uint8_t* parameters, size_t at, float x) {
  if (panels.has_fp16_parameters)
    reinterpret_cast<uint16_t*>(parameters)[at] = *to_fp16(x);
  else
    reinterpret_cast<float*>(parameters)[at] = x;
}

float parameter(const Panels& panels, const uint8_t* parameters, size_t at) {
  return panels.has_fp16_parameters
             ? from_fp16(reinterpret_cast<const uint16_t*>(parameters)[at])
             : reinterpret_cast<const float*>(parameters)[at];
}

template <int BITS>
void pack_quantized(const PlainWeights& plain, const Panels& panels, int panel, uint8_t* target) {
  const int num_groups = plain.num_inputs / plain.group;
  auto* words = static_cast<const uint32_t*>(plain.weights);
  for (int j = 0; j < panels.columns; j++) {
    const size_t output = static_cast<size_t>(panel) * panels.columns + j;
    if (output >= static_cast<size_t>(plain.num_outputs)) return;
    const uint32_t* row = words + output * (plain.num_inputs * BITS / 32);
    for (int g = 0; g < num_groups; g++) {
      uint8_t* block = target + g * group_bytes(panels);
      for (int i = 0; i < plain.group; i++) {
        const ValuePosition position(panels, i, j);
        block[position.byte] |= value<BITS>(row, g * plain.group + i) << position.shift;
      }
      uint8_t* parameters = block + group_value_bytes(panels);
      set_parameter(panels, parameters, j, plain.scales[output * num_groups + g]);
      set_parameter(panels, parameters, panels.columns + j, plain.biases[output * num_groups + g]);
    }
  }
}

std::atomic<size_t> total_bytes{0};

}  // namespace

PackedWeights::PackedWeights(const PlainWeights& plain, int columns)
    : panels_(layout(plain, columns)), memory_(panels_.panel_bytes() * panels_.num_panels()) {
  auto* data = static_cast<uint8_t*>(memory_.data());
  for (int panel = 0; panel < panels_.num_panels(); panel++) {
    uint8_t* target = data + panel * panels_.panel_bytes();
    switch (plain.format) {
      case Format::kFloat32: pack_floats<float>(plain, columns, panel, target); break;
      case Format::kBfloat16: pack_floats<uint16_t>(plain, columns, panel, target); break;
      case Format::kBits8: pack_quantized<8>(plain, panels_, panel, target); break;
      case Format::kBits4: pack_quantized<4>(plain, panels_, panel, target); break;
    }
  }
  panels_.data = data;
  total_bytes += memory_.size();
}

PackedWeights::~PackedWeights() { total_bytes -= memory_.size(); }

size_t PackedWeights::all_bytes() { return total_bytes; }

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
  const uint8_t* block = panel + input / panels_.group * group_bytes(panels_);
  const uint8_t* parameters = block + group_value_bytes(panels_);
  const float scale = parameter(panels_, parameters, column);
  const float bias = parameter(panels_, parameters, panels_.columns + column);
  const ValuePosition position(panels_, input % panels_.group, column);
  const int mask = panels_.format == Format::kBits4 ? 15 : 255;
  const float q = static_cast<float>(block[position.byte] >> position.shift & mask);
  return std::fma(q, scale, bias);
}

}  // namespace native

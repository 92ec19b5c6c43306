#include "weights.h"

#include <bit>
#include <cmath>

namespace native {

namespace {

Panels layout(const PlainWeights& plain, int columns) {
  return {plain.format, plain.num_outputs, plain.num_inputs, plain.group, columns, plain.rounds, nullptr};
}

template <typename Float>
void pack_floats(const PlainWeights& plain, int columns, int panel, uint8_t* target) {
  auto* values = static_cast<const Float*>(plain.weights);
  auto* packed = reinterpret_cast<Float*>(target);
  for (int j = 0; j < columns; j++) {
    const int output = panel * columns + j;
    if (output >= plain.num_outputs) return;  // the memory is zero
    const Float* row = values + static_cast<size_t>(output) * plain.num_inputs;
    for (int i = 0; i < plain.num_inputs; i++) packed[static_cast<size_t>(i) * columns + j] = row[i];
  }
}

/// Value `i` of a row of words, least significant bits first.
template <int BITS>
uint8_t value(const uint32_t* row, int i) {
  constexpr int PER_WORD = 32 / BITS;
  return row[i / PER_WORD] >> (i % PER_WORD * BITS) & ((1u << BITS) - 1);
}

template <int BITS>
void pack_quantized(const PlainWeights& plain, int columns, int panel, uint8_t* target) {
  constexpr int PER_BYTE = 8 / BITS;
  const int num_groups = plain.num_inputs / plain.group;
  const size_t value_bytes = static_cast<size_t>(plain.group) * columns / PER_BYTE;
  const size_t group_bytes = value_bytes + 2 * sizeof(float) * columns;
  auto* words = static_cast<const uint32_t*>(plain.weights);
  for (int j = 0; j < columns; j++) {
    const size_t output = static_cast<size_t>(panel) * columns + j;
    if (output >= static_cast<size_t>(plain.num_outputs)) return;
    const uint32_t* row = words + output * (plain.num_inputs * BITS / 32);
    for (int g = 0; g < num_groups; g++) {
      uint8_t* block = target + g * group_bytes;
      for (int i = 0; i < plain.group; i++)
        block[static_cast<size_t>(i / PER_BYTE) * columns + j] |=
            value<BITS>(row, g * plain.group + i) << (i % PER_BYTE * BITS);
      auto* parameters = reinterpret_cast<float*>(block + value_bytes);
      parameters[j] = plain.scales[output * num_groups + g];
      parameters[columns + j] = plain.biases[output * num_groups + g];
    }
  }
}

/// As in kernels/linear.h.
float rounded(float x) { return std::fma(x, 8192.0f, x) - x * 8192.0f; }

}  // namespace

PackedWeights::PackedWeights(const PlainWeights& plain, int columns)
    : panels_(layout(plain, columns)), memory_(panels_.panel_bytes() * panels_.num_panels()) {
  auto* data = static_cast<uint8_t*>(memory_.data());
  for (int panel = 0; panel < panels_.num_panels(); panel++) {
    uint8_t* target = data + panel * panels_.panel_bytes();
    switch (plain.format) {
      case Format::kFloat32: pack_floats<float>(plain, columns, panel, target); break;
      case Format::kBfloat16: pack_floats<uint16_t>(plain, columns, panel, target); break;
      case Format::kBits8: pack_quantized<8>(plain, columns, panel, target); break;
      case Format::kBits4: pack_quantized<4>(plain, columns, panel, target); break;
    }
  }
  panels_.data = data;
}

void PackedWeights::unpack(int output, float* row) const {
  const size_t columns = panels_.columns, group = panels_.group;
  const size_t j = output % columns;
  const uint8_t* panel = panels_.data + output / columns * panels_.panel_bytes();
  const size_t per_byte = panels_.format == Format::kBits4 ? 2 : 1;
  const size_t value_bytes = group * columns / per_byte;
  const size_t group_bytes = value_bytes + 2 * sizeof(float) * columns;
  for (size_t i = 0; i < static_cast<size_t>(panels_.num_inputs); i++) {
    if (panels_.format == Format::kFloat32) {
      row[i] = reinterpret_cast<const float*>(panel)[i * columns + j];
    } else if (panels_.format == Format::kBfloat16) {
      const uint32_t bits = reinterpret_cast<const uint16_t*>(panel)[i * columns + j];
      row[i] = std::bit_cast<float>(bits << 16);
    } else {
      const uint8_t* block = panel + i / group * group_bytes;
      const size_t at = i % group;
      const int byte = block[at / per_byte * columns + j];
      const int q = per_byte == 1 ? byte : at % 2 ? byte >> 4 : byte & 15;
      auto* parameters = reinterpret_cast<const float*>(block + value_bytes);
      const float product = static_cast<float>(q) * parameters[j];
      row[i] = panels_.rounds ? rounded(rounded(product) + parameters[columns + j])
                              : std::fma(static_cast<float>(q), parameters[j], parameters[columns + j]);
    }
  }
}

}  // namespace native

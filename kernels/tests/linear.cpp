// Packing, products with packed weights, and unpacking, of all formats.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <list>
#include <stdexcept>
#include <system_error>
#include <thread>

#include "check.h"
#include "operations/experts.h"
#include "operations/linear.h"

namespace tests {

namespace {

using namespace native;

constexpr double EPSILON = 1.0 / (1 << 24);

/// A linear layer as MLX stores it, and its dequantized weights.
struct Layer {
  PlainWeights plain;
  std::vector<float> floats;
  std::vector<uint16_t> halves;
  std::vector<uint32_t> words;
  std::vector<float> scales, biases;
  std::vector<uint8_t> exponents;
  ParameterType parameter_type = ParameterType::kFloat32;
  std::vector<Expected> weights;  // [outputs, inputs]

  explicit Layer(const PlainWeights& shape) : plain(shape) {}
  Layer(const Layer&) = delete;
  Layer& operator=(const Layer&) = delete;
};

using LayerPointer = std::unique_ptr<Layer>;

std::string describe(const PlainWeights& plain) {
  const char* const names[] = {"float32", "bfloat16", "8 bits", "4 bits", "MXFP4"};
  const char* const inputs[] = {" ", ", inputs of 16, "};
  return std::string(names[static_cast<int>(plain.format)]) +
         (plain.bits ? " of " + std::to_string(plain.bits) : "") +
         inputs[static_cast<int>(plain.input_type)] +
         std::to_string(plain.num_outputs) + "x" + std::to_string(plain.num_inputs) + "/" +
         std::to_string(plain.group);
}

/// Round to the 11 bits of float16, ties to even, for any exponent.
float round_to_fp16(float x) {
  int exponent;
  const double fraction = std::frexp(static_cast<double>(x), &exponent);
  return static_cast<float>(std::ldexp(std::nearbyint(std::ldexp(fraction, 11)), exponent - 11));
}

/// The values of scales and biases.
enum class Parameters { kFloats, kHalves, kSmallHalves, kCentered, kProducts, kCenteredProducts };

/// Factors of 11 bits times integers of 8, of which some have too many bits for float16.
std::vector<float> products(Random& random, size_t size) {
  std::vector<float> numbers(size);
  float factor = 0;
  for (size_t i = 0; i < size; i++) {
    if (i % SUPER == 0) factor = (1025 + 2 * random.between(0, 511)) * 0x1p-20f;
    numbers[i] = factor * (i % SUPER == 0 ? random.one_of({63, -128}) : random.between(-127, 127));
  }
  return numbers;
}

/// The small ones are subnormal in float16.
std::vector<float> parameters(Random& random, Parameters kind, size_t size) {
  if (kind >= Parameters::kProducts) return products(random, size);
  std::vector<float> numbers = random.normal(size);
  for (float& x : numbers) {
    if (kind == Parameters::kHalves || kind == Parameters::kCentered)
      x = std::abs(x) < 0x1p-14f ? 0 : round_to_fp16(x);
    if (kind == Parameters::kSmallHalves) x = std::nearbyint(x * 250) * 0x1p-24f;
  }
  return numbers;
}

void fill_floats(Layer& layer, Random& random) {
  PlainWeights& plain = layer.plain;
  const size_t rows = static_cast<size_t>(plain.num_matrices) * plain.num_outputs;
  layer.floats = random.normal(rows * plain.num_inputs);
  plain.weights = layer.floats.data();
  if (plain.format == Format::kBfloat16) {
    for (float x : layer.floats) layer.halves.push_back(to_bf16(x));
    plain.weights = layer.halves.data();
  }
  for (size_t i = 0; i < layer.floats.size(); i++)
    layer.weights.push_back(
        {layer.halves.empty() ? layer.floats[i] : from_bf16(layer.halves[i]), 0});
}

/// A kernel may take a center, which `top` is more than, from the integers.
Expected dequantized(int q, float scale, float bias, int top) {
  const double product = static_cast<double>(q) * scale;
  const double magnitude = std::abs(product + bias) + std::abs(bias) + top * std::abs(scale);
  return {product + bias, EPSILON * magnitude};
}

/// Scales and biases of the codes of a layer, also where it stores exponents.
void fill_parameters(Layer& layer, Random& random, size_t size) {
  PlainWeights& plain = layer.plain;
  if (plain.format == Format::kMxfp4) {
    layer.parameter_type = ParameterType::kPowerOfTwo;
    for (size_t i = 0; i < size; i++) {
      layer.exponents.push_back(random.between(120, 130));
      layer.scales.push_back(std::ldexp(1.0f, layer.exponents.back() - 128));
      layer.biases.push_back(-MXFP4_CENTER * layer.scales.back());
    }
    plain.exponents = layer.exponents.data();
    return;
  }
  const bool has_super = plain.num_inputs / plain.group % SUPER == 0;
  const auto kind = static_cast<Parameters>(random.between(0, has_super ? 5 : 3));
  layer.scales = parameters(random, kind, size);
  layer.biases = parameters(random, kind, size);
  layer.parameter_type =
      kind == Parameters::kFloats ? ParameterType::kFloat32 : ParameterType::kFloat16;
  if (kind == Parameters::kProducts) layer.parameter_type = ParameterType::kProducts;
  if (kind == Parameters::kCentered || kind == Parameters::kCenteredProducts) {
    layer.parameter_type = kind == Parameters::kCentered ? ParameterType::kCentered
                                                         : ParameterType::kCenteredProducts;
    for (size_t i = 0; i < size; i++)
      layer.biases[i] = -std::ldexp(layer.scales[i], plain.bits - 1);
  }
  plain.scales = layer.scales.data();
  plain.biases = layer.biases.data();
}

/// Set the integers of a layer to what `next` returns, and its weights by these.
template <typename Next>
void fill_integers(Layer& layer, Next next) {
  PlainWeights& plain = layer.plain;
  const size_t size = layer.scales.size() * plain.group;
  layer.words.assign(size * plain.bits / 32, 0);
  layer.weights.clear();
  auto* bytes = reinterpret_cast<uint8_t*>(layer.words.data());
  for (size_t i = 0; i < size; i++) {
    const int q = next();
    for (int b = 0; b < plain.bits; b++)
      bytes[(i * plain.bits + b) / 8] |= (q >> b & 1) << (i * plain.bits + b) % 8;
    const size_t group = i / plain.group;
    const int code = plain.format == Format::kMxfp4 ? MXFP4_CODES[q] : q;
    const int top = 1 << plain.bits;
    layer.weights.push_back(dequantized(code, layer.scales[group], layer.biases[group], top));
  }
  plain.weights = layer.words.data();
}

void fill_quantized(Layer& layer, Random& random) {
  const PlainWeights& plain = layer.plain;
  const size_t rows = static_cast<size_t>(plain.num_matrices) * plain.num_outputs;
  fill_parameters(layer, random, rows * plain.num_inputs / plain.group);
  fill_integers(layer, [&] { return random.between(0, (1 << plain.bits) - 1); });
}

/// The kind of a layer, without its size.
struct Kind {
  Format format;
  InputType input_type = InputType::kFloat32;
  bool is_scaled = false;  // by channel
  bool in_bfloat16 = false;
  int bits = 0;  // of a weight; 0 is any

  bool is_quantized() const { return native::is_quantized(format); }
};

/// What inputs can be rounded to here.
std::vector<InputType> input_types() {
  std::vector<InputType> types{InputType::kFloat32};
  if (kernels()->min_input_bits <= 16) types.push_back(InputType::kInt16);
  return types;
}

Shifts random_shifts(Random& random, int num_inputs) {
  std::vector<uint8_t> shifts;
  for (int i = 0; i < num_inputs; i++) shifts.push_back(random.between(0, MAX_SHIFT));
  return std::make_shared<const std::vector<uint8_t>>(std::move(shifts));
}

int random_bits(Random& random, const Kind& kind) {
  if (kind.bits) return kind.bits;
  if (kind.format == Format::kBits8) return random.one_of({5, 6, 8, 8});
  return kind.format == Format::kBits4 ? random.one_of({2, 3, 4, 4}) : 4;
}

LayerPointer make_layer(Random& random, const Kind& kind, int num_inputs = 0, int group = 0,
                        int num_matrices = 1) {
  if (group == 0 && kind.is_quantized()) group = random.one_of({16, 16, 32, 64, 128});
  if (kind.format == Format::kMxfp4) group = 32;
  const int num_outputs = random.between(1, 130);
  if (num_inputs == 0)
    num_inputs = group ? std::max(group, 32) * random.one_of({1, 2, 3, 5, 8, 16})
                       : random.between(1, 400);
  auto layer = std::make_unique<Layer>(
      PlainWeights{.format = kind.format,
                   .num_matrices = num_matrices,
                   .num_outputs = num_outputs,
                   .num_inputs = num_inputs,
                   .group = group,
                   .bits = kind.is_quantized() ? random_bits(random, kind) : 0,
                   .input_type = kind.input_type});
  kind.is_quantized() ? fill_quantized(*layer, random) : fill_floats(*layer, random);
  return layer;
}

/// A layer with its packed weights, its inputs, and what is added to its outputs.
struct Product {
  LayerPointer layer;
  PackedWeights packed;
  int num_rows;
  std::vector<float> x, bias, residual, y;

  Product(Random& random, LayerPointer made, int rows)
      : layer(std::move(made)),
        packed(layer->plain, kernels()->columns),
        num_rows(rows),
        x(random.normal(static_cast<size_t>(rows) * layer->plain.num_inputs)),
        bias(random.chance() ? random.normal(layer->plain.num_outputs) : std::vector<float>{}),
        residual(random.chance() ? random.normal(size()) : std::vector<float>{}),
        y(size(), NAN) {}

  size_t size() const { return static_cast<size_t>(num_rows) * layer->plain.num_outputs; }

  LinearArgs args() {
    return {.weights = packed.panels(),
            .bias = bias.empty() ? nullptr : bias.data(),
            .residual = residual.empty() ? nullptr : residual.data(),
            .x = x.data(),
            .y = y.data(),
            .num_rows = num_rows};
  }

  std::string name() const {
    const InputType type = packed.panels().input_type;
    return describe(layer->plain) + (packed.panels().shifts ? ", scaled" : "") +
           (type == InputType::kBfloat16 ? ", in bfloat16" : "") +
           ", " + std::to_string(num_rows) + " rows" +
           (bias.empty() ? "" : ", bias") + (residual.empty() ? "" : ", residual");
  }
};

/// By how much the integers of each input of a row differ, scaled by channel or not.
std::vector<double> steps_of(const Product& product, int row) {
  const Panels panels = product.packed.panels();
  const float* x = product.x.data() + static_cast<size_t>(row) * panels.num_inputs;
  const bool is_int8 = panels.input_type == InputType::kInt8;
  const int top = is_int8 ? 127 : 32767, group = is_int8 ? INT8_GROUP : panels.input_group();
  const auto factor = [&](int i) { return panels.shifts ? std::ldexp(1.0, panels.shifts[i]) : 1; };
  std::vector<double> steps;
  for (int i = 0; i < panels.num_inputs; i++) {
    double largest = 0;
    for (int at = i / group * group; at < (i / group + 1) * group; at++)
      largest = std::max(largest, std::abs(x[at] / factor(at)));
    steps.push_back(largest / top * factor(i));
  }
  return steps;
}

/// The effect of rounding inputs to integers, and of adding up the two parts of a weight, q * scale
/// and bias, separately.
double integer_tolerance(const Product& product, int row, int output,
                         const std::vector<double>& steps) {
  const PlainWeights& plain = product.layer->plain;
  const float* x = product.x.data() + static_cast<size_t>(row) * plain.num_inputs;
  const Expected* weights = product.layer->weights.data() + size_t(output) * plain.num_inputs;
  const Layer& layer = *product.layer;
  const float* biases = layer.biases.data() + size_t(output) * plain.num_inputs / plain.group;
  double tolerance = 0;
  for (int i = 0; i < plain.num_inputs; i++) {
    const double size = std::abs(weights[i].value), bias = std::abs(biases[i / plain.group]);
    tolerance += 0.51 * steps[i] * size;
    tolerance += EPSILON * plain.num_inputs * std::abs(x[i]) * (size + 2 * bias);
  }
  return tolerance;
}

/// The effect of rounding an input and a dequantized weight, this by way of float16, in which the
/// largest weight has a large exponent.
double bfloat16_tolerance(double x, const Expected& weight, double largest) {
  constexpr double HALF_ULP = 0x1p-8, FP16 = 0x1p-11, LEAST = 0x1p-28;
  const double in_fp16 = weight.tolerance / EPSILON * FP16 + largest * LEAST;
  return std::abs(x) * (2.02 * HALF_ULP * std::abs(weight.value) + in_fp16);
}

double largest_weight(const Product& product) {
  double largest = 0;
  for (const Expected& weight : product.layer->weights)
    largest = std::max(largest, std::abs(weight.value));
  return largest;
}

/// `steps` are those of a row that is rounded to integers, or empty.
Expected expected_output(const Product& product, int row, int output, double largest,
                         const std::vector<double>& steps) {
  const int num_inputs = product.layer->plain.num_inputs;
  const size_t num_outputs = product.layer->plain.num_outputs;
  const bool in_bfloat16 = product.packed.panels().input_type == InputType::kBfloat16;
  double sum = 0, magnitude = 0, tolerance = 0;
  const auto add = [&](double term) { sum += term, magnitude += std::abs(term); };
  for (int i = 0; i < num_inputs; i++) {
    const double x = product.x[static_cast<size_t>(row) * num_inputs + i];
    const Expected& weight = product.layer->weights[static_cast<size_t>(output) * num_inputs + i];
    add(x * weight.value);
    tolerance += std::abs(x) * weight.tolerance;
    if (in_bfloat16) tolerance += bfloat16_tolerance(x, weight, largest);
  }
  if (!steps.empty()) tolerance += integer_tolerance(product, row, output, steps);
  if (!product.bias.empty()) add(product.bias[output]);
  if (!product.residual.empty()) add(product.residual[row * num_outputs + output]);
  return {sum, tolerance + EPSILON * (num_inputs + 3) * magnitude};
}

void check_product(const Product& product) {
  std::vector<Expected> expected;
  const double largest = largest_weight(product);
  const InputType type = product.packed.panels().input_type;
  const bool has_integers = type != InputType::kFloat32 && type != InputType::kBfloat16;
  for (int m = 0; m < product.num_rows; m++) {
    const std::vector<double> steps = has_integers ? steps_of(product, m) : std::vector<double>{};
    for (int j = 0; j < product.layer->plain.num_outputs; j++)
      expected.push_back(expected_output(product, m, j, largest, steps));
  }
  expect_close(product.y, expected, "product: " + product.name());
}

/// A row's bits depend on no other row.
void check_rows_alone(Product& product) {
  const std::vector<float> together = product.y;
  const LinearArgs all = product.args();
  for (int m = 0; m < product.num_rows; m++) {
    LinearArgs row = all;
    const size_t at = static_cast<size_t>(m) * all.weights.num_outputs;
    row.x += static_cast<size_t>(m) * all.weights.num_inputs;
    row.y += at;
    if (row.residual) row.residual += at;
    row.num_rows = 1;
    multiply({row});
  }
  expect_same(product.y, together, "rows alone: " + product.name());
}

/// `arg_max` finds the largest of the outputs that `multiply` writes.
void check_arg_max(Product& product) {
  const size_t width = product.layer->plain.num_outputs;
  LinearArgs args = product.args();
  args.residual = nullptr;
  multiply({args});
  std::vector<uint32_t> indices(product.num_rows);
  std::vector<float> values(product.num_rows), expected;
  args.y = nullptr;
  arg_max(args, indices.data(), values.data());
  for (size_t m = 0; m < values.size(); m++) {
    const float* row = product.y.data() + m * width;
    expected.push_back(*std::max_element(row, row + width));
    if (indices[m] != std::max_element(row, row + width) - row) expected[m] = NAN;
  }
  expect_same(values, expected, "arg_max: " + product.name());
}

/// `unpack` finds the weights, and so does the product with each unit vector.
void check_unpack(const Product& product) {
  const Panels panels = product.packed.panels();
  const size_t size = panels.num_inputs;
  std::vector<float> unpacked(panels.num_outputs * size);
  for (int j = 0; j < panels.num_outputs; j++)
    product.packed.unpack(j, unpacked.data() + j * size);
  expect_close(unpacked, product.layer->weights, "unpack: " + product.name());
  // With integer inputs the identity is rounded.
  if (panels.input_type != InputType::kFloat32) return;
  std::vector<float> identity(size * size), columns(size * panels.num_outputs), rows(unpacked);
  for (size_t i = 0; i < size; i++) identity[i * size + i] = 1;
  multiply({{.weights = panels,
             .bias = nullptr,
             .residual = nullptr,
             .x = identity.data(),
             .y = columns.data(),
             .num_rows = panels.num_inputs}});
  for (size_t i = 0; i < size; i++)
    for (int j = 0; j < panels.num_outputs; j++)
      // A sum of zeros with a negative zero is a positive one.
      rows[j * size + i] = columns[i * panels.num_outputs + j] + 0.0f;
  for (float& x : unpacked) x += 0.0f;
  const std::string what = "product with the identity: " + product.name();
  // A bias and the multiple of the scale that it is taken from may round.
  const bool has_biases = panels.parameter_type == ParameterType::kFloat32 ||
                          panels.parameter_type == ParameterType::kFloat16 ||
                          panels.parameter_type == ParameterType::kProducts;
  if (panels.group == 0 || !has_biases)
    expect_same(rows, unpacked, what);
  else
    expect_close(rows, product.layer->weights, what);
}

void check_embed(const Product& product, Random& random) {
  const Panels panels = product.packed.panels();
  const size_t size = panels.num_inputs;
  std::vector<int32_t> tokens = {-1, panels.num_outputs};
  for (int i = 0; i < 30; i++) tokens.push_back(random.between(0, panels.num_outputs - 1));
  std::vector<float> found(tokens.size() * size), expected(found.size());
  embed(product.packed, tokens.data(), static_cast<int>(tokens.size()), found.data());
  for (size_t m = 0; m < tokens.size(); m++)
    product.packed.unpack(std::clamp(tokens[m], 0, panels.num_outputs - 1),
                          expected.data() + m * size);
  expect_same(found, expected, "embed: " + product.name());
}

/// A number of inputs, 0 is any.
int num_inputs_of(Random& random, const Kind& kind) {
  return kind.in_bfloat16 && !kind.is_quantized() ? UNIT_INPUTS * random.between(1, 20) : 0;
}

/// The kinds that a matrix unit multiplies in bfloat16.
std::vector<Kind> bfloat16_kinds() {
  if (!kernels()->multiplies_bfloat16) return {};
  std::vector<Kind> kinds{{.format = Format::kBfloat16, .in_bfloat16 = true}};
  for (Format format : {Format::kBits8, Format::kBits4, Format::kMxfp4})
    kinds.push_back({.format = format, .input_type = InputType::kInt16, .in_bfloat16 = true});
  return kinds;
}

/// Round inputs as a kind says.
void round_further(Random& random, const Kind& kind, PackedWeights& packed) {
  if (kind.in_bfloat16) packed.use_bfloat16(packed.panels().exponent);
  if (kind.is_scaled) packed.scale_inputs(random_shifts(random, packed.panels().num_inputs));
}

void test_kind(Random& random, const Kind& kind) {
  for (int i = 0; i < 16; i++) {
    // Few rows have their own kernels.
    const int num_rows = i < 8 ? i + 1 : random.between(9, 100);
    Product product(random, make_layer(random, kind, num_inputs_of(random, kind)), num_rows);
    round_further(random, kind, product.packed);
    set_num_threads(random.one_of({1, 2, 3, 4, 7}));
    multiply({product.args()});
    if (kind.is_quantized())
      expect(product.packed.panels().parameter_type == product.layer->parameter_type,
             "scales take as few bits as they can: " + product.name());
    check_product(product);
    check_rows_alone(product);
    check_unpack(product);
    check_embed(product, random);
    check_arg_max(product);
  }
}

/// Layers like one of a kind, but of these formats.
void test_several_of_one_input(Random& random, Kind kind, const std::vector<Format>& formats) {
  constexpr int NUM_INPUTS = 256;
  const Shifts shifts = random_shifts(random, NUM_INPUTS);
  std::list<Product> products;
  std::vector<LinearArgs> args;
  int least = BFLOAT16_EXPONENT;
  for (int i = 0; i < 3; i++)
    for (Format format : formats) {
      kind.format = format;
      const int group = kind.is_quantized() ? random.one_of({16, 32}) : 0;
      products.emplace_back(random, make_layer(random, kind, NUM_INPUTS, group), 30);
      if (kind.is_scaled) products.back().packed.scale_inputs(shifts);
      least = std::min(least, products.back().packed.panels().exponent);
      products.back().x = products.front().x;
    }
  for (Product& product : products) {
    if (kind.in_bfloat16) product.packed.use_bfloat16(least);
    args.push_back(product.args());
    args.back().x = products.front().x.data();
  }
  set_num_threads(4);
  multiply(args);
  for (const Product& product : products) check_product(product);
}

/// More rows than a tile has, and inputs of which no tile of all rows would stay in a cache.
void test_many_rows_in_bfloat16(Random& random) {
  for (const Kind& kind : bfloat16_kinds())
    for (int num_inputs : {256, 8192}) {
      Product product(random, make_layer(random, kind, num_inputs), num_inputs == 256 ? 300 : 70);
      product.packed.use_bfloat16(product.packed.panels().exponent);
      set_num_threads(2);
      multiply({product.args()});
      check_product(product);
      check_rows_alone(product);
    }
}

void test_what_cannot_be_multiplied_in_bfloat16(Random& random) {
  const auto is_refused = [](PackedWeights& weights, int exponent) {
    const InputType before = weights.panels().input_type;
    try {
      weights.use_bfloat16(exponent);
    } catch (const std::invalid_argument&) {
      return weights.panels().input_type == before;
    }
    return false;
  };
  for (Format format : {Format::kFloat32, Format::kBits4}) {
    Product product(random, make_layer(random, {format}), 1);
    expect(is_refused(product.packed, 0), "bfloat16 of what stays exact: " + product.name());
  }
  Product odd(random, make_layer(random, {Format::kBfloat16}, UNIT_INPUTS + 1), 1);
  expect(is_refused(odd.packed, 0), "bfloat16 of a part of an instruction: " + odd.name());
  for (const Kind& kind : bfloat16_kinds()) {
    Product product(random, make_layer(random, kind, 256), 1);
    expect(is_refused(product.packed, product.packed.panels().exponent + 1),
           "weights beyond float16: " + product.name());
  }
}

/// An input alone is not rounded, whatever it is scaled by.
void test_single_inputs(Random& random, const Kind& kind) {
  constexpr int SIZE = 128;
  Product product(random, make_layer(random, kind, SIZE, 32), SIZE);
  product.bias.clear();
  product.residual.clear();
  std::fill(product.x.begin(), product.x.end(), 0.0f);
  for (int i = 0; i < SIZE; i++) product.x[i * SIZE + i] = std::ldexp(1.0f, random.between(-20, 20));
  round_further(random, kind, product.packed);
  multiply({product.args()});
  std::vector<Expected> expected;
  const int num_outputs = product.layer->plain.num_outputs;
  for (int i = 0; i < SIZE; i++)
    for (int j = 0; j < num_outputs; j++) {
      const Expected& weight = product.layer->weights[j * SIZE + i];
      const double x = product.x[i * SIZE + i];
      expected.push_back({x * weight.value, x * (4 * weight.tolerance + 1e-30)});
    }
  expect_close(product.y, expected, "single inputs: " + product.name());
}

void test_wrong_shifts(Random& random) {
  const auto is_refused = [](PackedWeights& weights, Shifts shifts) {
    try {
      weights.scale_inputs(std::move(shifts));
    } catch (const std::invalid_argument&) {
      return weights.panels().shifts == nullptr;
    }
    return false;
  };
  const bool has_integers = kernels()->min_input_bits <= 16;
  for (const Kind& kind : std::vector<Kind>{{Format::kBits4}, {Format::kFloat32}}) {
    Product product(random, make_layer(random, kind), 1);
    expect(is_refused(product.packed, random_shifts(random, product.packed.panels().num_inputs)),
           "shifts of inputs that are not rounded: " + product.name());
  }
  for (Format format : {Format::kBits8, Format::kBits4}) {
    if (!has_integers) continue;
    Product product(random, make_layer(random, {format, InputType::kInt16}), 1);
    const int size = product.packed.panels().num_inputs;
    const std::vector<uint8_t> large(size, MAX_SHIFT + 1);
    expect(is_refused(product.packed, std::make_shared<const std::vector<uint8_t>>(large)),
           "shifts by too much: " + product.name());
    expect(is_refused(product.packed, random_shifts(random, size - 1)),
           "too few shifts: " + product.name());
  }
}

/// The threads belong to one caller at a time; no result depends on which.
void test_two_callers(Random& random) {
  std::list<Product> products;
  for (Format format : {Format::kBits8, Format::kBits4})
    products.emplace_back(random, make_layer(random, {format}), 20);
  set_num_threads(4);
  std::vector<std::thread> callers;
  for (Product& product : products)
    callers.emplace_back([&product] {
      for (int i = 0; i < 50; i++) multiply({product.args()});
    });
  for (std::thread& caller : callers) caller.join();
  for (const Product& product : products) check_product(product);
}

bool are_same(const PackedWeights& one, const PackedWeights& other) {
  return one.num_bytes() == other.num_bytes() &&
         std::equal(one.panels().data, one.panels().data + one.num_bytes(), other.panels().data);
}

/// Packed weights that are written to a file, and read from there.
void test_stored(Random& random, const Kind& kind) {
  const LayerPointer layer = make_layer(random, kind, 0, 0, random.between(1, 3));
  const PackedWeights packed(layer->plain, kernels()->columns);
  constexpr size_t OFFSET = 1 << 16;
  std::FILE* file = std::tmpfile();
  std::fseek(file, OFFSET, SEEK_SET);
  std::fwrite(packed.panels().data, 1, packed.num_bytes(), file);
  std::fflush(file);
  const FilePart part{fileno(file), OFFSET};
  const int matrices = packed.num_matrices();
  const size_t all = PackedWeights::all_bytes();
  {
    const PackedWeights read(packed.panels(), matrices, part);
    expect(are_same(read, packed), "weights that are read");
    expect(PackedWeights::all_bytes() == all + packed.num_bytes(), "bytes of weights");
  }
  expect(PackedWeights::all_bytes() == all, "bytes of weights that are gone");
  bool has_failed = false;
  try {
    const PackedWeights beyond(packed.panels(), matrices, {part.file, OFFSET + 1});
  } catch (const std::system_error&) {
    has_failed = true;
  }
  expect(has_failed, "a file that is too short");
  std::fclose(file);
}

}  // namespace

/// A pointer to what another owns.
template <typename T>
std::shared_ptr<const T> borrowed(const T* owned) {
  return {std::shared_ptr<void>(), owned};
}

/// Each slot's bits are those of the product of its row with its expert alone.
void check_experts(Random& random, Product& product, int num_matrices,
                   const std::vector<int32_t>& indices) {
  const Panels first = product.packed.panels();
  const size_t num_inputs = first.num_inputs, num_outputs = first.num_outputs;
  const int num_slots = indices.size(), slots_per_row = num_slots / product.num_rows;
  const std::vector<float> bias =
      random.chance() ? random.normal(num_matrices * num_outputs) : std::vector<float>{};
  std::vector<float> y(num_slots * num_outputs, NAN), alone(y);
  switch_linear({borrowed(&product.packed), borrowed(bias.empty() ? nullptr : bias.data())},
                product.x.data(), slots_per_row, Routing(indices.data(), num_slots, num_matrices),
                y.data());
  for (int i = 0; i < num_slots; i++)
    multiply({{.weights = product.packed.panels(indices[i]),
               .bias = bias.empty() ? nullptr : bias.data() + indices[i] * num_outputs,
               .residual = nullptr,
               .x = product.x.data() + i / slots_per_row * num_inputs,
               .y = alone.data() + i * num_outputs,
               .num_rows = 1}});
  expect_same(y, alone, "experts: " + product.name());
}

std::vector<int32_t> random_experts(Random& random, int num_slots, int num_matrices) {
  std::vector<int32_t> indices;
  for (int i = 0; i < num_slots; i++) indices.push_back(random.between(0, num_matrices - 1));
  return indices;
}

/// Gated experts are their products, and what is between them, one after the other.
void check_gated(Random& random, Product& product, int num_matrices) {
  const int width = product.packed.panels().num_outputs, num_slots = 2 * product.num_rows;
  const LayerPointer layer = make_layer(random, {Format::kFloat32}, width, 0, num_matrices);
  const PackedWeights packed(layer->plain, kernels()->columns);
  const std::vector<float> bias = random.normal(static_cast<size_t>(num_matrices) * width);
  const ExpertLayer gate{borrowed(&product.packed), nullptr};
  const ExpertLayer up{borrowed(&product.packed), borrowed(bias.data())};
  const ExpertLayer down{borrowed(&packed), nullptr};
  const GatedActivation activation{random.chance(), 1.7f, 2.0f};
  const std::vector<int32_t> indices = random_experts(random, num_slots, num_matrices);
  const Routing routing(indices.data(), num_slots, num_matrices);
  std::vector<float> gated(static_cast<size_t>(num_slots) * width, NAN), other(gated);
  std::vector<float> y(static_cast<size_t>(num_slots) * layer->plain.num_outputs, NAN), expected(y);
  switch_linear(gate, product.x.data(), 2, routing, gated.data());
  switch_linear(up, product.x.data(), 2, routing, other.data());
  for (int i = 0; i < num_slots; i++) {
    float* row = gated.data() + static_cast<size_t>(i) * width;
    const float* own = other.data() + static_cast<size_t>(i) * width;
    for (int j = 0; activation.is_clipped && j < width; j++) {
      const double x = std::min(row[j], 2.0f), u = std::clamp(own[j], -2.0f, 2.0f);
      const double value = x / (1 + std::exp(-1.7f * x)) * (u + 1);
      float clipped;
      kernels()->clipped_swiglu(row + j, own + j, 1.7f, 2.0f, 1, &clipped);
      expect(std::abs(clipped - value) < 1e-5, "clipped SwiGLU: " + product.name());
    }
    if (activation.is_clipped)
      kernels()->clipped_swiglu(row, own, 1.7f, 2.0f, width, row);
    else
      kernels()->swiglu(row, own, width, row);
  }
  switch_linear(down, gated.data(), 1, routing, expected.data());
  run_experts({gate, up, down, activation}, product.x.data(), 2, routing, y.data());
  expect_same(y, expected, "gated experts: " + product.name());
}

void test_experts(Random& random, const Kind& kind) {
  for (int num_rows : {1, 2, 30}) {
    const int num_matrices = random.between(1, 9);
    const int num_inputs = num_inputs_of(random, kind);
    Product product(random, make_layer(random, kind, num_inputs, 0, num_matrices), num_rows);
    round_further(random, kind, product.packed);
    set_num_threads(random.one_of({1, 2, 4}));
    const int num_slots = num_rows * random.between(1, 3);
    check_experts(random, product, num_matrices, random_experts(random, num_slots, num_matrices));
    check_gated(random, product, num_matrices);
  }
}

/// An expert has many times the rows of the first one, in a thread that has no memory from before.
void test_unequal_experts(Random& random, const Kind& kind) {
  const int num_rows = 1200;
  Product product(random, make_layer(random, kind, 64, 16, 2), num_rows);
  round_further(random, kind, product.packed);
  std::vector<int32_t> indices(num_rows, 1);
  indices[0] = 0;
  set_num_threads(1);
  std::thread([&] { check_experts(random, product, 2, indices); }).join();
}

void test_experts(Random& random) {
  for (InputType input_type : input_types())
    test_unequal_experts(random, {Format::kBits4, input_type});
  for (const Kind& kind : bfloat16_kinds()) test_experts(random, kind);
  for (Format format : {Format::kFloat32, Format::kBfloat16, Format::kBits8, Format::kBits4,
                        Format::kMxfp4})
    for (InputType input_type : input_types())
      if (input_type == InputType::kFloat32 || is_quantized(format))
        test_experts(random, {format, input_type});
}

void test_linear() {
  Random random(1);
  for (Format format : {Format::kFloat32, Format::kBfloat16, Format::kBits8, Format::kBits4,
                        Format::kMxfp4})
    for (InputType input_type : input_types())
      if (input_type == InputType::kFloat32 || is_quantized(format))
        test_kind(random, {format, input_type});
  if (kernels()->min_input_bits == 8) {
    for (const Format format : {Format::kBits4, Format::kMxfp4}) {
      const Kind scaled{format, InputType::kInt16, true};
      test_kind(random, scaled);
      test_single_inputs(random, scaled);
      test_experts(random, scaled);
    }
    test_several_of_one_input(random, {Format::kBits4, InputType::kInt16, true}, {Format::kBits4});
  }
  for (const Kind& kind : bfloat16_kinds()) test_kind(random, kind);
  test_many_rows_in_bfloat16(random);
  test_what_cannot_be_multiplied_in_bfloat16(random);
  test_wrong_shifts(random);
  const std::vector<Format> quantized{Format::kBits8, Format::kBits4};
  test_several_of_one_input(random, {Format::kFloat32}, {Format::kFloat32, Format::kBfloat16});
  for (InputType input_type : input_types())
    test_several_of_one_input(random, {Format::kBits4, input_type}, quantized);
  if (const auto kinds = bfloat16_kinds(); !kinds.empty())
    test_several_of_one_input(random, kinds.back(), quantized);
  test_two_callers(random);
  test_experts(random);
  for (Format format : {Format::kFloat32, Format::kBfloat16, Format::kBits8, Format::kMxfp4})
    test_stored(random, {format});
}

}  // namespace tests

// The extension module.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <map>
#include <stdexcept>
#include <string>
#include <system_error>
#include <tuple>
#include <utility>

#include "primitives/adapters.h"
#include "primitives/primitives.h"
#include "shared.h"
#include "thread_pool.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace native;

namespace {

using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Rows = nb::ndarray<const int32_t, nb::shape<-1, 4>, nb::c_contig, nb::device::cpu>;
using Slices = nb::ndarray<const int32_t, nb::shape<-1, 5>, nb::c_contig, nb::device::cpu>;

std::shared_ptr<Step> make_step(const Slices& slices, const Ints& tables, const Ints& slots) {
  auto step = std::make_shared<Step>();
  for (size_t i = 0; i < slices.shape(0); i++)
    step->slices.push_back({slices(i, 0), slices(i, 1), slices(i, 2), slices(i, 3), slices(i, 4)});
  step->tables.assign(tables.data(), tables.data() + tables.size());
  step->slots.assign(slots.data(), slots.data() + slots.size());
  return step;
}

CacheType cache_type(int bits) {
  switch (bits) {
    case 32: return CacheType::kFloat32;
    case 16: return CacheType::kBfloat16;
    case 8: return CacheType::kInt8;
  }
  throw std::invalid_argument("keys and values have 8, 16 or 32 bits");
}

std::shared_ptr<Pool> make_pool(int num_blocks, int block_size, int num_heads, int key_dim,
                                int value_dim, int bits, bool rounds_inputs, bool is_latent) {
  if (std::min({num_blocks, block_size, num_heads, key_dim, value_dim}) < 1)
    throw std::invalid_argument("a pool has blocks, heads and dimensions");
  if (is_latent && (bits == 8 || value_dim > key_dim))
    throw std::invalid_argument("latents are a part of keys that are no integers");
  return std::make_shared<Pool>(
      PoolLayout{num_heads, block_size, key_dim, value_dim, cache_type(bits),
                 kernels()->columns, rounds_inputs && !is_latent, is_latent},
      num_blocks);
}

/// Copy blocks, in this order, in each of the pools.  Others have the interpreter's lock meanwhile: a page that
/// nothing has touched yet costs the system much more than its copy.
void copy_blocks(const std::vector<std::shared_ptr<Pool>>& pools, const Ints& sources,
                 const Ints& targets) {
  if (sources.size() != targets.size())
    throw std::invalid_argument("each block has one that it is copied to");
  const nb::gil_scoped_release unlocked;
  for (const auto& pool : pools)
    for (size_t i = 0; i < sources.size(); i++) pool->copy(sources(i), targets(i));
}

using Layout = std::map<std::string, int>;

/// How weights are packed, for a file that has them.
Layout layout_of(const Weights& weights) {
  const Panels panels = weights->panels();
  return {{"format", static_cast<int>(panels.format)},
          {"matrices", weights->num_matrices()},
          {"outputs", panels.num_outputs},
          {"inputs", panels.num_inputs},
          {"group", panels.group},
          {"columns", panels.columns},
          {"input_type", static_cast<int>(panels.input_type)},
          {"parameter_type", static_cast<int>(panels.parameter_type)},
          {"center", panels.center},
          {"exponent", panels.exponent}};
}

/// Packed weights, in `size` bytes of a file; raises OSError.
Weights stored_weights(const Layout& layout, size_t size, int file, size_t offset) {
  const Panels panels{.format = static_cast<Format>(layout.at("format")),
                      .num_outputs = layout.at("outputs"),
                      .num_inputs = layout.at("inputs"),
                      .group = layout.at("group"),
                      .columns = layout.at("columns"),
                      .input_type = static_cast<InputType>(layout.at("input_type")),
                      .parameter_type = static_cast<ParameterType>(layout.at("parameter_type")),
                      .center = layout.at("center"),
                      .exponent = layout.at("exponent"),
                      .data = nullptr};
  const int num_matrices = layout.at("matrices");
  if (panels.columns != kernels()->columns ||
      size != panels.panel_bytes() * panels.num_panels() * num_matrices)
    throw std::invalid_argument("these weights are packed for other kernels");
  try {
    return std::make_shared<PackedWeights>(panels, num_matrices, FilePart{file, offset});
  } catch (const std::system_error& error) {
    errno = error.code().value();
    PyErr_SetFromErrno(PyExc_OSError);
    throw nb::python_error();
  }
}

void scale_inputs(const std::vector<std::shared_ptr<PackedWeights>>& weights,
                  const nb::bytes& shifts) {
  const auto* bytes = static_cast<const uint8_t*>(shifts.data());
  const auto shared = std::make_shared<const std::vector<uint8_t>>(bytes, bytes + shifts.size());
  for (const auto& each : weights) each->scale_inputs(shared);
}

using PackedOfOneInput = std::vector<std::shared_ptr<PackedWeights>>;

/// Use bfloat16 for weights of one input, if that is possible for all of them.
void use_bfloat16(const PackedOfOneInput& weights) {
  int exponent = BFLOAT16_EXPONENT;
  for (const auto& each : weights) exponent = std::min(exponent, each->panels().exponent);
  if (std::all_of(weights.begin(), weights.end(),
                  [](const auto& each) { return each->can_use_bfloat16(); }))
    for (const auto& each : weights) each->use_bfloat16(exponent);
}

// Temperature, top-k, top-p, min-p, top-n-sigma and seed.
using SamplingTuple = std::tuple<float, int, float, float, float, uint64_t>;
using FloatArray = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
// Index, factor and term, factors and terms.
using ExpectedTuple = std::optional<std::tuple<int32_t, float, float, FloatArray, FloatArray>>;
// Tokens, factors and terms.
using EditsTuple = std::optional<std::tuple<Ints, FloatArray, FloatArray, ExpectedTuple>>;

template <typename Array>
auto vector_of(const Array& array) {
  return std::vector(array.data(), array.data() + array.size());
}

mlx::core::array sample_rows(const mlx::core::array& logits, const std::vector<SamplingTuple>& rows,
                             const std::vector<EditsTuple>& edits,
                             const std::optional<mlx::core::array>& before) {
  std::vector<RowSampling> samplings;
  for (const auto& [temperature, top_k, top_p, min_p, top_n_sigma, seed] : rows)
    samplings.push_back({temperature, top_k, top_p, min_p, top_n_sigma, seed});
  std::vector<LogitEdits> of_rows(edits.size());
  for (size_t i = 0; i < edits.size(); i++)
    if (edits[i]) {
      const auto& [tokens, factors, terms, expected] = *edits[i];
      of_rows[i] = {vector_of(tokens), vector_of(factors), vector_of(terms), {}};
      if (!expected) continue;
      const auto& [index, factor, term, if_factors, if_terms] = *expected;
      of_rows[i].expected = {index, factor, term, vector_of(if_factors), vector_of(if_terms)};
    }
  return graph::sample(logits, std::move(samplings), std::move(of_rows), before);
}

using Bytes = nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>>;

Bytes bytes_of(nb::handle object) {
  const auto weights = nb::cast<Weights>(object);
  return Bytes(weights->panels().data, {weights->num_bytes()}, object);
}

using Floats = std::vector<float>;

using Layers = std::vector<std::pair<Weights, Floats>>;
// Weights, empty for none, eps, and for LayerNorm whether it is one, and a bias.
using NormTuple = std::tuple<Floats, float, bool, Floats>;
using Norms = std::vector<NormTuple>;

/// The layers of a half but the last one, which is that of its output.
std::vector<Layer> inputs_of(const Layers& layers) {
  std::vector<Layer> inputs;
  for (size_t i = 0; i + 1 < layers.size(); i++)
    inputs.push_back({layers[i].first, layers[i].second});
  return inputs;
}

Norm norm_of(const NormTuple& norm) {
  const auto& [weight, eps, is_centered, bias] = norm;
  if (!bias.empty() && bias.size() != weight.size())
    throw std::invalid_argument("a bias for each weight of a norm");
  return {weight, eps, is_centered, bias};
}

Output output_of(const Layers& layers, const Norms& norms, float residual) {
  return {{layers.back().first, layers.back().second}, {norm_of(norms.back()), residual}};
}

std::shared_ptr<AttentionHalf> make_attention(const Layers& layers, const Norms& norms,
                                              int num_heads, float scale, const Floats& sinks,
                                              float residual, bool is_gated, bool norms_last) {
  if (layers.size() < 2 || layers.size() > 4 || norms.size() != 5 || num_heads < 1)
    throw std::invalid_argument("attention has 2 to 4 layers and up to 5 norms");
  return std::make_shared<AttentionHalf>(
      AttentionHalf{inputs_of(layers), norm_of(norms[0]), norm_of(norms[1]), norm_of(norms[2]),
                    norm_of(norms[3]), output_of(layers, norms, residual), sinks, num_heads, scale,
                    is_gated, norms_last});
}

std::shared_ptr<LatentHalf> make_latent(const Layers& inputs, const Layers& q,
                                        const std::vector<Weights>& heads, const Layers& output,
                                        const Norms& norms, int num_heads, float scale,
                                        float residual) {
  if (inputs.size() != 2 || q.size() > 1 || (heads.size() != 2 && !heads.empty()) ||
      output.size() != (heads.empty() ? 2 : 1) || norms.size() != 4 || num_heads < 1)
    throw std::invalid_argument("latent attention has two inputs and up to 4 norms");
  const auto layers = [](const Layers& given, size_t count) {
    std::vector<Layer> made;
    for (size_t i = 0; i < count; i++) made.push_back({given[i].first, given[i].second});
    return made;
  };
  return std::make_shared<LatentHalf>(
      LatentHalf{layers(inputs, 2), layers(q, q.size()), norm_of(norms[0]), norm_of(norms[1]),
                 norm_of(norms[2]), heads.empty() ? nullptr : heads[0],
                 heads.empty() ? nullptr : heads[1], layers(output, output.size() - 1),
                 output_of(output, norms, residual), num_heads, scale});
}

std::shared_ptr<MlpHalf> make_mlp(const Layers& layers, const Norms& norms, int activation,
                                  float residual) {
  if ((layers.size() != 3 && layers.size() != 2) || norms.size() != 2)
    throw std::invalid_argument("an MLP has 3 layers, or 2, and up to 2 norms");
  if (activation < 0 || activation >= NUM_ACTIVATIONS)
    throw std::invalid_argument("no such activation");
  return std::make_shared<MlpHalf>(MlpHalf{inputs_of(layers), norm_of(norms[0]),
                                           output_of(layers, norms, residual),
                                           static_cast<Activation>(activation)});
}

Router make_router(int num_experts, int top_k, bool is_sigmoid, const Floats& correction,
                   int num_groups, int top_groups, bool is_normalized, float epsilon,
                   float factor) {
  Router router{num_experts, top_k, is_sigmoid, correction, num_groups, top_groups, is_normalized,
                epsilon, factor};
  graph::check_router(router);
  return router;
}

/// The index and the weight of each expert that a row is routed to.
std::vector<std::pair<int, float>> route_row(const Router& router, const Floats& logits) {
  if (static_cast<int>(logits.size()) != router.num_experts)
    throw std::invalid_argument("a logit for each expert");
  std::vector<int32_t> indices(router.top_k);
  Floats weights(router.top_k);
  route(router, logits.data(), indices.data(), weights.data());
  std::vector<std::pair<int, float>> chosen;
  for (int i = 0; i < router.top_k; i++) chosen.emplace_back(indices[i], weights[i]);
  return chosen;
}

std::optional<Layer> layer_of(const std::optional<Layers::value_type>& layer) {
  if (!layer) return std::nullopt;
  return Layer{layer->first, layer->second};
}

std::shared_ptr<MixtureHalf> make_mixture(const Layers::value_type& router_layer,
                                          const Router& router,
                                          const std::shared_ptr<const Experts>& experts,
                                          const Norms& norms,
                                          const std::shared_ptr<const MlpHalf>& shared,
                                          const std::optional<Layers::value_type>& shared_gate,
                                          float residual) {
  if (norms.size() != 2) throw std::invalid_argument("a mixture has up to 2 norms");
  auto half = std::make_shared<MixtureHalf>(
      MixtureHalf{{router_layer.first, router_layer.second}, router, *experts,
                  shared ? std::optional(*shared) : std::nullopt, layer_of(shared_gate),
                  norm_of(norms[0]), {norm_of(norms[1]), residual}});
  graph::check_mixture(*half);
  return half;
}

HeadColumns columns_of(const std::tuple<int, int, int>& of) {
  const auto [layer, first, stride] = of;
  return {layer, first, stride};
}

Recurrence recurrence_of(const std::string& name) {
  if (name == "none") return Recurrence::kNone;
  if (name == "delta") return Recurrence::kDelta;
  if (name == "additive") return Recurrence::kAdditive;
  throw std::invalid_argument("a recurrence is none, delta or additive");
}

/// Columns are those of q, k, v, z, b and a; norms of the input, of heads' outputs and of the output.
std::shared_ptr<Mixer> make_mixer(
    const Layers& layers, const Norms& norms, const std::string& recurrence,
    const std::vector<std::tuple<int, int, int>>& columns, const std::pair<int, int>& heads,
    const std::pair<int, int>& dims, const Floats& taps, const Floats& tap_bias,
    const Floats& decay, const Floats& dt_bias, const std::pair<float, float>& step_limits,
    const Floats& skip, const std::pair<float, float>& scales, float eps, int norm_width,
    bool gates_first, float residual) {
  if (layers.size() < 2 || norms.size() != 3 || columns.size() != 6)
    throw std::invalid_argument("a mixer has layers, 3 norms and 6 kinds of columns");
  Mixer mixer{.layers = inputs_of(layers),
              .norm = norm_of(norms[0]),
              .recurrence = recurrence_of(recurrence),
              .q = columns_of(columns[0]),
              .k = columns_of(columns[1]),
              .v = columns_of(columns[2]),
              .z = columns_of(columns[3]),
              .b = columns_of(columns[4]),
              .a = columns_of(columns[5]),
              .num_key_heads = heads.first,
              .num_heads = heads.second,
              .key_dim = dims.first,
              .value_dim = dims.second,
              .taps = taps,
              .tap_bias = tap_bias,
              .decay = decay,
              .dt_bias = dt_bias,
              .min_step = step_limits.first,
              .max_step = step_limits.second,
              .skip = skip,
              .q_scale = scales.first,
              .k_scale = scales.second,
              .eps = eps,
              .head_norm = norm_of(norms[1]),
              .norm_width = norm_width,
              .gates_first = gates_first,
              .output = output_of(layers, norms, residual)};
  mixer.check();
  return std::make_shared<Mixer>(std::move(mixer));
}

std::shared_ptr<StateStep> make_state_step(const Rows& rows) {
  std::vector<StatePiece> pieces;
  for (size_t i = 0; i < rows.shape(0); i++)
    pieces.push_back({rows(i, 0), rows(i, 1), rows(i, 2), rows(i, 3)});
  return std::make_shared<StateStep>(std::move(pieces));
}

/// None in Python is null here.
nb::object use_adapters(std::shared_ptr<const AdaptedRows> rows) {
  const auto before = graph::use_adapters(std::move(rows));
  return before ? nb::cast(before) : nb::none();
}

/// A callable that is called, and at last dropped, in a thread that does not hold the interpreter's lock.
struct Callable {
  nb::object object;

  explicit Callable(nb::callable given) : object(std::move(given)) {}
  Callable(const Callable&) = delete;
  Callable& operator=(const Callable&) = delete;
  ~Callable() {
    nb::gil_scoped_acquire lock;
    object.reset();
  }
};

using Addresses = std::vector<uintptr_t>;

std::vector<mlx::core::array> host_kernel(nb::callable run,
                                          const std::vector<mlx::core::array>& inputs,
                                          const std::vector<std::vector<int>>& shapes,
                                          const std::vector<mlx::core::Dtype>& dtypes) {
  const auto kernel = std::make_shared<Callable>(std::move(run));
  const auto call = [kernel](const Addresses& from, const Addresses& to) {
    nb::gil_scoped_acquire lock;
    try {
      kernel->object(from, to);
    } catch (nb::python_error& error) {
      // Nothing could catch it in that thread.
      error.discard_as_unraisable("a kernel on the host");
    }
  };
  return graph::host_kernel(call, inputs, shapes, dtypes);
}

}  // namespace

NB_MODULE(_native, m) {
  nb::module_::import_("mlx.core");
  m.def("min_input_bits", [] { return kernels() ? kernels()->min_input_bits : 32; });
  m.def("supports_bfloat16", [] { return kernels() && kernels()->multiplies_bfloat16; });
  m.def("isa", [] { return kernels() ? kernels()->name : ""; });
  m.def("missing_isa", [] { return std::string(missing_isa()); });
  m.def("weight_bytes", &PackedWeights::all_bytes);
  m.def("release_freed", &release_freed);
  m.def("set_num_threads", &set_num_threads, "num_threads"_a, "nodes"_a = Nodes{});
  m.def("num_threads", [] { return threads().num_threads(); });

  nb::class_<Shared<PackedWeights>>(m, "PackedWeights")
      .def_prop_ro("nbytes", [](const Weights& weights) { return weights->num_bytes(); })
      .def_prop_ro("bytes", &bytes_of)
      .def_prop_ro("layout", &layout_of)
      .def_prop_ro("can_scale_inputs",
                   [](const Weights& weights) { return weights->can_scale_inputs(); })
      .def_prop_ro("num_matrices", [](const Weights& weights) { return weights->num_matrices(); })
      .def_prop_ro("shape", [](const Weights& weights) {
        return std::make_pair(weights->panels().num_outputs, weights->panels().num_inputs);
      });
  nb::class_<Shared<Step>>(m, "Step");
  m.def("step", &make_step, "slices"_a, "tables"_a, "slots"_a);
  nb::class_<Shared<Pool>>(m, "Pool")
      // Addresses and sizes of its memory.
      .def_prop_ro("regions", [](const std::shared_ptr<Pool>& pool) {
        std::vector<std::pair<uintptr_t, size_t>> regions;
        for (const Memory* memory : {&pool->key_memory(), &pool->value_memory()})
          if (memory->size()) regions.emplace_back(reinterpret_cast<uintptr_t>(memory->data()), memory->size());
        return regions;
      });
  m.def("pool", &make_pool, "num_blocks"_a, "block_size"_a, "num_heads"_a, "key_dim"_a,
        "value_dim"_a, "bits"_a = 32, "rounds_inputs"_a = false, "is_latent"_a = false);
  m.def("copy_blocks", &copy_blocks, "pools"_a, "sources"_a, "targets"_a);

  m.def("pack", &graph::pack, "weight"_a, "scales"_a = nb::none(), "biases"_a = nb::none(),
        "bits"_a = 0, "input_bits"_a = 32);
  m.def("stored_weights", &stored_weights, "layout"_a, "size"_a, "file"_a, "offset"_a);
  m.def("use_bfloat16", &use_bfloat16, "weights"_a);
  m.def("scale_inputs", &scale_inputs, "weights"_a, "shifts"_a);
  nb::class_<Shared<Adapter>>(m, "Adapter")
      .def_prop_ro("nbytes", [](const std::shared_ptr<Adapter>& adapter) { return adapter->num_bytes(); })
      .def("touched", [](const std::shared_ptr<Adapter>& adapter) { return adapter->used(); });
  m.def("adapter", &graph::adapter, "layers"_a, nb::call_guard<nb::gil_scoped_release>());
  nb::class_<Shared<AdaptedRows>>(m, "AdaptedRows")
      .def_prop_ro("num_rows", [](const std::shared_ptr<AdaptedRows>& rows) { return rows->num_rows(); });
  m.def("adapted_rows", [](const std::vector<RowSegment>& segments) {
    return std::make_shared<AdaptedRows>(segments);
  }, "segments"_a);
  m.def("use_adapters", &use_adapters, "rows"_a.none());
  m.def("linear", &graph::linear, "x"_a, "weights"_a, "biases"_a);
  nb::class_<ExpertLayer>(m, "ExpertLayer").def_prop_ro("nbytes", [](const ExpertLayer& layer) {
    return layer.weights->num_bytes();
  });
  m.def("expert_layer", &graph::expert_layer, "weights"_a, "bias"_a = nb::none());
  m.def("switch_linear", &graph::switch_linear, "x"_a, "indices"_a, "layer"_a);
  nb::class_<Shared<Experts>>(m, "Experts");
  m.def("gated_experts", &graph::gated_experts, "gate"_a, "up"_a, "down"_a, "alpha"_a = 0.0f,
        "limit"_a = 0.0f);
  m.def("experts", &graph::experts, "x"_a, "indices"_a, "experts"_a);
  m.def("arg_max", &graph::arg_max, "logits"_a);
  m.def("sample", &sample_rows, "logits"_a, "rows"_a, "edits"_a,
        "before"_a.none() = nb::none());
  m.def("embed", &graph::embed, "tokens"_a, "weights"_a);
  m.def("rms_norm", &graph::rms_norm, "x"_a, "weight"_a.none(), "eps"_a);
  m.def("layer_norm", &graph::layer_norm, "x"_a, "weight"_a.none(), "bias"_a.none(), "eps"_a);
  m.def("swiglu", &graph::swiglu, "gate"_a, "up"_a);
  m.def("silu", &graph::silu, "x"_a);
  m.def("gelu", &graph::gelu, "x"_a);
  nb::class_<graph::Frequencies>(m, "Frequencies")
      .def(nb::init<std::vector<double>, double>(), "radians"_a, "factor"_a);
  m.def("angles", &graph::angles, "positions"_a, "frequencies"_a);
  m.def("rope", &graph::rope, "x"_a, "cosines"_a, "sines"_a, "traditional"_a);
  m.def("delta_rule", &graph::delta_rule, "queries"_a, "keys"_a, "values"_a, "decay"_a, "beta"_a,
        "state"_a = nb::none(), "is_additive"_a = false);
  m.def("convolve", &graph::convolve, "x"_a, "taps"_a, "bias"_a = nb::none());
  m.def("attend", &graph::attend, "queries"_a, "keys"_a, "values"_a, "pool"_a, "step"_a, "scale"_a,
        "window"_a = 0, "soft_cap"_a = 0.0f, "sinks"_a = nb::none(),
        "is_chunked"_a = false);

  nb::class_<Shared<AttentionHalf>>(m, "AttentionHalf");
  m.def("attention", &make_attention, "layers"_a, "norms"_a, "num_heads"_a, "scale"_a,
        "sinks"_a = Floats{}, "residual"_a = 0.0f, "is_gated"_a = false, "norms_last"_a = false);
  m.def("run_attention", &graph::run_attention, "x"_a, "cosines"_a.none(), "sines"_a.none(),
        "traditional"_a, "half"_a, "pool"_a, "step"_a, "window"_a = 0, "is_chunked"_a = false,
        "soft_cap"_a = 0.0f, "query_factors"_a = nb::none());
  nb::class_<Shared<LatentHalf>>(m, "LatentHalf");
  m.def("latent", &make_latent, "inputs"_a, "q"_a, "heads"_a, "output"_a, "norms"_a,
        "num_heads"_a, "scale"_a, "residual"_a = 0.0f);
  m.def("run_latent", &graph::run_latent, "x"_a, "cosines"_a.none(), "sines"_a.none(),
        "traditional"_a, "half"_a, "pool"_a, "step"_a, "window"_a = 0,
        "query_factors"_a = nb::none());
  nb::class_<Shared<MlpHalf>>(m, "MlpHalf");
  m.def("mlp", &make_mlp, "layers"_a, "norms"_a, "activation"_a = 0, "residual"_a = 0.0f);
  m.def("run_mlp", &graph::run_mlp, "x"_a, "half"_a, "residual"_a = nb::none());
  nb::class_<Router>(m, "Router");
  m.def("router", &make_router, "num_experts"_a, "top_k"_a, "is_sigmoid"_a,
        "correction"_a = Floats{}, "num_groups"_a = 1, "top_groups"_a = 1,
        "is_normalized"_a = false, "epsilon"_a = 0.0f, "factor"_a = 1.0f);
  m.def("route", &route_row, "router"_a, "logits"_a);
  nb::class_<Shared<MixtureHalf>>(m, "MixtureHalf");
  m.def("mixture", &make_mixture, "router_layer"_a, "router"_a, "experts"_a, "norms"_a,
        "shared"_a.none() = nb::none(), "shared_gate"_a = nb::none(), "residual"_a = 0.0f);
  m.def("run_mixture", &graph::run_mixture, "x"_a, "half"_a);

  nb::class_<Shared<StatePool>>(m, "StatePool")
      // Address and size of a cell.
      .def("cell", [](const std::shared_ptr<StatePool>& pool, int index) {
        pool->grow(index + 1);
        return std::make_pair(reinterpret_cast<uintptr_t>(pool->cell(index)),
                              pool->cell_floats() * sizeof(float));
      }, "index"_a);
  nb::class_<Shared<StateStep>>(m, "StateStep");
  m.def("state_step", &make_state_step, "pieces"_a);
  nb::class_<Shared<Mixer>>(m, "Mixer").def("pool", [](const std::shared_ptr<Mixer>& mixer) {
    return std::make_shared<StatePool>(mixer->state_size());
  });
  m.def("mixer", &make_mixer, "layers"_a, "norms"_a, "recurrence"_a, "columns"_a, "heads"_a,
        "dims"_a, "taps"_a, "tap_bias"_a = Floats{}, "decay"_a = Floats{},
        "dt_bias"_a = Floats{}, "step_limits"_a = std::make_pair(0.0f, INFINITY),
        "skip"_a = Floats{}, "scales"_a = std::make_pair(0.0f, 0.0f), "eps"_a = 0.0f,
        "norm_width"_a = 0, "gates_first"_a = false, "residual"_a = 0.0f);
  m.def("run_mixer", &graph::run_mixer, "x"_a, "mixer"_a, "pool"_a, "step"_a);

  m.def("host_kernel", &host_kernel, "run"_a, "inputs"_a, "output_shapes"_a, "output_dtypes"_a);
}

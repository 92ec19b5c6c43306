#include "operations/experts.h"

#include <algorithm>
#include <cstring>

#include "memory.h"
#include "operations/linear.h"
#include "operations/parallel.h"

namespace native {

namespace {

/// The product of each expert with its rows; `y` has the sorted rows.
void add_products(const ExpertLayer& layer, const Routing& routing, const InputPacker& packer,
                  float* y, std::vector<LinearArgs>& products) {
  for (const Routing::Group& group : routing.groups()) {
    const Panels panels = layer.weights->panels(group.expert);
    const size_t size = panels.num_outputs;
    products.push_back({.weights = panels,
                        .bias = layer.bias ? layer.bias.get() + group.expert * size : nullptr,
                        .residual = nullptr,
                        .x = nullptr,
                        .y = y + group.first * size,
                        .num_rows = group.num_rows,
                        .packed = packer.packed({group.first, group.num_rows})});
  }
}

/// Pack all sorted rows; `row(sorted)` returns the inputs of one.
template <typename Row>
void pack_rows(const Routing& routing, const InputPacker& packer, const Row& row) {
  for_rows(routing.num_slots(), packer.rows_per_part(), [&](int first, int next) {
    for (int i = first; i < next; i++) {
      const Routing::Group& group = routing.group_of(i);
      packer.pack(row(i), {group.first, group.num_rows}, i);
    }
  });
}

void activate(const GatedActivation& activation, const float* up, size_t size, float* gate) {
  if (activation.is_clipped)
    kernels()->clipped_swiglu(gate, up, activation.alpha, activation.limit, size, gate);
  else
    kernels()->swiglu(gate, up, size, gate);
}

/// Bring sorted rows to their slots.
void unsort(const Routing& routing, const float* sorted, size_t size, float* y) {
  for_rows(routing.num_slots(), ROWS_PER_PART, [&](int first, int next) {
    for (int i = first; i < next; i++)
      std::memcpy(y + routing.slot(i) * size, sorted + i * size, size * sizeof(float));
  });
}

/// Intermediate results, of sorted rows.
struct Buffers {
  float *gate, *up, *down;

  Buffers(const Experts& experts, size_t num_rows) {
    const size_t width = num_rows * experts.gate.weights->panels().num_outputs;
    const size_t size = num_rows * experts.num_outputs();
    thread_local std::vector<float> memory;
    gate = grow(memory, 2 * width + size);
    up = gate + width;
    down = up + width;
  }
};

}  // namespace

Routing::Routing(const int32_t* indices, int num_slots, int num_experts)
    : slots_(num_slots), sorted_(num_slots), group_of_(num_slots) {
  const auto expert = [&](int slot) { return std::clamp(indices[slot], 0, num_experts - 1); };
  std::vector<int> next(num_experts + 1);
  for (int slot = 0; slot < num_slots; slot++) next[expert(slot) + 1]++;
  for (int i = 0; i < num_experts; i++) {
    const int num_rows = next[i + 1];
    next[i + 1] += next[i];
    if (num_rows == 0) continue;
    std::fill_n(group_of_.begin() + next[i], num_rows, static_cast<int>(groups_.size()));
    groups_.push_back({i, next[i], num_rows});
  }
  for (int slot = 0; slot < num_slots; slot++) {
    sorted_[slot] = next[expert(slot)]++;
    slots_[sorted_[slot]] = slot;
  }
}

void switch_linear(const ExpertLayer& layer, const float* x, int slots_per_row,
                   const Routing& routing, float* y) {
  const Panels panels = layer.weights->panels();
  const InputPacker packer(panels, routing.num_slots());
  pack_rows(routing, packer, [&](int i) {
    return x + static_cast<size_t>(routing.slot(i) / slots_per_row) * panels.num_inputs;
  });
  const size_t size = panels.num_outputs;
  thread_local std::vector<float> memory;
  float* sorted = grow(memory, routing.num_slots() * size);
  std::vector<LinearArgs> products;
  add_products(layer, routing, packer, sorted, products);
  multiply_packed(products);
  unsort(routing, sorted, size, y);
}

const float* run_sorted(const Experts& experts, const float* x, int slots_per_row,
                        const Routing& routing) {
  const int num_rows = routing.num_slots();
  const Panels gate = experts.gate.weights->panels(), down = experts.down.weights->panels();
  const bool has_halves = experts.up.weights->panels().has_halves();
  const Buffers b(experts, num_rows);
  std::vector<LinearArgs> products;
  {
    const InputPacker packer(gate, num_rows, has_halves);
    pack_rows(routing, packer, [&](int i) {
      return x + static_cast<size_t>(routing.slot(i) / slots_per_row) * gate.num_inputs;
    });
    add_products(experts.gate, routing, packer, b.gate, products);
    add_products(experts.up, routing, packer, b.up, products);
    multiply_packed(products);
  }
  products.clear();
  const InputPacker packer(down, num_rows);
  const size_t width = gate.num_outputs;
  pack_rows(routing, packer, [&](int i) {
    activate(experts.activation, b.up + i * width, width, b.gate + i * width);
    return b.gate + i * width;
  });
  add_products(experts.down, routing, packer, b.down, products);
  multiply_packed(products);
  return b.down;
}

void run_experts(const Experts& experts, const float* x, int slots_per_row, const Routing& routing,
                 float* y) {
  unsort(routing, run_sorted(experts, x, slots_per_row, routing), experts.num_outputs(), y);
}

}  // namespace native

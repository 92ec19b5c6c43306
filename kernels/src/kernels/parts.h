// What the files of one instruction set have of each other: compiled side by side, they take a third of the time.
#pragma once

#include "kernels.h"
#include "kernels/microkernel.h"

namespace native::NATIVE_ISA {

/// Computes one tile of a panel; `scratch` is that of Kernels::linear.
using LinearTile = void (*)(const LinearArgs& args, int tile, const uint8_t* panel, float* y,
                            size_t ldy, Prefetcher prefetcher, float* scratch);

// Of inputs that are floats, also of 16 bits, or integers.
LinearTile float_tile(const Panels& weights);
LinearTile int16_tile(const Panels& weights);
LinearTile int8_tile(const Panels& weights);

// See Kernels.
void attend(const AttentionArgs& args, const AttentionPart& part, float* scratch);
void merge_spans(const AttentionArgs& args, const AttentionPart& part, int num_spans,
                 float* scratch);

}  // namespace native::NATIVE_ISA

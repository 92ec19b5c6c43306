// The kernels of one instruction set, NATIVE_ISA of the build.
#include "kernels/linear/linear.h"
#include "kernels/low_rank.h"
#include "kernels/parts.h"
#include "kernels/pointwise.h"
#include "kernels/pool.h"
#include "kernels/recurrent.h"
#include "kernels/sampling.h"

#define STRING_(x) #x
#define STRING(x) STRING_(x)
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)

namespace native {
extern const Kernels JOIN(kernels_, NATIVE_ISA);
const Kernels JOIN(kernels_, NATIVE_ISA) = {
    .name = STRING(NATIVE_ISA),
    .columns = COLUMNS,
    .min_input_bits = MIN_INPUT_BITS,
    .multiplies_bfloat16 = MAX_ROWS_AMX > 0,
    .max_tile_rows = max_tile_rows,
    .pack_row = pack_row,
    .pack_row_int16 = pack_row_int16,
    .pack_row_int8 = pack_row_int8,
    .pack_row_bf16 = pack_row_bf16,
    .linear = linear,
    .argmax = argmax,
    .low_rank_inner = low_rank_inner,
    .add_low_rank = add_low_rank,
    .largest = largest,
    .total_weight = total_weight,
    .find_above = find_above,
    .race = race,
    .write = write,
    .attend = NATIVE_ISA::attend,
    .merge_spans = NATIVE_ISA::merge_spans,
    .rms_norm = rms_norm,
    .weighted_sum = weighted_sum,
    .layer_norm = layer_norm,
    .rope = rope,
    .swiglu = gated<silu>,
    .gate = gated<sigmoid>,
    .clipped_swiglu = clipped_swiglu,
    .geglu = gated<gelu>,
    .geglu_erf = gated<gelu_erf>,
    .reglu = gated<relu>,
    .squared_reglu = gated<squared_relu>,
    .delta_rule = delta_rule,
    .delta_columns = delta_columns,
    .convolve = convolve,
    .convolve_rows = convolve_rows,
};
}  // namespace native

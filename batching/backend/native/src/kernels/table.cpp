// The kernels of one instruction set, which the build names NATIVE_ISA.
#include "kernels/attention.h"
#include "kernels/integers.h"
#include "kernels/linear.h"
#include "kernels/pointwise.h"

#define STRING_(x) #x
#define STRING(x) STRING_(x)
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)

namespace native {
extern const Kernels JOIN(kernels_, NATIVE_ISA);
const Kernels JOIN(kernels_, NATIVE_ISA) = {
    .name = STRING(NATIVE_ISA),
    .columns = COLUMNS,
    .max_tile_rows = MAX_ROWS,
    .max_tile_rows_integers = MAX_ROWS_INTEGERS,
    .arrange = arrange,
    .arrange_int16 = arrange_integers<int16_t>,
    .arrange_int8 = arrange_integers<int8_t>,
    .linear = linear,
    .highest = highest,
    .write = write,
    .attend = attend,
    .merge_spans = merge_spans,
    .rms_norm = rms_norm,
    .rope = rope,
    .swiglu = swiglu,
};
}  // namespace native

// A matrix unit that multiplies bfloat16 numbers and adds in float32: Intel's AMX.
#pragma once

#include "kernels.h"
#include "kernels/amx_instructions.h"
#include "kernels/microkernel.h"

namespace {

#if defined(HAS_AMX)

constexpr bool HAS_UNIT = true;
/// Rows of the unit's registers, of 64 bytes each.
constexpr int UNIT_ROWS = 16;
/// Inputs of an instruction.
constexpr int UNIT_INPUTS = native::UNIT_INPUTS;
static_assert(LANES == 16 && VECTORS == 2 && UNIT_INPUTS == 32);

// Registers: sums of two times 16 rows and of the vectors of a panel, inputs of the same rows, and
// weights of the same vectors.
constexpr int SUMS = 0, INPUTS = 4, WEIGHTS = 6;

/// Sizes of the registers (Intel's Software Developer's Manual, LDTILECFG).
struct alignas(64) UnitConfig {
  uint8_t palette = 1, first_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  ALWAYS_INLINE void set(int at, int num_rows) {
    rows[at] = static_cast<uint8_t>(num_rows);
    row_bytes[at] = num_rows ? 64 : 0;
  }
  /// For up to two times 16 rows.
  ALWAYS_INLINE explicit UnitConfig(int num_rows) {
    const int first = num_rows < UNIT_ROWS ? num_rows : UNIT_ROWS;
    for (int v = 0; v < VECTORS; v++) {
      set(SUMS + v, first);
      set(SUMS + VECTORS + v, num_rows - first);
      set(WEIGHTS + v, UNIT_ROWS);
    }
    set(INPUTS, first);
    set(INPUTS + 1, num_rows - first);
  }
};

/// The unit while it multiplies tiles of so many rows; then its registers are unused, and the system
/// need not save them.
struct MatrixUnit {
  int block_rows;  // that its registers have space for; none if it is not used

  ALWAYS_INLINE explicit MatrixUnit(int num_rows)
      : block_rows(num_rows < 2 * UNIT_ROWS ? num_rows : 2 * UNIT_ROWS) {
    if (!block_rows) return;
    const UnitConfig config(block_rows);
    configure_unit(&config);
  }
  ALWAYS_INLINE ~MatrixUnit() {
    if (block_rows) release_unit();
  }
  MatrixUnit(const MatrixUnit&) = delete;
};

/// Sums of up to two times 16 rows, `[row][COLUMNS]` in memory.
template <bool HAS_SECOND>
struct UnitSums {
  static constexpr size_t SECOND = UNIT_ROWS;  // where the second 16 rows are

  ALWAYS_INLINE static void clear() {
    clear_unit<SUMS>(), clear_unit<SUMS + 1>();
    if (HAS_SECOND) clear_unit<SUMS + 2>(), clear_unit<SUMS + 3>();
  }
  ALWAYS_INLINE static void load(const float* y, size_t ldy) {
    load_unit<SUMS>(y, 4 * ldy), load_unit<SUMS + 1>(y + LANES, 4 * ldy);
    if (!HAS_SECOND) return;
    y += SECOND * ldy;
    load_unit<SUMS + 2>(y, 4 * ldy), load_unit<SUMS + 3>(y + LANES, 4 * ldy);
  }
  ALWAYS_INLINE static void store(float* y, size_t ldy) {
    store_unit<SUMS>(y, 4 * ldy), store_unit<SUMS + 1>(y + LANES, 4 * ldy);
    if (!HAS_SECOND) return;
    y += SECOND * ldy;
    store_unit<SUMS + 2>(y, 4 * ldy), store_unit<SUMS + 3>(y + LANES, 4 * ldy);
  }
  /// Add the products of UNIT_INPUTS inputs of each row, `[row][UNIT_INPUTS]`, with the weights of two
  /// vectors of columns, `[input / 2][column][2]` each; strides are in bytes.
  ALWAYS_INLINE static void add(const void* inputs, size_t input_stride, const uint16_t* weights,
                                const uint16_t* second_weights, size_t weight_stride) {
    load_unit<INPUTS>(inputs, input_stride);
    load_unit<WEIGHTS>(weights, weight_stride);
    multiply_unit<SUMS, INPUTS, WEIGHTS>();
    load_unit<WEIGHTS + 1>(second_weights, weight_stride);
    multiply_unit<SUMS + 1, INPUTS, WEIGHTS + 1>();
    if (!HAS_SECOND) return;
    load_unit<INPUTS + 1>(static_cast<const uint8_t*>(inputs) + SECOND * input_stride, input_stride);
    multiply_unit<SUMS + 2, INPUTS + 1, WEIGHTS>();
    multiply_unit<SUMS + 3, INPUTS + 1, WEIGHTS + 1>();
  }
};

#else

constexpr bool HAS_UNIT = false;
struct MatrixUnit {
  ALWAYS_INLINE explicit MatrixUnit(int) {}
};

#endif

}  // namespace

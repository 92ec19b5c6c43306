// Transposes a block of the pool, whose keys lie side by side.
#pragma once

#include "kernels.h"
#include "kernels/microkernel.h"
#include "kernels/simd.h"

namespace {

#if defined(__AVX512F__)
#define ZIP_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define ZIP_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif defined(__AVX2__)
#define ZIP_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define ZIP_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
#define ZIP_LOW 0, 4, 1, 5
#define ZIP_HIGH 2, 6, 3, 7
#endif

/// Transpose LANES vectors.  Zipping the rows that are half of them apart moves the highest bit of a
/// number's row to the end of its column, and that of the column to the end of the row; as many
/// times as there are bits, it exchanges both.
ALWAYS_INLINE void transpose(F32 (&rows)[LANES]) {
  for (int bit = 1; bit < LANES; bit *= 2) {
    F32 zipped[LANES];
    for (int i = 0; i < LANES / 2; i++) {
      const F32 a = rows[i], b = rows[i + LANES / 2];
      zipped[2 * i] = __builtin_shufflevector(a, b, ZIP_LOW);
      zipped[2 * i + 1] = __builtin_shufflevector(a, b, ZIP_HIGH);
    }
    for (int i = 0; i < LANES; i++) rows[i] = zipped[i];
  }
}

#undef ZIP_LOW
#undef ZIP_HIGH

/// Make keys `[dim][stride]`, of which the first `num_keys` are wanted, rows `[num_keys][width]`, in
/// whole vectors; rows of keys have less or more than `dim` numbers, and zeros beyond these.
template <typename Stored>
void transpose(const Stored* keys, int stride, int dim, int num_keys, float* y, int width) {
  constexpr int PACK = native::packed_rows(sizeof(Stored));
  for (int i = 0; i < width; i += LANES) {
    for (int t = 0; t < num_keys; t += LANES) {
      F32 tile[LANES] = {};
      for (int j = 0; j < LANES && i + j < dim; j += PACK) {
        F32 rows[PACK];
        load_numbers(keys + static_cast<size_t>(i + j) * stride + PACK * t, rows);
        for (int p = 0; p < PACK; p++) tile[j + p] = rows[p];
      }
      transpose(tile);
      for (int j = 0; j < LANES && t + j < num_keys; j++) store(y + (t + j) * width + i, tile[j]);
    }
  }
}

}  // namespace

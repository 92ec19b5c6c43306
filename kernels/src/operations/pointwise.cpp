#include "operations/pointwise.h"

#include "kernels.h"
#include "operations/parallel.h"

namespace native {

namespace {

// Fewer do not repay claiming a part.
constexpr size_t VALUES_PER_PART = 4096;

int rows_per_part(size_t values_per_row) {
  return std::max(1, static_cast<int>(VALUES_PER_PART / values_per_row));
}

template <typename Activate>
void gated(const Activate& activate, const float* gate, const float* up, size_t size, float* y) {
  const int num_parts = static_cast<int>((size + VALUES_PER_PART - 1) / VALUES_PER_PART);
  threads().for_each(num_parts, [&](int part) {
    const size_t first = part * VALUES_PER_PART;
    activate(gate + first, up ? up + first : nullptr, std::min(VALUES_PER_PART, size - first),
             y + first);
  });
}

}  // namespace

void norm_rows(const float* x, const float* weight, float eps, int first, int next, int size,
               float* y) {
  for (size_t m = first; m < static_cast<size_t>(next); m++)
    kernels()->rms_norm(x + m * size, weight, eps, size, y + m * size);
}

void layer_norm_rows(const float* x, const float* weight, const float* bias, float eps, int first,
                     int next, int size, float* y) {
  for (size_t m = first; m < static_cast<size_t>(next); m++)
    kernels()->layer_norm(x + m * size, weight, bias, eps, size, y + m * size);
}

void rotate_rows(const float* x, const Rotation& rotation, int first, int next, int num_heads,
                 int dim, float* y) {
  for (size_t m = first; m < static_cast<size_t>(next); m++)
    for (int h = 0; h < num_heads; h++) {
      const size_t at = (m * num_heads + h) * dim;
      kernels()->rope(x + at, rotation.cosines + m * rotation.half,
                      rotation.sines + m * rotation.half, rotation.half, dim, rotation.traditional,
                      y + at);
    }
}

void rms_norm(const float* x, const float* weight, float eps, int num_rows, int size, float* y) {
  for_rows(num_rows, rows_per_part(size), [&](int first, int next) {
    norm_rows(x, weight, eps, first, next, size, y);
  });
}

void layer_norm(const float* x, const float* weight, const float* bias, float eps, int num_rows,
                int size, float* y) {
  for_rows(num_rows, rows_per_part(size), [&](int first, int next) {
    layer_norm_rows(x, weight, bias, eps, first, next, size, y);
  });
}

void swiglu(const float* gate, const float* up, size_t size, float* y) {
  gated(kernels()->swiglu, gate, up, size, y);
}

void geglu(const float* gate, const float* up, size_t size, float* y) {
  gated(kernels()->geglu, gate, up, size, y);
}

void rotate(const float* x, const Rotation& rotation, int num_rows, int num_heads, int dim,
            float* y) {
  for_rows(num_rows, rows_per_part(static_cast<size_t>(num_heads) * dim), [&](int first, int next) {
    rotate_rows(x, rotation, first, next, num_heads, dim, y);
  });
}

}  // namespace native

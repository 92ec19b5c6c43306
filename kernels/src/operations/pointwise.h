// Operations on each row or each value by itself, by all threads.
#pragma once

#include <cstddef>

namespace native {

/// Rows `[num_rows, size]`; `weight` may be null.
void rms_norm(const float* x, const float* weight, float eps, int num_rows, int size, float* y);

/// The bias may be null, too.
void layer_norm(const float* x, const float* weight, const float* bias, float eps, int num_rows,
                int size, float* y);

/// `up` may be null.
void swiglu(const float* gate, const float* up, size_t size, float* y);
void geglu(const float* gate, const float* up, size_t size, float* y);

/// Cosines and sines `[num_rows, half]` of the angles by which pairs are rotated.
struct Rotation {
  const float* cosines;
  const float* sines;
  int half;
  bool traditional;  // a pair is two adjacent values, else two that are `half` apart
};

/// Rotate heads `[num_rows, num_heads, dim]`; `y` may be `x`.
void rotate(const float* x, const Rotation& rotation, int num_rows, int num_heads, int dim,
            float* y);

// The same for rows [first, next), in the calling thread:

void norm_rows(const float* x, const float* weight, float eps, int first, int next, int size,
               float* y);

void layer_norm_rows(const float* x, const float* weight, const float* bias, float eps, int first,
                     int next, int size, float* y);

void rotate_rows(const float* x, const Rotation& rotation, int first, int next, int num_heads,
                 int dim, float* y);

}  // namespace native

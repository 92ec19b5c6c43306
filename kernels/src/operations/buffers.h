// Intermediate results of an operation.
#pragma once

#include <initializer_list>
#include <vector>

#include "memory.h"

namespace native {

struct Buffer {
  float** data;
  size_t size;
};

/// Assign parts of the memory that an operation keeps for its next call.
inline void assign(std::vector<float>& memory, std::initializer_list<Buffer> buffers) {
  size_t total = 0;
  for (const Buffer& buffer : buffers) total += buffer.size;
  float* next = grow(memory, total);
  for (const Buffer& buffer : buffers) {
    *buffer.data = next;
    next += buffer.size;
  }
}

}  // namespace native

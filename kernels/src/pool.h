// The paged KV cache of one layer.
#pragma once

#include <cstdint>

#include "kernels.h"
#include "memory.h"

namespace native {

class Pool {
 public:
  Pool(const PoolLayout& layout, int num_blocks);

  const PoolLayout& layout() const { return layout_; }
  const void* keys() const { return keys_.data(); }
  const void* values() const { return values_.data(); }
  const Memory& key_memory() const { return keys_; }
  const Memory& value_memory() const { return values_; }

  /// Write keys `[num_rows, num_heads, key_dim]` and values `[num_rows, num_heads, value_dim]`, which
  /// may be null if the pool is latent.
  void write(const int32_t* slots, int num_rows, const float* keys, const float* values);
  /// Copy a block; no operation may use the pool meanwhile.  Throws std::invalid_argument.
  void copy(int source, int target);

 private:
  PoolLayout layout_;
  int num_blocks_;
  Memory keys_;
  Memory values_;
};

}  // namespace native

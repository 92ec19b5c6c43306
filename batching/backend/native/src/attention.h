// The paged pool of one layer, the rows of one step, and attention of these over that.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"
#include "memory.h"
#include "thread_pool.h"

namespace native {

class Pool {
 public:
  Pool(const PoolLayout& layout, int num_blocks);

  const PoolLayout& layout() const { return layout_; }
  const void* keys() const { return keys_.data(); }
  const void* values() const { return values_.data(); }
  const Memory& key_memory() const { return keys_; }
  const Memory& value_memory() const { return values_; }

  /// Write keys `[num_heads, key_dim]` and values `[num_heads, value_dim]` of some tokens.
  void write(const int32_t* slots, int num_rows, const float* keys, const float* values);
  /// Copy a whole block; nothing may run on the pool meanwhile.  Throws std::invalid_argument.
  void copy(int source, int target);

 private:
  PoolLayout layout_;
  int num_blocks_;
  Memory keys_;
  Memory values_;
};

/// `num_rows` successive tokens of one request, from a position on.
struct Slice {
  int first_row;
  int num_rows;
  int first_position;
  int first_block;  // in the tables
};

/// The rows of one step; made once and used by every layer.
struct Step {
  std::vector<Slice> slices;
  std::vector<int32_t> tables;  // the blocks of all slices' requests
  std::vector<int32_t> slots;   // where each row's key and value go

  int num_rows() const { return static_cast<int>(slots.size()); }
};

void attend_step(ThreadPool& threads, const Kernels& kernels, const AttentionArgs& args,
                 const Step& step);

}  // namespace native

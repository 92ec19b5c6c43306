#include "pool.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <vector>

namespace native {

namespace {

void copy_block(void* memory, size_t block_bytes, int source, int target) {
  if (block_bytes == 0) return;
  auto* bytes = static_cast<uint8_t*>(memory);
  std::memcpy(bytes + block_bytes * target, bytes + block_bytes * source, block_bytes);
}

}  // namespace

Pool::Pool(const PoolLayout& layout, int num_blocks)
    : layout_(layout),
      num_blocks_(num_blocks),
      keys_(layout.key_bytes() * layout.num_heads * num_blocks),
      values_(layout.value_bytes() * layout.num_heads * num_blocks) {}

void Pool::write(const int32_t* slots, int num_rows, const float* keys, const float* values) {
  thread_local std::vector<float> scratch;
  kernels()->write(layout_, keys_.data(), values_.data(), slots, num_rows, keys, values,
                   grow(scratch, layout_.key_dim));
}

void Pool::copy(int source, int target) {
  if (std::min(source, target) < 0 || std::max(source, target) >= num_blocks_)
    throw std::invalid_argument("no such block");
  copy_block(keys_.data(), layout_.key_bytes() * layout_.num_heads, source, target);
  copy_block(values_.data(), layout_.value_bytes() * layout_.num_heads, source, target);
}

}  // namespace native

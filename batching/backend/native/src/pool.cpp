#include "pool.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace native {

namespace {

size_t pool_bytes(const PoolLayout& layout, int num_blocks, size_t floats) {
  const size_t width = layout.is_bf16 ? sizeof(uint16_t) : sizeof(float);
  return std::max<size_t>(1, floats * width * layout.num_heads * num_blocks);
}

void copy_block(void* memory, size_t block_bytes, int source, int target) {
  auto* bytes = static_cast<uint8_t*>(memory);
  std::memcpy(bytes + block_bytes * target, bytes + block_bytes * source, block_bytes);
}

}  // namespace

Pool::Pool(const PoolLayout& layout, int num_blocks)
    : layout_(layout),
      num_blocks_(num_blocks),
      keys_(pool_bytes(layout, num_blocks, layout.key_floats())),
      values_(pool_bytes(layout, num_blocks, layout.value_floats())) {}

void Pool::write(const int32_t* slots, int num_rows, const float* keys, const float* values) {
  kernels()->write(layout_, keys_.data(), values_.data(), slots, num_rows, keys, values);
}

void Pool::copy(int source, int target) {
  if (std::min(source, target) < 0 || std::max(source, target) >= num_blocks_)
    throw std::invalid_argument("no such block");
  const size_t width = layout_.num_heads * (layout_.is_bf16 ? sizeof(uint16_t) : sizeof(float));
  copy_block(keys_.data(), layout_.key_floats() * width, source, target);
  copy_block(values_.data(), layout_.value_floats() * width, source, target);
}

}  // namespace native

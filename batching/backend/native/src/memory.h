// Memory of the kernels.
#pragma once

#include <cstddef>
#include <vector>

namespace native {

/// Zeroed memory of the system, backed by pages when first touched, large ones if available.
class Memory {
 public:
  /// Throws std::bad_alloc.
  explicit Memory(size_t size);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  void* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  void* data_;
  size_t size_;
};

/// Enlarge a buffer that a thread keeps between operations; its contents are not preserved.
template <typename T>
T* grow(std::vector<T>& buffer, size_t size) {
  if (buffer.size() < size) buffer.resize(size);
  return buffer.data();
}

}  // namespace native

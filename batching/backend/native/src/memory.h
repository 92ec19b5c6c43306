// Memory that the kernels own.
#pragma once

#include <cstddef>
#include <vector>

namespace native {

/// Zeros from the system, backed as they are touched and in large pages where it has them.
class Memory {
 public:
  /// Throws std::bad_alloc if there is none.
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

/// A buffer that a thread keeps for its next operation, with room for `size`.
template <typename T>
T* room(std::vector<T>& buffer, size_t size) {
  if (buffer.size() < size) buffer.resize(size);
  return buffer.data();
}

}  // namespace native

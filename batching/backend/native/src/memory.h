// Memory that the kernels own.
#pragma once

#include <cstddef>

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

}  // namespace native

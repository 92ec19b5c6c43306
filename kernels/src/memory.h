// Memory of the kernels.
#pragma once

#include <cstddef>
#include <vector>

namespace native {

/// Where a part of an open file begins.
struct FilePart {
  int file;  // descriptor
  size_t offset;
};

/// Zeroed memory of the system, null if there is none, backed by pages when first touched, large
/// ones if available.
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
  void* data_ = nullptr;
  size_t size_;
};

/// Fill memory from a file, by all threads.  Throws std::system_error.
void read_file(const Memory& memory, FilePart part);

/// Give what was freed, and the allocator keeps, back to the system.
void release_freed();

/// Enlarge a buffer that a thread keeps between operations; its contents are not preserved.
template <typename T>
T* grow(std::vector<T>& buffer, size_t size) {
  if (buffer.size() < size) buffer.resize(size);
  return buffer.data();
}

}  // namespace native

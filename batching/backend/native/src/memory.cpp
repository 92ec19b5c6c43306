#include "memory.h"

#include <sys/mman.h>

#include <new>

namespace native {

Memory::Memory(size_t size) : size_(size) {
  data_ = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data_ == MAP_FAILED) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
  madvise(data_, size, MADV_HUGEPAGE);
#endif
}

Memory::~Memory() { munmap(data_, size_); }

}  // namespace native

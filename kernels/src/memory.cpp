#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <new>
#include <system_error>

#include "thread_pool.h"

namespace native {

namespace {

constexpr size_t READ_AT_ONCE = size_t{1} << 24;

[[noreturn]] void fail(int error) { throw std::system_error(error, std::generic_category()); }

/// Return 0, or the number of the error.
int read_fully(int file, uint8_t* target, size_t size, size_t offset) {
  while (size > 0) {
    const ssize_t count = pread(file, target, size, static_cast<off_t>(offset));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return count < 0 ? errno : EIO;
    target += count, offset += count, size -= count;
  }
  return 0;
}

}  // namespace

Memory::Memory(size_t size) : size_(size) {
  if (size == 0) return;
  data_ = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data_ == MAP_FAILED) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
  madvise(data_, size, MADV_HUGEPAGE);
#endif
}

Memory::~Memory() {
  if (size_) munmap(data_, size_);
}

void read_file(const Memory& memory, FilePart part) {
  auto* data = static_cast<uint8_t*>(memory.data());
  std::atomic<int> error{0};
  const size_t count = (memory.size() + READ_AT_ONCE - 1) / READ_AT_ONCE;
  threads().for_each(static_cast<int>(count), [&](int i) {
    const size_t start = i * READ_AT_ONCE, size = std::min(READ_AT_ONCE, memory.size() - start);
    if (const int e = read_fully(part.file, data + start, size, part.offset + start)) error = e;
  });
  if (error) fail(error);
}

void release_freed() {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

}  // namespace native

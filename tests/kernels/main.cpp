// Runs a kernel that a sanitizer watches: main CASE ORDER...
//
// CASE has the numbers of buffers and of inputs, the grid and the threads of a group, and for each buffer its
// bytes, its dimensions and, if it is an input, its contents; all numbers are int64.  In every order the
// buffers must end with the same bits.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

extern "C" int run(void* const* buffers, const int* const* shapes, const int* grid, int threads, int order,
                   char* error, std::size_t error_size);

namespace {

struct Buffer {
  std::vector<int> shape;
  std::vector<char> contents;
};

// Exactly as large as the buffer, so that ASan sees what is read or written beyond it.
struct Copies {
  explicit Copies(const std::vector<Buffer>& buffers) {
    for (const Buffer& buffer : buffers) {
      void* copy = std::malloc(buffer.contents.size());
      std::copy(buffer.contents.begin(), buffer.contents.end(), static_cast<char*>(copy));
      pointers.push_back(copy);
    }
  }
  ~Copies() {
    for (void* pointer : pointers) std::free(pointer);
  }
  std::vector<void*> pointers;
};

struct Reader {
  std::FILE* file;

  std::int64_t number() {
    std::int64_t value = 0;
    if (std::fread(&value, sizeof value, 1, file) != 1) std::abort();
    return value;
  }
  void contents(std::vector<char>& bytes) {
    if (std::fread(bytes.data(), 1, bytes.size(), file) != bytes.size()) std::abort();
  }
};

}  // namespace

int main(int argc, char** argv) {
  Reader reader{argc > 1 ? std::fopen(argv[1], "rb") : nullptr};
  if (!reader.file) return 2;
  std::vector<Buffer> buffers(reader.number());
  const std::int64_t num_inputs = reader.number();
  int grid[3];
  for (int& size : grid) size = static_cast<int>(reader.number());
  const int threads = static_cast<int>(reader.number());
  for (std::size_t i = 0; i < buffers.size(); i++) {
    buffers[i].contents.assign(reader.number(), '\xff');
    buffers[i].shape.resize(reader.number());
    for (int& size : buffers[i].shape) size = static_cast<int>(reader.number());
    if (static_cast<std::int64_t>(i) < num_inputs) reader.contents(buffers[i].contents);
  }
  std::fclose(reader.file);

  std::vector<const int*> shapes;
  for (const Buffer& buffer : buffers) shapes.push_back(buffer.shape.data());
  std::vector<std::vector<char>> first;
  for (int turn = 2; turn < argc; turn++) {
    const Copies copies(buffers);
    char error[200] = "";
    if (run(copies.pointers.data(), shapes.data(), grid, threads, std::atoi(argv[turn]), error,
            sizeof error)) {
      std::fprintf(stderr, "%s\n", error);
      return 1;
    }
    for (std::size_t i = 0; i < buffers.size(); i++) {
      const char* bytes = static_cast<const char*>(copies.pointers[i]);
      std::vector<char> result(bytes, bytes + buffers[i].contents.size());
      if (turn == 2) {
        first.push_back(std::move(result));
      } else if (result != first[i]) {
        std::fprintf(stderr, "order %s changes buffer %zu\n", argv[turn], i);
        return 1;
      }
    }
  }
  return 0;
}

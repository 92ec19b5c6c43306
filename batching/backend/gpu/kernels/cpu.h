// The dialect on the CPU, for tests: each thread of a group is a fiber.  See docs/architecture/gpu.md.
#include <cmath>
#include <cstdint>
#include <cstring>

#define DEVICE
#define SHARED(type, name, size) \
  type* const name = static_cast<type*>(dialect::shared_memory(sizeof(type) * (size), __LINE__))
#define BARRIER() dialect::barrier(__LINE__)
#define UNROLL

#define EXP(x) std::exp(x)
#define TANH(x) std::tanh(x)
#define SIN(x) std::sin(x)
#define COS(x) std::cos(x)
#define RSQRT(x) (1.0f / std::sqrt(x))
#define ROUND(x) std::rint(x)
#define MAX(x, y) std::fmax(x, y)
#define MIN(x, y) ((x) < (y) ? (x) : (y))
#define IS_FINITE(x) ((x) >= -3.402823466e38f && (x) <= 3.402823466e38f)
#define NEGATIVE_INFINITY (-INFINITY)

typedef std::int64_t Offset;
typedef _Float16 half;

struct bfloat16 {
  std::uint16_t bits;

  bfloat16() = default;
  explicit bfloat16(float value) {
    std::uint32_t wide;
    std::memcpy(&wide, &value, sizeof wide);
    // To the nearest, to even in the middle; a NaN stays one.
    bits = value != value ? 0x7fc0 : (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;
  }
  explicit operator float() const {
    const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
  }
};

struct int3 {
  int x, y, z;
};

// What tests/kernels/fibers.cpp provides.  A line tells one call from another: all threads of a group,
// or of 32 lanes, must wait at the same one.
namespace dialect {
int thread_index();
int3 group_index();
int3 num_groups();
void* shared_memory(std::size_t bytes, int line);
void barrier(int line);
// Replaces each of n values by its sum (or maximum) over `lanes` neighbouring threads.
void reduce(float* values, int n, int lanes, bool maximum, int line);
}  // namespace dialect

template <typename T>
inline void load8(const T* from, float* to) {
  for (int i = 0; i < 8; i++) to[i] = static_cast<float>(from[i]);
}

template <int N, int LANES>
inline void team_sum(float* values, int line = __builtin_LINE()) {
  dialect::reduce(values, N, LANES, false, line);
}

template <int N, int LANES>
inline void team_sum_each(float* values, int lane, int line = __builtin_LINE()) {
  dialect::reduce(values, N, LANES, false, line);
  for (int i = 0; i < N / LANES || i == 0; i++) values[i] = values[lane * N / LANES + i];
}

template <int N, int LANES>
inline void team_max(float* values, int line = __builtin_LINE()) {
  dialect::reduce(values, N, LANES, true, line);
}

// The dialect on the CPU, for tests: each thread of a group is a fiber.  See docs/architecture/gpu.md.
#include "tests/kernels/fibers.h"

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

// CUDA's and Metal's words on fibers, so that the text for a GPU runs on the CPU.
#include <math.h>

#include "tests/kernels/fibers.h"

// CUDA.  A group runs alone, so that its memory may be static.
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __syncthreads() dialect::barrier(__LINE__)
#define threadIdx int3{dialect::thread_index(), 0, 0}
#define blockIdx dialect::group_index()
#define gridDim dialect::num_groups()

using __half = half;
using __nv_bfloat16 = bfloat16;

inline int3 make_int3(int x, int y, int z) { return {x, y, z}; }
inline int min(int x, int y) { return x < y ? x : y; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __uint_as_float(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline float __shfl_xor_sync(unsigned, float value, int mask, int line = __builtin_LINE()) {
  return dialect::shuffle_xor(value, mask, line);
}

// Metal.
using bfloat = bfloat16;
using ushort = unsigned short;

namespace metal {
template <typename T, int N>
struct alignas(N * sizeof(T)) vec {
  T elements[N];
  T operator[](int i) const { return elements[i]; }
};
enum class mem_flags { mem_threadgroup };
using ::min;
inline float fmax(float x, float y) { return fmaxf(x, y); }
inline float rint(float x) { return rintf(x); }
inline float simd_shuffle_xor(float value, ushort mask, int line = __builtin_LINE()) {
  return dialect::shuffle_xor(value, mask, line);
}
namespace precise {
inline float exp(float x) { return expf(x); }
inline float tanh(float x) { return tanhf(x); }
inline float sin(float x) { return sinf(x); }
inline float cos(float x) { return cosf(x); }
inline float rsqrt(float x) { return rsqrtf(x); }
}  // namespace precise
}  // namespace metal

#define threadgroup_barrier(flags) dialect::barrier(__LINE__)
#define device
#define constant
#define threadgroup static
#define thread
#define thread_index_in_threadgroup dialect::thread_index()
#define threadgroup_position_in_grid dialect::group_index()
#define threadgroups_per_grid dialect::num_groups()

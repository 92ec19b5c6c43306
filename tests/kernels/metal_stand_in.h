// Declares, in C++ for OpenCL, what the dialect uses of Metal; in place of what clang includes by itself.
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#define device __global
#define constant __constant
#define threadgroup __local
#define thread __private
#define INFINITY __builtin_inff()

typedef unsigned int uint;
typedef unsigned short ushort;
typedef signed char int8_t;
typedef uint uint3 __attribute__((ext_vector_type(3)));
typedef int int3 __attribute__((ext_vector_type(3)));

// Of the same size, and converted by casts likewise; its arithmetic is not looked at.
typedef short bfloat;

namespace metal {
template <typename T, int N>
using vec = T __attribute__((ext_vector_type(N)));

enum class mem_flags { mem_threadgroup };
void threadgroup_barrier(mem_flags);
float simd_shuffle_xor(float value, ushort mask);
float fmax(float x, float y);
float rint(float x);
int min(int x, int y);
namespace precise {
float exp(float x);
float tanh(float x);
float sin(float x);
float cos(float x);
float rsqrt(float x);
}  // namespace precise
}  // namespace metal
using metal::threadgroup_barrier;

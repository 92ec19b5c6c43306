// The dialect on Metal.  See docs/architecture/gpu.md.
#define DEVICE device
#define SHARED(type, name, size) threadgroup type name[size]
#define BARRIER() threadgroup_barrier(metal::mem_flags::mem_threadgroup)
#define UNROLL _Pragma("clang loop unroll(full)")

#define EXP(x) metal::precise::exp(x)
#define TANH(x) metal::precise::tanh(x)
#define SIN(x) metal::precise::sin(x)
#define COS(x) metal::precise::cos(x)
#define RSQRT(x) metal::precise::rsqrt(x)
#define ROUND(x) metal::rint(x)
#define MAX(x, y) metal::fmax(x, y)
#define MIN(x, y) metal::min(x, y)
#define IS_FINITE(x) ((x) >= -3.402823466e38f && (x) <= 3.402823466e38f)
#define NEGATIVE_INFINITY (-INFINITY)

typedef long Offset;

template <typename T>
inline void load8(const device T* from, thread float* to) {
  for (int i = 0; i < 8; i += 4) {
    const metal::vec<T, 4> part = *(const device metal::vec<T, 4>*)(from + i);
    for (int j = 0; j < 4; j++) to[i + j] = float(part[j]);
  }
}

template <int N, int LANES>
inline void team_sum(thread float* values) {
  UNROLL for (ushort step = LANES / 2; step > 0; step /= 2) {
    UNROLL for (int i = 0; i < N; i++) values[i] += metal::simd_shuffle_xor(values[i], step);
  }
}

template <int N, int LANES>
inline void team_max(thread float* values) {
  UNROLL for (ushort step = LANES / 2; step > 0; step /= 2) {
    UNROLL for (int i = 0; i < N; i++) {
      values[i] = metal::fmax(values[i], metal::simd_shuffle_xor(values[i], step));
    }
  }
}

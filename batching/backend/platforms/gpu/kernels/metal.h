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

// Each of N values over LANES neighbouring threads, both powers of two; `lane` is the thread's place among them.
// A thread gets N / LANES of the sums, from that of number lane * N / LANES on, in the first values; with
// fewer sums than threads neighbours get the same one.  In each step half of the values are exchanged.
template <int N, int STEP>
struct Exchange {
  static void run(thread float* values, int lane) {
    constexpr int n = N > 1 ? N / 2 : 1;
    const bool upper = N > 1 && (lane & STEP);
    UNROLL for (int i = 0; i < n; i++) {
      const float kept = upper ? values[i + N - n] : values[i];
      const float sent = upper ? values[i] : values[i + N - n];
      values[i] = kept + metal::simd_shuffle_xor(sent, ushort(STEP));
    }
    Exchange<n, STEP / 2>::run(values, lane);
  }
};

template <int N>
struct Exchange<N, 0> {
  static void run(thread float*, int) {}
};

template <int N, int LANES>
inline void team_sum_each(thread float* values, int lane) {
  Exchange<N, LANES / 2>::run(values, lane);
}

template <int N, int LANES>
inline void team_max(thread float* values) {
  UNROLL for (ushort step = LANES / 2; step > 0; step /= 2) {
    UNROLL for (int i = 0; i < N; i++) {
      values[i] = metal::fmax(values[i], metal::simd_shuffle_xor(values[i], step));
    }
  }
}

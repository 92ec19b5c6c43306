// The dialect on CUDA.  See docs/architecture/gpu.md.
#define DEVICE
#define SHARED(type, name, size) __shared__ type name[size]
#define BARRIER() __syncthreads()
#define UNROLL _Pragma("unroll")

#define EXP(x) ::expf(x)
#define TANH(x) ::tanhf(x)
#define SIN(x) ::sinf(x)
#define COS(x) ::cosf(x)
#define RSQRT(x) ::rsqrtf(x)
#define ROUND(x) ::rintf(x)
#define MAX(x, y) ::fmaxf(x, y)
#define MIN(x, y) ::min(x, y)
#define IS_FINITE(x) ((x) >= -3.402823466e38f && (x) <= 3.402823466e38f)
#define NEGATIVE_INFINITY __uint_as_float(0xff800000u)

typedef long long Offset;

// Loads of up to 16 bytes: a thread's eight elements are one or two of them.
template <typename T, int N>
struct alignas(N * sizeof(T)) Elements {
  T values[N];
};

template <typename T>
__device__ __forceinline__ void load8(const T* from, float* to) {
  constexpr int n = sizeof(T) == 4 ? 4 : 8;
  UNROLL for (int i = 0; i < 8; i += n) {
    const auto part = *reinterpret_cast<const Elements<T, n>*>(from + i);
    UNROLL for (int j = 0; j < n; j++) to[i + j] = static_cast<float>(part.values[j]);
  }
}

template <int N, int LANES>
__device__ __forceinline__ void team_sum(float* values) {
  UNROLL for (int step = LANES / 2; step > 0; step /= 2) {
    UNROLL for (int i = 0; i < N; i++) values[i] += __shfl_xor_sync(0xffffffffu, values[i], step);
  }
}

// Each of N values over LANES neighbouring threads, both powers of two; `lane` is the thread's place among them.
// A thread gets N / LANES of the sums, from that of number lane * N / LANES on, in the first values; with
// fewer sums than threads neighbours get the same one.  In each step half of the values are exchanged.
template <int N, int STEP>
struct Exchange {
  __device__ __forceinline__ static void run(float* values, int lane) {
    constexpr int n = N > 1 ? N / 2 : 1;
    const bool upper = N > 1 && (lane & STEP);
    UNROLL for (int i = 0; i < n; i++) {
      const float kept = upper ? values[i + N - n] : values[i];
      const float sent = upper ? values[i] : values[i + N - n];
      values[i] = kept + __shfl_xor_sync(0xffffffffu, sent, STEP);
    }
    Exchange<n, STEP / 2>::run(values, lane);
  }
};

template <int N>
struct Exchange<N, 0> {
  __device__ __forceinline__ static void run(float*, int) {}
};

template <int N, int LANES>
__device__ __forceinline__ void team_sum_each(float* values, int lane) {
  Exchange<N, LANES / 2>::run(values, lane);
}

template <int N, int LANES>
__device__ __forceinline__ void team_max(float* values) {
  UNROLL for (int step = LANES / 2; step > 0; step /= 2) {
    UNROLL for (int i = 0; i < N; i++) {
      values[i] = ::fmaxf(values[i], __shfl_xor_sync(0xffffffffu, values[i], step));
    }
  }
}

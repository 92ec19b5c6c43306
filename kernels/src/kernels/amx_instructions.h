// The instructions of Intel's AMX, and those for vectors of float16 of the processors that have it.
//
// tests/native/emulation has a file of this name that computes the same on other processors.
#pragma once

#include "kernels/simd.h"

#if defined(__AMX_BF16__) && defined(__AVX512FP16__)
#define HAS_AMX

namespace {

using Halves = __m512h;

ALWAYS_INLINE Halves to_halves(__m512i integers) { return _mm512_cvtepi16_ph(integers); }
ALWAYS_INLINE Halves product(Halves a, Halves b) { return _mm512_mul_ph(a, b); }
/// a * b + c, rounded once.
ALWAYS_INLINE Halves fused(Halves a, Halves b, Halves c) { return _mm512_fmadd_ph(a, b, c); }

/// Take the sizes of the registers, 64 bytes; clears the registers.
ALWAYS_INLINE void configure_unit(const void* sizes) {
  asm volatile("ldtilecfg (%0)" ::"r"(sizes) : "memory");
}
ALWAYS_INLINE void release_unit() { asm volatile("tilerelease"); }

// Of the registers that are template arguments.  The compiler's own functions do not say that memory
// is read.
template <int TO>
ALWAYS_INLINE void clear_unit() {
  asm volatile("tilezero %%tmm%c0" ::"i"(TO));
}
template <int TO>
ALWAYS_INLINE void load_unit(const void* rows, size_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(rows), "r"(stride), "i"(TO) : "memory");
}
template <int FROM>
ALWAYS_INLINE void store_unit(void* rows, size_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(rows), "r"(stride), "i"(FROM) : "memory");
}
template <int TO, int X, int W>
ALWAYS_INLINE void multiply_unit() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(TO), "i"(X), "i"(W));
}

}  // namespace

#endif

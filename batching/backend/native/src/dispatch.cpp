#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(NATIVE_HAS_AMX)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <cstdlib>
#include <cstring>

#include "kernels.h"

namespace native {

#if defined(__x86_64__)
extern const Kernels kernels_avx2, kernels_avx2_vnni, kernels_avx512, kernels_avx512_vnni,
    kernels_avx512_vbmi, kernels_avx512_bf16;
#if defined(NATIVE_HAS_AMX)
extern const Kernels kernels_avx512_amx;
#endif
#else
extern const Kernels kernels_baseline;
#endif

namespace {

/// Tests select a lesser instruction set by NATIVE_ISA in the environment.
bool is_allowed(const Kernels& kernels) {
  const char* name = std::getenv("NATIVE_ISA");
  return !name || !*name || std::strcmp(name, kernels.name) == 0;
}

#if defined(__x86_64__)
/// AVX-VNNI, which not every compiler's __builtin_cpu_supports knows.
bool has_avx_vnni() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && eax >> 4 & 1;
}
#endif

#if defined(NATIVE_HAS_AMX)
/// AMX with bfloat16, which a process must ask for (Linux 5.16, arch/x86/include/uapi/asm/prctl.h), and
/// vectors of float16.
bool has_amx() {
  constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILE_DATA = 18;
  constexpr unsigned AMX_BF16 = 1 << 22, AVX512_FP16 = 1 << 23, AMX_TILE = 1 << 24;
  constexpr unsigned ALL = AMX_BF16 | AVX512_FP16 | AMX_TILE;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (edx & ALL) == ALL &&
         syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA) == 0;
}
#endif

const Kernels* select() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx512 = __builtin_cpu_supports("x86-64-v4");
  const bool has_vnni = has_avx512 && __builtin_cpu_supports("avx512vnni");
  const bool has_vbmi = has_vnni && __builtin_cpu_supports("avx512vbmi");
  const bool has_bf16 = has_vbmi && __builtin_cpu_supports("avx512bf16");
#if defined(NATIVE_HAS_AMX)
  if (has_bf16 && is_allowed(kernels_avx512_amx) && has_amx()) return &kernels_avx512_amx;
#endif
  if (has_bf16 && is_allowed(kernels_avx512_bf16)) return &kernels_avx512_bf16;
  if (has_vbmi && is_allowed(kernels_avx512_vbmi)) return &kernels_avx512_vbmi;
  if (has_vnni && is_allowed(kernels_avx512_vnni)) return &kernels_avx512_vnni;
  if (has_avx512 && is_allowed(kernels_avx512)) return &kernels_avx512;
  const bool has_avx2 = __builtin_cpu_supports("x86-64-v3");
  if (has_avx2 && has_avx_vnni() && is_allowed(kernels_avx2_vnni)) return &kernels_avx2_vnni;
  return has_avx2 && is_allowed(kernels_avx2) ? &kernels_avx2 : nullptr;
#else
  return is_allowed(kernels_baseline) ? &kernels_baseline : nullptr;
#endif
}

}  // namespace

const Kernels* kernels() {
  static const Kernels* const selected = select();
  return selected;
}

}  // namespace native

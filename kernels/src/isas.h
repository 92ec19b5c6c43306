// The instruction sets that kernels are written for.
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <string_view>
#include <vector>

namespace native {

#if defined(__x86_64__)
/// AVX-VNNI, which not every compiler's __builtin_cpu_supports knows.
inline bool has_avx_vnni() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && eax >> 4 & 1;
}

/// AMX with bfloat16, which a process must ask for (Linux 5.16, arch/x86/include/uapi/asm/prctl.h), and
/// vectors of float16.
inline bool has_amx() {
#if defined(__linux__)
  constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILE_DATA = 18;
  constexpr unsigned AMX_BF16 = 1 << 22, AVX512_FP16 = 1 << 23, AMX_TILE = 1 << 24;
  constexpr unsigned ALL = AMX_BF16 | AVX512_FP16 | AMX_TILE;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (edx & ALL) == ALL &&
         syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA) == 0;
#else
  return false;
#endif
}
#endif

/// Those that this processor has, the fastest first; asks the system for AMX.  The last ones are built for
/// tests alone, except that a processor of another kind has no other than the baseline.
inline std::vector<std::string_view> supported_isas() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_vnni =
      __builtin_cpu_supports("x86-64-v4") && __builtin_cpu_supports("avx512vnni");
  const bool has_vbmi = has_vnni && __builtin_cpu_supports("avx512vbmi");
  const bool has_bf16 = has_vbmi && __builtin_cpu_supports("avx512bf16");
  const bool has_avx2 = __builtin_cpu_supports("x86-64-v3");
  // All that have AVX-VNNI have GFNI, which shifts bytes.
  const bool has_vnni_256 = has_avx2 && has_avx_vnni() && __builtin_cpu_supports("gfni");
  std::vector<std::string_view> isas;
  if (has_bf16 && has_amx()) isas.push_back("avx512_amx");
  if (has_bf16) isas.push_back("avx512_bf16");
  if (has_vbmi) isas.push_back("avx512_vbmi");
  if (has_vnni) isas.push_back("avx512_vnni");
  if (has_vnni_256) isas.push_back("avx2_vnni");
  if (has_avx2) isas.push_back("avx2");
  if (has_bf16) isas.push_back("emulated_amx");
  if (has_avx2) isas.push_back("baseline");
  return isas;
#else
  return {"baseline"};
#endif
}

}  // namespace native

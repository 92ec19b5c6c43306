#include <cstdlib>
#include <functional>
#include <string_view>

#include "isas.h"
#include "kernels.h"

namespace native {

// What was built: names with commas between them.
extern const Kernels NATIVE_TABLES;

namespace {

constexpr std::reference_wrapper<const Kernels> TABLES[] = {NATIVE_TABLES};

const Kernels* find(std::string_view isa) {
  for (const Kernels& kernels : TABLES)
    if (kernels.name == isa) return &kernels;
  return nullptr;
}

/// Tests select a lesser instruction set by NATIVE_ISA in the environment.
const Kernels* select() {
  const char* name = std::getenv("NATIVE_ISA");
  for (const std::string_view isa : supported_isas())
    if (!name || !*name || isa == name)
      if (const Kernels* found = find(isa)) return found;
  return nullptr;
}

#if defined(__x86_64__)
/// Whether this is a Zen 3 or 4.
bool is_amd_family_19h() {
  __builtin_cpu_init();
  return __builtin_cpu_is("amdfam19h");
}
#else
bool is_amd_family_19h() { return false; }
#endif

}  // namespace

const bool PREFETCHES_ONE_ROW_INT8 = !is_amd_family_19h();

const Kernels* kernels() {
  static const Kernels* const selected = select();
  return selected;
}

std::string_view missing_isa() {
  const auto isas = supported_isas();
  return isas.empty() || find(isas.front()) ? std::string_view() : isas.front();
}

}  // namespace native

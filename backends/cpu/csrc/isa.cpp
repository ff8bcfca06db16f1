#include "isa.h"

#include <cpuid.h>

#include <cstdlib>
#include <cstring>

namespace core_cpu {
namespace {

struct Level {
  const KernelTable* table;
  bool (*usable)();
  bool automatic;
};

uint64_t xcr0() {
  uint32_t a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & (1u << 27))) return 0;  // OSXSAVE
  uint32_t lo, hi;
  __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
  return (uint64_t{hi} << 32) | lo;
}

struct Leaf {
  uint32_t a = 0, b = 0, c = 0, d = 0;
};

Leaf leaf(uint32_t id, uint32_t sub) {
  Leaf r;
  if (!__get_cpuid_count(id, sub, &r.a, &r.b, &r.c, &r.d)) return Leaf{};
  return r;
}

bool bit(uint32_t reg, int index) { return (reg >> index) & 1; }

bool has_scalar() { return true; }

bool has_avx2() {
  Leaf one = leaf(1, 0), seven = leaf(7, 0);
  bool os = (xcr0() & 0x6) == 0x6;
  return os && bit(one.c, 12) && bit(one.c, 28) && bit(one.c, 29) && bit(seven.b, 5) && bit(seven.b, 8);
}

bool has_avx512() {  // F, DQ, BW, VL
  Leaf seven = leaf(7, 0);
  bool os = (xcr0() & 0xe6) == 0xe6;
  return has_avx2() && os && bit(seven.b, 16) && bit(seven.b, 17) && bit(seven.b, 30) && bit(seven.b, 31);
}

bool has_vnni() { return has_avx512() && bit(leaf(7, 0).c, 11); }
bool has_bf16() { return has_vnni() && leaf(7, 0).a >= 1 && bit(leaf(7, 1).a, 5); }

const Level kLevels[] = {
    {&isa_scalar::table, has_scalar, true},
#ifdef CORE_WITH_AVX2
    {&isa_avx2::table, has_avx2, true},
#endif
#ifdef CORE_WITH_AVX512
    {&isa_avx512::table, has_avx512, true},
#endif
#ifdef CORE_WITH_AVX512_VNNI
    {&isa_avx512_vnni::table, has_vnni, true},
#endif
#ifdef CORE_WITH_AVX512_BF16
    {&isa_avx512_bf16::table, has_bf16, true},
#endif
#ifdef CORE_WITH_EMULATED_BF16
    {&isa_emulated_bf16::table, has_vnni, false},
#endif
};

const KernelTable* g_table = nullptr;

const KernelTable* best() {
  const KernelTable* found = nullptr;
  for (const Level& level : kLevels)
    if (level.automatic && level.usable()) found = level.table;
  return found;
}

}  // namespace

const KernelTable& kernels() {
  if (!g_table) g_table = best();
  return *g_table;
}

const char* isa_available(int index) {
  for (const Level& level : kLevels)
    if (level.usable() && index-- == 0) return level.table->name;
  return nullptr;
}

bool isa_select(const char* name) {
  for (const Level& level : kLevels) {
    if (std::strcmp(level.table->name, name) != 0) continue;
    if (!level.usable()) return false;
    g_table = level.table;
    return true;
  }
  return false;
}

}  // namespace core_cpu

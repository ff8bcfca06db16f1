// Run-time choice of the instruction-set level. Each level is one table made by one translation unit.
#pragma once
#include "args.h"

namespace core_cpu {
namespace isa_scalar { extern const KernelTable table; }
namespace isa_avx2 { extern const KernelTable table; }
namespace isa_avx512 { extern const KernelTable table; }
namespace isa_avx512_vnni { extern const KernelTable table; }
namespace isa_avx512_bf16 { extern const KernelTable table; }
namespace isa_emulated_bf16 { extern const KernelTable table; }
}  // namespace core_cpu

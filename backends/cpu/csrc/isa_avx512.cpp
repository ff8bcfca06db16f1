#define CORE_ISA isa_avx512
#define CORE_ISA_NAME "avx512"
#include "kernels/table.inc"

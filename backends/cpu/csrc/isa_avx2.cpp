#define CORE_ISA isa_avx2
#define CORE_ISA_NAME "avx2"
#include "kernels/table.inc"

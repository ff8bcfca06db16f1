#define CORE_ISA isa_avx512_vnni
#define CORE_ISA_NAME "avx512_vnni"
#include "kernels/table.inc"

#define CORE_ISA isa_avx512_bf16
#define CORE_ISA_NAME "avx512_bf16"
#include "kernels/table.inc"

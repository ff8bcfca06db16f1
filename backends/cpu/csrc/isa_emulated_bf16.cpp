#define CORE_ISA isa_emulated_bf16
#define CORE_ISA_NAME "emulated_bf16"
#include "kernels/table.inc"

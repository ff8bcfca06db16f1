#define CORE_ISA isa_scalar
#define CORE_ISA_NAME "scalar"
#include "kernels/table.inc"

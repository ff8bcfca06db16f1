"""How fast an operation could be at best on a chip: bytes over bandwidth, or operations over the matrix rate.

`costs` counts what an OpSpec must move and compute, `chips` holds what vendors publish, `times` divides. Nothing here
was measured: a device record (`nox -s device`) has the measured bandwidth and rate of its own chip beside these.
"""

from core_triton.roofline.chips import CHIPS, Chip
from core_triton.roofline.costs import Cost, Sizes, cost_of
from core_triton.roofline.times import Expected, expected

__all__ = ["CHIPS", "Chip", "Cost", "Expected", "Sizes", "cost_of", "expected"]

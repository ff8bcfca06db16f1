"""Every operation in plain torch: the oracle of the conformance suite, the composite fallback, the specification.

Importing it fills `COMPOSITES`, `DECOMPOSITIONS` and, by `core.backend.schemes`, `SCHEMES`.
"""

from __future__ import annotations

from core.backend import schemes as _schemes  # noqa: F401
from core.backend.reference import cache as _cache  # noqa: F401
from core.backend.reference import coarse as _coarse  # noqa: F401
from core.backend.reference import dense as _dense  # noqa: F401
from core.backend.reference import experts as _experts  # noqa: F401
from core.backend.reference import family as _family  # noqa: F401
from core.backend.reference import minor as _minor  # noqa: F401
from core.backend.reference import sampling as _sampling  # noqa: F401
from core.backend.reference.registry import COMPOSITES, DECOMPOSITIONS, HOST_READERS

__all__ = ["COMPOSITES", "DECOMPOSITIONS", "HOST_READERS"]

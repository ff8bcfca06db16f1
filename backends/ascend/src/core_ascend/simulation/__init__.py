"""A simulated NPU: the real torch_npu over stand-ins of CANN, with CPU numerics behind its operators.

What runs on it counts as SIMULATED. It proves names, arguments, shapes, documented bounds and arithmetic of the calls;
it proves nothing about CANN's kernels, their speed, streams, or races.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import os
from typing import Any

from core.backend import BackendUnavailableError
from core_ascend.chips import Chip
from core_ascend.device import Device

__all__ = ["import_vendor", "open_simulated"]

_MODULES = ("attention", "dense", "experts", "latent", "products", "recurrent")


def open_simulated(chip: Chip) -> Device:
    """A device of that chip.

    Raises:
        BackendUnavailableError: torch_npu is missing or does not load over the stand-ins.
    """
    from core_ascend.simulation import chip_types
    from core_ascend.simulation.device import SimulatedNpu

    libraries = _numerics()
    chip_types.set_chip(chip)
    return SimulatedNpu(libraries)


@functools.cache
def import_vendor() -> Any:
    """Imports the real torch_npu over stand-ins of CANN, once a process.

    Raises:
        BackendUnavailableError: it is missing or does not load.
    """
    from core_ascend.simulation import stubs

    stubs.load("Ascend910B3")
    # Where CANN was half set up, torch_npu looks for files that the stand-ins do not bring.
    home = os.environ.pop("ASCEND_HOME_PATH", None)
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it says there that CANN is missing, which is the point
            return importlib.import_module("torch_npu")
    except Exception as error:
        raise BackendUnavailableError(
            f"torch_npu does not load over the stand-ins of CANN ({type(error).__name__}: {str(error)[:200]}); "
            "take the torch_npu whose version equals that of torch"
        ) from error
    finally:
        if home is not None:
            os.environ["ASCEND_HOME_PATH"] = home


@functools.cache
def _numerics() -> list[Any]:
    import_vendor()
    for name in _MODULES:
        importlib.import_module(f"core_ascend.simulation.{name}")
    from core_ascend.simulation.calls import put_behind

    return put_behind()

"""Triton's interpreter, repaired: kernels run in numpy on host tensors, with the values that a chip would have.

As it comes, the interpreter multiplies and adds the bit patterns of bfloat16 and 8-bit floats, truncates where chips
round to nearest even, and reads any address. Here products and casts work on values, arithmetic that no chip does in
such a type is an error, and so is an access outside of the tensors that the kernel was given. It proves a kernel's
arithmetic and addresses; races, barriers and speed are not seen.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import warnings
from types import ModuleType, SimpleNamespace
from typing import Any

from core.backend import BackendUnavailableError

__all__ = ["install", "installed"]

_SWITCH = "TRITON_INTERPRET"
_PACKAGES = "'core-triton-kernels[interpreter]' and triton"

_state: dict[str, Any] = {}


def installed() -> bool:
    """Whether this process runs kernels in the repaired interpreter."""
    return bool(_state)


def install() -> None:
    """Makes this process run Triton kernels in the interpreter. Idempotent; to be called before kernels are imported.

    It is for the life of the process: what Triton decorates is decorated for one way of running.

    Raises:
        BackendUnavailableError: triton or ml_dtypes is missing, or triton was imported for compiling before.
    """
    if installed():
        return
    missing = [name for name in ("triton", "ml_dtypes") if importlib.util.find_spec(name) is None]
    if missing:
        raise BackendUnavailableError(
            f"the simulated device needs {' and '.join(missing)}, not installed: pip install {_PACKAGES}"
        )
    if "triton" not in sys.modules:
        os.environ[_SWITCH] = "1"
    runtime = importlib.import_module("triton.runtime.interpreter")
    language = importlib.import_module("triton.language")
    if not isinstance(language.sum, runtime.InterpretedFunction):
        raise BackendUnavailableError(
            f"triton was imported for compiling before the simulated device was opened: start with {_SWITCH}=1 set"
        )
    repairs = importlib.import_module("core_triton.interpreted")
    repairs.repair(runtime)
    importlib.import_module("core_triton.interpreted_types").share_types(runtime, language.core)
    _patch_language_once(runtime, language)
    runtime.InterpretedFunction.run = _run
    runtime.InterpretedFunction.__call__ = _call_device_function
    _state["runtime"], _state["repairs"] = runtime, repairs


def _patch_language_once(runtime: Any, language: ModuleType) -> None:
    """The interpreter patches `triton.language` around every launch and device function: most of its time."""
    runtime._patch_lang(SimpleNamespace(__globals__={"tl": language, "core": language.core}))
    runtime._patch_lang = lambda fn: SimpleNamespace(restore=lambda: None)


def _call_device_function(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self.rewrite()(*args, **kwargs)


def _run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    """One launch: every program of the grid, one after the other."""
    if warmup:
        return
    runtime, repairs = _state["runtime"], _state["repairs"]
    launch = _launch_of(self, runtime)
    values = launch.defaults | dict(zip(launch.names, args, strict=False))
    values |= {name: value for name, value in kwargs.items() if name in launch.known}
    missing = [name for name in launch.names if name not in values]
    if missing:
        raise TypeError(f"kernel {self.__name__}: no value for {', '.join(missing)}")
    cells = grid(values) if callable(grid) else grid
    cells = (*cells, *[1] * (3 - len(cells)))
    converted = {
        name: value if name in launch.constexprs else runtime._implicit_cvt(value) for name, value in values.items()
    }
    builder = runtime.interpreter_builder
    builder.set_grid_dim(*cells)
    with repairs.quiet_numpy(), warnings.catch_warnings(), repairs.bounds_of(values.values()):
        warnings.simplefilter("ignore", RuntimeWarning)
        for x in range(cells[0]):
            for y in range(cells[1]):
                for z in range(cells[2]):
                    builder.set_grid_idx(x, y, z)
                    try:
                        launch.fn(**converted)
                    except Exception as error:
                        raise runtime.InterpreterError(f"{self.__name__}, program {(x, y, z)}: {error!r}") from error


def _launch_of(kernel: Any, runtime: ModuleType) -> Any:
    """What a launch needs to know of a kernel; found once."""
    launches = _state.setdefault("launches", {})
    if kernel.fn not in launches:
        executor = runtime.GridExecutor(kernel.rewrite(), kernel.arg_names, (1,))
        parameters = inspect.signature(kernel.fn).parameters
        launches[kernel.fn] = SimpleNamespace(
            fn=executor.fn,
            names=kernel.arg_names,
            known=frozenset(kernel.arg_names),
            constexprs=frozenset(executor.constexprs),
            defaults={name: p.default for name, p in parameters.items() if p.default is not p.empty},
        )
    return launches[kernel.fn]

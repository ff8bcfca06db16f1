"""Stand-ins for the CANN libraries that torch_npu links: enough to import it, not to run anything.

They are C functions that return 0, one for each symbol that the wheel's own libraries leave undefined.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from core.backend import BackendUnavailableError

__all__ = ["build", "load"]

_LIBRARIES = ("ascendcl", "hccl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel", "atb")
_SPECIAL = {
    "aclrtGetSocName": 'const char *aclrtGetSocName(void) { return "%s"; }',
    "aclrtGetDeviceCount": "int aclrtGetDeviceCount(unsigned *count) { *count = 0; return 0; }",
    "aclGetRecentErrMsg": 'const char *aclGetRecentErrMsg(void) { return "simulated"; }',
    "aclrtGetDevice": "int aclrtGetDevice(int *device) { *device = 0; return 0; }",
}
"""Functions whose caller reads what they write or return."""


def load(soc: str) -> None:
    """Makes the stand-ins visible to the libraries that are loaded after them."""
    folder = build(soc)
    for name in _LIBRARIES:
        ctypes.CDLL(str(folder / f"lib{name}.so"), ctypes.RTLD_GLOBAL)


def build(soc: str, folder: Path | None = None) -> Path:
    """Builds the stand-ins, once for a version of torch_npu, and returns their folder.

    Raises:
        BackendUnavailableError: torch_npu, a C compiler or `nm` is missing.
    """
    spec = importlib.util.find_spec("torch_npu")
    if spec is None or not spec.submodule_search_locations:
        raise BackendUnavailableError("a simulated NPU needs the package torch_npu; `pip install --no-deps torch_npu`")
    for tool in ("gcc", "nm"):
        if shutil.which(tool) is None:
            raise BackendUnavailableError(
                f"a simulated NPU needs {tool} to build stand-ins of CANN; install binutils and gcc"
            )
    package = Path(next(iter(spec.submodule_search_locations)))
    version = importlib.metadata.version("torch_npu")
    if folder is None:
        key = hashlib.sha256(f"{package} {version} {soc} {os.getuid()}".encode()).hexdigest()[:12]
        folder = Path(tempfile.gettempdir()) / f"core-ascend-{key}"
    if not (folder / "complete").exists():
        _build(package, folder, soc)
    return folder


def _build(package: Path, folder: Path, soc: str) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=folder))
    plain, atb = _missing(package)
    texts = {name: text % soc if "%s" in text else text for name, text in _SPECIAL.items()}
    lines = [*texts.values(), *(f"long {name}(void) {{ return 0; }}" for name in sorted(plain - set(texts)))]
    bodies = dict.fromkeys(_LIBRARIES, "int core_ascend_stand_in;")
    bodies["ascendcl"] = "\n".join(lines)
    bodies["atb"] = "\n".join(f"long {name}(void) {{ return 0; }}" for name in sorted(atb))
    for name, body in bodies.items():
        source, target = work / f"{name}.c", work / f"lib{name}.so"
        source.write_text(body + "\n", encoding="ascii")
        flags = ("-shared", "-fPIC", "-w", "-fno-builtin", "-O1", f"-Wl,-soname,{target.name}")
        done = subprocess.run(
            ["gcc", *flags, "-o", str(target), str(source)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise BackendUnavailableError(f"stand-ins of CANN cannot be built ({done.stderr.strip()[:200]}); see gcc")
        os.replace(target, folder / target.name)  # another process may be building the same
    shutil.rmtree(work, ignore_errors=True)
    (folder / "complete").touch()


def _missing(package: Path) -> tuple[set[str], set[str]]:
    """Symbols that CANN, and that ATB would define."""
    import torch

    own = [*(package / "lib").glob("*.so"), *package.glob("_C*.so")]
    theirs = list((Path(torch.__file__).parent / "lib").glob("*.so"))
    defined = {name for path in [*own, *theirs] for name in _symbols(path, "--defined-only")}
    wanted: dict[bool, set[str]] = {False: set(), True: set()}
    for path in own:
        wanted["atb" in path.name] |= set(_symbols(path, "--undefined-only"))
    plain = {name for name in wanted[False] - defined if name.startswith(_CANN_PREFIXES)}
    return plain, {name for name in wanted[True] - defined if name.startswith("_ZN3atb")}


_CANN_PREFIXES = (
    "acl",
    "Acl",
    "hccl",
    "Hccl",
    "ge",
    "Ge",
    "Msprof",
    "prof",
    "Prof",
    "Dlog",
    "dlog",
    "tdt",
    "Tsd",
    "rt",
)


def _symbols(path: Path, which: str) -> list[str]:
    done = subprocess.run(["nm", "-D", which, str(path)], capture_output=True, text=True, check=True)
    return [line.split()[-1].partition("@")[0] for line in done.stdout.splitlines() if line.split()]

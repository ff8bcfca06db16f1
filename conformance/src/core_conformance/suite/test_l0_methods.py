"""L0: the four methods that a vendor writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import torch

from core.backend import Backend, OpenConfig, Verdict
from core.backend.ops import OpSpec
from core.spec import Capabilities, DeviceInfo, DType
from core_conformance.checks import check
from core_conformance.operations.samples import core_operations, variations
from core_conformance.records import UnsupportedOutcome
from core_conformance.subject import Subject
from core_conformance.target import LIMITS, Target

_PROBE_SECONDS = 2.0


@check("L0/entry-point")
def test_the_package_is_found_and_listed_without_torch(target: Target) -> None:
    """Listing installed backends imports neither torch nor the backend, and names this one."""
    module = target.info.load.partition(":")[0]
    assert ":" in target.info.load and module, f"load must be module:attribute, got {target.info.load!r}"
    assert not target.info.version_conflict(), target.info.version_conflict()
    if not target.installed:
        return
    code = (
        "import json, sys; from core import plugins; names = [item.name for item in plugins.list_backends()]; "
        f"print(json.dumps([names, 'torch' in sys.modules, {module!r} in sys.modules]))"
    )
    names, torch_there, backend_there = json.loads(_python(code).splitlines()[-1])
    assert target.name in names, f"{target.name!r} is not among the installed backends {names}"
    assert not torch_there, "listing the package imports torch; its plugin module must not"
    assert not backend_there, f"listing the package imports {module}; name it in BackendInfo.load alone"


@check("L0/signatures")
def test_every_method_of_the_contract_is_there(target: Target) -> None:
    """The class derives from Backend and overrides methods with names of the contract's parameters."""
    import inspect

    backend = target.make()
    assert isinstance(backend, Backend), f"{type(backend).__name__} must derive from core.backend.Backend"
    for name, base in inspect.getmembers(Backend, inspect.isfunction):
        if name.startswith("_"):
            continue
        wanted = list(inspect.signature(base).parameters)
        own = inspect.signature(getattr(type(backend), name)).parameters
        missing = [parameter for parameter in wanted if parameter not in own]
        assert not missing or any(p.kind is p.VAR_KEYWORD for p in own.values()), f"{name}() lacks {missing}"
        added = [p.name for p in own.values() if p.name not in wanted and p.default is p.empty and p.kind < 2]
        assert not added, f"{name}() asks for {added}, which no caller gives"


@check("L0/probe-cheap")
def test_probe_is_quick_and_repeatable(target: Target) -> None:
    """A second instance answers within two seconds, with the same devices."""
    first = target.make().probe()
    begin = time.monotonic()
    second = target.make().probe()
    seconds = time.monotonic() - begin
    assert seconds < _PROBE_SECONDS, f"probe() took {seconds:.1f} s; it must not create a context"
    assert first == second, f"probe() gave {first}, then {second}"
    assert all(isinstance(device, DeviceInfo) for device in first), first
    assert [device.index for device in first] == list(range(len(first))), "devices must be indexed 0, 1, ..."
    assert all(device.arch for device in first), "a device needs an arch"


@check("L0/probe-never-raises")
def test_probe_survives_a_bare_environment(target: Target) -> None:
    """In a fresh process without PATH, HOME and library paths probe() still returns a list."""
    keep = {name: value for name, value in os.environ.items() if name.startswith("PYTHON")}
    env = {**keep, "PATH": "/nonexistent", "LD_LIBRARY_PATH": "/nonexistent", "PYTHONPATH": os.pathsep.join(sys.path)}
    module, _, attribute = target.info.load.partition(":")
    code = (
        f"import importlib; backend = getattr(importlib.import_module({module!r}), {attribute!r})(); "
        "print('devices:', type(backend.probe()).__name__)"
    )
    assert "devices: list" in _python(code, env=env), "probe() must return a list"


@check("L0/open-sets-attributes", mandatory=True)
def test_open_sets_device_and_capabilities(target: Target) -> None:
    """After open() there are a torch device and Capabilities with usable block sizes."""
    backend = target.open()
    assert isinstance(backend.device, torch.device), f"device is {backend.device!r}, expected a torch.device"
    assert isinstance(backend.capabilities, Capabilities), "capabilities must be core.spec.Capabilities"
    sizes = backend.capabilities.block_sizes
    assert sizes and all(isinstance(size, int) and size > 0 for size in sizes), f"block_sizes {sizes} are unusable"
    assert len(set(sizes)) == len(sizes), f"block_sizes {sizes} repeat themselves"
    backend.close()


@check("L0/reopen")
def test_close_is_idempotent_and_open_may_follow(target: Target) -> None:
    """open, close, close, open, and the device still works."""
    backend = target.open()
    backend.close()
    backend.close()
    backend.open(target.index, OpenConfig(limits=LIMITS))
    subject = Subject(target, backend)
    values = torch.arange(7, dtype=torch.float32)
    subject.equal("to_device and to_host after a second open", subject.put(values), values)
    backend.close()


@check("L0/spawn")
def test_the_backend_works_in_a_spawned_process(target: Target) -> None:
    """A fresh process with the backend's environment opens the device and moves a tensor there and back."""
    module, _, attribute = target.info.load.partition(":")
    code = (
        "import importlib, torch\n"
        "from core.backend import OpenConfig\n"
        f"backend = getattr(importlib.import_module({module!r}), {attribute!r})()\n"
        f"backend.open({target.index}, OpenConfig())\n"
        "host = torch.arange(9.0); there = torch.empty(9, device=backend.device)\n"
        "backend.to_device(host, there).wait()\n"
        "back, pending = backend.to_host(there); pending.wait()\n"
        "print('equal:', torch.equal(back, host)); backend.close()\n"
    )
    env = {**os.environ, **target.info.env, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert "equal: True" in _python(code, env=env), "a tensor came back changed in a spawned process"


@check("L0/leaves-torch-alone")
def test_torch_defaults_are_left_alone(target: Target) -> None:
    """open, pack and close change neither torch's default dtype and device nor its random state."""
    before = _torch_state()
    backend = target.open()
    subject = Subject(target, backend)
    subject.pack({"weight": torch.ones(8, 16)}, "none", (8, 16), DType.FLOAT32)
    after_open = _torch_state()
    backend.close()
    for name, value in before.items():
        assert after_open[name] == value, f"open() changed torch's {name} from {value} to {after_open[name]}"
        assert _torch_state()[name] == value, f"close() changed torch's {name}"


@check("L0/supports-pure")
def test_supports_is_pure_and_needs_no_device(target: Target) -> None:
    """For every operation in many forms: a Verdict, before open as after it, twice the same."""
    closed, opened = target.make(), target.backend
    for op in variations(target.info.api[2]):
        verdict = closed.supports(op, target.device)
        assert isinstance(verdict, Verdict), f"supports({op.describe()}) gave {verdict!r}, expected a Verdict"
        assert verdict == closed.supports(op, target.device), f"supports({op.describe()}) changes from call to call"
        assert verdict == opened.supports(op, target.device), f"supports({op.describe()}) changes with open()"
        assert verdict.kind == "NATIVE" or verdict.reason, (
            f"supports({op.describe()}) gives no reason for {verdict.kind}"
        )
        assert not hasattr(closed, "device"), "supports() opened the device"


@check("L0/declared-unsupported-raises")
def test_what_is_not_native_is_refused_by_bind(subject: Subject) -> None:
    """bind raises UnsupportedError for every form that supports does not call NATIVE."""
    target = subject.target
    for op in variations(target.info.api[2]):
        if subject.backend.supports(op, target.device).kind != "NATIVE":
            subject.must_refuse(op)


@check("L0/mandatory-core", mandatory=True)
def test_the_mandatory_core_is_there_in_bfloat16_or_float16(subject: Subject) -> None:
    """Paged KV, causal GQA attention over mixed batches, products into float32 logits, and greedy sampling."""
    refusals = [_refusal(subject, dtype) for dtype in (DType.BFLOAT16, DType.FLOAT16)]
    if all(refusals):
        raise UnsupportedOutcome("; ".join(refusals))


def _refusal(subject: Subject, dtype: DType) -> str:
    for op in core_operations(dtype):
        row = subject.binder.resolve(op)
        if row.kind == "NO":
            return f"{_name(op)} in {dtype}: {row.reason}"
    return ""


def _name(op: OpSpec) -> str:
    return op.describe()


def _torch_state() -> dict[str, object]:
    return {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "random state": torch.random.get_rng_state().numpy().tobytes(),
        "gradient mode": torch.is_grad_enabled(),
    }


def _python(code: str, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    last = (done.stderr.strip().splitlines() or [""])[-1]
    assert done.returncode == 0, f"a fresh process ended with {done.returncode}: {last}"
    return done.stdout

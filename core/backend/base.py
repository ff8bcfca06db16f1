"""The Backend: four methods that a vendor must write, and working defaults over torch for all others."""

from __future__ import annotations

import abc
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from core.backend.batch import Batch, GroupSpec, Plan
from core.backend.comm import CommLimits, Communicator, SingleRank, TorchCommunicator
from core.backend.layout import KVLayout, KVSlab, canonical_layout
from core.backend.ops.spec import Determinism, OpSpec
from core.backend.weights import Packed, Role, Scheme, WeightSource
from core.spec import Capabilities, DeviceInfo, KVCacheSpec

__all__ = [
    "Arena",
    "Backend",
    "Capture",
    "Graph",
    "Kind",
    "Lens",
    "Limits",
    "MemoryInfo",
    "OpenConfig",
    "Pending",
    "Verdict",
]


class Kind(enum.StrEnum):
    """How an operation is done."""

    NATIVE = "NATIVE"
    """By the backend's own kernel."""
    COMPOSITE = "COMPOSITE"
    """By the core, out of other operations or torch calls on the same device."""
    NO = "NO"
    """Not at all."""


class Capture(enum.StrEnum):
    """Which steps with this operation may be recorded."""

    ANY = "ANY"
    UNIFORM = "UNIFORM"
    """Those in which every request has the same number of tokens."""
    SINGLE = "SINGLE"
    """Those in which every request has one token."""
    NEVER = "NEVER"


class Lens(enum.StrEnum):
    """Where a kernel needs the lengths of requests."""

    DEVICE = "DEVICE"
    HOST_BOUND = "HOST_BOUND"
    """An upper bound on the host."""
    HOST_EXACT = "HOST_EXACT"
    """Exact lists on the host."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A backend's answer about one operation.

    Args:
        kind: NATIVE, COMPOSITE ("I have no kernel, compose it") or NO ("not on this device, not composed either").
        reason: Why not NATIVE, for people.
        capture: Which steps with it may be recorded.
        lens: Where it needs lengths.
        max_decode_q: Most query tokens of a request that count as decode for its kernels; 0 means no bound.
        determinism: The class that it gives. Below what the OpSpec asks, the operation counts as COMPOSITE.
        workspace_bytes: Scratch memory that a call may need, reserved at warm-up.
        input_format: Activation format that a weight's kernel asks for ("int8_row"); None for plain tensors.
        activation_format: Format to which the kernel itself rounds plain activations: "int8_block32" (linear) or
            "int16_row" (attention), see `core.backend.schemes`; None where it uses them as they are. Only where the
            OpSpec's `quantize_activations` allows it.
    """

    kind: Kind
    reason: str = ""
    capture: Capture = Capture.ANY
    lens: Lens = Lens.DEVICE
    max_decode_q: int = 0
    determinism: Determinism = Determinism.D1
    workspace_bytes: int = 0
    input_format: str | None = None
    activation_format: str | None = None

    @classmethod
    def native(cls, **kwargs: Any) -> Verdict:
        """NATIVE, with any other field."""
        return cls(kind=Kind.NATIVE, **kwargs)

    @classmethod
    def composite(cls, reason: str = "no kernel for it") -> Verdict:
        """COMPOSITE, with the reason."""
        return cls(kind=Kind.COMPOSITE, reason=reason)

    @classmethod
    def no(cls, reason: str) -> Verdict:
        """NO, with the reason."""
        return cls(kind=Kind.NO, reason=reason)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The largest step that will ever come, so that a backend can reserve at `open`."""

    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    max_model_len: int = 2048


@dataclass(frozen=True, kw_only=True)
class OpenConfig:
    """What `Backend.open` gets.

    Args:
        limits: The largest step.
        rank: This worker's rank in the world.
        world: Workers in the world.
        deterministic: Whether operations will be asked for class D3.
        num_threads: Compute threads for a host backend; 0 takes what the process may use.
    """

    limits: Limits = Limits()
    rank: int = 0
    world: int = 1
    deterministic: bool = False
    num_threads: int = 0


@dataclass(frozen=True, kw_only=True)
class MemoryInfo:
    """Device memory in bytes: free and total as the device says, reserved and peak by this process."""

    free: int
    total: int
    reserved: int
    peak: int


class Pending:
    """Work that the device may still be doing. The base is work already done."""

    __slots__ = ()

    def done(self) -> bool:
        """Whether it is finished, without waiting."""
        return True

    def wait(self) -> None:
        """Blocks the host until it is finished."""


class _StreamEvent(Pending):
    """What a device's stream held when the event was recorded.

    Args:
        event: Recorded already.
    """

    __slots__ = ("_event",)

    def __init__(self, event: torch.Event) -> None:
        self._event = event

    def done(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        self._event.synchronize()


class Arena:
    """A range of device memory of one purpose ("kv", "weights", "graphs") that can be given back and taken again.

    Args:
        tensor: [reserve_bytes], uint8, on the device.
        tag: The purpose.
    """

    __slots__ = ("_bytes", "_device", "tag", "tensor")

    stable_address = False
    """Whether `restore` brings the memory back at the same address."""

    def __init__(self, tensor: Tensor, tag: str) -> None:
        self.tensor = tensor
        self.tag = tag
        self._bytes = tensor.numel()
        self._device = tensor.device

    def commit(self, num_bytes: int) -> Tensor:
        """The first `num_bytes`, backed by memory. Contents are undefined."""
        assert 0 <= num_bytes <= self.tensor.numel(), f"arena {self.tag!r} holds {self.tensor.numel()} bytes"
        return self.tensor[:num_bytes]

    def release(self) -> None:
        """Gives the memory back; contents are lost. Views of `tensor` must not be used until `restore`."""
        self.tensor = torch.empty(0, dtype=torch.uint8, device=self._device)

    def restore(self) -> Tensor:
        """Takes the memory again and returns `tensor`; contents are undefined."""
        self.tensor = torch.empty(self._bytes, dtype=torch.uint8, device=self._device)
        return self.tensor


class Graph:
    """A recorded step. The base records nothing and calls the function again.

    Args:
        fn: The step; it reads its inputs from the tensors of its plans.
    """

    __slots__ = ("_fn",)

    def __init__(self, fn: Callable[[], Any]) -> None:
        self._fn = fn

    def replay(self, plans: Sequence[Plan]) -> Any:
        """Runs the step on what the recorded storage now holds.

        Args:
            plans: The plans of the recording, refreshed by `Backend.plan(..., into=plan)`.

        Returns:
            What the recorded function returned: the same tensors, overwritten.
        """
        return self._fn()


class Backend(abc.ABC):
    """One device of one kind, driven by one worker process.

    A vendor writes `probe`, `open`, `supports` and `bind`. Everything else works over torch as it is and is overridden
    where the device has something better. `open` must set `device` and `capabilities`.
    """

    device: torch.device
    """Where tensors live; set by `open`."""
    capabilities: Capabilities
    """What belongs to the device alone; set by `open`."""

    # -- must --------------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def probe(self) -> list[DeviceInfo]:
        """Lists the devices that could be opened, best effort and cheap.

        Creates no context, never raises (an unusable driver means an empty list), and is safe in a subprocess.

        Conformance: L0/probe-cheap, L0/probe-never-raises
        """

    @abc.abstractmethod
    def open(self, index: int, config: OpenConfig) -> None:
        """Takes device `index` of `probe()` and sets `device` and `capabilities`. Called once before `bind`.

        Leaves torch's default device, dtype and random state alone.

        Raises:
            BackendUnavailableError: the device cannot be taken; the message says what to do.

        Conformance: L0/open-sets-attributes, L0/reopen, L0/leaves-torch-alone
        """

    @abc.abstractmethod
    def supports(self, op: OpSpec, device: DeviceInfo) -> Verdict:
        """Says how this backend does `op` on such a device. Pure; works before `open` and without the device.

        Conformance: L0/supports-pure, L0/declared-unsupported-raises
        """

    @abc.abstractmethod
    def bind(self, op: OpSpec) -> Callable[..., Any]:
        """Makes the callable of an operation that `supports` calls NATIVE, static parameters baked in.

        It takes the operation's record as its one argument and is called with the device's work in stream order. After
        warm-up it neither compiles nor allocates workspace.

        Raises:
            UnsupportedError: `supports` does not say NATIVE.

        Conformance: L0/declared-unsupported-raises, L1/operations
        """

    # -- defaults ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Gives the device back. Idempotent; `open` may follow.

        Conformance: L0/reopen
        """

    def memory(self) -> MemoryInfo:
        """Device memory now; the default asks torch's module for the device, and the host where that cannot tell.

        Conformance: L0/memory
        """
        module = _torch_module(self.device)
        if hasattr(module, "mem_get_info"):
            free, total = module.mem_get_info(self.device)
            reserved, peak = module.memory_reserved(self.device), module.max_memory_reserved(self.device)
            return MemoryInfo(free=free, total=total, reserved=reserved, peak=peak)
        with open("/proc/meminfo", encoding="ascii") as lines:
            kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
        total, free = kib["MemTotal"] * 1024, kib["MemAvailable"] * 1024
        return MemoryInfo(free=free, total=total, reserved=0, peak=0)

    def reset_peak(self) -> None:
        """Starts the `peak` of `memory()` anew.

        Conformance: L0/memory
        """
        module = _torch_module(self.device)
        if hasattr(module, "reset_peak_memory_stats"):
            module.reset_peak_memory_stats(self.device)

    def arena(self, tag: str, reserve_bytes: int) -> Arena:
        """Reserves device memory of one purpose.

        Conformance: L0/arena-round-trip
        """
        return Arena(torch.empty(reserve_bytes, dtype=torch.uint8, device=self.device), tag)

    def kv_layout(self, spec: KVCacheSpec, block_size: int) -> KVLayout:
        """How a block of such a cache lies in memory; the default is the canonical token-major layout.

        Pure and usable before `open`. Args: block_size is one of `capabilities.block_sizes`.

        Conformance: L0/kv-layout
        """
        return canonical_layout(spec, block_size)

    def pack(self, source: WeightSource, scheme: Scheme, role: Role, dtype: torch.dtype) -> Packed:
        """Brings one weight to the device in the form that the kernels want; called once a weight, peak of one tensor.

        Args:
            source: Where it comes from, already cut for this rank.
            scheme: How to keep it: the source's own, "none" for dense in `dtype`, or another one to convert to.
            role: What it is for. Experts are expert-major in every tensor.
            dtype: Type of a dense weight.

        Conformance: L0/pack-round-trip, L1/linear
        """
        if scheme.name == "none":
            dense = source.dense(dtype).to(self.device)
            return Packed(shape=source.shape, scheme="none", tensors={"weight": dense.contiguous()})
        assert scheme.name == source.scheme, f"cannot keep {source.name} ({source.scheme}) as {scheme.name}"
        tensors = {name: part.to(self.device) for name, part in source.parts().items()}
        return Packed(shape=source.shape, scheme=scheme.name, tensors=tensors)

    def plan(self, batch: Batch, group: GroupSpec, into: Plan | None = None) -> Plan:
        """Prepares what the operations of one cache group need; once a step and group.

        Args:
            into: A plan that a graph has captured; its storage is refreshed in place and it is returned.

        Conformance: L1/attention, L0/plan-into
        """
        part = batch.groups[group.index]
        if into is None:
            return Plan(batch=batch, group=part, spec=group, block_size=group.layout.block_size)
        into.batch, into.group = batch, part
        return into

    def capture(self, fn: Callable[[], Any], plans: Sequence[Plan]) -> Graph:
        """Records one call of `fn` for replay. The default records nothing: it keeps the function and calls it again.

        Whether the call itself takes effect is open: whoever records replays next, and `fn` bears being run twice.
        A backend that overrides this gets decode steps recorded by the engine, where the verdicts allow it.

        Args:
            fn: Reads its inputs from tensors that stay where they are, and from `plans`.
            plans: Plans of the step, one a cache group; a graph may skip the padding that their batch announces by
                `num_valid_tokens`.

        Raises:
            Exception: `fn` does what cannot be recorded. The engine then runs all steps eagerly and says so once.

        Conformance: L0/capture-replay
        """
        return Graph(fn)

    def to_device(self, src: Tensor, dst: Tensor) -> Pending:
        """Copies a host tensor into a device tensor, in stream order. `src` must stay as it is until done.

        Conformance: L0/copy-round-trip
        """
        dst.copy_(src, non_blocking=self.capabilities.pinned_memory)
        return self.fence() if self.capabilities.pinned_memory else Pending()

    def to_host(self, tensor: Tensor) -> tuple[Tensor, Pending]:
        """Starts a copy to the host; the tensor is valid once the Pending is done.

        Conformance: L0/copy-round-trip
        """
        return tensor.to("cpu"), Pending()

    def fence(self) -> Pending:
        """Done when all work submitted so far is. The default records an event on the device's current stream.

        Conformance: L0/fence
        """
        if self.device.type in ("cpu", "meta"):
            return Pending()
        return _StreamEvent(torch.accelerator.current_stream(self.device).record_event())

    def copy_blocks(self, src: KVSlab, dst: KVSlab, pairs: Sequence[tuple[int, int]], after: Pending) -> Pending:
        """Copies whole blocks between two slabs of equal layout, on the device, on the host, or between them.

        Args:
            pairs: (source block, target block); no target twice, and no block both source and target.
            after: What must be done first: the last step that could write a source block.

        Conformance: L0/copy-blocks
        """
        assert src.layout.id == dst.layout.id, f"{src.layout.id} is not {dst.layout.id}"
        after.wait()
        if pairs:
            sources, targets = (torch.tensor(side, dtype=torch.int64) for side in zip(*pairs, strict=True))
            for a, b in zip(src.views(), dst.views(), strict=True):
                b[targets.to(b.device)] = a[sources.to(a.device)].to(b.device)
        return self.fence()

    def comm(self, ranks: Sequence[int], tag: str, limits: CommLimits) -> Communicator:
        """Collectives over some of the world's ranks; every rank of the list calls it.

        The default uses torch.distributed, which the caller has initialised, with the process group's own transport.

        Conformance: L1/collectives
        """
        if len(ranks) == 1:
            return SingleRank()
        group = dist.new_group(list(ranks), group_desc=tag)
        assert isinstance(group, dist.ProcessGroup)
        return TorchCommunicator(group)


def _torch_module(device: torch.device) -> Any:
    """The device's module of torch; None for the host, whose memory torch does not count, and where it has none."""
    try:
        return None if device.type == "cpu" else torch.get_device_module(device)
    except RuntimeError:
        return None

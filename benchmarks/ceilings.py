"""What the machine can do at most, measured by `ceilings.c`, and the rates that a model could reach on it at best.

A limit is bytes over bandwidth, or operations over the matrix peak, whichever takes longer: nothing can pass it.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Ceilings", "ModelCosts", "build_ceilings", "limit"]

MEMORY_BYTES = 1 << 30
"""Read as a whole, so that no cache holds it."""
_SOURCE = Path(__file__).with_name("ceilings.c")


@dataclass
class Ceilings:
    """The best of the measurements of one run: a ceiling that a busy machine hides is still there.

    Args:
        program: As `build_ceilings` compiled it.
        threads: Threads that every engine gets too.
        sizes: Bytes of the models to be read; a small one partly stays in the cache, for everybody.
    """

    program: Path
    threads: int
    sizes: Sequence[int]
    runs: list[dict[str, object]] = field(default_factory=list)

    def measure(self) -> None:
        """Adds one measurement; takes a few seconds."""
        sizes = sorted({*self.sizes, MEMORY_BYTES})
        command = [str(self.program), str(self.threads), *map(str, sizes)]
        self.runs.append(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))

    def bandwidth(self, num_bytes: int) -> float:
        """Bytes a second of reading as many bytes over and over; of memory where the size was not measured."""
        key = str(num_bytes if num_bytes in self.sizes else MEMORY_BYTES)
        return 1e9 * max(run["read"][key] for run in self.runs)  # type: ignore[index]

    def peak(self, kind: str) -> float:
        """Operations a second: "int8", or "bf16", which is float32's where the processor has no products of its own."""
        found = max(float(run[kind]) for run in self.runs)  # type: ignore[arg-type]
        return max(1e9 * found, self.peak("fp32")) if kind != "fp32" else 1e9 * found


def build_ceilings(folder: Path) -> Path:
    """Compiles `ceilings.c` for this very processor.

    Raises:
        SystemExit: there is no gcc, or it fails.
    """
    program = folder / "ceilings"
    folder.mkdir(parents=True, exist_ok=True)
    flags = ["-O3", "-march=native", "-ffp-contract=fast", "-pthread"]
    try:
        subprocess.run(["gcc", *flags, str(_SOURCE), "-o", str(program)], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"ceilings.c cannot be compiled ({error}); install gcc, or pass --no-ceilings") from None
    return program


@dataclass(frozen=True, kw_only=True)
class ModelCosts:
    """What a token costs, whoever computes it.

    Args:
        weight_bytes: Read once a step: every matrix and the output head.
        body_params: Elements of the matrices that each token meets.
        head_params: Elements of the output head, which only tokens that sample meet.
        attention_dims: Sum over layers of query heads times head size.
        kv_bytes: Bytes of one token in the KV cache, in bf16.
        quantized: Whether the products may be done in int8.
    """

    weight_bytes: int
    body_params: int
    head_params: int
    attention_dims: int
    kv_bytes: int
    quantized: bool


def limit(test: str, costs: ModelCosts, ceilings: Ceilings) -> float:
    """Tokens a second of a test of `compare.py` that no program can pass on this machine."""
    kind, _, size = test.partition("_")
    if kind == "single":
        return 1.0 / _decode_seconds(1, 192, costs, ceilings)
    if kind == "prefill":
        return int(size) / _prefill_seconds(1, int(size), costs, ceilings)
    count = int(size)
    steps = 127 * _decode_seconds(count, 192, costs, ceilings)
    return count * 128 / (_prefill_seconds(count, 128, costs, ceilings) + steps)


def _decode_seconds(count: int, context: int, costs: ModelCosts, ceilings: Ceilings) -> float:
    """Seconds of a step of `count` requests, each behind `context` tokens."""
    read = (costs.weight_bytes + count * context * costs.kv_bytes) / ceilings.bandwidth(costs.weight_bytes)
    params = costs.body_params + costs.head_params
    return max(read, _seconds(2.0 * count * params, count * context * costs.attention_dims, costs, ceilings))


def _prefill_seconds(count: int, length: int, costs: ModelCosts, ceilings: Ceilings) -> float:
    """Seconds of `count` prompts; of the causal half of attention only what must be computed counts."""
    linear = 2.0 * count * (length * costs.body_params + costs.head_params)
    read = costs.weight_bytes / ceilings.bandwidth(costs.weight_bytes)
    return max(read, _seconds(linear, count * length * length / 2 * costs.attention_dims, costs, ceilings))


def _seconds(linear_ops: float, attention_pairs: float, costs: ModelCosts, ceilings: Ceilings) -> float:
    """Two products for each pair of query and key, in bf16 whatever the weights are."""
    kind = "int8" if costs.quantized else "bf16"
    return linear_ops / ceilings.peak(kind) + 4.0 * attention_pairs / ceilings.peak("bf16")

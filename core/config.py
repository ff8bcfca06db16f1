"""What an operator may set, in one place; the command line and `LLM(...)` both make an EngineConfig."""

from __future__ import annotations

from typing import Literal

import msgspec

from core.errors import ConfigError

__all__ = ["CacheConfig", "EngineConfig", "SchedulerConfig"]

MAX_INT32 = 2**31 - 1
"""Positions, blocks and slots are int32 on every device."""
MAX_INT64 = 2**63 - 1
MAX_RUNNING = 2**16
"""Every place costs host memory, whether it is taken or not."""
MAX_THREADS = 4096


def _check_range(flag: str, value: int | None, low: int, high: int) -> None:
    """Raises ConfigError, naming the flag, where a value is given and not in [low, high]."""
    if value is not None and not low <= value <= high:
        bound = f"at least {low}" if value < low else f"at most {high}"
        advice = "give a larger value" if value < low else "give a smaller value"
        raise ConfigError(f"{flag} must be {bound}, got {value}; {advice}")


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds and policy of the Scheduler.

    Raises:
        ConfigError: on construction, naming flag and value.
    """

    max_num_seqs: int = 128
    """Requests that may run at once (`--max-num-seqs`)."""
    max_num_batched_tokens: int = 2048
    """Token budget of a step (`--max-num-batched-tokens`)."""
    max_model_len: int = 0
    """Longest sequence, prompt and output; 0 until the engine knows the model and the pool (`--max-model-len`)."""
    max_num_queued_reqs: int = 0
    """Waiting requests before new ones get 429; 0 means no bound (`--max-num-queued-reqs`)."""
    enable_chunked_prefill: bool = True
    """Whether a prompt may be computed over several steps (`--enable-chunked-prefill`)."""
    long_prefill_token_threshold: int = 0
    """Most tokens of one prompt in a step that also serves others; 0 takes half the budget."""
    max_step_stretch: float | None = None
    """How many times as long prompts may make a step that also generates, by what steps were measured to take; 0 sets
    no bound, None is 2 for a server and no bound offline (`--max-step-stretch`)."""
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    preemption_mode: Literal["recompute", "swap"] = "recompute"
    """What happens to the blocks of a preempted request (`--preemption-mode`)."""
    async_scheduling: bool = True
    """Whether step n+1 is prepared while step n runs (`--async-scheduling`)."""
    num_spec_tokens: int = 0
    """Most draft tokens of a request in a step; 0 where no drafter is at work."""
    force_preemption: bool = False
    """For tests: preempt a running request at every step that allows it."""

    def __post_init__(self) -> None:
        _check_range("--max-num-seqs", self.max_num_seqs, 1, MAX_RUNNING)
        _check_range("--max-num-batched-tokens", self.max_num_batched_tokens, 1, MAX_INT32)
        _check_range("--max-num-queued-reqs", self.max_num_queued_reqs, 0, MAX_INT64)
        _check_range("num_spec_tokens", self.num_spec_tokens, 0, MAX_RUNNING)
        _check_range("--long-prefill-token-threshold", self.long_prefill_token_threshold, 0, MAX_INT32)
        if self.max_step_stretch is not None and not (
            self.max_step_stretch == 0 or 1.2 <= self.max_step_stretch <= 1000
        ):
            raise ConfigError(
                f"--max-step-stretch must be from 1.2 to 1000, or 0 for no bound, got {self.max_step_stretch}; "
                "2 lets a step with prompts take twice as long"
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ConfigError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} is below --max-model-len {self.max_model_len} "
                "and chunked prefill is off: a long prompt could never run; raise it or enable chunked prefill"
            )


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The KV cache.

    Raises:
        ConfigError: on construction, naming flag and value.
    """

    block_size: int | None = None
    """Tokens a block; None takes the backend's preferred size (`--block-size`)."""
    num_blocks: int | None = None
    """Blocks of the device pool; None sizes it from memory (`--num-kv-blocks`)."""
    kv_cache_memory_bytes: int | None = None
    """Memory of the device pool (`--kv-cache-memory-bytes`)."""
    device_memory_utilization: float = 0.9
    """Share of device memory that weights and cache may take together (`--gpu-memory-utilization`)."""
    kv_cache_dtype: str = "auto"
    """"auto" takes the model's dtype (`--kv-cache-dtype`)."""
    enable_prefix_caching: bool = True
    swap_space_bytes: int = 0
    """Host memory for blocks of preempted requests; needed by `--preemption-mode swap` (`--swap-space`)."""

    def __post_init__(self) -> None:
        _check_range("--block-size", self.block_size, 1, MAX_INT32)
        _check_range("--num-kv-blocks", self.num_blocks, 2, MAX_INT32)  # block 0 is reserved
        _check_range("--kv-cache-memory-bytes", self.kv_cache_memory_bytes, 1, MAX_INT64)
        _check_range("--swap-space", self.swap_space_bytes, 0, MAX_INT64)
        if not 0.0 < self.device_memory_utilization <= 1.0:
            raise ConfigError(f"--gpu-memory-utilization must be in (0, 1], got {self.device_memory_utilization}")


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything an engine is built from.

    Raises:
        ConfigError: on construction, naming flag and value.
    """

    model: str
    """A folder, a GGUF file, or a name that `core pull` knows."""
    device: str = "auto"
    """Backend name, "auto", or "name:index" (`--device`)."""
    dtype: str = "auto"
    """"auto" takes the checkpoint's type where the device has it (`--dtype`)."""
    quantization: str | None = None
    """Quantize dense weights at load: "int8" (W8A8 dynamic) or "fp8" (`--quantization`); GGUF files bring their own."""
    dequantize: bool = False
    """Dequantize quantized weights at load even where the device has a kernel for the scheme."""
    quantize_activations: bool = False
    """Let kernels round activations: for quantized weights to 8 bits, in attention to 16 (`--quantize-activations`)."""
    tokenizer: str | None = None
    seed: int = 0
    revision: str | None = None
    enforce_eager: bool = False
    """Never record a step and replay it (`--enforce-eager`)."""
    deterministic: bool = False
    """Ask every operation for batch- and chunk-invariant results (`--deterministic`)."""
    num_threads: int = 0
    """Compute threads of a host backend; 0 takes the cores that this process may use (`--threads`)."""
    max_model_len: int | None = None
    """None takes the model's own, shortened to what the KV pool holds (`--max-model-len`)."""
    max_logprobs: int = 20
    scheduler: SchedulerConfig = SchedulerConfig()
    cache: CacheConfig = CacheConfig()

    def __post_init__(self) -> None:
        _check_range("--seed", self.seed, -MAX_INT64 - 1, MAX_INT64)
        _check_range("--threads", self.num_threads, 0, MAX_THREADS)
        _check_range("--max-model-len", self.max_model_len, 1, MAX_INT32)
        _check_range("--max-logprobs", self.max_logprobs, 0, MAX_INT32)

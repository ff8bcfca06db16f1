"""The flags as data: one table of the engine's, one of the server's.

A flag is named after the field that it sets, so that tests can compare the tables with the configuration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["ENGINE_FLAGS", "SERVE_FLAGS", "Flag"]


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One option of the command line.

    Args:
        field: Dotted path of the configuration field: "seed", "scheduler.max_num_seqs".
        names: Spellings; the first is the documented one. "--a/--no-a" makes a switch.
        kind: Python type of the value.
        text: One sentence for --help.
        default: The default as shown in --help; taken from the field where empty.
        envvar: Environment variable that may set it.
    """

    field: str
    names: tuple[str, ...]
    kind: Any
    text: str
    default: str = ""
    envvar: str | None = None

    @property
    def name(self) -> str:
        """Name of the command's parameter, also the key in `--config` files."""
        return self.field.rpartition(".")[2]


_SCHEDULER, _CACHE = "scheduler.", "cache."
_DEVICE_MEMORY = ("--gpu-memory-utilization", "--device-memory-utilization")

ENGINE_FLAGS: tuple[Flag, ...] = (
    Flag(field="device", names=("--device",), kind=str, text="Backend: a name, name:index, or auto."),
    Flag(field="dtype", names=("--dtype",), kind=str, text="Type of weights and activations."),
    Flag(
        field="quantization",
        names=("--quantization", "-q"),
        kind=str,
        text="Quantize dense weights at load: int8 or fp8.",
        default="none",
    ),
    Flag(
        field="dequantize",
        names=("--dequantize/--no-dequantize",),
        kind=bool,
        text="Dequantize quantized weights at load, even where the device has a kernel for them.",
    ),
    Flag(
        field="quantize_activations",
        names=("--quantize-activations/--no-quantize-activations",),
        kind=bool,
        text="Let kernels round activations: for quantized weights to 8 bits, in attention to 16; core doctor tells.",
    ),
    Flag(
        field="tokenizer",
        names=("--tokenizer",),
        kind=str,
        text="Folder or name of another tokenizer.",
        default="the model's",
    ),
    Flag(
        field="revision", names=("--revision",), kind=str, text="Branch, tag or commit of the model.", default="newest"
    ),
    Flag(field="seed", names=("--seed",), kind=int, text="Seed of the engine."),
    Flag(
        field="max_model_len",
        names=("--max-model-len",),
        kind=int,
        text="Longest sequence, prompt and output, in tokens; -1 fits it to the KV cache.",
        default="the model's, as far as it fits",
    ),
    Flag(
        field="max_logprobs",
        names=("--max-logprobs",),
        kind=int,
        text="Most log-probabilities that a request may ask for at a position.",
    ),
    Flag(
        field="enforce_eager",
        names=("--enforce-eager/--no-enforce-eager",),
        kind=bool,
        text="Run every step call by call; no decode step is recorded and replayed.",
    ),
    Flag(
        field="deterministic",
        names=("--deterministic/--no-deterministic",),
        kind=bool,
        text="Ask for results that depend neither on the batch nor on chunking.",
    ),
    Flag(
        field="num_threads",
        names=("--threads", "-t"),
        kind=int,
        text="Compute threads of a host backend.",
        default="all cores",
    ),
    Flag(
        field=_SCHEDULER + "max_num_seqs",
        names=("--max-num-seqs",),
        kind=int,
        text="Requests that may run at once.",
    ),
    Flag(
        field=_SCHEDULER + "max_num_batched_tokens",
        names=("--max-num-batched-tokens",),
        kind=int,
        text="Token budget of a step.",
    ),
    Flag(
        field=_SCHEDULER + "max_num_queued_reqs",
        names=("--max-num-queued-reqs",),
        kind=int,
        text="Waiting requests before new ones get 429; 0 means no bound.",
    ),
    Flag(
        field=_SCHEDULER + "enable_chunked_prefill",
        names=("--enable-chunked-prefill/--no-enable-chunked-prefill",),
        kind=bool,
        text="Compute a long prompt over several steps.",
    ),
    Flag(
        field=_SCHEDULER + "long_prefill_token_threshold",
        names=("--long-prefill-token-threshold",),
        kind=int,
        text="Most tokens of one prompt in a step that also serves others; 0 takes half the budget.",
    ),
    Flag(
        field=_SCHEDULER + "max_step_stretch",
        names=("--max-step-stretch",),
        kind=float,
        text="How many times as long prompts may make a step that also generates, as measured; 0 sets no bound.",
        default="2 for a server, 0 offline",
    ),
    Flag(
        field=_SCHEDULER + "scheduling_policy",
        names=("--scheduling-policy",),
        kind=Literal["fcfs", "priority"],
        text="Order of waiting requests; with priority, lower numbers run first.",
    ),
    Flag(
        field=_SCHEDULER + "preemption_mode",
        names=("--preemption-mode",),
        kind=Literal["recompute", "swap"],
        text="What happens to the cache of a preempted request.",
    ),
    Flag(
        field=_SCHEDULER + "async_scheduling",
        names=("--async-scheduling/--no-async-scheduling",),
        kind=bool,
        text="Prepare the next step while one runs.",
    ),
    Flag(
        field=_CACHE + "block_size",
        names=("--block-size",),
        kind=int,
        text="Tokens a KV block.",
        default="the device's choice",
    ),
    Flag(
        field=_CACHE + "num_blocks",
        names=("--num-kv-blocks", "--num-gpu-blocks-override"),
        kind=int,
        text="KV blocks on the device.",
        default="sized from memory",
    ),
    Flag(
        field=_CACHE + "kv_cache_memory_bytes",
        names=("--kv-cache-memory-bytes",),
        kind=str,
        text="Memory of the KV cache, as 4GiB or 500M.",
        default="sized from memory",
    ),
    Flag(
        field=_CACHE + "device_memory_utilization",
        names=_DEVICE_MEMORY,
        kind=float,
        text="Share of device memory for weights and cache together.",
    ),
    Flag(field=_CACHE + "kv_cache_dtype", names=("--kv-cache-dtype",), kind=str, text="Type of the KV cache."),
    Flag(
        field=_CACHE + "enable_prefix_caching",
        names=("--enable-prefix-caching/--no-enable-prefix-caching",),
        kind=bool,
        text="Keep the cache of prompts for requests that begin alike.",
    ),
    Flag(
        field=_CACHE + "swap_space_bytes",
        names=("--swap-space",),
        kind=str,
        text="Host memory for swapped requests, as 4GiB.",
    ),
)
"""Every field of EngineConfig that an operator may set, besides the model itself."""

SERVE_FLAGS: tuple[Flag, ...] = (
    Flag(field="host", names=("--host",), kind=str, text="Address to listen on."),
    Flag(field="port", names=("--port",), kind=int, text="TCP port; 0 takes a free one."),
    Flag(
        field="served_model_names",
        names=("--served-model-name",),
        kind=list[str],
        text="Name that requests use; may be given several times, the first one is reported.",
        default="the model as given",
    ),
    Flag(
        field="api_keys",
        names=("--api-key",),
        kind=list[str],
        text="Key that requests must send; may be given several times.",
        default="none, the server is open",
        envvar="CORE_API_KEY",
    ),
    Flag(
        field="chat_template",
        names=("--chat-template",),
        kind=str,
        text="Jinja file, or the template itself, instead of the model's.",
        default="the model's",
    ),
    Flag(
        field="trust_special_tokens",
        names=("--trust-special-tokens/--no-trust-special-tokens",),
        kind=bool,
        text="Let control tokens spelled in chat messages act as control tokens. Unsafe with untrusted users.",
    ),
    Flag(
        field="shutdown_timeout",
        names=("--shutdown-timeout",),
        kind=float,
        text="Seconds that running requests get to finish after SIGTERM.",
    ),
    Flag(
        field="max_body_bytes",
        names=("--max-request-bytes",),
        kind=str,
        text="Larger request bodies get 413, as 32MiB.",
    ),
    Flag(
        field="log_requests",
        names=("--enable-log-requests/--no-enable-log-requests",),
        kind=bool,
        text="Write one line for each HTTP request.",
    ),
    Flag(
        field="dev_routes",
        names=("--enable-dev-routes/--no-enable-dev-routes",),
        kind=bool,
        text="Offer routes that change the server's state.",
    ),
)
"""Every field of ServeSettings."""

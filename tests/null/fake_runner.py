"""A runner without a model: it knows what each KV slot holds and refuses to read a wrong one.

The next token is a hash of all tokens before it, so that any schedule must give the same output. Steps are executed
when they are submitted, in order, as a device would; the caller may hold results back to model asynchronous scheduling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from core.kv import KVCacheGroups
from core.outputs import PositionLogprobs
from core.sampling_params import SamplingParams
from core.sched import ModelRunnerOutput, ScheduledRequest, SchedulerOutput

VOCAB_SIZE = 50
_MASK = (1 << 61) - 1

Drafter = Callable[[list[int], int], list[int]]


def extend(fingerprint: int, token_id: int) -> int:
    """Fingerprint of a sequence that grew by one token."""
    return (fingerprint * 6364136223846793005 + token_id * 1442695040888963407 + 1013904223) & _MASK


def start_fingerprint(adapter: str | None) -> int:
    """Fingerprint of no tokens at all."""
    return 7 if adapter is None else sum(adapter.encode()) + 1000


def next_token(fingerprint: int, num_output: int, params: SamplingParams) -> int:
    """What a sampler would draw: nothing that ends the request before `min_tokens`."""
    token_id = (fingerprint >> 20) % VOCAB_SIZE
    if num_output < params.min_tokens:
        while token_id in params.eos_token_ids or token_id in params.stop_token_ids:
            token_id = (token_id + 1) % VOCAB_SIZE
    return token_id


def reference_output(
    prompt: Sequence[int], params: SamplingParams, max_total: int, adapter: str | None = None
) -> list[int]:
    """Output tokens of a request that runs alone and without any cache."""
    fingerprint = start_fingerprint(adapter)
    for token_id in prompt:
        fingerprint = extend(fingerprint, token_id)
    output: list[int] = []
    room = max_total - len(prompt)
    limit = room if params.max_tokens is None else min(params.max_tokens, room)
    while len(output) < limit:
        token_id = next_token(fingerprint, len(output), params)
        fingerprint = extend(fingerprint, token_id)
        output.append(token_id)
        if len(output) > params.min_tokens:
            ended = token_id in params.eos_token_ids and not params.ignore_eos
            if ended or token_id in params.stop_token_ids:
                break
    return output


@dataclass
class Mirror:
    """What the runner knows of a request."""

    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    tables: list[list[int]]
    adapter: str | None
    fingerprints: list[int] = field(default_factory=list)

    def fill(self, end: int) -> None:
        """Fingerprints of tokens [0, end)."""
        while len(self.fingerprints) < end:
            last = self.fingerprints[-1] if self.fingerprints else start_fingerprint(self.adapter)
            self.fingerprints.append(extend(last, self.tokens[len(self.fingerprints)]))


Slot = tuple[int, int, int, int, int]
"""(group, position, token id, fingerprint of the tokens up to and with it, step that wrote it)"""


class FakeRunner:
    """Executes steps over a KV cache that is made of checks."""

    def __init__(self, groups: KVCacheGroups, block_size: int) -> None:
        self.windows = [group.window for group in groups.groups]
        self.block_size = block_size
        self.mirrors: dict[str, Mirror] = {}
        self.device: dict[int, dict[int, Slot]] = {}
        self.host: dict[int, dict[int, Slot]] = {}
        self.errors: dict[str, str] = {}
        self.next_step_id = 0

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Runs one step and checks all that it is told."""
        assert output.step_id == self.next_step_id
        self.next_step_id += 1
        self._prepare(output)
        for share in output.scheduled:
            self._append_blocks(share)
        written: set[tuple[int, int]] = set()
        for share in output.scheduled:
            self._write(share, output.step_id, written)
        for share in output.scheduled:
            self._read(share, output.step_id)
        result = ModelRunnerOutput(step_id=output.step_id)
        for share in output.scheduled:
            self._sample(share, result)
        return result

    def _prepare(self, output: SchedulerOutput) -> None:
        for request_id in output.dropped_request_ids:
            del self.mirrors[request_id]  # KeyError: dropped twice, or never known
        copied = [(dst, dict(self.device.get(src, {}))) for src, dst in output.swap_out]
        assert len({dst for dst, _ in copied}) == len(copied)
        self.host.update(copied)
        back = [(dst, dict(self.host[src])) for src, dst in output.swap_in]
        assert len({dst for dst, _ in back}) == len(back)
        self.device.update(back)
        for new in output.new_requests:
            assert new.request_id not in self.mirrors
            assert any(new.request_id == share.request_id for share in output.scheduled)
            tables = [list(ids) for ids in new.block_ids]
            self.mirrors[new.request_id] = Mirror(
                list(new.token_ids), new.num_prompt_tokens, new.sampling_params, tables, new.adapter
            )
        counts = [share.num_scheduled_tokens for share in output.scheduled]
        assert sum(counts) == output.num_scheduled_tokens and all(counts)
        assert [count > 1 for count in counts] == sorted(count > 1 for count in counts), "one-token requests come first"
        assert len({share.request_id for share in output.scheduled}) == len(counts)

    def _append_blocks(self, share: ScheduledRequest) -> None:
        mirror = self.mirrors[share.request_id]
        for table, new_ids in zip(mirror.tables, share.new_block_ids, strict=True):
            table.extend(new_ids)
        drafts, end = list(share.draft_token_ids), share.num_computed_tokens + share.num_scheduled_tokens
        num_known = len(mirror.tokens)
        assert end - len(drafts) <= num_known
        if drafts or share.samples:
            assert end - len(drafts) == num_known
        mirror.tokens += drafts
        mirror.fill(end)

    def _write(self, share: ScheduledRequest, step_id: int, written: set[tuple[int, int]]) -> None:
        mirror = self.mirrors[share.request_id]
        start = share.num_computed_tokens
        for position in range(start, start + share.num_scheduled_tokens):
            index, offset = divmod(position, self.block_size)
            for group, table in enumerate(mirror.tables):
                block_id = table[index]
                assert block_id > 0, "a write to the null block"
                assert (block_id, offset) not in written, "two requests write one slot"
                written.add((block_id, offset))
                slot = (group, position, mirror.tokens[position], mirror.fingerprints[position], step_id)
                self.device.setdefault(block_id, {})[offset] = slot

    def _read(self, share: ScheduledRequest, step_id: int) -> None:
        mirror = self.mirrors[share.request_id]
        start, end = share.num_computed_tokens, share.num_computed_tokens + share.num_scheduled_tokens
        for group, (window, table) in enumerate(zip(self.windows, mirror.tables, strict=True)):
            for position in range(max(0, start - window + 1) if window else 0, end):
                index, offset = divmod(position, self.block_size)
                slot = self.device[table[index]][offset]
                right = (group, position, mirror.tokens[position], mirror.fingerprints[position])
                assert slot[:4] == right, f"{share.request_id} reads {slot} at position {position}, not {right}"
                assert position >= start or slot[4] < step_id, "a key is read in the step in which another writes it"

    def _sample(self, share: ScheduledRequest, result: ModelRunnerOutput) -> None:
        mirror, request_id = self.mirrors[share.request_id], share.request_id
        end, drafts = share.num_computed_tokens + share.num_scheduled_tokens, list(share.draft_token_ids)
        self._prompt_logprobs(share, mirror, result)
        if not share.samples:
            return
        if request_id in self.errors:
            result.errors[request_id] = self.errors[request_id]
            mirror.tokens.append(0)  # steps in flight may count on a token; nobody will see what they make of it
            return
        known = end - len(drafts)
        del mirror.tokens[known:]
        del mirror.fingerprints[known:]
        sampled: list[int] = []
        for draft in [*drafts, None]:
            mirror.fill(len(mirror.tokens))
            token_id = next_token(mirror.fingerprints[-1], len(mirror.tokens) - mirror.num_prompt, mirror.params)
            mirror.tokens.append(token_id)
            sampled.append(token_id)
            if token_id != draft:
                break
        result.sampled_token_ids[request_id] = sampled
        if mirror.params.logprobs is not None:
            result.logprobs[request_id] = [PositionLogprobs((t,), (-float(t),), 1) for t in sampled]

    def _prompt_logprobs(self, share: ScheduledRequest, mirror: Mirror, result: ModelRunnerOutput) -> None:
        first = share.num_computed_tokens + 1
        last = min(share.num_computed_tokens + share.num_scheduled_tokens, mirror.num_prompt - 1)
        if mirror.params.prompt_logprobs is not None and first <= last:
            entries = [
                PositionLogprobs((mirror.tokens[p],), (-float(mirror.fingerprints[p - 1] % 97),), 1)
                for p in range(first, last + 1)
            ]
            result.prompt_logprobs[share.request_id] = (first, entries)


def perfect_drafter(tokens: list[int], num_prompt: int) -> list[int]:
    """Three tokens, all of them right (for requests without min_tokens)."""
    fingerprint = start_fingerprint(None)
    for token_id in tokens:
        fingerprint = extend(fingerprint, token_id)
    drafts = []
    for _ in range(3):
        drafts.append(next_token(fingerprint, 0, SamplingParams(max_tokens=1)))
        fingerprint = extend(fingerprint, drafts[-1])
    return drafts


def wrong_drafter(tokens: list[int], num_prompt: int) -> list[int]:
    """Three tokens, all of them wrong."""
    return [(token_id + 1) % VOCAB_SIZE for token_id in perfect_drafter(tokens, num_prompt)]


def mixed_drafter(tokens: list[int], num_prompt: int) -> list[int]:
    """Right up to a place that depends on the length, wrong after it."""
    right, num_right = perfect_drafter(tokens, num_prompt), len(tokens) % 4
    return [t if i < num_right else (t + 1) % VOCAB_SIZE for i, t in enumerate(right)][: 1 + len(tokens) % 3]

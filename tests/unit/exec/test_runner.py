"""The model runner under the scheduler: whatever the schedule, the tokens are those of the model alone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engine_rig import MakeRig, Rig

from core.errors import ConfigError


def _prompts(count: int, seed: int = 0, longest: int = 60) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(rng.randrange(1, longest))] for _ in range(count)]


def _reference(folder: Path, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    outputs = []
    for prompt in prompts:
        tokens = list(prompt)
        with torch.no_grad():
            for _ in range(num_tokens):
                logits = model(torch.tensor([tokens])).logits[0, -1, :259]
                tokens.append(int(logits.argmax()))
        outputs.append(tokens[len(prompt) :])
    return outputs


@pytest.fixture(scope="module")
def golden(llama: Path, gemma: Path) -> dict[Path, tuple[list[list[int]], list[list[int]]]]:
    prompts = _prompts(5)
    return {folder: (prompts, _reference(folder, prompts, 12)) for folder in (llama, gemma)}


@pytest.mark.parametrize("model", ["llama", "gemma"])
@pytest.mark.parametrize(
    "scheduler",
    [
        {},
        {"async_scheduling": False},
        {"max_num_batched_tokens": 7},
        {"max_num_batched_tokens": 1},
        {"force_preemption": True},
        {"force_preemption": True, "async_scheduling": False, "max_num_batched_tokens": 16},
        {"max_num_seqs": 1},
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) or "default",
)
def test_greedy_tokens_equal_transformers_under_any_schedule(
    model: str, scheduler: dict[str, Any], golden: Any, make_rig: MakeRig, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(model)
    prompts, expected = golden[folder]
    rig = make_rig(folder, **scheduler)
    assert rig.run(prompts, max_tokens=12, ignore_eos=True) == expected
    assert rig.run(prompts, max_tokens=12, ignore_eos=True) == expected, "differs with a warm prefix cache"
    if scheduler.get("force_preemption"):
        assert rig.engine.stats().num_preemptions > 0


def test_a_pool_too_small_preempts_by_swapping_and_changes_no_token(
    golden: Any, llama: Path, make_rig: MakeRig
) -> None:
    prompts, expected = golden[llama]
    cache = {"num_blocks": 9, "swap_space_bytes": 1 << 20, "enable_prefix_caching": False}
    rig = make_rig(llama, cache=cache, preemption_mode="swap", max_num_batched_tokens=32)
    assert rig.runner.num_host_blocks > 0
    assert rig.run(prompts, max_tokens=12, ignore_eos=True) == expected
    assert rig.engine.stats().num_preemptions > 0, "the pool was large enough: the test shows nothing"


def test_seeded_requests_do_not_depend_on_their_batch_mates(llama: Path, make_rig: MakeRig) -> None:
    """H015: alone, among others, first or last, after preemptions: one seed, one answer."""

    def seeded(rig: Rig, num_before: int, num_after: int) -> list[int]:
        for _ in range(num_before):
            rig.start([7, 8, 9], temperature=0.9, max_tokens=20, ignore_eos=True)
        mine = rig.start([1, 2, 3], temperature=0.8, seed=42, top_p=0.9, top_k=50, max_tokens=16, ignore_eos=True)
        for _ in range(num_after):
            rig.start([4, 5], temperature=0.8, max_tokens=16, ignore_eos=True)
        return [token for output in rig.finish()[mine] for token in output.new_token_ids]

    rig = make_rig(llama)
    alone = seeded(rig, 0, 0)
    assert all(seeded(rig, before, after) == alone for before, after in [(0, 1), (1, 0), (5, 2)])
    assert seeded(make_rig(llama, force_preemption=True), 2, 2) == alone
    others = {tuple(rig.run([[4, 5]], temperature=0.8, max_tokens=16, ignore_eos=True)[0]) for _ in range(6)}
    assert len(others) > 1, "requests without a seed repeat themselves"


def test_padding_rows_of_the_head_are_never_drawn(llama: Path, make_rig: MakeRig) -> None:
    """H045: the head has 264 rows and the tokenizer 259 ids."""
    rig = make_rig(llama)
    [tokens] = rig.run([[1]], temperature=1.0, top_k=-1, max_tokens=100, ignore_eos=True, logit_bias={3: 1.0})
    assert max(tokens) < 259
    request = rig.start([1, 2], logprobs=20, max_tokens=1)
    [output] = rig.finish()[request]
    assert all(token < 259 for token in output.new_logprobs[0].token_ids)
    assert rig.runner.model_spec.vocab_size == 259


def test_prompt_logprobs_are_complete_on_hits_and_under_chunked_prefill(llama: Path, make_rig: MakeRig) -> None:
    """H040: cold, repeated, after a longer prompt of the same prefix, in chunks of 8, without a prefix cache."""
    prompt = [(7 * i) % 256 for i in range(33)]

    def score(rig: Rig) -> list[float]:
        request = rig.start(prompt, prompt_logprobs=1, max_tokens=1)
        entries = rig.finish()[request][0].prompt_logprobs
        assert entries is not None
        assert entries[0] is None
        assert len(entries) == 33
        assert [entry.token_ids[0] for entry in entries[1:] if entry] == prompt[1:]
        return [entry.logprobs[0] for entry in entries[1:] if entry]

    rig = make_rig(llama)
    cold = score(rig)
    rig.run([prompt + [1, 2, 3] * 10], max_tokens=1)
    again = [score(rig), score(make_rig(llama, max_num_batched_tokens=8))]
    again.append(score(make_rig(llama, cache={"enable_prefix_caching": False})))
    assert all(other == pytest.approx(cold, abs=1e-4) for other in again)
    with torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).eval()
        logprobs = torch.log_softmax(model(torch.tensor([prompt])).logits[0, :, :259], dim=-1)
    assert cold == pytest.approx([float(logprobs[i, prompt[i + 1]]) for i in range(32)], abs=1e-3)


def test_scoring_without_output_gives_every_prompt_logprob(llama: Path, make_rig: MakeRig) -> None:
    """H011: max_tokens=0 with prompt_logprobs."""
    rig = make_rig(llama)
    request = rig.start([5, 6, 7], prompt_logprobs=2, max_tokens=0)
    outputs = rig.finish()[request]
    assert sum(len(output.new_token_ids) for output in outputs) == 0
    assert outputs[-1].finish_reason == "length"
    [entries] = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
    assert [len(entry.token_ids) if entry else None for entry in entries] == [None, 3, 3]


def test_cache_salts_separate_what_is_cached(llama: Path, make_rig: MakeRig) -> None:
    """H039: the same salt hits, another one and none at all do not."""
    rig = make_rig(llama)
    prompt = list(range(64))
    found = []
    for salt in ["S", "S", "T", None, None]:
        request = rig.start(prompt, max_tokens=1, cache_salt=salt)
        found.append(rig.finish()[request][0].num_cached_tokens)
    assert found == [0, 48, 0, 0, 48]


def test_an_impossible_request_fails_alone(llama: Path, make_rig: MakeRig) -> None:
    """H016 c: when every candidate is masked the request ends with an error and its neighbour with an answer."""
    rig = make_rig(llama)
    bad = rig.start([1], allowed_token_ids=(5,), bad_words_token_ids=((5,),), max_tokens=4)
    good = rig.start([1], max_tokens=4, ignore_eos=True)
    news = rig.finish()
    assert news[bad][-1].finish_reason == "error"
    assert "masked" in (news[bad][-1].error or "")
    assert sum(len(output.new_token_ids) for output in news[good]) == 4


@pytest.mark.parametrize(
    ("cache", "flag"),
    [({"num_blocks": 2**31 - 1}, "--num-kv-blocks"), ({"swap_space_bytes": 2**55}, "--swap-space")],
)
def test_memory_that_there_is_not_is_refused_with_its_flag(
    llama: Path, make_rig: MakeRig, cache: dict[str, int], flag: str
) -> None:
    with pytest.raises(ConfigError, match=f"could not be had .*{flag}"):
        make_rig(llama, cache=cache)

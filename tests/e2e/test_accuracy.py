"""The accuracy gate in short: what a 4-bit model loses over 1,000 tokens by bfloat16 and by rounded activations."""

from __future__ import annotations

import pytest
from core_process import default_device
from real_models import pulled

from core import LLM
from core.cli.bench_perplexity import perplexity, shipped_text, windows

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

LIMIT = 0.01
"""The same as `nox -s accuracy` keeps over the whole text, for 4 bits."""


def measured(**args: object) -> float:
    path = pulled("smollm2-135m-instruct")
    with LLM(str(path), device=default_device(), max_model_len=1024, **args) as llm:
        return perplexity(llm, windows(llm.get_tokenizer().encode(shipped_text()), 500, 1000))[0]


def test_rounded_activations_keep_the_perplexity_of_the_weights_in_float32() -> None:
    exact = measured(dtype="float32", dequantize=True, quantize_activations=False)
    rounded = measured()
    assert 20 < exact < 40, "a model that knows English"
    assert abs(rounded / exact - 1) < LIMIT, (rounded, exact)

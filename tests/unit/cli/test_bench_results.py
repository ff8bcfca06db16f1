"""Where a benchmark writes its result is looked at before it measures; what it cannot measure is said in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.cli.bench_offline import run_offline_bench
from core.cli.bench_perplexity import run_perplexity_bench
from core.cli.bench_report import result_file
from core.errors import ConfigError

NO_MODEL = "no-such-model"


@pytest.mark.parametrize("place", ["", "no/such/folder/x.json"])
def test_a_place_that_takes_no_file_is_refused_before_the_model_is_looked_for(tmp_path: Path, place: str) -> None:
    path = str(tmp_path / place)
    with pytest.raises(ConfigError, match=r"--output-json .* cannot be written"):
        run_perplexity_bench(NO_MODEL, {}, None, 16, None, path)
    with pytest.raises(ConfigError, match=r"--output-json .* cannot be written"):
        run_offline_bench(NO_MODEL, {}, 1, 1, 1, path)


def test_a_file_that_is_there_may_be_written_over(tmp_path: Path) -> None:
    there = tmp_path / "x.json"
    there.write_text("old")
    assert result_file(str(there)) == there and result_file(None) is None
    assert result_file(str(tmp_path / "new.json")) == tmp_path / "new.json"


@pytest.mark.parametrize("number", [-1, 0, 1])
def test_fewer_than_two_tokens_are_refused(number: int) -> None:
    with pytest.raises(ConfigError, match=f"--num-tokens must be at least 2, got {number}"):
        run_perplexity_bench(NO_MODEL, {}, None, 16, number, None)

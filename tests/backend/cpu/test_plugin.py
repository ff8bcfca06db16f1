"""What the package announces before anything of it is imported."""

from __future__ import annotations

import pytest

from core_cpu.plugin import core_backends


@pytest.mark.parametrize(("own", "given"), [(None, "PASSIVE"), ("ACTIVE", None)])
def test_threads_of_torch_wait_asleep_unless_the_operator_says_otherwise(
    own: str | None, given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if own is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", own)
    assert core_backends()[0].env.get("OMP_WAIT_POLICY") == given

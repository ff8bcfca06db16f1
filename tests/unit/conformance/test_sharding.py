"""Shards of a run, the ids of one model's key, and the one report that shards make together."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from core.errors import ConfigError
from core.spec import DeviceInfo
from core_conformance.cli import app
from core_conformance.merging import merge_reports
from core_conformance.must_pass_lists import LEVELS, must_pass
from core_conformance.records import Mode, Outcome, Record, level_of
from core_conformance.report.document import Report, read_report
from core_conformance.report.facts import RunFacts
from core_conformance.report.provenance import Package
from core_conformance.sharding import Shard, choose, parse_shard, scope_of

IDS = must_pass(LEVELS)
L0 = {check_id for check_id in IDS if level_of(check_id) == "L0"}


# -- which ids -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64])
def test_shards_run_every_id_once_and_all_of_l0_each(count: int) -> None:
    shards = [Shard(index, count).ids(IDS) for index in range(1, count + 1)]
    times = Counter(check_id for shard in shards for check_id in shard)
    assert all(shard >= L0 for shard in shards)
    assert {check_id: n for check_id, n in times.items() if n != (count if check_id in L0 else 1)} == {}
    assert times.keys() == set(IDS)
    sizes = [len(shard) for shard in shards]
    assert max(sizes) - min(sizes) <= 1


def test_a_shard_depends_on_the_ids_alone() -> None:
    """Not on their order, nor on the seed of the interpreter's hashes."""
    mixed = IDS * 2
    random.Random(1).shuffle(mixed)
    mine = Shard(2, 3).ids(mixed)
    assert mine == Shard(2, 3).ids(IDS)
    code = (
        "import sys; from core_conformance.sharding import Shard; "
        "print(*sorted(Shard(2, 3).ids(sys.stdin.read().split())), sep='\\n')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input="\n".join(IDS),
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "7"},
    )
    assert done.stdout.split() == sorted(mine)


def test_each_shard_has_its_part_of_every_level() -> None:
    for level in LEVELS[1:]:
        ids = [check_id for check_id in IDS if level_of(check_id) == level]
        shares = [len(Shard(index, 3).ids(IDS) & set(ids)) for index in (1, 2, 3)]
        assert max(shares) - min(shares) <= 1, level


@pytest.mark.parametrize("text", ["", "1", "0/2", "3/2", "a/b", "1/0", "-1/2", "1/2/3", "1 / 2", "1/99999"])
def test_a_malformed_shard_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--shard.*2/3"):
        parse_shard(text)
    assert parse_shard("2/3") == Shard(2, 3) and str(Shard(2, 3)) == "2/3"


def test_the_scope_of_a_model_leaves_out_ids_of_others_and_keeps_the_witness() -> None:
    inside = scope_of(["llama"], ["llama", "gemma3", "copy"])
    kept = {check_id for check_id in IDS if inside(check_id)}
    assert kept >= {check_id for check_id in IDS if level_of(check_id) in ("L0", "L1")}
    assert {"L2/mixed/llama-bf16", "L3/greedy/llama", "L3/greedy/copy", "L3/seeds/batch"} <= kept
    assert not [check_id for check_id in kept if "gemma3" in check_id and level_of(check_id) >= "L2"]
    everything = ["llama", "gemma3", "copy"]
    assert all(map(scope_of(everything, everything), IDS))


def test_a_part_leaves_out_the_ids_of_other_models_and_shards() -> None:
    part = choose("reference", LEVELS, shard="", models=["llama"], dtype="float32")
    assert part.skip == part.others and part.models == ("llama",) and not part.checkpoints
    assert choose("reference", LEVELS, shard="", models=[], dtype="float32").skip == frozenset()
    first, second = (choose("sim", LEVELS, shard=f"{n}/2", models=["llama"], dtype="float32") for n in (1, 2))
    assert first.others == part.others and first.skip & second.skip == part.others
    assert not (first.skip | second.skip) & L0


@pytest.mark.parametrize(("model", "words"), [("lama", ["'lama'", "llama"]), (".", ["config.json"])])
def test_a_model_that_is_neither_the_suites_nor_on_disk_is_refused(
    model: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        choose("reference", LEVELS, shard="", models=[model], dtype="float32")
    assert all(word in str(caught.value) for word in words)


# -- merging ---------------------------------------------------------------------------------------------------------

SOME = sorted({*list(L0)[:3], "L1/a/1", "L1/a/2", "L1/b/1", "L3/greedy/llama"})


def package(name: str, version: str = "1.0") -> Package:
    return Package(name=name, module="m", version=version, digest="0" * 64, source="wheel")


def facts(shard: str) -> RunFacts:
    return RunFacts(
        backend="acme",
        device=DeviceInfo(index=0, arch="acme-1", memory_bytes=4, sdk="7.0"),
        mode=Mode.VALIDATED,
        levels=("L0", "L1", "L3"),
        shard=shard,
        core=package("core-inference"),
        suite=package("core-conformance"),
        package=package("core-backend-acme"),
        suite_hash="a" * 64,
        contract="1.0",
        torch="2.13.0",
        python="3.11.7",
        machine="x86_64 Linux",
        date=f"2026-11-30T0{shard[0]}:00:00+00:00",
        seconds=10.0,
    )


def shard_report(shard: str, **changes: object) -> Report:
    """What a run of that shard reports where all is well; `changes` are of its facts."""
    mine = parse_shard(shard).ids(SOME)
    outcomes = {check_id: Outcome.PASS if check_id in mine else Outcome.NOT_RUN for check_id in SOME}
    records = [Record(id=i, outcome=o, seconds=float(shard[0])) for i, o in outcomes.items()]
    return Report(dataclasses.replace(facts(shard), **changes), records)  # type: ignore[arg-type]


def merged(*reports: Report) -> Report:
    return merge_reports(reports, [f"part{at}.json" for at in range(len(reports))])


def refusal(*reports: Report) -> str:
    with pytest.raises(ConfigError) as caught:
        merged(*reports)
    return str(caught.value)


def test_shards_make_the_report_of_one_run() -> None:
    whole = merged(shard_report("2/2"), shard_report("1/2"))
    assert [record.id for record in whole.records] == SOME and whole.ok and whole.complete("L1")
    assert (whole.facts.shard, whole.facts.date, whole.facts.seconds) == ("", "2026-11-30T01:00:00+00:00", 20.0)
    assert {record.seconds for record in whole.of_level("L0")} == {1.0}, "of L0 the first shard's record counts"


def test_a_failure_and_a_problem_of_one_shard_are_kept() -> None:
    broken = shard_report("2/2")
    at = next(n for n, record in enumerate(broken.records) if record.ran and level_of(record.id) == "L1")
    broken.records[at] = dataclasses.replace(broken.records[at], outcome=Outcome.FAIL, reason="wrong")
    broken.problems.append("a plugin was loaded")
    whole = merged(shard_report("1/2"), broken)
    assert [record.reason for record in whole.failures] == ["wrong"] and whole.problems == ["a plugin was loaded"]
    assert not whole.ok


def test_what_no_shard_ran_stays_not_run() -> None:
    parts = [shard_report("1/2"), shard_report("2/2")]
    for part in parts:
        part.records = [
            dataclasses.replace(r, outcome=Outcome.NOT_RUN) if r.id == "L1/b/1" else r for r in part.records
        ]
    whole = merged(*parts)
    assert not whole.complete("L1") and whole.complete("L3")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"torch": "2.12.0"}, ["torch: '2.13.0' and '2.12.0'", "part0.json (shard 1/2)", "part1.json (shard 2/2)"]),
        ({"suite_hash": "b" * 64}, ["suite_hash", "bbbb"]),
        ({"package": package("core-backend-acme", "1.1")}, ["package.version: '1.0' and '1.1'"]),
        ({"device": DeviceInfo(index=0, arch="acme-2", memory_bytes=4, sdk="7.0")}, ["device.arch", "acme-2"]),
        ({"levels": ("L0", "L1")}, ["levels"]),
        ({"models": ("llama",)}, ["models", "llama"]),
        ({"mode": Mode.SIMULATED, "machine": "aarch64 Linux"}, ["mode", "machine", "aarch64", "; run every shard"]),
    ],
)
def test_a_differing_environment_is_refused_with_its_fields(changes: dict[str, object], words: list[str]) -> None:
    message = refusal(shard_report("1/2"), shard_report("2/2", **changes))
    for word in words:
        assert word in message
    if "torch" not in changes:
        assert "torch" not in message


@pytest.mark.parametrize(
    ("shards", "words"),
    [
        ([], ["no report"]),
        (["1/3", "3/3"], ["shard 2/3 is missing"]),
        (["1/2", "1/2"], ["twice", "part0.json", "part1.json"]),
        (["1/2", "2/3"], ["2/3", "1/2"]),
    ],
)
def test_missing_and_doubled_shards_are_refused(shards: list[str], words: list[str]) -> None:
    message = refusal(*map(shard_report, shards))
    for word in words:
        assert word in message


def test_the_report_of_a_whole_run_is_no_shard() -> None:
    only = shard_report("1/1")
    assert merged(only).ok
    assert "no shard's" in refusal(Report(dataclasses.replace(only.facts, shard=""), only.records))


def with_record(report: Report, check_id: str, change: Callable[[Record], Record]) -> Report:
    report.records = [change(record) if record.id == check_id else record for record in report.records]
    return report


def test_an_outcome_of_l0_that_is_not_the_same_in_all_shards_is_refused() -> None:
    name = min(L0 & set(SOME))
    other = with_record(
        shard_report("2/2"), name, lambda record: dataclasses.replace(record, outcome=Outcome.UNSUPPORTED)
    )
    message = refusal(shard_report("1/2"), other)
    assert f"{name}: PASS and UNSUPPORTED" in message and "not reliable" in message


def test_an_id_that_ran_twice_or_is_not_in_every_report_is_refused() -> None:
    taken = next(record.id for record in shard_report("1/2").records if record.ran and record.id not in L0)
    greedy = with_record(shard_report("2/2"), taken, lambda record: dataclasses.replace(record, outcome=Outcome.PASS))
    assert f"more than one shard: {taken}" in refusal(shard_report("1/2"), greedy)
    short = shard_report("2/2")
    short.records = [record for record in short.records if record.id != taken]
    assert f"{taken} is only in the first" in refusal(shard_report("1/2"), short)


def test_cases_of_a_package_may_be_in_one_shard_alone() -> None:
    one, two = shard_report("1/2"), shard_report("2/2")
    two.records.append(Record(id="acme/own", outcome=Outcome.PASS))
    assert [record.id for record in merged(one, two).records][-1] == "acme/own"


def test_the_command_writes_a_report_that_can_be_read_again(tmp_path: Path) -> None:
    for shard in ("1/2", "2/2"):
        (tmp_path / f"{shard[0]}.json").write_text(shard_report(shard).to_json(), encoding="utf-8")
    paths = [str(tmp_path / name) for name in ("2.json", "1.json")]
    done = CliRunner().invoke(app, ["merge", *paths, "--out", str(tmp_path / "made" / "report.json")])
    assert done.exit_code == 0 and "acme L3 (VALIDATED): complete" in done.output
    assert read_report(tmp_path / "made" / "report.json").ok
    done = CliRunner().invoke(app, ["merge", paths[0], "--out", str(tmp_path / "report.json")])
    assert isinstance(done.exception, ConfigError) and "shard 1/2 is missing" in str(done.exception)
    (tmp_path / "1.json").write_text(json.dumps({"schema": 1}), encoding="utf-8")
    done = CliRunner().invoke(app, ["merge", *paths, "--out", str(tmp_path / "report.json")])
    assert isinstance(done.exception, ConfigError) and "1.json" in str(done.exception)

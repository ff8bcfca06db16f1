"""The measurement of starts, on programs that only pretend to load."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"

_SERVER = """#!{python}
import http.server, sys, time
time.sleep({load_s})
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture(autouse=True)
def _benchmarks_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def program(folder: Path, text: str) -> str:
    folder.mkdir()
    path = folder / "core"
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_each_program_is_started_and_its_time_to_ready_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import start_up

    slow = program(tmp_path / "slow", _SERVER.format(python=sys.executable, load_s=1.0))
    fast = program(tmp_path / "fast", _SERVER.format(python=sys.executable, load_s=0.0))
    start_up.main(["model.gguf", "--rounds", "1", "--core", slow, fast])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["model.gguf", f"{slow}:"], ["model.gguf", f"{fast}:"]]
    assert float(lines[0].split("after ")[1].split()[0]) >= 1.0


def test_a_program_that_ends_is_no_figure(tmp_path: Path) -> None:
    import start_up
    from engines import EngineFailedError

    broken = program(tmp_path / "broken", "#!/bin/sh\nexit 3\n")
    with pytest.raises(EngineFailedError, match="code 3"):
        start_up.main(["model.gguf", "--rounds", "1", "--core", broken])

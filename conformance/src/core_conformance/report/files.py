"""The folder of a run: `report.json`, `junit.xml` and `summary.md`."""

from __future__ import annotations

from pathlib import Path

from core.errors import ConfigError
from core_conformance.report.document import Report
from core_conformance.report.junit import to_junit
from core_conformance.report.markdown import summary_markdown

__all__ = ["REPORT_FILE", "write_file", "write_report_files"]

REPORT_FILE = "report.json"


def write_report_files(report: Report, folder: Path) -> bytes:
    """Writes the three files and returns the content of `report.json`.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    text = report.to_json()
    write_file(folder / REPORT_FILE, text)
    write_file(folder / "junit.xml", to_junit([report]))
    write_file(folder / "summary.md", summary_markdown(report))
    return text.encode()


def write_file(path: Path, text: str) -> None:
    """Writes a text, its folder too.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}); give a place that can") from error

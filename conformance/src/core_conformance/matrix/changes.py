"""Which jobs a change concerns: the files that differ from a revision, against the paths of the tables."""

from __future__ import annotations

import fnmatch
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from core.errors import ConfigError
from core_conformance.matrix.jobs import Job
from core_conformance.matrix.tables import Tables

__all__ = ["changed_files", "repository_root", "touched"]


def repository_root(start: Path) -> Path | None:
    """The root of the git repository that holds a folder; None where there is none."""
    done = _git(start, "rev-parse", "--show-toplevel")
    return Path(done.stdout.rstrip("\n")) if done.returncode == 0 else None


def changed_files(root: Path, rev: str) -> list[str]:
    """Files that differ from where this branch left a revision, relative to the root and sorted.

    Committed, staged, unstaged, untracked and deleted ones; of a renamed file both names. Where no common history is
    there (a shallow clone), the revision itself is compared, which can only find more.

    Raises:
        ConfigError: git does not know the revision.
    """
    known = _git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{rev}^{{commit}}")
    if known.returncode:
        raise ConfigError(
            f"--since {rev!r} is no revision that git knows in {root}; fetch it, or leave --since out for every job"
        )
    commit = known.stdout.strip()
    base = _git(root, "merge-base", commit, "HEAD")
    start = base.stdout.strip() if base.returncode == 0 else commit
    found = _names(root, "diff", "--name-only", "--no-renames", "--no-ext-diff", "-z", start, "--")
    return sorted({*found, *_names(root, "ls-files", "--others", "--exclude-standard", "-z")})


def touched(jobs: Sequence[Job], files: Iterable[str], tables: Tables) -> list[Job]:
    """The jobs that a change of these files concerns, in their order.

    A file on the ignore list concerns none, one that rows name concerns the jobs of these rows, any other every job.
    """
    kept: set[int] = set()
    for file in files:
        if _matches(file, tables.ignore):
            continue
        mine = [index for index, job in enumerate(jobs) if _matches(file, (*job.model.paths, *job.runner.paths))]
        kept.update(mine if _is_named(file, tables) else range(len(jobs)))
    return [job for index, job in enumerate(jobs) if index in kept]


def _is_named(file: str, tables: Tables) -> bool:
    """Whether any row names the file: then no job but those of such rows depends on it."""
    return any(_matches(file, row.paths) for row in tables.models) or any(
        _matches(file, row.paths) for row in tables.runners
    )


def _matches(file: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(file, pattern) for pattern in patterns)


def _names(root: Path, *arguments: str) -> list[str]:
    done = _git(root, *arguments)
    if done.returncode:
        raise ConfigError(f"git {arguments[0]} failed in {root}: {done.stderr.strip()}; repair the clone")
    return [name for name in done.stdout.split("\0") if name]


def _git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            ["git", *arguments],
            cwd=folder,
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="surrogateescape",
            check=False,
        )
    except FileNotFoundError as error:
        raise ConfigError("git is not installed; install it, or leave --since out") from error

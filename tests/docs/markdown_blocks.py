"""Commands and code blocks of Markdown files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["REPO_ROOT", "Block", "blocks", "commands", "documents"]

REPO_ROOT = Path(__file__).resolve().parents[2]
SHELL_WORDS = ("core", "curl", "python3", "python", "pip", "nox", "pytest", "echo", "export", "git", "ruff", "mypy")
"""What a line begins with where it is a command; a path before the word (`.venv/bin/nox`) does not hide it."""


@dataclass(frozen=True)
class Block:
    """An indented or fenced block.

    Args:
        path: The document.
        line: Its first line in the document, counted from 1.
        language: The word after the fence; empty where there is none, and for indented blocks.
        text: The block without fence and indent.
    """

    path: Path
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        """For messages."""
        return f"{self.path.name}:{self.line}"


def documents(root: Path) -> list[Path]:
    """README, CONTRIBUTING and everything below docs and beside the backends."""
    found = [root / "README.md", root / "CONTRIBUTING.md", *root.glob("docs/**/*.md"), *root.glob("*/**/README.md")]
    return sorted({path for path in found if not any(part.startswith(".") for part in path.relative_to(root).parts)})


def blocks(path: Path) -> list[Block]:
    """Every block of the document, in order."""
    lines = path.read_text(encoding="utf-8").splitlines()
    found: list[Block] = []
    number = 0
    while number < len(lines):
        fence = re.match(r"\s*(```+)\s*(\w*)", lines[number])
        after_blank = number == 0 or not lines[number - 1].strip()
        if fence:
            end = next(i for i in range(number + 1, len(lines)) if lines[i].strip() == fence[1])
            found.append(Block(path, number + 2, fence[2], "\n".join(lines[number + 1 : end])))
            number = end + 1
        elif lines[number].startswith("    ") and after_blank:
            end = number
            while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
                end += 1
            text = "\n".join(line[4:] for line in lines[number:end]).rstrip()
            found.append(Block(path, number + 1, "", text))
            number = end
        else:
            number += 1
    return found


def commands(block: Block) -> list[str]:
    """The block's shell commands, continued lines joined and comments left out; none where it is not of shell."""
    if block.language not in ("", "sh", "bash", "shell", "console"):
        return []
    found: list[str] = []
    for line in block.text.replace("\\\n", " ").splitlines():
        command = re.sub(r"\s+#\s.*$", "", line).strip()
        command = re.sub(r"\s{2,}", " ", command)
        word = command.split(" ", 1)[0].rpartition("/")[2]
        if word in SHELL_WORDS:
            found.append(command)
    return found

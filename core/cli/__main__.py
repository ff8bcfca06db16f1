"""`python -m core.cli`."""

from __future__ import annotations

from core.cli import main

main()

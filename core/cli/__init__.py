"""The command `core`. Imports nothing heavy: each command imports what it needs when it runs."""

from __future__ import annotations

import os
import sys

from core.errors import CoreError

__all__ = ["main"]


def main() -> None:
    """Runs the command line. A CoreError is one line on standard error and its exit code, never a traceback."""
    from core.cli.app import app

    try:
        app()
    except CoreError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)

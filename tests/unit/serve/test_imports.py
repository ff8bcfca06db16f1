"""What the server process does not load: the engine's process has torch, the one that speaks HTTP stays small."""

from __future__ import annotations

import subprocess
import sys

_CODE = """
import sys
import core.engine.async_engine, core.engine.build, core.serve.server, core.serve.app, core.cli.serve_loop
from core.loader.hub import resolve_model
from core.text.chat_template import ChatTemplate
from core.text.tokenizer import load_tokenizer
print(sorted(name for name in ("torch", "transformers", "numpy") if name in sys.modules))
"""


def test_the_server_process_imports_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"

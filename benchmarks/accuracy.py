"""The accuracy gate: perplexity of each scheme beside that of the same weights in float32, on a text that comes along.

    python benchmarks/accuracy.py [--num-tokens N] [--markdown FILE] [SCHEME ...]

Both runs of a pair read one file, so that what the pair shows is what types, kernels and rounded activations cost here,
and not what quantizing the weights cost. Exit code 1 where a scheme is over its limit.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf_variants import write_variant

from core.cli.bench_perplexity import perplexity, shipped_text, windows
from core.llm import LLM
from core.loader import pull

__all__ = ["CASES", "Case", "main", "measure"]

MODEL = "smollm2-135m-instruct"
WINDOW = 1024
EXACT = {"dtype": "float32", "dequantize": True, "quantize_activations": False}
"""What each scheme is held against."""


@dataclass(frozen=True)
class Case:
    """A way to serve a model.

    Args:
        name: In the table.
        variant: How its file stores matrices.
        limit: Most that its perplexity may differ from that of `reference` in float32, as a share.
        args: Engine arguments.
        reference: Variant that the exact run reads.
    """

    name: str
    variant: str
    limit: float
    args: dict[str, Any]
    reference: str


def _pair(variant: str, limit: float) -> tuple[Case, Case]:
    return (
        Case(f"{variant}, plain activations", variant, limit, {"quantize_activations": False}, variant),
        Case(f"{variant}, int8 activations", variant, limit, {"quantize_activations": True}, variant),
    )


CASES: tuple[Case, ...] = (
    Case("BF16", "BF16", 0.001, {}, "BF16"),
    *_pair("Q8_0", 0.005),
    Case("W8A8", "BF16", 0.005, {"quantization": "int8", "quantize_activations": True}, "INT8"),
    *_pair("Q4_0", 0.01),
    *_pair("Q4_1", 0.01),
    *_pair("Q5_0", 0.01),
    *_pair("Q5_1", 0.01),
)


def measure(file: Path, num_tokens: int | None, **args: Any) -> float:
    """Perplexity of the text that comes along."""
    with LLM(str(file), enable_prefix_caching=False, max_model_len=2 * WINDOW, **args) as llm:
        return perplexity(llm, windows(llm.get_tokenizer().encode(shipped_text()), WINDOW, num_tokens))[0]


def main(arguments: Sequence[str]) -> int:
    """Measures the cases asked for and writes a table; 1 where one of them is over its limit."""
    parser = argparse.ArgumentParser(prog="accuracy.py")
    parser.add_argument("schemes", nargs="*", help="words of the cases to run; all without")
    parser.add_argument("--num-tokens", type=int, help="only the first of the text")
    parser.add_argument("--markdown", help="write the table to this file too")
    asked = parser.parse_args(arguments)
    cases = [case for case in CASES if not asked.schemes or any(word in case.name for word in asked.schemes)]
    lines = ["| scheme | perplexity | float32, dequantized | difference | limit | |", "|---|---|---|---|---|---|"]
    print("\n".join(lines), flush=True)
    over = 0
    with tempfile.TemporaryDirectory() as folder:
        files: dict[str, Path] = {}
        exact: dict[str, float] = {}
        for case in cases:
            for name in (case.variant, case.reference):
                if name not in files:
                    files[name] = write_variant(pull(MODEL), Path(folder) / f"{name}.gguf", name)
            if case.reference not in exact:
                exact[case.reference] = measure(files[case.reference], asked.num_tokens, **EXACT)
            got, want = measure(files[case.variant], asked.num_tokens, **case.args), exact[case.reference]
            share = got / want - 1
            over += abs(share) > case.limit
            verdict = "over" if abs(share) > case.limit else "kept"
            lines.append(f"| {case.name} | {got:.4f} | {want:.4f} | {share:+.3%} | {case.limit:.1%} | {verdict} |")
            print(lines[-1], flush=True)
    if asked.markdown:
        Path(asked.markdown).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return int(over > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

# ruff: noqa: T201
"""Prints GB/s and GFLOP/s of linear for each scheme and row count beside torch, and attention's decode and prefill.

    python backends/cpu/bench/bench_kernels.py [--n 4096 --k 4096] [--threads 2] [--schemes bf16,q8_0] [--int8]

Weights are rotated among copies larger than the last-level cache where memory allows (--bytes), so that few rows show
memory bandwidth and not cache bandwidth.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch

from core_cpu import kernels
from core_cpu.kernels import PackedWeight, Scheme

ROWS = (1, 2, 4, 8, 32, 128, 512)
GGUF_BYTES = {"q8_0": 34 / 32, "q4_0": 18 / 32, "q4_1": 20 / 32, "q5_0": 22 / 32, "q5_1": 24 / 32} | {
    "q4_k": 144 / 256,
    "q5_k": 176 / 256,
    "q6_k": 210 / 256,
}
SCHEMES = ("f32", "bf16", "f16", "int8", "fp8_channel", "fp8_block", *GGUF_BYTES)


def best_seconds(call: Callable[[int], object], budget: float) -> float:
    """The fastest of some calls within about `budget` seconds; call(i) is the i-th."""
    call(0)
    best, start, i = float("inf"), time.perf_counter(), 1
    while i < 3 or time.perf_counter() - start < budget:
        begin = time.perf_counter()
        call(i)
        best = min(best, time.perf_counter() - begin)
        i += 1
    return best


def make_weight(scheme: str, n: int, k: int) -> PackedWeight:
    if scheme in GGUF_BYTES:
        raw = torch.randint(0, 60, (n, int(k * GGUF_BYTES[scheme])), dtype=torch.uint8)
        return kernels.pack(raw, Scheme[scheme.upper()])
    if scheme == "int8":
        return kernels.pack(torch.randint(-127, 128, (n, k), dtype=torch.int8), scale=torch.rand(n))
    if scheme.startswith("fp8"):
        weight = torch.randn(n, k).to(torch.float8_e4m3fn)
        blocks = (-(-n // 128), -(-k // 128))
        return kernels.pack(weight, scale=torch.rand(blocks if scheme == "fp8_block" else (n, 1)))
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[scheme]
    return kernels.pack(torch.randn(n, k).to(dtype))


def bench_linear(args: argparse.Namespace) -> list[dict[str, object]]:
    rows = []
    print(f"{'linear':14}" + "".join(f"{f'M={m}':>20}" for m in args.rows) + "    (weight GB/s, GFLOP/s)")
    for scheme in [*args.schemes, *(["torch bf16", "torch f32"] if args.torch else [])]:
        line = f"{scheme:14}"
        calls = torch_calls(scheme, args) if scheme.startswith("torch") else our_calls(scheme, args)
        for m in args.rows:
            call, nbytes = calls(m)
            seconds = best_seconds(call, args.seconds)
            gbs, gflops = nbytes / seconds / 1e9, 2 * m * args.n * args.k / seconds / 1e9
            line += f"{gbs:>10.1f}{gflops:>10.1f}"
            rows.append({"op": "linear", "scheme": scheme, "m": m, "us": seconds * 1e6, "gbs": gbs, "gflops": gflops})
        print(line, flush=True)
    return rows


def our_calls(scheme: str, args: argparse.Namespace) -> Callable[[int], tuple[Callable[[int], object], int]]:
    first = make_weight(scheme, args.n, args.k)
    copies = max(1, min(args.bytes // first.nbytes, 64))
    weights = [first, *(make_weight(scheme, args.n, args.k) for _ in range(copies - 1))]

    def at(m: int) -> tuple[Callable[[int], object], int]:
        x = torch.randn(m, args.k).bfloat16()
        out = torch.empty(m, args.n, dtype=torch.bfloat16)
        return lambda i: kernels.linear(x, weights[i % copies], out=out, int8_activations=args.int8), first.nbytes

    return at


def torch_calls(scheme: str, args: argparse.Namespace) -> Callable[[int], tuple[Callable[[int], object], int]]:
    dtype = torch.bfloat16 if scheme.endswith("bf16") else torch.float32
    nbytes = args.n * args.k * dtype.itemsize
    weights = [torch.randn(args.n, args.k).to(dtype) for _ in range(max(1, min(args.bytes // nbytes, 64)))]

    def at(m: int) -> tuple[Callable[[int], object], int]:
        x = torch.randn(m, args.k).to(dtype)
        return lambda i: torch.nn.functional.linear(x, weights[i % len(weights)]), nbytes

    return at


def bench_attention(args: argparse.Namespace) -> list[dict[str, object]]:
    rows = []
    print(f"\n{'attention (bf16, 9 heads on 3, dim 64)':50}{'us':>10}{'KV GB/s':>10}{'GFLOP/s':>10}")
    for label, count, query, seq in (
        ("decode 1 x 512", 1, 1, 512),
        ("decode 1 x 4096", 1, 1, 4096),
        ("decode 32 x 512", 32, 1, 512),
        ("prefill 512", 1, 512, 512),
        ("prefill 2048", 1, 2048, 2048),
        ("chunk 256 at 2048", 1, 256, 2048),
        ("16 chunks of 32 at 1032", 16, 32, 1032),
    ):
        seen = seq * query - query * (query - 1) // 2
        flops, nbytes = count * 9 * seen * 64 * 4, count * seq * 3 * 64 * 4
        for int16 in (False, True) if query > 1 and kernels.rounds_attention() else (False,):
            seconds = best_seconds(attention_call(count, query, seq, int16), args.seconds)
            name = f"{label}, int16" if int16 else label
            gflops = flops / seconds / 1e9
            print(f"{name:50}{seconds * 1e6:>10.0f}{nbytes / seconds / 1e9:>10.1f}{gflops:>10.1f}", flush=True)
            rows.append({"op": "attention", "case": name, "us": seconds * 1e6, "gflops": gflops})
    return rows


def attention_call(count: int, query: int, seq: int, int16: bool) -> Callable[[int], object]:
    blocks = -(-seq // 16)
    shapes = kernels.kv_block_shapes(torch.bfloat16, 3, 64, 64, 16)
    key, value = (torch.randn(count * blocks + 1, *shape).bfloat16() for shape in shapes)
    planes = kernels.KvPlanes(key, value, 64)
    table = torch.arange(1, count * blocks + 1, dtype=torch.int32).view(count, blocks)
    starts = torch.arange(0, count * query + 1, query, dtype=torch.int32)
    lens = torch.full((count,), seq, dtype=torch.int32)
    q = torch.randn(count * query, 9, 64).bfloat16()
    return lambda _: kernels.attention(q, planes, starts, lens, table, scale=0.125, int16=int16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=4096)
    parser.add_argument("--k", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--rows", type=lambda s: tuple(map(int, s.split(","))), default=ROWS)
    parser.add_argument("--schemes", type=lambda s: s.split(","), default=list(SCHEMES))
    parser.add_argument("--int8", action="store_true", help="round activations where the scheme allows it")
    parser.add_argument("--bytes", type=int, default=2**29)
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--no-torch", dest="torch", action="store_false")
    parser.add_argument("--no-attention", dest="attention", action="store_false")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    if args.threads:
        kernels.set_num_threads(args.threads)
        torch.set_num_threads(args.threads)
    print(f"level {kernels.isa()}, {kernels.num_threads()} threads, weights {args.n} x {args.k}")
    rows = bench_linear(args) + (bench_attention(args) if args.attention else [])
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"level": kernels.isa(), "threads": kernels.num_threads(), "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()

"""L1: products of experts in every scheme, and the way to and from other ranks where there are none."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from core.backend import CommLimits, Packed, torch_dtype
from core.backend.ops import CombineArgs, CombineOp, DispatchArgs, DispatchOp, ExpertsArgs, ExpertsOp
from core.backend.schemes import SCHEMES, int8_row, quantize_rows
from core.spec import DType
from core_conformance.checks import check
from core_conformance.diagnosis import Suspects, known
from core_conformance.operations.cache_memory import int32
from core_conformance.subject import Subject
from core_conformance.suite.test_l1_dense import DTYPES, normal
from core_conformance.suite.test_l1_linear import SCHEME_NAMES, plain_act, put_act, stored_weight
from core_conformance.tolerance import COMPOSITE_RATIO, U_ACC

_FORMS: dict[str, dict[str, Any]] = {
    "silu": {},
    "gelu": {"activation": "gelu"},
    "gelu_tanh": {"activation": "gelu_tanh"},
    "other-ranks": {"first_expert": 2},
    "top-1": {"top_k": 1},
}


def _op(dtype: DType, **changes: Any) -> ExpertsOp:
    fields: dict[str, Any] = {"num_experts": 4, "hidden_size": 48, "intermediate_size": 40, "top_k": 2}
    return ExpertsOp(dtype=dtype, **(fields | changes))


class _Case:
    """Weights and tokens of one operation.

    Args:
        subject: The backend.
        op: The operation.
        dice: Of everything that is drawn.
        tokens: Rows.
        whole: Whether activations are whole multiples of their row's int8 scale.
    """

    def __init__(
        self, subject: Subject, op: ExpertsOp, dice: torch.Generator, tokens: int, *, whole: bool = False
    ) -> None:
        self.subject, self.op = subject, op
        dtype = torch_dtype(op.dtype)
        shapes = (2 * op.intermediate_size, op.hidden_size), (op.hidden_size, op.intermediate_size)
        self.packed, self.dense = [], []
        for rows, columns in shapes:
            parts = self._parts(dice, rows, columns)
            shape = (op.num_experts, rows, columns)
            self.packed.append(subject.pack(parts, op.scheme, shape, op.dtype, role="experts"))
            self.dense.append(Packed(shape=shape, scheme=op.scheme, tensors=parts).dense())
        self.x = torch.randn(tokens, op.hidden_size, generator=dice).to(dtype)
        if whole:
            ints = torch.randint(-127, 128, self.x.shape, generator=dice)
            ints[:, 0] = 127
            self.x = (ints / 64).to(dtype)
        form = self.packed[0].input_format or ""
        # What the first product multiplies, where the device asks for activations in 8-bit floats.
        self.taken = plain_act(quantize_rows(self.x, form)) if form.startswith("fp8") else self.x
        self.weights = torch.rand(tokens, op.top_k, generator=dice)
        # The last expert of this rank gets no token; ids of other ranks come by where there are such ranks.
        first, last = max(op.first_expert - 2, 0), op.first_expert + op.num_experts - 1
        draws = [torch.randperm(last - first, generator=dice)[: op.top_k] + first for _ in range(tokens)]
        self.ids = torch.stack(draws).to(torch.int32) if draws else torch.zeros(0, op.top_k, dtype=torch.int32)

    def _parts(self, dice: torch.Generator, rows: int, columns: int) -> dict[str, Tensor]:
        op = self.op
        if op.scheme == "none":
            weight = torch.randn(op.num_experts, rows, columns, generator=dice) * columns**-0.5
            return {"weight": weight.to(torch_dtype(op.dtype))}
        experts = [stored_weight(op.scheme, rows, columns, dice) for _ in range(op.num_experts)]
        return {name: torch.stack([parts[name] for parts in experts]) for name in experts[0]}

    def run(self, order: Tensor | None = None) -> Tensor:
        """The device's answer, rows in that order."""
        put, form = self.subject.put, self.packed[0].input_format
        x, weights, ids = (t if order is None else t[order] for t in (self.x, self.weights, self.ids))
        act = x if form is None else quantize_rows(x, form)
        args = ExpertsArgs(
            x=put_act(self.subject, act),
            gate_up=self.packed[0],
            down=self.packed[1],
            weights=put(weights),
            expert_ids=put(ids),
        )
        out: Tensor = self.subject.bind(self.op)(args)
        return out

    def by_hand(self, *, rounded: bool = False, swapped: bool = False, equal: bool = False, first: int = 0) -> Tensor:
        """Token by token, float64; float32 with intermediate results in the model's type where `rounded`.

        Args:
            rounded: See above.
            swapped: Up comes first, then gate.
            equal: All weights are 1.
            first: Added to `first_expert`.
        """
        op, dtype = self.op, torch_dtype(self.op.dtype)
        wide = torch.float32 if rounded else torch.float64
        gate_up, down = (weight.to(wide) for weight in self.dense)
        out = torch.zeros(len(self.x), op.hidden_size, dtype=wide)
        for token, (row, ids, weights) in enumerate(zip(self.taken, self.ids.tolist(), self.weights, strict=True)):
            for expert, weight in zip(ids, weights, strict=True):
                local = expert - op.first_expert - first
                if not 0 <= local < op.num_experts:
                    continue
                both = gate_up[local] @ self._taken(row, wide)
                # Products and gate may be calls of their own, with memory in the model's type between them.
                both = both.to(dtype).to(wide) if rounded else both
                gate, up = both.split(op.intermediate_size)
                gate, up = (up, gate) if swapped else (gate, up)
                hidden = _activate(gate, op.activation) * up
                hidden = hidden.to(dtype).to(wide) if rounded else hidden
                part = down[local] @ self._taken(hidden, wide)
                out[token] += (part.to(dtype).to(wide) if rounded else part) * (1.0 if equal else weight.to(wide))
        return out.to(dtype) if rounded else out

    def _taken(self, row: Tensor, wide: torch.dtype) -> Tensor:
        """What the product takes of a row: itself, or its int8 form."""
        if self.op.scheme != "int8":
            return row.to(wide)
        rows = int8_row(row[None].float())
        return rows.q[0].to(wide) * rows.scale[0].to(wide)

    def check(self) -> None:
        """In order, and in another order of tokens."""
        exact, plain = self.by_hand(), self.by_hand(rounded=True)
        largest = float(exact.abs().max()) if exact.numel() else 0.0
        measured = float((plain.double() - exact).abs().max()) if exact.numel() else 0.0
        bound = COMPOSITE_RATIO * measured + 64 * U_ACC * largest + self._flip()
        self.subject.agree(self.op, self.run(), exact, bound, suspects=self._suspects())
        order = torch.arange(len(self.x)).flip(0)
        self.subject.agree(self.op, self.run(order), exact[order], bound, "(tokens in another order) result")

    def _flip(self) -> float:
        """A few activations of the second product next to a rounding boundary may fall to the other side."""
        if self.op.scheme != "int8" or not len(self.x):
            return 0.0
        gate_up, down = (weight.double() for weight in self.dense)
        hidden = torch.einsum("enk,tk->etn", gate_up, self.x.double())
        gate, up = hidden.split(self.op.intermediate_size, dim=-1)
        step = float((_activate(gate, self.op.activation) * up).abs().max()) / 127
        return 3 * step * float(down.abs().max())

    def _suspects(self) -> Suspects:
        def suspects(got: Tensor) -> dict[str, Tensor]:
            return {
                "order: up is taken for gate": self.by_hand(swapped=True),
                "weights: they do not count": self.by_hand(equal=True),
                "shift: expert e gets what expert e + 1 should": self.by_hand(first=1),
                "shift: expert e gets what expert e - 1 should": self.by_hand(first=-1),
            }

        return suspects


def _activate(x: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return x * torch.sigmoid(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


@check("L1/experts", [f"{form}-{dtype}" for form in _FORMS for dtype in DTYPES])
def test_products_of_experts(subject: Subject, dice: torch.Generator, variant: str) -> None:
    """Activations, one expert a token, experts of other ranks; an expert without a token; any order of tokens."""
    form, name = variant.rsplit("-", 1)
    op = _op(DTYPES[name], **_FORMS[form])
    subject.bind(op)
    for tokens in (1, 7, 0):
        _Case(subject, op, dice, tokens).check()


@check("L1/experts/scheme", [f"{scheme}-{dtype}" for scheme in SCHEME_NAMES for dtype in ("bf16", "fp32")])
def test_quantized_experts(subject: Subject, dice: torch.Generator, variant: str) -> None:
    """Weights in every scheme; int8 quantizes the activations of both products row by row."""
    scheme, name = variant.rsplit("-", 1)
    assert scheme in SCHEMES
    op = _op(DTYPES[name], scheme=scheme, num_experts=3, hidden_size=256, intermediate_size=256, top_k=1)
    subject.bind(op)
    _Case(subject, op, dice, 3, whole=scheme == "int8").check()


@check("L1/experts/which", [f"{form}-{dtype}" for form in ("here", "other-ranks") for dtype in DTYPES])
def test_each_token_shows_its_experts(subject: Subject, variant: str) -> None:
    """Expert e answers e + 1 exactly, weights are powers of two: a result names the experts that made it."""
    form, name = variant.rsplit("-", 1)
    op = _op(DTYPES[name], num_experts=6, hidden_size=16, intermediate_size=16, first_expert=3 * (form != "here"))
    experts, bound = subject.bind(op), 0.0
    gate_up, down = torch.zeros(6, 32, 16), torch.eye(16).expand(6, 16, 16) / 64
    gate_up[:, :16, 0] = 64.0  # silu(64) is 64 in float32
    gate_up[:, 16:, 0] = (torch.arange(6.0)[:, None] + 1) * (1 + torch.arange(16) % 4)
    x = torch.zeros(8, 16)
    x[:, 0] = 1.0
    ids = int32([[0, 1], [5, 0], [2, 4], [8, 3], [1, 0], [4, 4], [7, 8], [3, 5]])
    weights = torch.tensor([[1.0, 0], [0.5, 0.5], [0.25, 0.5], [1, 0.5], [0.5, 1], [0.5, 0.5], [1, 1], [0, 1]])
    dtype = torch_dtype(op.dtype)
    packed = [subject.pack({"weight": w.to(dtype)}, "none", w.shape, op.dtype, role="experts") for w in (gate_up, down)]
    put = subject.put
    args = ExpertsArgs(x=put(x.to(dtype)), gate_up=packed[0], down=packed[1], weights=put(weights), expert_ids=put(ids))

    def answers(first: int) -> Tensor:
        local = ids.double() - first
        shown = torch.where((local >= 0) & (local < 6), local + 1, 0.0)
        return (weights.double() * shown).sum(1)[:, None] * (1 + torch.arange(16, dtype=torch.float64) % 4)

    suspects = known({"experts: first_expert is ignored": answers(0)} if op.first_expert else {})
    subject.agree(
        op, experts(args), answers(op.first_expert), bound, "(numbers of the experts) result", suspects=suspects
    )


@check("L1/dispatch", DTYPES)
def test_dispatch_pads_to_the_capacity(subject: Subject, dice: torch.Generator, variant: DType) -> None:
    """One rank: the tokens themselves, bit by bit, then padding with expert id -1; a full and an empty step too."""
    op = DispatchOp(dtype=variant, hidden_size=24, top_k=2, capacity=6)
    dispatch, put = subject.bind(op), subject.put
    comm = subject.backend.comm([0], "ep", CommLimits(max_bytes=1 << 16))
    for tokens in (4, 6, 0):
        x, weights = normal(dice, variant, tokens, 24), torch.rand(tokens, 2, generator=dice)
        ids = torch.randint(0, 8, (tokens, 2), generator=dice, dtype=torch.int32)
        out = dispatch(DispatchArgs(x=put(x), weights=put(weights), expert_ids=put(ids), comm=comm))
        for got, sent, what in zip(out, (x, weights, ids), ("x", "weights", "expert ids"), strict=True):
            subject.equal(op, got[:tokens], sent, what)
        subject.equal(op, out[2][tokens:], torch.full((6 - tokens, 2), -1, dtype=torch.int32), "expert ids of padding")
    comm.close()


@check("L1/combine", DTYPES)
def test_combine_cuts_the_padding_off(subject: Subject, dice: torch.Generator, variant: DType) -> None:
    """One rank: its own rows, bit by bit."""
    op = CombineOp(dtype=variant, hidden_size=24, capacity=6)
    combine = subject.bind(op)
    comm = subject.backend.comm([0], "ep", CommLimits(max_bytes=1 << 16))
    x = normal(dice, variant, 6, 24)
    for tokens in (4, 6, 0):
        out = combine(CombineArgs(x=subject.put(x), num_tokens=tokens, comm=comm))
        subject.equal(op, out, x[:tokens], f"rows of {tokens} tokens")
    comm.close()


@check("L1/experts/update", DTYPES)
def test_experts_that_were_updated_count(subject: Subject, dice: torch.Generator, variant: DType) -> None:
    """After update_ with another weight's tensors the products are the other weight's."""
    op = _op(variant)
    subject.bind(op)
    one = _Case(subject, op, dice, 5)
    one.check()
    two = _Case(subject, op, dice, 5)
    for mine, other in zip(one.packed, two.packed, strict=True):
        mine.update_({name: part.clone() for name, part in other.tensors().items()})
    two.packed = one.packed
    two.check()

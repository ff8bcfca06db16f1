"""L4: speed as a share of what the device can do at most, both measured in this run."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from core_conformance.checks import check
from core_conformance.records import Findings, Mode
from core_conformance.served.roofline import Roofline, better, measure_roofline
from core_conformance.served.setups import SPEED, Servers
from core_conformance.served.speed import Speed, decode_speed, prefill_speed
from core_conformance.served.speed_model import shape_of
from core_conformance.subject import Mismatch
from core_conformance.tolerance import PERFORMANCE_FLOOR


@dataclass(frozen=True)
class Measured:
    """What one measurement found."""

    roofline: Roofline
    decode: Speed
    prefill: Speed


@functools.cache
def _measured(servers: Servers) -> Measured | Mismatch:
    """Once a run: the roofline while no server holds the device, before and after the server's own speed."""
    simulated = servers.target.mode is Mode.SIMULATED
    megabytes = 16 if simulated else 192
    try:
        servers.stop()
        before = measure_roofline(servers.target, servers.dtype, megabytes=megabytes)
        server = servers.get(SPEED)
        decode, prefill = decode_speed(server), prefill_speed(server)
        servers.stop()
        after = measure_roofline(servers.target, servers.dtype, megabytes=megabytes)
    except Mismatch as error:
        return error
    return Measured(better(before, after), decode, prefill)


def _found(servers: Servers) -> Measured:
    servers.require_installed()
    found = _measured(servers)
    if isinstance(found, Mismatch):
        raise Mismatch(str(found))
    return found


def _judge(servers: Servers, findings: Findings, what: str, speed: Speed, reached: float, limit: float) -> None:
    """Notes the share; below the floor of this mode it is a failure."""
    share, floor = reached / limit, PERFORMANCE_FLOOR[servers.target.mode].get(what)
    findings.notes |= {
        "tokens_per_s": round(speed.tokens_per_s, 2),
        "runs": [round(run, 2) for run in speed.runs],
        "share_of_roofline": round(share, 4),
        "floor": floor,
        "dtype": servers.dtype.value,
    }
    if floor is None:
        return
    findings.err, findings.bound, findings.ratio = share, floor, floor / share
    if share < floor:
        raise Mismatch(
            f"{what}: {speed.tokens_per_s:.1f} tokens/s are {share:.1%} of the roofline ({reached:.3g} of {limit:.3g} "
            f"a second), at least {floor:.0%} is asked for"
        )


@check("L4/performance/decode")
def test_decode(servers: Servers, findings: Findings) -> None:
    """One stream reads all weights for each token: bytes a second as a share of the device's."""
    found = _found(servers)
    roofline, speed = found.roofline, found.decode
    shape = shape_of(simulated=servers.target.mode is Mode.SIMULATED)
    findings.notes |= {"bytes_per_s": roofline.bytes_per_s, "by": roofline.bytes_by}
    _judge(servers, findings, "decode", speed, speed.tokens_per_s * shape.matrix_weights * 2, roofline.bytes_per_s)


@check("L4/performance/prefill")
def test_prefill(servers: Servers, findings: Findings) -> None:
    """A prompt in one go: two operations a weight and token, as a share of the device's matrix product."""
    found = _found(servers)
    roofline, speed = found.roofline, found.prefill
    shape = shape_of(simulated=servers.target.mode is Mode.SIMULATED)
    findings.notes |= {"flops_per_s": roofline.flops_per_s, "by": roofline.flops_by}
    _judge(servers, findings, "prefill", speed, speed.tokens_per_s * shape.matrix_weights * 2, roofline.flops_per_s)

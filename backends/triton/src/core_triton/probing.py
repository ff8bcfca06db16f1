"""What a look at a driver gave, sorted into devices that can be opened and reasons why others cannot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from core.spec import DeviceInfo
from core_triton.simulation import Family, archs

__all__ = ["Found", "sort_out"]


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a look at the driver gave.

    Args:
        devices: Those that can be opened, in the driver's order.
        ordinals: The number that each has for torch, which also counts chips that nothing here supports.
        passed_over: Why others, or all, cannot; each with what to do.
    """

    devices: tuple[DeviceInfo, ...] = ()
    ordinals: tuple[int, ...] = ()
    passed_over: tuple[str, ...] = ()


def sort_out(family: Family, seen: Sequence[DeviceInfo], visible: Sequence[int], variables: str) -> Found:
    """Takes the devices that kernels are built for.

    Args:
        seen: All that the driver lists.
        visible: Indices into `seen` of those that the process may use, in torch's order.
        variables: What hides devices, for people.
    """
    if not seen:
        return Found(passed_over=("the driver lists no GPU that this user may see; check its own tool",))
    if not visible:
        return Found(passed_over=(f"{variables} hides every GPU; unset it",))
    known = archs(family)
    devices: list[DeviceInfo] = []
    ordinals: list[int] = []
    passed_over: list[str] = []
    for ordinal, index in enumerate(visible):
        device = seen[index]
        if device.arch in known:
            devices.append(replace(device, index=len(devices)))
            ordinals.append(ordinal)
        else:
            passed_over.append(
                f"{device.name} is {device.arch} and the kernels are for {', '.join(known)}; choose another --device"
            )
    return Found(devices=tuple(devices), ordinals=tuple(ordinals), passed_over=tuple(passed_over))

"""The backend under test: how it is found, opened anew, and asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from core import plugins
from core.backend import Backend, Limits, OpenConfig
from core.spec import BackendInfo, DeviceInfo
from core_conformance.bare import INFO as REFERENCE_INFO
from core_conformance.bare import BareBackend
from core_conformance.records import Mode
from core_conformance.served.options import ServedOptions

__all__ = ["LIMITS", "Target", "load_target"]

LIMITS = Limits(max_num_seqs=32, max_num_batched_tokens=1024, max_model_len=1024)
"""The largest step that the suite makes."""


@dataclass
class Target:
    """A backend under test.

    Args:
        info: How it announces itself.
        make: A new instance, not opened.
        installed: Whether `plugins.list_backends` must find it under its name.
        package: Distribution that brings it, with its version.
        index: Which of its devices.
        served: What the caller chose about L4.
    """

    info: BackendInfo
    make: Callable[[], Backend]
    installed: bool = False
    package: str = ""
    index: int = 0
    served: ServedOptions = field(default_factory=ServedOptions)
    _opened: Backend | None = field(default=None, repr=False)
    _device: DeviceInfo | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """The word after `--backend`."""
        return self.info.name

    @property
    def device(self) -> DeviceInfo:
        """The device, as `probe()` sees it.

        Raises:
            BackendUnavailableError: there is none.
        """
        if self._device is None:
            self._device = plugins.find_device(self.make(), self.info, self.index)
        return self._device

    @property
    def mode(self) -> Mode:
        """What counts of the records."""
        return Mode.SIMULATED if self.device.simulated else Mode.VALIDATED

    @property
    def backend(self) -> Backend:
        """An instance that is opened once and shared by the checks that leave it as it is."""
        if self._opened is None:
            self._opened = self.open()
        return self._opened

    def open(self) -> Backend:
        """A new opened instance, the caller's to close."""
        backend = self.make()
        backend.open(self.index, OpenConfig(limits=LIMITS))
        return backend

    def close(self) -> None:
        """Closes the shared instance."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None


def load_target(name: str) -> Target:
    """The installed backend of that name ("acme" or "acme:1"); "reference" is the core's own reference in torch.

    Raises:
        BackendNotFoundError: nothing of that name is installed.
        BackendUnavailableError: it is installed and broken.
    """
    if name == "reference":
        return Target(info=REFERENCE_INFO, make=BareBackend, package="core-inference")
    listing, index = plugins.choose_device(name)
    info = listing.info
    assert info is not None
    return Target(
        info=info, make=lambda: plugins.load_backend(info), installed=True, package=listing.package, index=index
    )

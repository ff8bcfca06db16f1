"""Fixtures of L4, beside those of `SuitePlugin`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from core_conformance.target import Target

if TYPE_CHECKING:
    from core_conformance.served.server import Server
    from core_conformance.served.setups import Servers

__all__ = ["ServedPlugin"]


class ServedPlugin:
    """Servers of the suite's models over the backend under test; registered with `pytest.main(plugins=[...])`.

    What serves is imported when a check asks for it: the levels below need none of it.

    Args:
        target: The backend under test, with what the caller chose about L4.
    """

    def __init__(self, target: Target) -> None:
        self._target = target

    @pytest.fixture(scope="session")
    def servers(self) -> Iterator[Servers]:
        """Servers on demand; whatever runs at the end of the session, however it ends, is stopped."""
        from core_conformance.served.setups import Servers

        with Servers(self._target, self._target.served) as servers:
            yield servers

    @pytest.fixture
    def server(self, servers: Servers) -> Server:
        """The copy model with room for all."""
        from core_conformance.served.setups import ROOMY

        return servers.get(ROOMY)

    @pytest.fixture
    def small_server(self, servers: Servers) -> Server:
        """The copy model with a pool and a queue that are too small."""
        from core_conformance.served.setups import SMALL

        return servers.get(SMALL)

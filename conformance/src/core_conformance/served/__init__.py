"""L4's side of the wire: `core serve` as a process of its own, and everything that is asked of it over HTTP."""

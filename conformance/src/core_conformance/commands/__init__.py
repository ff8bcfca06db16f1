"""Commands of `core conformance`, one module each; `core_conformance.cli` registers them by one line each."""

"""The suite's own proof: backends and engines with one bug each must fail, honest ones that differ must pass.

`core_conformance.mutants.catalogue` has them all; nothing is imported here, since a server with a bug starts from here.
"""

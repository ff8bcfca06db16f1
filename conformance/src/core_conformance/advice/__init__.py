"""What `core conformance next` says to a vendor: where the time of a step goes, and what to write first."""

"""A strict fake accelerator for core-inference."""

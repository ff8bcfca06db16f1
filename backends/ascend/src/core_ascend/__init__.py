"""Ascend NPUs as a backend of core-inference."""

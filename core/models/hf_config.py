"""Reading a config.json: every value checked, every error names the key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from core.backend.ops import Activation
from core.errors import ModelLoadError

__all__ = ["HfConfig"]

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


class HfConfig:
    """A configuration in the terms of Hugging Face.

    Args:
        values: As in config.json.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def get(self, key: str, default: Any = None) -> Any:
        """A value; null counts as absent."""
        value = self.values.get(key)
        return default if value is None else value

    def count(self, key: str, default: int | None = None) -> int:
        """A positive whole number.

        Raises:
            ModelLoadError: It is absent and has no default, or is something else.
        """
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelLoadError(f"config.json: {key} must be a positive whole number, got {value!r}; fetch it again")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number.

        Raises:
            ModelLoadError: It is absent and has no default, or is something else.
        """
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelLoadError(f"config.json: {key} must be a number, got {value!r}; fetch it again")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """Whether something is on."""
        return bool(self.get(key, default))

    def activation(self, key: str, default: str) -> Activation:
        """The activation of the gate.

        Raises:
            ModelLoadError: It is not one of the contract's.
        """
        name = self.get(key, default)
        if name not in _ACTIVATIONS:
            raise ModelLoadError(
                f"config.json: {key} {name!r} is not computed; supported are {', '.join(_ACTIVATIONS)}: "
                "use another model"
            )
        return _ACTIVATIONS[name]

    @property
    def head_dim(self) -> int:
        """Elements of a head: the value of its own, or an even share of the hidden size.

        Raises:
            ModelLoadError: There is no value and the hidden size does not divide.
        """
        if self.get("head_dim") is not None:
            return self.count("head_dim")
        hidden, heads = self.count("hidden_size"), self.count("num_attention_heads")
        if hidden % heads:
            raise ModelLoadError(
                f"config.json: hidden_size {hidden} is no multiple of {heads} heads and head_dim is absent"
            )
        return hidden // heads

    def layer_types(self, num_layers: int) -> tuple[str, ...] | None:
        """The kind of each layer, "full_attention" or "sliding_attention"; None where the configuration has no list.

        Raises:
            ModelLoadError: The list is of another length or names an unknown kind.
        """
        kinds = self.get("layer_types")
        if kinds is None:
            return None
        unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
        if unknown or len(kinds) != num_layers:
            raise ModelLoadError(
                f"config.json: layer_types has {len(kinds)} entries for {num_layers} layers"
                + (f" and names {', '.join(unknown)}" if unknown else "")
                + "; full_attention and sliding_attention are supported, one for each layer"
            )
        return tuple(kinds)

"""The chat template that a server or a command uses: the model's, or the operator's."""

from __future__ import annotations

from core.serve.interface import ServedEngine
from core.serve.prompts import ChatRenderer
from core.serve.settings import ServeSettings
from core.text.chat_template import ChatTemplate

__all__ = ["chat_renderer"]


def chat_renderer(engine: ServedEngine, settings: ServeSettings | None = None) -> ChatRenderer:
    """Renders conversations with `--chat-template`, else with the model's own template.

    Raises:
        ConfigError: `--chat-template` names a file that cannot be read.
    """
    settings = settings or ServeSettings()
    template = ChatTemplate(engine.tokenizer, settings.chat_template)
    encoder = template if template.names else None
    return ChatRenderer(encoder, trust_special_tokens=settings.trust_special_tokens)

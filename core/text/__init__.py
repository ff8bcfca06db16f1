"""Text in, token ids out, and back: tokenizers, chat templates, streaming text, stop strings. Imports no torch."""

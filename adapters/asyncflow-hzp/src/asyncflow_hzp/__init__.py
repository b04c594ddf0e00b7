"""The `hzp` trainer: Hugging Face causal language models on torch."""

__all__: list[str] = []

"""A run from its first prompt to its last step: admission, steps, counts, checkpoints."""

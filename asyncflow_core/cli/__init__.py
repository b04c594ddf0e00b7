"""The `asyncflow` command."""

"""Jobs that `asyncflow init` writes: each a configuration and the file of its reward."""

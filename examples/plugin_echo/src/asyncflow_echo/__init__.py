"""Example plugin of AsyncFlow."""

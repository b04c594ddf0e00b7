"""The weight transport `collective`."""

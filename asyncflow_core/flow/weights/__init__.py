"""Bringing new weights to every replica: the protocol, and carrying it out."""

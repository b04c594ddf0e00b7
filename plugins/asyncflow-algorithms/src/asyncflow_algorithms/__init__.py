"""Advantages, policy losses and off-policy corrections. Names load when first used."""

"""Verifiable rewards and reasoning-gym prompts. Names load when first used."""

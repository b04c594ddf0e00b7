"""Rollout on transformers models."""

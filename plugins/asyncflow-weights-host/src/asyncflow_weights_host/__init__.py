"""Weights from trainer to replicas through files in the memory of one host."""

"""Checkpoints and models of others."""

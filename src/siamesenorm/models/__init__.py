"""Whole models: sublayers, a topology, an embedding and a head."""

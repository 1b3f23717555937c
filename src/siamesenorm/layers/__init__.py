"""Sublayers of Transformers and what they share: attention, FFN, rotary positions, the loss of a language head."""

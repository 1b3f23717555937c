"""Operators of the sublayers: SwiGLU and rotary positions, and what decoding needs."""

"""Operators of our own: what eager mode runs in one kernel, each with a plain form in PyTorch's operators beside it."""

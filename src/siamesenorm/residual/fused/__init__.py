"""Fused steps: `write` of one sublayer and `read` of the next as one autograd node that keeps little."""

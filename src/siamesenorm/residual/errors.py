"""The one exception of the library's heart."""


class TopologyError(ValueError):
    """A name, option, layout or shape that a topology cannot take; the message is one sentence."""

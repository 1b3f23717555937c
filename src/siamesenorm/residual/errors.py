"""The one exception of the library's heart, and its one warning."""


class TopologyError(ValueError):
    """A name, option, layout or shape that a topology cannot take; the message is one sentence."""


class UnmetNeedsWarning(UserWarning):
    """A topology runs without norms inside sublayers, or without first weights, that it is not itself without."""

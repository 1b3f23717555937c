"""What pages share, whatever they show: the page itself, its style, colours that can be read."""

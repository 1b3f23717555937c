"""What the command line shows, one file per command."""

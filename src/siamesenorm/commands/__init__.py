"""What the command line shows, one file a command."""

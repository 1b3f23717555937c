"""What finished runs say: read from their folders, paired by seed, put into sentences, tables and plots."""

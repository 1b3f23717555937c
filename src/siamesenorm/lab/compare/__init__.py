"""Comparing topologies: a grid of runs, checked, planned and run, each cell in a folder of its own."""

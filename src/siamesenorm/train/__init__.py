"""One training engine for every task: configuration, optimiser, schedule, loop, checkpoints, distribution, logging."""

"""What a run needs of memory, work and network, found out before it begins and without a device."""

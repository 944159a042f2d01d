"""The simulated machine: its event loop, clock, threads, disk and network."""

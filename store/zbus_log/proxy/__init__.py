"""Owner side of proxied writes: executes write requests from other processes."""

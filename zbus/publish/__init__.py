"""The path of an event into the bus: publishers, backpressure, the commit queue and proxied writes."""

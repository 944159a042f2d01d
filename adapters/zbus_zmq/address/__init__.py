"""Options of a ZMQ URL, and keys as ZMQ topics."""

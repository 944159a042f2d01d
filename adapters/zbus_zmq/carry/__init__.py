"""Events and requests over ZMQ sockets."""

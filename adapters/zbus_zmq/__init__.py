"""ZMQ for zbus: the fabric `zmq://`, how its nodes find each other, the broker, and plain messages (`zmq+raw://`)."""

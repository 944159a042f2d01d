"""NATS for zbus: the fabric, plain messages (`nats+raw`), and JetStream as a source (`nats+js`)."""

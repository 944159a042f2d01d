"""Events over HTTP: publishing, event streams and cursors."""

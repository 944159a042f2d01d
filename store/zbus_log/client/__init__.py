"""Client side of proxied writes: write to a log, whichever process owns it."""

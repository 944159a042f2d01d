"""Writing a log: the single writer thread, identities, cursors, positions and schemas."""

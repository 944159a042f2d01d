"""The command `zbus demo`."""

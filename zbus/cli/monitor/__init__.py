"""The command `zbus monitor`."""

"""The command `zbus top`."""

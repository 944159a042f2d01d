"""The command `zbus bench`."""

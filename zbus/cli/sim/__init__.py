"""`zbus sim`: runs scenarios in the simulator."""

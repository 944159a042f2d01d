"""Knowledge of the logs of other nodes: positions, claims, past events that are owed, and incarnations."""

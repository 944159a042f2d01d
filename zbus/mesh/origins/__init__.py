"""Knowledge of the logs of other nodes: positions in them, past events that they owe, and their incarnations."""

"""What this node knows of the logs of other nodes: how far it has them, what they still owe, and their incarnations."""

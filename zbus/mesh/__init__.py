"""Links to other nodes: sending, receiving, gap repair, request/reply and the node registry."""

"""Small mechanisms that know nothing of a bus."""

"""Request admission: authentication, permissions, hosts and origins, rate limits."""

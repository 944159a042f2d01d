"""Discovery: how ZMQ nodes find each other and stay connected."""

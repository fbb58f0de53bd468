"""A Flower app: scanned digits on nodes, each of which serves some of the writers."""

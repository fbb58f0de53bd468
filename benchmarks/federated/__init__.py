"""What a federated round costs beyond its clients; see `benchmarks.federated.__main__`."""

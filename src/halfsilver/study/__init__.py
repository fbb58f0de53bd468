"""Studies: the four methods side by side at one epsilon, and a verdict."""

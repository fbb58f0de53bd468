"""Helpers that both sides may import, and that import neither: tensors, random state, processes, files."""

"""Measurements of the library against its rivals. Run as modules: `python -m benchmarks.speed`."""

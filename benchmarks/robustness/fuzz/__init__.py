"""Damaged files for every reader: what comes out must be data or a typed error."""

"""Bugs put into the library from outside, to see whether its audit finds them."""

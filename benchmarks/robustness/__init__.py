"""Attacks: kills, broken data, planted bugs, intruders."""

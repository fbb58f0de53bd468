"""Convolutions: the layer, and four exact ways to obtain norms and sums of per-example gradients."""

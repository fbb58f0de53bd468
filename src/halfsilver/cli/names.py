"""Names that help texts show. `halfsilver --help` must not import torch, which takes seconds, to know them."""

METHODS = ("public", "cold", "warm", "pda")
ALL_METHODS = (*METHODS, "guarded", "whitened", "finished", "centred")
MIN_WORDS = 8

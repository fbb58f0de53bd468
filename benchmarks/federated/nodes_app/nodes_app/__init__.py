"""A Flower app whose nodes send known numbers, so that a sum shows who is in it."""

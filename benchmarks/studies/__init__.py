"""Studies of what helps: one question per file, asked by `halfsilver.compare` or of its results."""

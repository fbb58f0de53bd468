"""Where the rows of private users are read from: memory, JSON lines, SQLite."""

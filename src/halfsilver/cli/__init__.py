"""The command line, one file per family of commands. `halfsilver.__main__` is the entry point."""

"""The only code that sees private data. An auditor reads this folder."""

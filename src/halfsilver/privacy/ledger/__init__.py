"""The durable record of every private release: written and synced before the noise is drawn."""

from halfsilver.privacy.ledger.ledger import Budget, Head, Ledger

__all__ = ["Budget", "Head", "Ledger"]

"""Private training of `transformers` models: losses per example, and a trainer with the arguments people know."""

from halfsilver.huggingface.losses import causal_loss, loss_of, sequence_loss, token_loss
from halfsilver.huggingface.private_trainer import Privacy, PrivateTrainer

__all__ = ["Privacy", "PrivateTrainer", "causal_loss", "loss_of", "sequence_loss", "token_loss"]

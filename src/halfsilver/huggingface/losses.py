"""Losses of `transformers` models per example, which private training needs in place of ``model(**batch).loss``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional

from halfsilver._core.tensors import LossFn, batch_rows
from halfsilver.errors import ConfigError, require

_ONE, _SEVERAL = "single_label_classification", "multi_label_classification"
_IGNORED = -100  # the label of tokens that do not count, as in transformers


def sequence_loss(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """One loss per row of a model that returns logits per row, such as ``BertForSequenceClassification``.

    As the model's own loss, it follows from ``config.problem_type``, and where that is not set from the shapes: a model
    with one output predicts a number (squared error), whole numbers are classes (cross-entropy), and a number per class
    means several labels at once (binary cross-entropy, mean over classes).

    Args:
        model: The model.
        batch: Its inputs by name, and "labels".

    Raises:
        ConfigError: The batch has no labels, or they do not fit the logits.
    """
    labels, logits = _labels(batch), _logits(model, batch).float()
    kind = getattr(getattr(model, "config", None), "problem_type", None)
    if logits.dim() == 2:
        if logits.shape[1] == 1 and labels.numel() == len(labels) and kind in (None, "regression"):
            return (logits[:, 0] - labels.reshape(-1)).square()
        if logits.shape == labels.shape and kind == "regression":
            return (logits - labels).square().mean(1)
        if logits.shape == labels.shape and labels.is_floating_point() and kind in (None, _SEVERAL):
            return functional.binary_cross_entropy_with_logits(logits, labels, reduction="none").mean(1)
        if labels.dim() == 1 and not labels.is_floating_point() and kind in (None, _ONE):
            return functional.cross_entropy(logits, labels, reduction="none")
    raise ConfigError(
        f"Expected labels that fit logits of the shape {tuple(logits.shape)}, got {tuple(labels.shape)} "
        f"{labels.dtype} with problem_type {kind!r}. For a loss per token, use token_loss or causal_loss."
    )


def token_loss(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """One loss per row of a model that classifies tokens: the mean cross-entropy over the tokens that count.

    Args:
        model: The model, such as ``BertForTokenClassification`` or ``BertForMaskedLM``.
        batch: Its inputs by name, and "labels", one per token. Tokens labelled -100 do not count.

    Raises:
        ConfigError: The batch has no labels, or they do not fit the logits.
    """
    return _over_tokens(_logits(model, batch), _labels(batch))


def causal_loss(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """One loss per row of a causal language model: the mean cross-entropy of each token given those before.

    A row is one unit of privacy, however long it is. Rows without a token that counts have the loss 0.

    Args:
        model: The model, such as ``GPT2LMHeadModel``.
        batch: Its inputs by name, and "labels", one per token. Set labels to -100 where the attention mask is 0,
            because padding that counts is learnt.

    Raises:
        ConfigError: The batch has no labels, or they do not fit the logits.
    """
    return _over_tokens(_logits(model, batch)[:, :-1], _labels(batch)[:, 1:])


def counted(loss_fn: LossFn, batch: Mapping[str, Tensor]) -> Tensor:
    """Which labels of each row count in a loss of this module, of shape (rows, labels)."""
    labels = _labels(batch).reshape(batch_rows(batch), -1)
    return (labels[:, 1:] if loss_fn is causal_loss else labels) != _IGNORED


def loss_of(model: Any) -> LossFn:
    """The loss per example of a model, by the name of its class.

    Args:
        model: A model of `transformers`, also wrapped by PEFT.

    Returns:
        `sequence_loss`, `token_loss` or `causal_loss`.

    Raises:
        ConfigError: The class is of another kind. Write the loss yourself.
    """
    name = type(base_model(model)).__name__
    for endings, loss in _BY_NAME:
        if name.endswith(endings):
            return loss
    known = sorted(ending for endings, _ in _BY_NAME for ending in endings)
    raise ConfigError(f"Expected a model whose class ends with one of {known}, got {name}. Give loss_fn for others.")


_BY_NAME: list[tuple[tuple[str, ...], LossFn]] = [
    (("ForCausalLM", "LMHeadModel"), causal_loss),
    (("ForMaskedLM", "ForTokenClassification"), token_loss),
    (("ForSequenceClassification", "ForImageClassification", "ForAudioClassification"), sequence_loss),
]


def base_model(model: Any) -> Any:
    """The model of `transformers` inside an adapter of PEFT, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _over_tokens(logits: Tensor, labels: Tensor) -> Tensor:
    if logits.dim() != 3 or logits.shape[:2] != labels.shape:
        raise ConfigError(
            f"Expected one label per token for logits of the shape {tuple(logits.shape)}, got {tuple(labels.shape)}."
        )
    losses = functional.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=_IGNORED, reduction="none"
    )
    counted = labels != _IGNORED
    return (losses.view(labels.shape) * counted).sum(1) / counted.sum(1).clamp(min=1)


def _labels(batch: Mapping[str, Tensor]) -> Tensor:
    require("labels" in batch, "columns of the batch", sorted(batch), "to have one called 'labels'")
    return batch["labels"]


def _logits(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    logits: Tensor = model(**{name: values for name, values in batch.items() if name != "labels"}).logits
    return logits

"""The two data sets of a run as the trainer takes them: examples, or users who train themselves."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from halfsilver._core.local_training import LocalTraining
from halfsilver._core.tensors import LossFn
from halfsilver.errors import ConfigError
from halfsilver.mirror.public import PublicLoss
from halfsilver.mirror.rows import PublicRows
from halfsilver.mirror.users import PublicUsers
from halfsilver.privacy.data import PrivateData
from halfsilver.privacy.users import Engine, InProcess, PrivateUsers
from halfsilver.study.problem import Problem, Recipe
from halfsilver.study.start import precision


def private_side(problem: Problem, recipe: Recipe) -> PrivateData | Engine:
    """The private rows; in a study they are of the public rows' kind, so one of these shows the shapes."""
    private = problem.private
    if isinstance(private, PrivateUsers):
        return InProcess(private, _local(recipe))
    if isinstance(private, PrivateData):
        return private
    return PrivateData(private, example=PublicRows(problem.public).example())


def public_side(model: nn.Module, problem: Problem, recipe: Recipe) -> PublicLoss:
    """The public rows; or public users who train as the private ones do, each clipped as they are."""
    if problem.public_users is None:
        loss_fn = public_loss_fn(problem, recipe) or problem.loss_fn
        return PublicLoss(model, loss_fn, problem.public, batch_size=recipe.public_batch_size)
    local = _local(recipe)
    return PublicUsers(
        model,
        problem.loss_fn,
        problem.public_users,
        replace(local, max_examples=recipe.public_examples or local.max_examples),
        cohort=recipe.public_batch_size,
        max_norm=recipe.max_grad_norm,
    )


def public_loss_fn(problem: Problem, recipe: Recipe) -> LossFn | None:
    """The loss of the mirror step: augmented if asked for, at the precision of the private passes."""
    loss_fn, augment = precision(recipe).precise(problem.loss_fn), problem.augment
    if augment is None or not recipe.augment_public:
        return loss_fn if recipe.autocast else None
    # PublicLoss seeds the generators by the step, so the augmentation is a function of the step as well.
    return lambda model, batch: loss_fn(model, augment(batch))


def _local(recipe: Recipe) -> LocalTraining:
    if recipe.local is None:
        raise ConfigError(f"The recipe {recipe.name!r} does not say how users train: it needs a table [recipe.local].")
    return recipe.local

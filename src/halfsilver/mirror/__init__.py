"""Mirror maps and the public loss: everything to the right of the noise."""

from halfsilver.mirror.base import (
    Chain,
    ClipReleased,
    Euclidean,
    MirrorMap,
    Mixture,
    State,
    Stateless,
    Step,
    chain,
    clip_released,
)
from halfsilver.mirror.bregman import Bregman, DualAveraging
from halfsilver.mirror.fall_back import FallBack
from halfsilver.mirror.finish import Calibrated, Finish, Finished
from halfsilver.mirror.first_order import FirstOrder
from halfsilver.mirror.fold import fold_batch_norm
from halfsilver.mirror.geometry import Geometry, Shaped, Whitened
from halfsilver.mirror.momentum import Momentum
from halfsilver.mirror.pretrain import PretrainResult, pretrain
from halfsilver.mirror.public import PublicLoss
from halfsilver.mirror.quadratic import Quadratic
from halfsilver.mirror.schedules import Clock, Constant, Cosine, OneCycle, Schedule, constant, cosine
from halfsilver.mirror.sets import ConstraintSet, GradientBall, Intersection, L2Ball

__all__ = [
    "Bregman",
    "Calibrated",
    "Chain",
    "ClipReleased",
    "Clock",
    "Constant",
    "ConstraintSet",
    "Cosine",
    "DualAveraging",
    "Euclidean",
    "FallBack",
    "Finish",
    "Finished",
    "FirstOrder",
    "Geometry",
    "GradientBall",
    "Intersection",
    "L2Ball",
    "MirrorMap",
    "Mixture",
    "Momentum",
    "OneCycle",
    "PretrainResult",
    "PublicLoss",
    "Quadratic",
    "Schedule",
    "Shaped",
    "State",
    "Stateless",
    "Step",
    "Whitened",
    "chain",
    "clip_released",
    "constant",
    "cosine",
    "fold_batch_norm",
    "pretrain",
]

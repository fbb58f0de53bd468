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
from halfsilver.mirror.first_order import FirstOrder
from halfsilver.mirror.geometry import Geometry, Shaped, Whitened
from halfsilver.mirror.momentum import Momentum
from halfsilver.mirror.pretrain import PretrainResult, pretrain
from halfsilver.mirror.public import PublicLoss
from halfsilver.mirror.quadratic import Quadratic
from halfsilver.mirror.schedules import Clock, Constant, Cosine, Schedule, constant, cosine
from halfsilver.mirror.sets import ConstraintSet, GradientBall, Intersection, L2Ball

__all__ = [
    "Bregman",
    "Chain",
    "ClipReleased",
    "Clock",
    "Constant",
    "ConstraintSet",
    "Cosine",
    "DualAveraging",
    "Euclidean",
    "FallBack",
    "FirstOrder",
    "Geometry",
    "GradientBall",
    "Intersection",
    "L2Ball",
    "MirrorMap",
    "Mixture",
    "Momentum",
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
    "pretrain",
]

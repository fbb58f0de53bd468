"""Studies: several methods side by side at one epsilon, and a verdict."""

from halfsilver.study.advice import Advice, advise
from halfsilver.study.calibration import calibration_error
from halfsilver.study.compare import Comparison, compare
from halfsilver.study.method import COLD, PDA, PUBLIC, WARM, Method
from halfsilver.study.problem import Grid, Pretrain, Problem, Recipe
from halfsilver.study.rehearsal import GeometryChoice, choose_geometry

__all__ = [
    "COLD",
    "PDA",
    "PUBLIC",
    "WARM",
    "Advice",
    "Comparison",
    "GeometryChoice",
    "Grid",
    "Method",
    "Pretrain",
    "Problem",
    "Recipe",
    "advise",
    "calibration_error",
    "choose_geometry",
    "compare",
]

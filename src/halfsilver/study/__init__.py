"""Studies: several methods side by side at one epsilon, and a verdict."""

from halfsilver.study.compare import Comparison, compare
from halfsilver.study.method import COLD, PDA, PUBLIC, WARM, Method
from halfsilver.study.problem import Grid, Pretrain, Problem, Recipe

__all__ = [
    "COLD",
    "PDA",
    "PUBLIC",
    "WARM",
    "Comparison",
    "Grid",
    "Method",
    "Pretrain",
    "Problem",
    "Recipe",
    "compare",
]

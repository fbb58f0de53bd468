"""A centre for the clip: the update of public users, from which those of private users differ less than from zero."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from halfsilver._core.tensors import Tensors
from halfsilver.errors import ConfigError, require
from halfsilver.mirror.users import PublicUsers

_log = logging.getLogger("halfsilver")


@dataclass(frozen=True, kw_only=True)
class Centre:
    """Clips the updates of users around the mean update p of public users.

    A round releases p + (sum_u clip(Delta_u - p, C) + z) / B for the expected number B of users. p comes from public
    users and released weights alone, and one user changes the sum by at most C, so the noise z and epsilon are those of
    the plan. A user who does not answer counts as p.

    What is subtracted need not be clipped, so a smaller clip norm C clips as much, and the noise becomes smaller with
    it: by the factor sqrt(1 - rho^2), where rho is the alignment of users' updates. It is measured on the public users
    when a run begins or resumes, and is logged. Below `least` the centre stays off, because the public update would
    bring more error than it saves.

    Args:
        least: The alignment in [0, 1] from which on updates are centred. Default 0.3, which saves 5 % of the clip norm.

    Raises:
        ConfigError: If `least` is outside its range.

    Example:
        >>> Centre()
        Centre(least=0.3)

    References:
        - Karimireddy, He and Jaggi 2021, Learning from History for Byzantine Robust Optimization, arXiv:2012.10333,
          for clipping around a centre.
    """

    least: float = 0.3

    def __post_init__(self) -> None:
        require(0 <= self.least <= 1, "least", self.least, "in [0, 1]")

    def around(self, public: Any) -> Callable[[int], Tensors | None]:
        """The centre of each round, as a function of the number of updates so far; None where it stays off.

        Args:
            public: The public users of the run.

        Raises:
            ConfigError: If `public` are not at least two public users.
        """
        users = getattr(public, "wraps", public)  # on Flower, what computes their gradient ahead stands around them
        if not isinstance(users, PublicUsers) or len(users.users) < 2:
            raise ConfigError("A centre needs at least two public users: fit(engine, PublicUsers(...), ...).")
        rho: float | None = None

        def centre(step: int) -> Tensors | None:
            nonlocal rho
            if rho is None:
                rho = users.alignment()
                on = f"on, which saves {saved(rho):.0%} of the clip norm" if rho >= self.least else "off"
                _log.info("Updates of %d public users: rho %.2f. The centre is %s.", len(users.users), rho, on)
            return users.gradient(step=step) if rho >= self.least else None

        return centre


def saved(rho: float) -> float:
    """The share of the clip norm that a centre saves at alignment `rho`.

    >>> f"{saved(0.3):.3f} {saved(0.9):.3f}"
    '0.046 0.564'
    """
    return 1 - math.sqrt(1 - rho**2)

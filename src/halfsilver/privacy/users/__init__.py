"""Users who train themselves: the only code that sees their rows, or their updates before the noise."""

from halfsilver.privacy.users.engine import Contribution, Engine, InProcess, Round
from halfsilver.privacy.users.fold import Fold
from halfsilver.privacy.users.source import UserUpdates
from halfsilver.privacy.users.store import PrivateUsers, TensorUsers, UserStore
from halfsilver.privacy.users.workers import Workers

__all__ = [
    "Contribution",
    "Engine",
    "Fold",
    "InProcess",
    "PrivateUsers",
    "Round",
    "TensorUsers",
    "UserStore",
    "UserUpdates",
    "Workers",
]

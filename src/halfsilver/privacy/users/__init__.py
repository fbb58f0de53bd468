"""Users who train on their own rows: the only code that sees these rows, or updates before the noise."""

from halfsilver.privacy.users.engine import Contribution, Engine, InProcess, Round, WithCentre, WithPresence
from halfsilver.privacy.users.fold import Fold
from halfsilver.privacy.users.local import local_update
from halfsilver.privacy.users.source import UserUpdates
from halfsilver.privacy.users.stores.base import PrivateUsers, TensorUsers, UserStore
from halfsilver.privacy.users.stores.jsonl import JsonlUsers
from halfsilver.privacy.users.stores.sqlite import SqliteUsers, tff_users
from halfsilver.privacy.users.workers import Workers

__all__ = [
    "Contribution",
    "Engine",
    "Fold",
    "InProcess",
    "JsonlUsers",
    "PrivateUsers",
    "Round",
    "SqliteUsers",
    "TensorUsers",
    "UserStore",
    "UserUpdates",
    "WithCentre",
    "WithPresence",
    "Workers",
    "local_update",
    "tff_users",
]

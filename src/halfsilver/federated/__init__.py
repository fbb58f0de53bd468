"""Users who keep their data: training with user-level privacy, simulated or on real nodes.

`Trainer.fit` takes an engine in place of private data. `InProcess` and `Workers` simulate users on this machine;
`halfsilver.federated.flower` reaches them through Flower. Everything else is as in central training.
"""

from halfsilver._core.local_training import LocalTraining
from halfsilver.mirror.users import PublicUsers
from halfsilver.privacy.users import (
    Contribution,
    Engine,
    InProcess,
    JsonlUsers,
    PrivateUsers,
    Round,
    SqliteUsers,
    TensorUsers,
    UserStore,
    Workers,
    local_update,
    tff_users,
)

__all__ = [
    "Contribution",
    "Engine",
    "InProcess",
    "JsonlUsers",
    "LocalTraining",
    "PrivateUsers",
    "PublicUsers",
    "Round",
    "SqliteUsers",
    "TensorUsers",
    "UserStore",
    "Workers",
    "local_update",
    "tff_users",
]

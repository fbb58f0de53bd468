"""Federated training with user-level privacy, simulated on this machine or run on real nodes.

`Trainer.fit` takes an engine in place of private data. `InProcess` and `Workers` simulate users on this machine;
`halfsilver.federated.flower` reaches them through Flower. Everything else is as in central training.

References:
    - McMahan, Moore, Ramage, Hampson and Aguera y Arcas 2017, Communication-Efficient Learning of Deep Networks from
      Decentralized Data, arXiv:1602.05629, for federated averaging.
    - McMahan, Ramage, Talwar and Zhang 2018, Learning Differentially Private Recurrent Language Models,
      arXiv:1710.06963, for user-level differential privacy.
"""

from halfsilver._core.local_training import LocalTraining
from halfsilver.mirror.centre import Centre
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
    WithCentre,
    WithPresence,
    Workers,
    local_update,
    tff_users,
)

__all__ = [
    "Centre",
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
    "WithCentre",
    "WithPresence",
    "Workers",
    "local_update",
    "tff_users",
]

"""Flower as an engine: real nodes train the users, and `Trainer` does the rest.

Needs ``pip install "halfsilver[flower]"``. `MirrorStrategy` runs on the server, `make_client_app` makes the app of the
nodes, and `Enrolment` lists the nodes that count.

References:
    - Beutel et al. 2020, Flower: A Friendly Federated Learning Research Framework, arXiv:2007.14390.
"""

from halfsilver.errors import MissingExtra

try:
    import flwr as _flwr
except ImportError as error:
    raise MissingExtra("flwr", "flower") from error

from halfsilver.federated.flower.ahead import Ahead
from halfsilver.federated.flower.client import Client, answer, make_client_app
from halfsilver.federated.flower.enrolment import Enrolment, Member
from halfsilver.federated.flower.keys import fingerprint
from halfsilver.federated.flower.strategy import MirrorStrategy, Settings

__all__ = [
    "Ahead",
    "Client",
    "Enrolment",
    "Member",
    "MirrorStrategy",
    "Settings",
    "answer",
    "fingerprint",
    "make_client_app",
]

del _flwr

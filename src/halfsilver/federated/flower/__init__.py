"""Flower as an engine: real nodes train the users, and `Trainer` does the rest.

Needs ``pip install "halfsilver[flower]"``. `MirrorStrategy` is the server's side, `make_client_app` the nodes', and
`Enrolment` the list of the nodes that count.
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

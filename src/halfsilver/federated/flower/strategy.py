"""`MirrorStrategy`: a Flower strategy whose rounds are those of a `Trainer`."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from logging import INFO, WARNING
from pathlib import Path
from typing import Any, final

import torch
from cryptography.exceptions import UnsupportedAlgorithm
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor

from halfsilver._core import system
from halfsilver._core.averaging import copy_to
from halfsilver._core.tensors import trainable
from halfsilver.errors import ConfigError, require
from halfsilver.federated.flower.ahead import Ahead
from halfsilver.federated.flower.enrolment import Enrolment
from halfsilver.federated.flower.exchange import exchange, patiently
from halfsilver.federated.flower.keys import fingerprint, public_key
from halfsilver.federated.flower.replies import Asked, Gate
from halfsilver.federated.flower.wire import CENTRE, MODEL, TASK, fixed_part, from_record, to_record
from halfsilver.privacy.strategies import Correlated
from halfsilver.privacy.users import Contribution, Round
from halfsilver.runs.folder import read_json, write_json
from halfsilver.trainer import RunResult, Trainer

Nodes = Mapping[str, tuple[int, bytes]]  # fingerprint -> node id and public key

_MEMBERS = "members.json"  # in the run folder: whom the numbers of users stand for


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How long a round waits for nodes, and what it accepts from them.

    Args:
        round_seconds: How long a round waits for replies, in seconds; above 0. Default 600. The link keeps a request
            for the same time.
        poll_seconds: How often the link is polled, in seconds; above 0. Default 0.5.
        reply_bytes: The largest reply that is decoded, in bytes; above 0. Default None, which means the model in
            float64.
        min_online: How many enrolled nodes should be online when a round starts, at least 0. Default 1. The run refuses
            to start with fewer. A later round goes on with fewer after `patience_seconds`, because it has been counted.
        patience_seconds: How long to wait for `min_online` nodes, in seconds; at least 0. Default 60.

    Raises:
        ConfigError: If a value is out of range.

    Example:
        >>> Settings(round_seconds=120).min_online
        1
    """

    round_seconds: float = 600.0
    poll_seconds: float = 0.5
    reply_bytes: int | None = None
    min_online: int = 1
    patience_seconds: float = 60.0

    def __post_init__(self) -> None:
        for name in ("round_seconds", "poll_seconds"):
            require(getattr(self, name) > 0, name, getattr(self, name), "above 0")
        require(self.reply_bytes is None or self.reply_bytes > 0, "reply_bytes", self.reply_bytes, "above 0 or None")
        require(self.min_online >= 0, "min_online", self.min_online, "at least 0")
        require(self.patience_seconds >= 0, "patience_seconds", self.patience_seconds, "at least 0")


@final
class MirrorStrategy(Strategy):
    """A Flower strategy that trains on the users of enrolled nodes. It is the `Engine` of the trainer that it is given.

    Guarantee: that of `Trainer.fit` with ``plan.unit="user"``. Loop, ledger, checkpoints and noise are the trainer's;
    Flower carries requests and replies. After the link or this process dies, `start` in a new run of the app resumes
    from the same `run_dir`. Steps that were begun stay counted.

    Args:
        trainer: The trainer, whose plan has ``unit="user"``.
        enrolment: The nodes that count. The plan's sampling rate refers to its population.
        run_dir: The run folder, for checkpoints and the statement.
        public: Public data for the mirror map, as for `Trainer.fit`. Default None. Its gradient is computed while the
            nodes train.
        settings: Waiting times and limits. Default None, which means ``Settings()``.
        fit: Further arguments of `Trainer.fit`: ledger, delta, test, test_every. Default None.

    References:
        - McMahan, Ramage, Talwar and Zhang 2018, Learning Differentially Private Recurrent Language Models,
          arXiv:1710.06963.
        - Beutel et al. 2020, Flower: A Friendly Federated Learning Research Framework, arXiv:2007.14390.
    """

    def __init__(
        self,
        trainer: Trainer,
        enrolment: Enrolment,
        *,
        run_dir: str | Path,
        public: Any = None,
        settings: Settings | None = None,
        fit: Mapping[str, Any] | None = None,
    ) -> None:
        self.trainer, self.enrolment, self.settings = trainer, enrolment, settings or Settings()
        self._public = None if public is None else Ahead(trainer._public_loss(public))
        self._run_dir, self._fit = Path(run_dir), dict(fit or {})
        self._fixed = ""
        self.refused: Counter[str] = Counter()
        self.grid: Grid | None = None
        self.result: RunResult | None = None
        self._round: Round | None = None
        self._gate: Gate | None = None
        self._incoming: Iterator[Contribution] = iter(())

    # ---- Flower's side

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int = 0,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run the trainer's plan over the nodes of a grid, or resume the run in `run_dir`.

        Model, rounds and tests belong to the trainer, so only `grid` is needed. Arguments that say otherwise are
        refused.

        Args:
            grid: Flower's connection to the nodes.
            initial_arrays: Values for the trainable parameters, in their order. Default None, which keeps the model's
                own.
            num_rounds: 0 or the number of steps of the plan. Default 0.
            timeout: Must be None; use ``Settings.round_seconds``.
            train_config: Must be None; settings of local training are the nodes' own.
            evaluate_config: Must be None; use ``test=`` of `Trainer.fit`.
            evaluate_fn: Must be None; use ``test=`` of `Trainer.fit`.

        Returns:
            Flower's result, with the trained parameters. The `RunResult` is in the attribute ``result``.

        Raises:
            ConfigError: If an argument is not as above, or if fewer than ``Settings.min_online`` enrolled nodes come
                online.
            BudgetExceeded: If the ledger's budget allows no step.
        """
        steps = self.trainer.plan.steps
        require(num_rounds in (0, steps), "num_rounds", num_rounds, f"to be left out, or the plan's {steps}")
        others = {"timeout": timeout, "train_config": train_config, "evaluate_config": evaluate_config}
        for name, value in (others | {"evaluate_fn": evaluate_fn}).items():
            require(value is None, name, value, "to be left out", "See Settings, and test= of Trainer.fit.")
        params = trainable(self.trainer.model)
        if initial_arrays is not None:
            values = from_record(initial_arrays, params)
            require(values is not None, "initial_arrays", list(initial_arrays), "to have the trainable parameters")
            copy_to(params, values or [])
        self.grid = grid
        self._keep_numbers()
        self._first_nodes()
        self.summary()
        self.result = self.trainer.fit(self, self._public, run_dir=self._run_dir, **self._fit)
        return Result(arrays=to_record(params))

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Make one request per online node that serves a drawn user, and start the public gradient.

        Args:
            server_round: The number of the round, from 1. The trainer must have opened it.
            arrays: The trainable parameters.
            config: Further entries of the request.
            grid: Flower's connection to the nodes.

        Returns:
            The requests.
        """
        asked = self._opened(server_round)
        self._gate = Gate(trainable(asked.model), self.settings.reply_bytes, self.refused)
        nodes, fixed = self._online(grid), fixed_part(asked.model)
        if self._fixed not in ("", fixed):
            raise ConfigError(
                "Expected frozen weights and buffers to stay as they were, because nodes hold their own. Leave out "
                "refresh of a geometry."
            )
        self._fixed = fixed
        task = {**config, "step": asked.step, "clip": asked.max_grad_norm, "fixed": self._fixed}
        records = {MODEL: arrays} | ({} if asked.centre is None else {CENTRE: to_record(asked.centre)})
        messages = [
            self._request(nodes[member.fingerprint], users, records, task)
            for member, users in self.enrolment.by_member(asked.users.tolist()).items()
            if member.fingerprint in nodes
        ]
        if self._public is not None:
            self._public.begin(asked.step)
        return messages

    def _request(
        self, node: tuple[int, bytes], users: list[int], records: Mapping[str, ArrayRecord], task: Mapping[str, Any]
    ) -> Message:
        assert self._gate is not None
        nonce = secrets.token_bytes(32)
        content = RecordDict({**records, TASK: ConfigRecord({**task, "users": users, "nonce": nonce})})
        message = Message(content, node[0], MessageType.TRAIN, ttl=self.settings.round_seconds)
        run, key = message.metadata.run_id, public_key(node[1])
        self._gate.expect(Asked(node=node[0], run=run, step=task["step"], nonce=nonce, users=len(users), key=key))
        return message

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[None, None]:
        """Check the replies as they arrive. The trainer computes the new model from them.

        Args:
            server_round: The number of the round, from 1.
            replies: What the nodes sent.

        Returns:
            Nothing for Flower to store: neither parameters nor metrics.
        """
        self._opened(server_round)
        assert self._gate is not None
        self._incoming = self._gate.admitted(replies)
        return None, None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """No requests, because what nodes measure on their users is not private. Use ``test=`` of `Trainer.fit`.

        Args:
            server_round: Not used.
            arrays: Not used.
            config: Not used.
            grid: Not used.

        Returns:
            An empty list.
        """
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Nothing, because nothing was requested.

        Args:
            server_round: Not used.
            replies: Not used.

        Returns:
            None.
        """
        return None

    def summary(self) -> None:
        """Log how many nodes and users are enrolled, and the plan."""
        members, plan = self.enrolment.members, self.trainer.plan
        log(INFO, "\t%d enrolled nodes, %d users; %s", len(members), self.population, plan)

    # ---- the trainer's side

    @property
    def population(self) -> int:
        """The number of enrolled users."""
        return self.enrolment.population

    def present(self) -> Tensor:
        """Users whose nodes are connected now, for runs with correlated noise; waits for ``Settings.min_online`` nodes.

        Returns:
            User numbers in rising order.

        Raises:
            ConfigError: If `start` was not called.
        """
        grid = self._reached()
        self._wait()
        return torch.tensor(self.enrolment.users_of(self._online(grid).keys()), dtype=torch.int64)

    @property
    def subtracts_centre(self) -> bool:
        """Whether nodes subtract `Round.centre`: they do, and receive it with the model."""
        return True

    def contributions(self, round: Round) -> Iterator[Contribution]:
        """Yield the contributions of the drawn users whose nodes answer in time.

        Args:
            round: The users, the model and the clip norm of this round.

        Returns:
            An iterator over one contribution per node that answered.

        Raises:
            ConfigError: If `start` was not called.
        """
        grid = self._reached()
        self._round = round
        self._wait()
        number, arrays = round.step + 1, to_record(trainable(round.model))
        messages = list(self.configure_train(number, arrays, ConfigRecord(), grid))
        wait = {"seconds": self.settings.round_seconds, "poll": self.settings.poll_seconds}
        self.aggregate_train(number, exchange(grid, messages, **wait))
        heard = False
        try:
            for contribution in self._incoming:
                heard = True
                yield contribution
        finally:
            if self._public is not None:
                self._public.wait()
        if messages and not heard:
            log(WARNING, "Round %d: no node answered as it should; the logs of the nodes may say why.", number)

    def _keep_numbers(self) -> None:
        """With correlated noise, the number of a user must stand for the same person in all rounds of a run."""
        if not isinstance(self.trainer.plan.noise, Correlated):
            return
        path = self._run_dir / _MEMBERS
        now = [[m.name, m.users] for m in self.enrolment.members]
        before = read_json(path)["members"] if path.exists() else []
        require(
            now[: len(before)] == before,
            "members",
            [name for name, _ in now],
            f"to begin with {[name for name, _ in before]}, each with as many users as at the start of the run",
            "Append new nodes at the end. A node with a new key keeps its place: replace its fingerprint.",
        )
        system.make_folder(self._run_dir.resolve())
        write_json(path, {"members": now})

    def _reached(self) -> Grid:
        if self.grid is None:
            raise ConfigError("Expected a grid to reach nodes by. Call start(grid) in the ServerApp.")
        return self.grid

    def _opened(self, server_round: int) -> Round:
        if self._round is None or self._round.step + 1 != server_round:
            raise ConfigError(f"Expected round {server_round} to have been opened by the trainer. Call start(grid).")
        return self._round

    def _online(self, grid: Grid) -> Nodes:
        """Enrolled nodes that the link has a connection with, by the keys they registered."""
        known = {m.fingerprint for m in self.enrolment.members if not m.revoked}
        nodes = patiently(lambda: list(grid.get_nodes()), self.settings.poll_seconds)
        found = {_fingerprint(n.public_key): (n.node_id, n.public_key) for n in nodes}
        return {mark: node for mark, node in found.items() if mark in known}

    def _wait(self) -> int:
        assert self.grid is not None
        until = time.monotonic() + self.settings.patience_seconds
        while (here := len(self._online(self.grid))) < self.settings.min_online and time.monotonic() < until:
            time.sleep(self.settings.poll_seconds)
        return here

    def _first_nodes(self) -> None:
        """Before anything is spent: a run that nobody takes part in would release noise alone."""
        here = self._wait()
        require(
            here >= self.settings.min_online,
            "enrolled nodes online",
            here,
            f"at least min_online={self.settings.min_online} within {self.settings.patience_seconds:g} s",
            "Start SuperNodes with enrolled keys, and the SuperLink with --enable-supernode-auth.",
        )


def _fingerprint(key: bytes) -> str:
    """Empty for a key that cannot be read: nodes of a link without authentication have none."""
    try:
        return fingerprint(key)
    except (ValueError, ConfigError, UnsupportedAlgorithm):
        return ""

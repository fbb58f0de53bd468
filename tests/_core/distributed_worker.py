"""What one rank does for tests/test_distributed.py: `python distributed_worker.py FOLDER RANK SIZE SCENARIO ...`.

The results of a scenario go to FOLDER/SCENARIO.RANK.safetensors and .json; a test reads those of all ranks.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

import halfsilver as hs
from halfsilver._core import checkpoint
from halfsilver._core.distributed import World
from halfsilver._core.sharded import full, unwrapped
from halfsilver.privacy import noise as noise_module
from halfsilver.privacy import releases
from halfsilver.privacy.data import PrivateData
from halfsilver.privacy.entropy import UnsafeSeed
from halfsilver.privacy.ledger import Budget, Ledger
from halfsilver.privacy.mechanism import PrivateGradient
from halfsilver.trainer import StepReport

Kind = Literal["plain", "ddp", "fsdp"]
Tensors = list[Tensor]
Result = tuple[dict[str, Tensor], dict[str, Any]]
CPU = torch.device("cpu")


def network(kind: Kind, dtype: torch.dtype = torch.float64, widths: tuple[int, int, int] = (5, 7, 3)) -> nn.Module:
    """By default with all that shards badly: dimensions that 2 and 4 do not divide, and a frozen layer."""
    torch.manual_seed(0)
    first, hidden, last = widths
    layers = [nn.Linear(first, hidden), nn.Dropout(0.1), nn.Linear(hidden, hidden), nn.LayerNorm(hidden), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Linear(hidden, last)).to(dtype)
    model[2].requires_grad_(False)
    if kind == "ddp" and dist.get_world_size() == 2:  # the wrapper comes off anyway, and its imports take seconds
        return nn.parallel.DistributedDataParallel(model)
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model[0])
        fully_shard(model)
    return model


def losses(model: Any, batch: Any) -> Tensor:
    x, y = batch
    return functional.cross_entropy(model(x), y, reduction="none")


def rows(n: int, dtype: torch.dtype = torch.float64, seed: int = 1) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 5, generator=g, dtype=torch.float64).to(dtype)
    return x, (x.sum(1) > 0).long()


def source(folder: Path, model: nn.Module, private: Any, **options: Any) -> PrivateGradient:
    """A mechanism over all ranks, with a ledger that only rank 0 has."""
    asked = {"steps": 50, "sampling_rate": 1.0, "expected_batch_size": 10, "noise_multiplier": 1e-2}
    plan = hs.PrivacyPlan(**{**asked, **options.pop("plan", {})})
    world = World.current(CPU)
    ledger = Ledger.open(folder / "ledger.jsonl", unit=plan.unit) if world.leads else None
    data = private if isinstance(private, PrivateData) else PrivateData(private)
    loss_fn = options.pop("loss_fn", losses)
    return PrivateGradient(model, loss_fn, data, plan, ledger=ledger, run_id="run", world=world, **options)


def clipped_sum(made: PrivateGradient) -> Tensors:
    """Over all ranks, in full, before any noise."""
    pieces = made._pieces.sum(made._clipped_sum().tensors)
    return made._pieces.whole(pieces)


# ---- scenarios


def sums(folder: Path) -> Result:
    """Clipped sums, with clipping active, of: 37 rows; users; a bad and a NaN record; one record; none at all."""
    x, y = rows(37)
    y_bad, x_bad = y.clone(), x.clone()
    y_bad[1], x_bad[6] = 99, torch.nan
    cases = {
        "rows": (x, y),
        "users": PrivateData((x, y), users=[i // 4 for i in range(37)]),
        "bad": (x_bad, y_bad),
        "one": (x[:1], y[:1]),
        "none": (x[:0], y[:0]),
    }
    found: dict[str, Tensor] = {}
    for kind in kinds():
        for name, data in cases.items():
            model = unwrapped(network(kind)).eval()
            plan = {"unit": "user" if name == "users" else "example", "max_grad_norm": 0.3}
            made = source(folder / f"{kind}-{name}", model, data, plan=plan)
            total = clipped_sum(made)
            found |= {f"{kind}.{name}.{i}": t for i, t in enumerate(total)}
            released = [full(t) * 10 for t in made.release()]
            found |= {f"{kind}.{name}.released.{i}": t for i, t in enumerate(released)}
    return found, {}


class Tied(nn.Module):
    """What a copy of a sharded model must get right: tied weights, an LSTM's list of its own, modules in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.lstm = nn.LSTM(6, 6, batch_first=True)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.order = [self.lstm, self.head]
        self.scale: Tensor
        self.register_buffer("scale", torch.tensor(1.5))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.order[0](self.embedding(tokens))
        scores: Tensor = self.order[1](hidden) * self.scale
        return scores


def tied(folder: Path) -> Result:
    """The clipped sum of a model that is hard to copy, without shards and with: after a forward pass of FSDP's own."""
    tokens = torch.randint(0, 11, (13, 7), generator=torch.Generator().manual_seed(0))
    found: dict[str, Tensor] = {}
    for kind in ("plain", "fsdp"):
        torch.manual_seed(0)
        model: nn.Module = Tied().double()
        model.train(False)
        if kind == "fsdp":
            from torch.distributed.fsdp import fully_shard

            fully_shard(model)
            with torch.no_grad():
                model(tokens[:2])  # leaves whole parameters behind
        made = source(folder / kind, model, (tokens,), plan={"max_grad_norm": 0.1}, loss_fn=next_token_losses)
        found |= {f"{kind}.{i}": t for i, t in enumerate(clipped_sum(made))}
    return found, {}


def next_token_losses(model: Any, batch: Any) -> Tensor:
    (tokens,) = batch
    scores = model(tokens[:, :-1]).transpose(1, 2)
    return functional.cross_entropy(scores, tokens[:, 1:], reduction="none").mean(1)


def noise(folder: Path) -> Result:
    """Releases of a set without records: noise alone, in two tensors of 200,000 numbers, one step a rank."""
    found: dict[str, Tensor] = {}
    for kind in kinds():
        for seeded in (False, True):
            torch.manual_seed(0)
            model: nn.Module = nn.Sequential(nn.Linear(500, 400, bias=False), nn.Linear(400, 500, bias=False)).double()
            if kind == "fsdp":
                from torch.distributed.fsdp import fully_shard

                fully_shard(model)
            x = torch.zeros(0, 500, dtype=torch.float64)
            y = torch.zeros(0, dtype=torch.long)
            entropy = UnsafeSeed(7) if seeded else None  # a bug to be seen: the same seed on every rank
            plan = {"expected_batch_size": 1.0, "noise_multiplier": 1.0}
            made = source(folder / f"{kind}-{seeded}", model, (x, y), plan=plan, entropy=entropy)
            steps = [made.release() for _ in range(dist.get_world_size())]
            for i in range(2):
                whole = torch.stack([full(step[i]) for step in steps])
                found[f"{kind}.{'seeded' if seeded else 'own'}.{i}"] = whole
    return found if dist.get_rank() == 0 else {}, {}


def trainer(kind: Kind, **options: Any) -> hs.Trainer:
    model = network(kind, torch.float32, (5, 8, 4))
    steps = options.pop("steps", 50)
    # Large noise on a small step: the accountant is much faster there, and has to run for every statement. There are
    # fewer records than the plan declares, so no `fit` of these counts them.
    plan = hs.PrivacyPlan(
        steps=steps, spare_steps=500, sampling_rate=0.3, expected_batch_size=600, noise_multiplier=16.0
    )
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = options.pop("optimizer", torch.optim.Adam)(params, lr=0.02)
    mirror = hs.chain(hs.clip_released(1.0), hs.FirstOrder(hs.cosine(end=0.5), public_max_norm=0.5))
    return hs.Trainer(
        model, losses, optimizer=optimizer, plan=plan, **{"mirror": mirror, "public_batch_size": 8, **options}
    )


def train(folder: Path) -> Result:
    """50 steps of everything at once: Adam, averaging, two maps with norms, dropout, tests on the way."""
    found: dict[str, Tensor] = {}
    about: dict[str, Any] = {}
    private, public = rows(200, torch.float32), rows(40, torch.float32, seed=2)
    for kind in kinds():
        for average in (None, "uniform") if dist.get_world_size() == 2 else ("uniform",):
            made = trainer(kind, unsafe_seed=3, average=average)
            made.pretrain(public, epochs=2)
            if dist.get_rank():  # whatever the others start from, rank 0's weights count
                with torch.no_grad():
                    [p.mul_(2) for p in made.model.parameters() if kind != "fsdp"]
            result = made.fit(
                private, public, check_usable=False, run_dir=folder / f"{kind}-{average}", test=public, test_every=25
            )
            name = f"{kind}.{average}"
            found |= {f"{name}.{k}": full(v).clone() for k, v in made.model.state_dict().items()}
            about[name] = {"history": result.history, "statement": result.statement, "updates": result.updates}
            about[name]["loss"] = made.evaluate(public)["loss"]
    return found, about


def round_trips(folder: Path) -> Result:
    """Checkpoints written by one kind of run and loaded by another: how many tensors come back as they were."""
    private, public = rows(200, torch.float32), rows(40, torch.float32, seed=2)
    same: dict[str, Any] = {}
    for optimizer in (torch.optim.Adam, momentum):
        for writer in kinds():
            run = folder / f"{writer}-{optimizer.__name__}"
            trainer(writer, steps=3, average=0.9, optimizer=optimizer).fit(
                private, public, check_usable=False, run_dir=run
            )
            parts = checkpoint.read(run / "checkpoint.safetensors")
            for reader in kinds():
                made = trainer(reader, steps=3, average=0.9, optimizer=optimizer)
                made.load_state_dict(parts)
                tensors, about = made.state_dict()
                equal = [torch.equal(t, tensors[name]) for name, t in parts[0].items()]
                kept = about["step"] == 3 and set(tensors) == set(parts[0])
                same[f"{optimizer.__name__} {writer} {reader}"] = [len(equal), sum(equal), kept]
    return {}, same


def momentum(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr, momentum=0.9)


def geometry(folder: Path) -> Result:
    """Whitened, on all rows in every step and as good as no noise; replicas also with new coordinates on the way.

    Shards are made of layers that are shaped already, and merged in a copy that was made before.
    """

    def quiet(total: Any, sigma: float, *more: Any, **options: Any) -> Any:
        return noise_module.noisy_mean(total, 1e-9 * sigma, *more, **options)

    def fit(model: nn.Module, name: str, **options: Any) -> None:
        sgd = momentum([p for p in model.parameters() if p.requires_grad], lr=0.5)
        options |= {"average": 0.5, "skip_public_copies": False}
        hs.Trainer(model, losses, optimizer=sgd, plan=plan, **options).fit(private, public, run_dir=folder / name)

    private, public = rows(40, torch.float32), rows(30, torch.float32, seed=2)
    plan = hs.PrivacyPlan(steps=4, sampling_rate=1.0, expected_batch_size=40, noise_multiplier=16.0)
    replica, sharded = (convolution() for _ in range(2))
    shaped = hs.Whitened().shape(sharded, losses, public)
    merged = copy.deepcopy(shaped)
    from torch.distributed.fsdp import fully_shard

    fully_shard(sharded[0])
    fully_shard(sharded)
    with mock.patch.object(releases, "noisy_mean", quiet):
        fit(replica, "replica", geometry=hs.Whitened())
        fit(sharded, "sharded")
        merged.model.load_state_dict({name: full(t) for name, t in sharded.state_dict().items()})
        merged.merge()
        wrapped = network("ddp" if dist.get_world_size() == 2 else "plain", torch.float32).eval()
        fit(wrapped, "refresh", geometry=hs.Whitened(refresh=2))
    ends = {"replica": replica, "sharded": merged.model, "refresh": unwrapped(wrapped)}
    return {f"{name}.{k}": t.clone() for name, model in ends.items() for k, t in model.state_dict().items()}, {}


def convolution() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Unflatten(1, (1, 7)), nn.Conv1d(1, 3, 3), nn.Flatten(), nn.Linear(15, 3))


def long(folder: Path) -> Result:
    """A run that is there to be killed. Each update leaves a line in a file that survives."""
    kind: Kind = "fsdp" if (folder.parent / "sharded").exists() else "ddp"
    made = long_trainer(kind, folder.parent / "witness", dist.get_rank() == 0)
    result = made.fit(
        rows(200, torch.float32), rows(40, torch.float32, seed=2), check_usable=False, run_dir=folder, delta=1e-5
    )
    return {}, {"stopped": result.stopped, "updates": result.updates}


def long_trainer(kind: Kind, witness: Path, writes: bool) -> hs.Trainer:
    def note(report: StepReport) -> None:
        with witness.open("a") as log:
            log.write(f"{report.step} {report.released_norm!r}\n")

    callbacks = [note] if writes else []
    return trainer(kind, steps=300, average="uniform", checkpoint_seconds=0.02, callbacks=callbacks)


def _spender(ledger: Path) -> Callable[[StepReport], None]:
    """Somebody else takes, after the first step, what the plan of this run would need."""

    def spend(report: StepReport) -> None:
        if dist.get_rank() == 0 and report.step == 1:
            Ledger.open(ledger).external((1.0, 1e-7), "another use")

    return spend


def failures(folder: Path) -> Result:
    """Errors that one rank alone can raise, as every rank sees them."""
    private, public = rows(200, torch.float32), rows(40, torch.float32, seed=2)
    seen: dict[str, Any] = {}

    def note(name: str, run: Callable[[], Any]) -> None:
        try:
            seen[name] = ["returned", str(run())]
        except Exception as error:
            seen[name] = [type(error).__name__, str(error)]

    def fit(made: hs.Trainer, name: str, **options: Any) -> str:
        return made.fit(private, public, run_dir=folder / name, check_usable=False, **options).stopped

    tight, some = folder / "tight.jsonl", folder / "some.jsonl"
    if dist.get_rank() == 0:
        Ledger.open(tight, budget=Budget(epsilon=1e-3, delta=1e-5))
        Ledger.open(some, budget=Budget(epsilon=1.8, delta=1e-5))
    dist.barrier()
    note("refused", lambda: fit(trainer("plain"), "refused", ledger=tight))
    note("stopped", lambda: fit(trainer("plain", callbacks=[_spender(some)]), "stopped", ledger=some))
    note("first", lambda: fit(trainer("plain", steps=2), "first"))
    note("changed", lambda: fit(trainer("plain", steps=3), "first"))
    note("differs", lambda: fit(trainer("plain", steps=2 + dist.get_rank()), "differs"))
    if dist.get_rank() == 0:
        (folder / "first" / "checkpoint.safetensors").write_bytes(b"no")
    note("corrupt", lambda: fit(trainer("plain", steps=2), "first"))
    last = dist.get_rank() == dist.get_world_size() - 1

    def drift(report: StepReport) -> None:
        with torch.no_grad():
            drifting.model.get_parameter("0.bias")[0] += 1e-3

    def narrow(model: Any, batch: Any) -> Tensor:
        return losses(model, batch).mean() if last else losses(model, batch)

    note("one rank", lambda: fit(_with_loss(trainer("plain"), narrow), "narrow"))
    note("memory", lambda: fit(_with_loss(trainer("plain", public_loss_fn=losses), _memory(last)), "memory"))
    drifting = trainer("plain", callbacks=[drift] if last else [], checkpoint_seconds=0.0)
    note("drift", lambda: fit(drifting, "drift"))
    note(
        "sizes",
        lambda: trainer("plain").fit(
            rows(200 + last, torch.float32), public, check_usable=False, run_dir=folder / "sizes"
        ),
    )
    shuffled = tuple(t.flip(0) if last else t for t in rows(200, torch.float32))
    note("order", lambda: trainer("plain").fit(shuffled, public, check_usable=False, run_dir=folder / "order"))
    note("arguments", lambda: trainer("plain").fit(
        rows(200, torch.float32), public, run_dir=folder / "arguments", test=public if last else None,
    ))  # fmt: skip

    def raises(report: StepReport) -> None:
        raise ValueError("callback")

    note("callback", lambda: fit(trainer("plain", callbacks=[raises] if last else []), "callback"))
    note("dense", lambda: fit(trainer("fsdp", mirror=hs.Quadratic(damping=1.0)), "dense"))
    return {}, seen


def _with_loss(made: hs.Trainer, loss_fn: Any) -> hs.Trainer:
    made.loss_fn, made.performance = loss_fn, hs.Performance(backend="vmap")
    return made


def _memory(fails: bool) -> Any:
    """A loss that runs out of memory in the private pass."""

    def loss(model: Any, batch: Any) -> Tensor:
        if fails and _in_release():
            raise MemoryError("no room")
        return losses(model, batch)

    return loss


def _in_release() -> bool:
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == "release":
            return True
    return False


def kinds() -> tuple[Kind, ...]:
    return ("ddp", "fsdp") if dist.get_world_size() > 1 else ("plain", "ddp", "fsdp")


SCENARIOS = {f.__name__: f for f in (sums, tied, noise, train, round_trips, geometry, long, failures)}


def main(folder: Path, rank: int, size: int, names: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size, timeout=timedelta(seconds=150)
    )
    for name in names:
        tensors, about = SCENARIOS[name](folder / name)
        save_file({k: t.contiguous() for k, t in tensors.items()}, folder / f"{name}.{rank}.safetensors")
        (folder / f"{name}.{rank}.json").write_text(json.dumps(about))
    time.sleep(0.5)  # for gloo's threads, as in examples/distributed.py
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])

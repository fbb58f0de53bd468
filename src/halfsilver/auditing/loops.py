"""Every training loop of the library, small, on synthetic rows: what the library's own audit runs.

A loop is a function (plan, folder, layout, unsafe_seed) -> `Observation`. Each calls the code that users call.
"""

from __future__ import annotations

import os
import traceback
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from halfsilver._core.local_training import LocalTraining
from halfsilver._core.tensors import take_rows, trainable
from halfsilver.auditing.bank import Banked, Layout, losses, public_losses, public_records
from halfsilver.auditing.observe import Observation
from halfsilver.auditing.report import AuditReport, reported
from halfsilver.auditing.run import Audited, Run, intents, observe
from halfsilver.auditing.watch import Watch, WatchedMap, WatchedRecords
from halfsilver.mirror import (
    Bregman,
    DualAveraging,
    Euclidean,
    FallBack,
    FirstOrder,
    Geometry,
    MirrorMap,
    Momentum,
    PublicLoss,
    Quadratic,
    Whitened,
    chain,
    clip_released,
    cosine,
)
from halfsilver.privacy.data import PrivateData
from halfsilver.privacy.gradients import BackendName, Performance
from halfsilver.privacy.plan import PrivacyPlan
from halfsilver.privacy.strategies import Buffered, Correlated
from halfsilver.privacy.users import InProcess, PrivateUsers
from halfsilver.trainer import Trainer

Rows = tuple[Tensor, Tensor]

BACKENDS: tuple[BackendName, ...] = ("book", "vmap", "hooks")
MAPS: dict[str, MirrorMap] = {
    "FirstOrder": FirstOrder(cosine(end=0.5)),
    "FallBack": FallBack(FirstOrder(0.5, public_max_norm=1.0)),
    "Quadratic": Quadratic(damping=0.5, normalize=False, dense_limit=0),
    "Bregman": Bregman(damping=0.5),
    "DualAveraging": DualAveraging(damping=0.5),
    "Momentum": chain(Momentum(0.9), FirstOrder(0.7)),
    "chain": chain(clip_released(0.1), FirstOrder(0.7)),
}
_MICRO_BATCH = 128


def plan_of(*, steps: int = 30, sampling_rate: float = 0.1, noise_multiplier: float = 1.0) -> PrivacyPlan:
    return PrivacyPlan(
        steps=steps, sampling_rate=sampling_rate, expected_batch_size=100.0, noise_multiplier=noise_multiplier
    )


def synthetic(n: int = 101, seed: int = 0) -> Rows:
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(seed))
    return x, x @ torch.tensor([1.0, -2.0, 0.5])


def squared(model: Any, batch: Rows) -> Tensor:
    residual: Tensor = model(batch[0]).squeeze(1) - batch[1]
    return 0.5 * residual.square()


def small_model() -> nn.Module:
    model = nn.Linear(3, 1)
    for p in model.parameters():
        nn.init.zeros_(p)
    return model


def trainer_loop(
    name: str,
    backend: BackendName = "book",
    mirror: MirrorMap | None = None,
    geometry: Geometry | None = None,
    **options: Any,
) -> Audited:
    """`Trainer.fit` on a small linear model, whose public loss is quadratic, as some maps need it to be."""
    model, public = small_model(), None if mirror is None and geometry is None else synthetic(40, seed=1)
    trainer = Trainer(
        model,
        squared,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        plan=plan_of(),
        mirror=mirror or Euclidean(),
        geometry=geometry,
        performance=Performance(backend=backend, micro_batch_size=_MICRO_BATCH),
    )
    return Audited(trainer=trainer, rows=synthetic(), public=public, name=name, **options)


def layered(run: Run, layer: Any) -> Run:
    """The same loop with a bank of another kind of layer."""
    return lambda plan, folder, layout, seed: run(plan, folder, replace(layout, layer=layer), seed)


def federated(plan: PrivacyPlan, folder: Path, layout: Layout, unsafe_seed: int | None = None) -> Observation:
    """Users who train themselves, here in this process: one record each, and an update that is its gradient."""
    users = lambda records: InProcess(PrivateUsers(records), LocalTraining(lr=1.0, batch_size=1))  # noqa: E731
    audited = trainer_loop("federated", private=users)
    return audited(replace(plan, unit="user"), folder, replace(layout, layer="embedding"), unsafe_seed)


def correlated(plan: PrivacyPlan, folder: Path, layout: Layout, unsafe_seed: int | None = None) -> Observation:
    """Records that take turns, and correlated noise with the plan's noise multiplier for the whole run."""
    noise = Correlated(separation=plan.batches_per_pass, strategy=Buffered((0.9, 0.3), (0.35, 0.2)))
    return trainer_loop("correlated noise")(replace(plan, noise=noise), folder, layout, unsafe_seed)


def keyed_users(plan: PrivacyPlan, folder: Path, layout: Layout, unsafe_seed: int | None = None) -> Observation:
    """Users with several records each, by keys: every row of the data belongs to the user of some canary."""

    def private(records: WatchedRecords) -> PrivateData:
        owners = records.canaries.copy()
        owners[owners < 0] = np.arange((owners < 0).sum())
        return PrivateData(_Rows(records), users=owners, example=records.example)

    return trainer_loop("users by key", private=private)(replace(plan, unit="user"), folder, layout, unsafe_seed)


# ---- two processes


def two_processes(plan: PrivacyPlan, folder: Path, layout: Layout, unsafe_seed: int | None = None) -> Observation:
    """`Trainer.fit` on two ranks. They are forked, so that whatever is true of this process is true of them."""
    folder.mkdir(parents=True)
    audited = trainer_loop("two processes", "vmap")  # not book, whose way of computing each process measures anew
    children = [_forked(_rank, rank, audited, plan, folder, layout, unsafe_seed) for rank in range(2)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(codes):
        raise RuntimeError("A rank of the audited run failed; it has printed why.")
    ranks = [_loaded(folder / f"{rank}.safetensors") for rank in range(2)]
    first = ranks[0]
    return Observation(
        loop=audited.name,
        plan=plan,
        scores=first["scores"],
        kinds=layout.kinds,
        reads=np.concatenate([rank["reads"] for rank in ranks]),
        places=layout.places,
        intents=intents(folder / "run" / "ledger.jsonl"),
        releases=len(first["scores"]),
        rest=bytes(first["rest"]).decode(),
        fixed=bytes(first["fixed"]).decode(),
    )


def _forked(function: Any, *args: Any) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            function(*args)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return child


def _rank(rank: int, audited: Audited, plan: PrivacyPlan, folder: Path, layout: Layout, seed: int | None) -> None:
    import torch.distributed as dist
    from safetensors.numpy import save_file

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder.resolve()}/meet", rank=rank, world_size=2)
    seen = audited(plan, folder / "run", layout, seed)
    digests = {name: np.frombuffer(getattr(seen, name).encode(), dtype=np.uint8) for name in ("rest", "fixed")}
    save_file({"scores": seen.scores, "reads": seen.reads, **digests}, folder / f"{rank}.safetensors")
    dist.barrier()


def _loaded(path: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    found: dict[str, np.ndarray] = load_file(path)
    return found


# ---- loops that are not the trainer's, or not for torch


def linear_model(plan: PrivacyPlan, folder: Path, layout: Layout, unsafe_seed: int | None = None) -> Observation:
    """`MirrorLinearRegression` with the plan's steps; its own plan takes all rows in every one of them.

    At twice the plan's epsilon: full batches need so much noise that the bound would be loose. The coefficients are the
    bank: canary k has one feature, k, and a target that it misses by far.
    """
    from scipy import sparse

    from halfsilver.linear_model import MirrorLinearRegression

    features, pulls = _one_feature_each(layout)
    numbers = features.shape[1]
    watch = Watch(np.arange(len(pulls)), len(layout.places), _coefficients, [])
    model = MirrorLinearRegression(
        epsilon=2 * plan.epsilon(1e-5),
        steps=plan.steps,
        max_grad_norm=1.0,
        damping=0.0,
        average=None,
        fit_intercept=False,
        n_private=1000,
        run_dir=folder,
        unsafe_seed=unsafe_seed,
    )
    public = sparse.identity(numbers, format="csr") * np.sqrt(numbers)  # whose Hessian is the identity
    with watch.watching():
        model.fit(features, -np.nan_to_num(pulls), X_public=public, y_public=np.zeros(numbers))
    banks = np.stack([np.zeros(numbers), *watch.numbers]).reshape(-1, 2, layout.width)
    reads = np.ones((1, plan.steps, len(layout.places)), dtype=np.int64)  # a full batch: nothing is drawn
    return Observation(
        loop="linear model",
        plan=model.plan_,
        scores=(banks[:-1] - banks[1:]) / model.learning_rate * model.plan_.expected_batch_size,
        kinds=layout.kinds,
        reads=reads,
        places=layout.places,
        intents=intents(folder / "ledger.jsonl"),
        releases=len(watch.numbers),
    )


def classifier(plan: PrivacyPlan, folder: Path, layout: Layout, unsafe_seed: int | None = None) -> Observation:
    """`MirrorLogisticRegression` with the plan's steps and all rows in every one of them, as `linear_model` does.

    Canary k has one feature, k, and the second of two classes. Its gradient is that feature, as the classifier maps it,
    in the weights of the first class, and its negative in those of the second; the clip norm is so small that every
    such gradient is clipped. Rows are not whitened, which leaves at most 2,000 axes; the mechanism is the same.
    """
    from scipy import sparse

    from halfsilver.linear_model import MirrorLogisticRegression

    features, pulls = _one_feature_each(layout)
    numbers = features.shape[1]
    watch = Watch(np.arange(len(pulls)), len(layout.places), _coefficients, [])
    clip, rate = 0.25, 1.0
    model = MirrorLogisticRegression(
        epsilon=2 * plan.epsilon(1e-5),
        classes=[0, 1],
        method="warm",
        steps=plan.steps,
        learning_rate=rate,
        max_grad_norm=clip,
        average=None,
        fit_intercept=False,
        n_private=1000,
        run_dir=folder,
        unsafe_seed=unsafe_seed,
    )
    public = sparse.vstack([sparse.identity(numbers), -sparse.identity(numbers)], format="csr")
    with watch.watching():
        model.fit(features, np.ones(len(pulls), dtype=np.int64), X_public=public)
    mapped = model._row_map(np.eye(numbers))
    axes = mapped / np.linalg.norm(mapped, axis=1, keepdims=True)
    weights = np.stack([np.zeros(2 * numbers), *watch.numbers]).reshape(-1, 2, numbers)
    released = (weights[:-1] - weights[1:]) / rate * model.plan_.expected_batch_size / clip
    return Observation(
        loop="classifier",
        plan=model.plan_,
        scores=((released[:, 0] - released[:, 1]) / np.sqrt(2) @ axes.T).reshape(-1, 2, layout.width),
        kinds=layout.kinds,
        reads=np.ones((1, plan.steps, len(layout.places)), dtype=np.int64),
        places=layout.places,
        intents=intents(folder / "ledger.jsonl"),
        releases=len(watch.numbers),
    )


def _one_feature_each(layout: Layout) -> tuple[Any, np.ndarray]:
    """The canaries as sparse rows, of which each has the feature of its place, and how they pull."""
    from scipy import sparse

    places = layout.places[: len(layout.places) - layout.absent]
    pulls = layout.pulls(1.0).double().sum(1).numpy()[: len(places)]
    values = np.where(np.isnan(pulls), np.nan, 1.0)
    return sparse.csr_matrix((values, (np.arange(len(places)), places)), (len(places), 2 * layout.width)), pulls


def _coefficients(optimizer: torch.optim.Optimizer) -> np.ndarray:
    weight: Tensor = optimizer.param_groups[0]["params"][0]
    return weight.detach().flatten().double().numpy().copy()


def opacus_loop(plan: PrivacyPlan, folder: Path, layout: Layout, unsafe_seed: int | None = None) -> Observation:
    """`attach_mirror` on a loop of Opacus, whose sampler, clipping, noise and count these are. It has no ledger."""
    from opacus import PrivacyEngine

    from halfsilver.opacus import attach_mirror
    from halfsilver.privacy.gradients.hooks import quiet

    layout, per_epoch = replace(layout, broken=False), round(1 / plan.sampling_rate)
    rows = synthetic(101 + (-101 - len(layout.places)) % per_epoch)  # so that Opacus's rate is the plan's
    model = Banked(small_model(), squared, squared, layout, 1.0)
    columns, order = layout.records(rows, plan.max_grad_norm)
    watch = Watch(order, len(layout.places), lambda _: model.numbers(), trainable(model.inner))
    records = WatchedRecords(columns, watch, layout.example(rows, plan.max_grad_norm))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Secure RNG turned off", category=UserWarning)
        engine, lr = PrivacyEngine(), 0.5
    private, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(trainable(model), lr=lr),
        data_loader=DataLoader(_Rows(records), batch_size=len(order) // per_epoch),
        noise_multiplier=plan.noise_multiplier,
        max_grad_norm=plan.max_grad_norm,
    )
    mirror = WatchedMap(FirstOrder(0.5), model.bank_weights(), 1.0)
    attach_mirror(optimizer, mirror, PublicLoss(model, public_losses, public_records(synthetic(40, seed=1))))
    with watch.watching(), quiet():
        while len(watch.numbers) < plan.steps:
            for batch in loader:
                optimizer.zero_grad()
                torch.autograd.backward(losses(private, batch).mean())
                optimizer.step()
                if len(watch.numbers) == plan.steps:
                    break
    banks = [np.zeros((2, layout.width)), *watch.numbers]
    return Observation(
        loop="attach_mirror",
        plan=plan,
        scores=mirror.scores(banks, lr) * (len(order) / per_epoch) / plan.max_grad_norm,
        kinds=layout.kinds,
        reads=np.stack(watch.read_for)[None],
        places=layout.places,
        intents=sum(steps for _, _, steps in engine.accountant.history),
        releases=len(watch.numbers),
        unread=mirror.unread,
        changed=mirror.changed,
    )


class _Rows(Dataset[Any]):
    """The same records for a torch data loader."""

    def __init__(self, records: WatchedRecords) -> None:
        self._records = records

    def __len__(self) -> int:
        return self._records.size()

    def __getitem__(self, index: int) -> Any:
        return take_rows(self._records.rows(index, 1), 0)


LOOPS: dict[str, Run] = {
    **{f"trainer/{name}": trainer_loop(f"trainer/{name}", name) for name in BACKENDS},
    **{f"layer/{kind}": layered(trainer_loop(f"layer/{kind}"), kind) for kind in ("embedding", "conv")},
    **{f"map/{name}": trainer_loop(f"map/{name}", mirror=mirror) for name, mirror in MAPS.items()},
    "geometry": trainer_loop("geometry", geometry=Whitened(damping=0.1, refresh=7)),
    "attach_mirror": opacus_loop,
    "federated": federated,
    "users by key": keyed_users,
    "correlated noise": correlated,
    "linear model": linear_model,
    "classifier": classifier,
    "two processes": two_processes,
}

# Opacus draws from one generator as many numbers as there are records, so its runs cannot be replayed.
NO_REPLAY = ("attach_mirror",)


def run_loop(name: str, plan: PrivacyPlan, folder: Path, *, canaries: int = 300, replay: bool = True) -> Observation:
    """One of `LOOPS` under the eyes of all instruments; instrument C only with `replay`."""
    return observe(LOOPS[name], plan, folder, Layout(canaries=canaries), replay=replay and name not in NO_REPLAY)


def audit_loop(name: str, *, canaries: int, steps: int, delta: float, confidence: float, folder: Path) -> AuditReport:
    """The audit of one of `LOOPS`, as `halfsilver.audit` makes it of a trainer."""
    seen = run_loop(name, plan_of(steps=steps), folder, canaries=canaries)
    return reported(seen, delta=delta, confidence=confidence)

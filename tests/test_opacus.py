"""attach_mirror: an Opacus loop with one added line takes the trainer's steps, and Opacus does not notice."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

import halfsilver as hs
from halfsilver._core.tensors import Tensors, flatten, trainable
from halfsilver.errors import CheckpointCorrupt, ConfigError, MissingExtra
from halfsilver.mirror import DualAveraging, MirrorMap, Step
from halfsilver.opacus import MirrorHandle, attach_mirror
from halfsilver.privacy.gradients.hooks import quiet
from halfsilver.privacy.mechanism import PrivateGradient

opacus = pytest.importorskip("opacus")
BatchMemoryManager = pytest.importorskip("opacus.utils.batch_memory_manager").BatchMemoryManager

Batches = Iterable[Any]
ROOT = Path(__file__).parents[1]
MODES = [("hooks", True), ("hooks", False), ("ghost", True), ("ghost", False)]  # and whether the model is wrapped
ALL_MODES = [*MODES, ("functorch", True), ("functorch", False), ("ew", True)]
EMPTY = (torch.zeros(0, 6), torch.zeros(0, dtype=torch.long))


def loss_fn(model: Any, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def squared(model: Any, batch: Any) -> Tensor:
    return functional.mse_loss(model(batch[0]), functional.one_hot(batch[1], 3).to(batch[0]), reduction="none").sum(1)


def rows(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=g)
    return x, (x[:, :3] + 0.1 * torch.randn(n, 3, generator=g)).argmax(1)


def network(*extra: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), *extra, nn.Linear(8, 3))


def sgd(net: nn.Module) -> Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.5)


def adam(net: nn.Module) -> Optimizer:
    return torch.optim.Adam(net.parameters(), lr=0.02)


@dataclass(eq=False)
class Loop:
    """What a user of Opacus has after `make_private`, on 200 private rows with a Poisson rate of 1/10."""

    net: Any
    model: Any  # what the user calls: Opacus's wrapper, or `net` itself
    optimizer: Any
    criterion: Any
    loader: Any
    noise: torch.Generator

    def train(self, batches: Batches, *, after_step: Callable[[], None] = lambda: None) -> None:
        for batch in batches:
            self.backward(batch)
            self.optimizer.step()  # outside of `quiet`: a warning from the public pass is an error
            after_step()

    def backward(self, batch: Any) -> None:
        self.optimizer.zero_grad()
        with quiet():
            self.criterion(self.model(batch[0]), batch[1]).backward()

    def epochs(self, n: int) -> Batches:
        return (batch for _ in range(n) for batch in self.loader)

    def psi(self, **options: Any) -> hs.PublicLoss:
        return hs.PublicLoss(self.model, loss_fn, rows(30, 1), **options)

    def attach(self, mirror: MirrorMap, **options: Any) -> MirrorHandle:
        return attach_mirror(self.optimizer, mirror, self.psi(batch_size=10), **options)

    @property
    def weights(self) -> Tensor:
        return flatten([p.detach().clone() for p in trainable(self.net)])


def private(
    net: nn.Module | None = None,
    inner: Callable[[nn.Module], Optimizer] = sgd,
    *,
    mode: str = "hooks",
    wrap: bool = True,
    batch_size: int = 20,
    **options: Any,
) -> Loop:
    net, noise = net or network(), torch.Generator().manual_seed(1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Secure RNG turned off", category=UserWarning)
        engine = opacus.PrivacyEngine()
    made = engine.make_private(
        module=net,
        optimizer=inner(net),
        data_loader=DataLoader(
            TensorDataset(*rows(200)), batch_size=batch_size, generator=torch.Generator().manual_seed(2)
        ),
        grad_sample_mode=mode,
        wrap_model=wrap,
        noise_generator=noise,
        **{"noise_multiplier": 1.0, "max_grad_norm": 1.0, **options},
    )
    criterion = made[2] if mode == "ghost" else nn.CrossEntropyLoss()
    return Loop(net, made[0] if wrap else net, made[1], criterion, made[-1], noise)


def recorded(optimizer: Any) -> list[Tensors]:
    """The gradients that Opacus releases from now on. To be called before attach_mirror: hooks run in order."""
    seen: list[Tensors] = []

    def note(inner: Optimizer, *_: Any) -> None:
        seen.append([p.grad.clone() for group in inner.param_groups for p in group["params"] if p.grad is not None])

    optimizer.original_optimizer.register_step_pre_hook(note)
    return seen


# ---- with alpha = 1, Opacus; below, the trainer


@pytest.mark.parametrize("inner", [sgd, adam])
@pytest.mark.parametrize(("mode", "wrap"), MODES)
def test_with_alpha_one_weights_stay_bit_identical(mode: str, wrap: bool, inner: Any) -> None:
    plain, mirrored = (private(network(nn.Dropout(0.2)), inner, mode=mode, wrap=wrap) for _ in range(2))
    handle = attach_mirror(mirrored.optimizer, hs.FirstOrder(1.0), mirrored.psi())
    for loop in (plain, mirrored):
        torch.manual_seed(3)
        loop.train(loop.epochs(5))
    assert handle.step == 50
    assert torch.equal(plain.weights, mirrored.weights)


@pytest.mark.parametrize(("mode", "wrap"), ALL_MODES)
def test_one_step_is_the_formula(mode: str, wrap: bool) -> None:
    loop, alpha = private(mode=mode, wrap=wrap), 0.7
    before, released = loop.weights, recorded(loop.optimizer)
    twin = network()
    grad = flatten(torch.autograd.grad(loss_fn(twin, rows(30, 1)).mean(), trainable(twin)))
    attach_mirror(loop.optimizer, hs.FirstOrder(alpha), loop.psi())
    loop.train([rows(20)])
    expected = before - 0.5 * (alpha * flatten(released[0]) + (1 - alpha) * grad)
    torch.testing.assert_close(loop.weights, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("alpha", [hs.cosine(end=0.3), hs.cosine(K=1.5, unit="epoch"), 0.6], ids=str)
@pytest.mark.parametrize("inner", [sgd, adam])
@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_it_takes_the_steps_of_the_trainer(mode: str, inner: Any, alpha: Any, tmp_path: Path) -> None:
    """Both fed the same batches and the same noise; each computes its own gradients at its own weights.

    The clip is too wide to act, because the trainer's has a margin for rounding and Opacus's has none.
    """
    steps, clip, sigma = 20, 100.0, 0.01
    loop, net = private(inner=inner, mode=mode, max_grad_norm=clip, noise_multiplier=sigma), network()
    handle = loop.attach(hs.FirstOrder(alpha), total_steps=steps, steps_per_epoch=10)
    scheduler = torch.optim.lr_scheduler.StepLR(loop.optimizer, 7, gamma=0.5)
    batches = list(loop.epochs(2))
    loop.train(batches, after_step=scheduler.step)

    optimizer, noise, original = inner(net), torch.Generator().manual_seed(1), PrivateGradient.release
    feed = iter(batches)

    def release(self: PrivateGradient) -> Tensors:
        original(self)  # keeps the ledger in order; what it returns is not used
        total = self._backend.clipped_sum(next(feed), clip).tensors
        noisy = [t + torch.normal(0.0, sigma * clip, t.shape, generator=noise) for t in total]
        return [(t / 20).float() for t in noisy]

    plan = hs.PrivacyPlan(steps=steps, sampling_rate=0.1, expected_batch_size=20, noise_multiplier=1.0)
    trainer = hs.Trainer(
        net,
        loss_fn,
        optimizer=optimizer,
        plan=plan,
        mirror=hs.FirstOrder(alpha),
        public_batch_size=10,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 7, gamma=0.5),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrivateGradient, "release", release)
        trainer.fit(rows(200), rows(30, 1), run_dir=tmp_path)
    assert handle.step == steps == len(batches)
    assert scheduler.get_last_lr()[0] == optimizer.param_groups[0]["lr"] < inner(net).param_groups[0]["lr"]
    torch.testing.assert_close(loop.weights, flatten(trainable(net)).detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("mirror", [hs.Quadratic(damping=0.1), hs.Bregman(damping=0.1), DualAveraging()], ids=repr)
@pytest.mark.parametrize(("mode", "wrap"), MODES)
def test_maps_that_need_curvature_see_the_plain_model(mode: str, wrap: bool, mirror: MirrorMap) -> None:
    net, twin = nn.Linear(6, 3), nn.Linear(6, 3)
    twin.load_state_dict(net.state_dict())
    loop = private(net, mode=mode, wrap=wrap)
    released = recorded(loop.optimizer)
    attach_mirror(loop.optimizer, mirror, hs.PublicLoss(loop.model, squared, rows(30, 1)))
    loop.train([rows(20)])
    psi, params = hs.PublicLoss(twin, squared, rows(30, 1)), trainable(twin)
    clock = hs.mirror.Clock(step=0, total_steps=1)
    state = mirror.init(params=params, public=psi)
    direction, _ = mirror.direction(released[0], state, Step(params=params, public=psi, clock=clock, lr=0.5))
    assert torch.equal(loop.weights, flatten(params).detach() - 0.5 * flatten(direction))


@pytest.mark.parametrize(("mode", "wrap"), [mode for mode in ALL_MODES if mode[0] != "ew"])  # ew has no reshape
def test_a_geometry_before_make_private(mode: str, wrap: bool) -> None:
    """Opacus validates the shaped layers and trains V: without noise, and a clip that does not act, by SGD's step."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 4, 3), nn.Flatten(), nn.Linear(24, 3))
    kinds, start, batch = [type(m) for m in net], net(rows(20)[0]).detach(), rows(20)
    shaped = hs.Whitened(damping=0.1).shape(net, loss_fn, rows(30, 1))
    assert opacus.validators.ModuleValidator.validate(shaped.model, strict=True) == []
    twin = deepcopy(shaped.model)
    loop = private(net, mode=mode, wrap=wrap, noise_multiplier=0.0, max_grad_norm=1e6)
    loop.train([batch])
    torch.autograd.backward([loss_fn(twin, batch).mean()])
    sgd(twin).step()
    torch.testing.assert_close(loop.weights, flatten(trainable(twin)).detach(), rtol=1e-4, atol=1e-5)
    if wrap:
        loop.model.disable_hooks()
    with torch.no_grad():
        trained = net(batch[0])
        shaped.merge()
        assert [type(m) for m in net] == kinds
        torch.testing.assert_close(net(batch[0]), trained, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(trained, start, rtol=0.01)


# ---- Opacus's own ways


@pytest.mark.parametrize(("mode", "wrap"), MODES)
def test_skipped_steps_of_the_memory_manager_do_not_count(mode: str, wrap: bool) -> None:
    whole, split = (private(mode=mode, wrap=wrap) for _ in range(2))
    handles = [loop.attach(hs.FirstOrder(hs.cosine(end=0.3)), total_steps=10) for loop in (whole, split)]
    whole.train(whole.loader)
    with BatchMemoryManager(data_loader=split.loader, max_physical_batch_size=7, optimizer=split.optimizer) as pieces:
        batches = list(pieces)
        split.train(batches)
    assert len(batches) > 20
    assert [handle.step for handle in handles] == [10, 10]
    torch.testing.assert_close(split.weights, whole.weights, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("mode", "wrap"), MODES)
def test_an_empty_batch_is_a_step(mode: str, wrap: bool) -> None:
    """Poisson batches of one row on average: more than a third are empty. Then only noise comes, and the mirror."""
    loop = private(mode=mode, wrap=wrap, batch_size=1)
    handle = loop.attach(hs.FirstOrder(0.5))
    batches = [batch for batch, _ in zip(loop.loader, range(40), strict=False)]
    assert sum(len(x) == 0 for x, _ in batches) > 5
    loop.train(batches)
    assert handle.step == 40
    assert loop.weights.isfinite().all()


def test_an_empty_batch_without_noise_leaves_the_public_gradient() -> None:
    loop, twin = private(noise_multiplier=0.0), network()
    attach_mirror(loop.optimizer, hs.FirstOrder(0.75), hs.PublicLoss(loop.model, loss_fn, rows(30, 1)))
    before = loop.weights
    loop.train([EMPTY])
    grad = flatten(hs.PublicLoss(twin, loss_fn, rows(30, 1)).gradient())
    torch.testing.assert_close(loop.weights, before - 0.5 * 0.25 * grad)


def test_the_optimizer_may_have_groups_of_its_own_in_any_order() -> None:
    def grouped(net: nn.Module) -> Optimizer:
        return torch.optim.SGD([{"params": [p]} for p in reversed(trainable(net))], lr=0.5)

    loops = private(inner=grouped, noise_multiplier=0.0), private(noise_multiplier=0.0)
    for loop in loops:
        loop.attach(hs.FirstOrder(0.5))
        loop.train(loop.loader)
    torch.testing.assert_close(loops[0].weights, loops[1].weights, rtol=0, atol=1e-6)


# ---- no traces


def traces(loop: Loop) -> list[Any]:
    """All that Opacus keeps on parameters and modules, the hooks included, and the state of the generators."""
    names = ("grad_sample", "summed_grad", "_forward_counter", "_norm_sample", "_current_grad_sample")
    on_params = [[getattr(p, name, "none") for name in names] for p in loop.net.parameters()]
    on_modules = [[getattr(m, name, "none") for name in ("activations", "max_batch_len")] for m in loop.net.modules()]
    hooks = [list(table.items()) for m in loop.net.modules() for table in (m._forward_hooks, m._backward_hooks)]
    generators = [torch.get_rng_state().tolist(), loop.noise.get_state().tolist()]
    return [[[id(x) for x in row] for row in on_params], deepcopy(on_modules), hooks, generators]


@dataclass(frozen=True)
class Watched:
    """A map that calls back around another's direction."""

    mirror: MirrorMap
    around: Callable[[], None]
    persistent: ClassVar[tuple[str, ...]] = ()

    def init(self, **options: Any) -> Any:
        return self.mirror.init(**options)

    def direction(self, *arguments: Any, **options: Any) -> Any:
        self.around()
        result = self.mirror.direction(*arguments, **options)
        self.around()
        return result


@pytest.mark.parametrize(("mode", "wrap"), ALL_MODES)
def test_the_public_pass_leaves_no_trace(mode: str, wrap: bool) -> None:
    loop, seen = private(network(nn.Dropout(0.2)), mode=mode, wrap=wrap), list[Any]()
    loop.attach(Watched(hs.FirstOrder(0.5), lambda: seen.append(traces(loop))))
    seen.clear()
    hooks = traces(loop)[2]
    loop.train([rows(20)] * 3)
    assert len(seen) == 6
    assert seen[::2] == seen[1::2]
    assert traces(loop)[2] == hooks


@pytest.mark.parametrize(("mode", "wrap"), MODES)
def test_after_an_error_in_the_public_pass_opacus_goes_on(mode: str, wrap: bool) -> None:
    loop, broken = private(mode=mode, wrap=wrap), list[bool]()

    def fragile(model: Any, batch: Any) -> Tensor:
        if broken:
            raise RuntimeError("public")
        return loss_fn(model, batch)

    handle = attach_mirror(loop.optimizer, hs.FirstOrder(0.5), hs.PublicLoss(loop.model, fragile, rows(30, 1)))
    hooks = traces(loop)[2]
    broken.append(True)
    loop.backward(rows(20))
    with pytest.raises(RuntimeError, match="public"):
        loop.optimizer.step()
    assert handle.step == 0
    assert traces(loop)[2] == hooks
    broken.clear()
    loop.train([rows(20)])
    assert handle.step == 1


def test_no_warning_is_shown_more_often_than_before() -> None:
    """Python shows a warning once a line. Whoever silences one in between makes it forget that."""

    def shown(mirrored: bool) -> int:
        loop = private()
        if mirrored:
            loop.attach(hs.FirstOrder(0.5))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            for x, y in [rows(20)] * 4:
                loop.optimizer.zero_grad()
                loop.criterion(loop.model(x), y).backward()
                loop.optimizer.step()
        return len(caught)

    assert shown(True) == shown(False) == 1


def test_remove_gives_plain_dp_sgd_back() -> None:
    loop = private()
    handle = loop.attach(hs.FirstOrder(0.2))
    loop.train([rows(20, seed) for seed in range(5)])
    plain = private()
    plain.net.load_state_dict(loop.net.state_dict())
    plain.noise.set_state(loop.noise.get_state())
    handle.remove()
    for each in (loop, plain):
        each.train([rows(20, seed) for seed in range(5, 10)])
    assert handle.step == 5
    assert torch.equal(loop.weights, plain.weights)
    loop.attach(hs.FirstOrder(0.2))  # and it can be attached again


# ---- checkpoints


def test_state_is_saved_with_the_step() -> None:
    mirror = hs.chain(hs.clip_released(0.5), DualAveraging())
    batches = [rows(20, seed) for seed in range(6)]
    whole, first = (private(nn.Linear(6, 3)) for _ in range(2))
    first.net.load_state_dict(whole.net.state_dict())
    whole.attach(mirror)
    handle = first.attach(mirror)
    whole.train(batches)
    first.train(batches[:3])
    assert handle.state_dict()["mirror"]["1.dual"].norm() > 0
    file = io.BytesIO()
    torch.save(handle.state_dict(), file)
    file.seek(0)

    second = private(nn.Linear(6, 3))
    second.net.load_state_dict(first.net.state_dict())
    second.noise.set_state(first.noise.get_state())
    resumed = second.attach(mirror)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    second.train(batches[3:])
    assert resumed.step == 6
    assert torch.equal(second.weights, whole.weights)


@pytest.mark.parametrize(
    "saved",
    [
        {},
        {"step": 1},
        {"step": "x", "mirror": {}},
        {"step": -1, "mirror": {"dual": torch.zeros(21)}},
        {"step": 1, "mirror": {}},
        {"step": 1, "mirror": {"dual": torch.zeros(20)}},
        {"step": 1, "mirror": {"dual": 3}},
        {"step": 1, "mirror": {"dual": torch.zeros(21), "other": torch.zeros(1)}},
    ],
    ids=repr,
)
def test_a_state_that_does_not_fit_is_refused_whole(saved: dict[str, Any]) -> None:
    handle = private(nn.Linear(6, 3)).attach(DualAveraging())
    with pytest.raises(CheckpointCorrupt):
        handle.load_state_dict(saved)
    assert handle.step == 0
    assert set(handle.state_dict()["mirror"]) == {"dual"}


# ---- refusals, all of them before a private row is touched


@pytest.mark.parametrize(
    ("mirror", "options", "message"),
    [
        (hs.FirstOrder(hs.cosine(end=0.5)), {}, r"total_steps: give it with attach_mirror\(\.\.\., total_steps=\.\.\."),
        (hs.FirstOrder(hs.cosine(K=3)), {"total_steps": 9}, "needs steps_per_epoch"),
        (hs.FirstOrder(0.5), {"total_steps": 0}, "total_steps=0 at least 1"),
        (hs.FirstOrder(0.5), {"steps_per_epoch": 0}, "steps_per_epoch=0 above 0"),
    ],
)
def test_a_schedule_gets_the_lengths_it_needs(mirror: MirrorMap, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        private().attach(mirror, **options)


def test_what_cannot_work_is_refused() -> None:
    loop, half = private(), hs.FirstOrder(0.5)
    data: Any = rows(30)
    for bare in (sgd(loop.net), loop.optimizer.original_optimizer):  # steps of these are private to nobody
        with pytest.raises(ConfigError, match=r"that make_private returns, not SGD.*Call make_private first"):
            attach_mirror(bare, half, loop.psi())
    with pytest.raises(ConfigError, match=r"public='tuple' to be PublicLoss\(model, loss_fn"):
        attach_mirror(loop.optimizer, half, data)
    with pytest.raises(ConfigError, match="public=None"):
        attach_mirror(loop.optimizer, half, None)
    with pytest.raises(ConfigError, match="exactly the trainable parameters"):
        attach_mirror(loop.optimizer, half, hs.PublicLoss(network(), loss_fn, rows(30)))
    mean = hs.PublicLoss(loop.model, lambda model, batch: loss_fn(model, batch).mean(), rows(30))
    with pytest.raises(ConfigError, match="one loss per example"):
        attach_mirror(loop.optimizer, hs.FirstOrder(hs.cosine(end=0.9)), mean, total_steps=10)
    summed = private(loss_reduction="sum")
    with pytest.raises(ConfigError, match="loss_reduction='sum' to be 'mean'"):
        summed.attach(half)
    loop.attach(half)
    with pytest.raises(ConfigError, match="has a mirror"):
        loop.attach(half)


def test_parameters_without_noise_are_never_read() -> None:
    """Opacus lets an optimizer hold only some parameters. The others have plain private gradients."""
    loop = private(inner=lambda net: sgd(net.get_submodule("2")))
    with pytest.raises(ConfigError, match="freeze the parameters"):
        loop.attach(hs.FirstOrder(0.5))
    loop.net[0].requires_grad_(False)
    loop.attach(hs.FirstOrder(0.5))
    loop.train([rows(20)])
    loop.net[0].requires_grad_(True)
    loop.backward(rows(20))
    with pytest.raises(ConfigError, match="freeze the parameters"):
        loop.optimizer.step()


def test_without_public_data_and_without_gradient() -> None:
    loop = private()
    handle = attach_mirror(loop.optimizer, hs.clip_released(1e-3), None)
    before = loop.weights
    loop.train([rows(20)])
    assert (loop.weights - before).norm() == pytest.approx(0.5e-3, rel=1e-4)
    loop.optimizer.zero_grad(set_to_none=True)
    with pytest.raises(ConfigError, match="after backward"):
        loop.optimizer.original_optimizer.step()
    assert handle.step == 1


@pytest.mark.parametrize("part", ["wrapped model", "model", "optimizer"])
def test_the_trainer_refuses_what_went_through_make_private(part: str) -> None:
    loop, plan = private(), hs.PrivacyPlan(steps=2, sampling_rate=0.1, expected_batch_size=20, noise_multiplier=1.0)
    model = {"wrapped model": loop.model, "model": loop.net, "optimizer": network()}[part]
    with pytest.raises(ConfigError, match=r"make_private.*Make new ones"):
        hs.Trainer(model, loss_fn, optimizer=loop.optimizer if part == "optimizer" else sgd(model), plan=plan)


def test_missing_opacus_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opacus.optimizers", None)
    with pytest.raises(MissingExtra, match=r"pip install 'halfsilver\[opacus\]'"):
        attach_mirror(sgd(network()), hs.Euclidean(), None)


@pytest.mark.docs
def test_the_example_runs() -> None:
    command = [sys.executable, str(ROOT / "examples" / "opacus_mirror.py"), "--quick", "--json"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=300)
    table = {row["method"]: row for row in json.loads(done.stdout)["rows"]}
    assert list(table) == ["public", "cold", "warm", "pda"]
    assert table["pda"]["accuracy"] > max(table["cold"]["accuracy"], 0.8)
    assert table["pda"]["epsilon"] == table["warm"]["epsilon"] <= 0.5

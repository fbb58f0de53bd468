"""Nothing that a private pass writes survives it: what is recorded, compared and put back."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import halfsilver as hs
from halfsilver._core.model_state import ModelState, untouched
from halfsilver.errors import ConfigError, UnsupportedLayer
from halfsilver.federated import InProcess, LocalTraining, PrivateUsers, TensorUsers, Workers, local_update
from halfsilver.privacy.data import PrivateData
from halfsilver.privacy.gradients.linear import LinearModel, with_row_norms
from halfsilver.privacy.gradients.probe import probe
from halfsilver.privacy.gradients.vmap import Vmap
from halfsilver.privacy.ledger import Ledger
from halfsilver.privacy.mechanism import PrivateGradient
from halfsilver.runs.verify import verify
from halfsilver.trainer import StepReport

TOKENS, WIDTH, LENGTH, SECRET = 300, 8, 6, 277
ODD = 42.75  # a value that one private record holds


def classes(model: Any, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


class Words(nn.Module):
    """An embedding and a linear layer; with `limit` the embedding renormalises the rows that it reads."""

    def __init__(self, limit: float | None = 2.0, frozen: bool = False) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(TOKENS, WIDTH, max_norm=limit), nn.Linear(WIDTH, 2)
        self.embed.weight.requires_grad_(not frozen)
        with torch.no_grad():  # tokens 0 and 1, which made-up rows are made of, lie within the limit
            self.embed.weight[:2] *= 0.1

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.out(self.embed(ids).mean(1))
        return found


def text(with_secret: bool) -> tuple[Tensor, Tensor]:
    ids = torch.randint(2, 200, (60, LENGTH), generator=torch.Generator().manual_seed(0))
    if with_secret:
        ids = torch.cat([ids, torch.full((1, LENGTH), SECRET)])
    return ids, torch.zeros(len(ids), dtype=torch.int64)


def plan(unit: Any = "example") -> hs.PrivacyPlan:
    return hs.PrivacyPlan(steps=6, sampling_rate=0.9, expected_batch_size=50, noise_multiplier=20.0, unit=unit)


def trainer(model: nn.Module, loss_fn: Any = classes, unit: Any = "example", **options: Any) -> hs.Trainer:
    learns = [p for p in model.parameters() if p.requires_grad]
    return hs.Trainer(model, loss_fn, optimizer=torch.optim.SGD(learns, lr=0.1), plan=plan(unit), **options)


def saved(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = load_file(folder / "checkpoint.safetensors")
    return found


# ---- layers that renormalise what they read


@pytest.mark.parametrize("backend", ["auto", "book", "vmap", "hooks"])
@pytest.mark.parametrize("unit", ["example", "user"])
def test_an_embedding_that_renormalises_is_refused(tmp_path: Path, backend: Any, unit: Any) -> None:
    """At the level of the layer's type: made-up tokens would not show it."""
    x, y = text(with_secret=True)
    private = PrivateData((x, y), users=list(range(len(x))) if unit == "user" else None)
    made = trainer(Words(), unit=unit, performance=hs.Performance(backend=backend))
    with pytest.raises(UnsupportedLayer, match="drop max_norm"):
        made.fit(private, run_dir=tmp_path)


@pytest.mark.parametrize("engine", [InProcess, Workers])
def test_users_who_train_themselves_leave_frozen_weights_alone(tmp_path: Path, engine: Any) -> None:
    """A user may write within its own training; what it wrote ends with it."""
    torch.manual_seed(0)
    model, (x, y) = Words(frozen=True), text(with_secret=True)
    before = model.embed.weight.detach().clone()
    users = engine(PrivateUsers(TensorUsers((x, y), users=list(range(len(x))))), LocalTraining(lr=0.1))
    trainer(model, unit="user").fit(users, run_dir=tmp_path)
    assert float(before[SECRET].norm()) > 2.0
    assert torch.equal(model.embed.weight, before)


def test_a_local_update_leaves_trainable_weights_alone() -> None:
    model, rows = Words(), text(with_secret=True)
    before = model.embed.weight.detach().clone()
    update = local_update(model, classes, rows, LocalTraining(lr=0.1))
    assert torch.equal(model.embed.weight, before)
    assert update[0][SECRET].any()  # its own update has what it wrote, and will be clipped


# ---- buffers


class Keeps(nn.Module):
    """Keeps the largest value that it saw, by one of the ways in which a layer can write."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.largest = way, torch.zeros(())
        if way != "attribute":
            del self.largest
            self.register_buffer("largest", torch.full((), 30.0))

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "with gradients" and not torch.is_grad_enabled():
            return x
        new = torch.maximum(self.largest, x.detach().abs().max())
        if float(new) > float(self.largest):
            if self.way == "data":
                self.largest.data.copy_(new)
            elif self.way == "numpy":
                self.largest.numpy()[...] = float(new)
            elif self.way == "other memory":
                self.largest.data = new.clone()
            elif self.way in ("assigned", "attribute"):
                self.largest = new
            else:
                self.largest.copy_(new)
        return x


WAYS = ["in place", "with gradients", "data", "numpy", "other memory", "assigned", "attribute"]


def numbers(odd: bool) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(60, 4, generator=g)
    if odd:
        x[23, 2] = ODD
    return x, torch.randint(0, 2, (60,), generator=g)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backend", ["book", "vmap", "hooks"])
def test_a_buffer_that_only_some_inputs_change_stays_as_it_was(
    tmp_path: Path, way: str, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made-up rows up to 30 do not move it, so the probe is kept from larger ones; one record would."""
    monkeypatch.setattr("halfsilver.privacy.gradients.probe._EXTREMES", (torch.nan,))
    keeps = Keeps(way)
    model = nn.Sequential(keeps, nn.Linear(4, 2))
    trainer(model, performance=hs.Performance(backend=backend)).fit(numbers(odd=True), run_dir=tmp_path)
    assert float(keeps.largest) == (0.0 if way == "attribute" else 30.0)
    assert not [t for t in saved(tmp_path).values() if (t == ODD).any()]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backend", ["book", "vmap", "hooks"])
@pytest.mark.parametrize("unit", ["example", "user"])
def test_the_record_that_writes_contributes_nothing_and_the_others_all(
    way: str, backend: Any, unit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the clipped sum. What was only assigned is undone, which needs nobody to be left out."""
    monkeypatch.setattr("halfsilver.privacy.gradients.probe._EXTREMES", (torch.nan,))
    (x, y), without = numbers(odd=True), torch.arange(60) != 23
    left_out = way not in ("attribute",)

    def total(x: Tensor, y: Tensor, way: str) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(Keeps(way) if way else nn.Identity(), nn.Linear(4, 2))
        users = list(range(len(x))) if unit == "user" else None
        full = hs.PrivacyPlan(steps=1, sampling_rate=1.0, expected_batch_size=60, noise_multiplier=1.0, unit=unit)
        with tempfile.TemporaryDirectory() as folder:
            source = PrivateGradient(
                model,
                classes,
                PrivateData((x, y), users=users),
                full,
                ledger=Ledger.open(Path(folder) / "ledger.jsonl", unit=unit),
                run_id="one",
                performance=hs.Performance(backend=backend, micro_batch_size=16),
            )
            return torch.cat([t.double().flatten() for t in source._clipped_sum().tensors])

    expected = total(x[without], y[without], "") if left_out else total(x, y, "")
    torch.testing.assert_close(total(x, y, way), expected, rtol=1e-5, atol=1e-6)


class DividesItsInput(nn.Module):
    """Scales pixels in place, as many a forward pass does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(x.div_(10))
        return found


def clipped_sum(
    model: nn.Module,
    rows: Any,
    backend: Any = "auto",
    unit: Any = "example",
    steps: int = 1,
    loss_fn: Any = classes,
) -> Tensor:
    count = len(rows[0])
    plan = hs.PrivacyPlan(
        steps=steps, sampling_rate=1.0, expected_batch_size=count, noise_multiplier=1.0, max_grad_norm=0.1, unit=unit
    )
    users = list(range(count)) if unit == "user" else None
    with tempfile.TemporaryDirectory() as folder:
        source = PrivateGradient(
            model,
            loss_fn,
            PrivateData(rows, users=users),
            plan,
            ledger=Ledger.open(Path(folder) / "ledger.jsonl", unit=unit),
            run_id="one",
            performance=hs.Performance(backend=backend, micro_batch_size=16),
        )
        for _ in range(steps):
            found = torch.cat([t.double().flatten() for t in source._clipped_sum().tensors])
        return found


@pytest.mark.parametrize("backend", ["book", "vmap", "hooks"])
def test_a_model_that_writes_into_its_input_writes_into_a_copy(backend: Any) -> None:
    """One record with a label out of range has its batch tried in halves: the others must not be divided again."""
    (x, y), before = numbers(odd=False), numbers(odd=False)[0]
    bad = y.clone()
    bad[5] = 7
    torch.manual_seed(0)
    model, others = DividesItsInput(), torch.arange(60) != 5
    found = clipped_sum(model, (x, bad), backend)
    torch.testing.assert_close(found, clipped_sum(model, (x[others], y[others]), backend), rtol=1e-5, atol=1e-7)
    assert torch.equal(x, before)


class Odd(nn.Module):
    """Writes when it meets a value above 30, in ways that hide from a look at values in places that stay."""

    first: Tensor
    second: Tensor
    wide: Tensor
    square: Tensor

    def __init__(self, way: str) -> None:
        super().__init__()
        flat = torch.zeros(4)
        self.way, self.linear = way, nn.Linear(4, 4)
        self.state, self.array, self.teacher = (torch.zeros(4),), np.zeros(4), [nn.Linear(4, 4)]
        self.generator = torch.Generator().manual_seed(0)
        self.register_buffer("first", flat[:2])
        self.register_buffer("second", flat[2:])
        self.register_buffer("wide", torch.zeros(4, 1).expand(4, 2))
        self.register_buffer("square", torch.arange(16.0).view(4, 4))
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        if bool((x.detach() > 30).any()):
            self.write(x)
        shift = self.state[0] + torch.from_numpy(self.array).float() + torch.cat([self.first, self.second])
        shift = shift + self.teacher[0].weight.detach().sum(0) + self.square[0]
        found: Tensor = self.out(self.linear(x) + shift)
        return found

    def write(self, x: Tensor) -> None:
        ways: dict[str, Callable[[], Any]] = {
            "views of one memory": lambda: (self.first.add_(1), self.second.add_(1)),
            "expanded": lambda: self.wide.data[:, :1].add_(1),
            "transposed": lambda: setattr(self.square, "data", self.square.data.t()),
            "transposed in place": lambda: self.square.t_(),
            "with a graph": lambda: self.square.add_(self.linear(x).sum()),
            "tuple": lambda: self.state[0].add_(1),
            "array": lambda: self.array.__iadd__(1),
            "hidden module": lambda: self.teacher[0].weight.data.add_(1),
            "generator": lambda: torch.rand(1, generator=self.generator),
            "class": lambda: setattr(self, "__class__", Odder),
        }
        ways[self.way]()


class Odder(Odd):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


HIDDEN = ("views of one memory", "expanded", "transposed", "transposed in place", "with a graph", "tuple", "array",
          "hidden module", "generator", "class")  # fmt: skip


@pytest.mark.parametrize("way", HIDDEN)
@pytest.mark.parametrize("unit", ["example", "user"])
def test_writes_that_hide_are_found_and_undone(way: str, unit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second step shows what the first one left."""
    monkeypatch.setattr("halfsilver.privacy.gradients.probe._EXTREMES", (torch.nan,))
    torch.manual_seed(0)
    model, (x, y), others = Odd(way), numbers(odd=True), torch.arange(60) != 23
    state = model.generator.get_state()
    found = clipped_sum(model, (x, y), "hooks", unit, steps=2)
    expected = clipped_sum(model, (x[others], y[others]), "hooks", unit)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    assert type(model) is Odd
    assert torch.equal(model.generator.get_state(), state)
    assert model.square.is_leaf
    assert torch.equal(model.square, torch.arange(16.0).view(4, 4))
    assert not model.array.any()


def test_sparse_buffers_are_no_obstacle() -> None:
    model = nn.Sequential(nn.Linear(4, 2))
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    assert clipped_sum(model, numbers(odd=False)).any()


def test_memory_that_a_record_asks_for_is_not_heard_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def greedy(model: Any, batch: Any) -> Tensor:
        if bool((batch[0] > 30).any()):
            np.zeros(10**17)
        return classes(model, batch)

    (x, y), others = numbers(odd=True), torch.arange(60) != 23
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    monkeypatch.setattr("halfsilver.privacy.gradients.probe._EXTREMES", (torch.nan,))
    found = clipped_sum(model, (x, y), loss_fn=greedy)
    expected = clipped_sum(model, (x[others], y[others]))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_stock_observers_are_refused(tmp_path: Path) -> None:
    with warnings.catch_warnings(action="ignore"):
        observer = pytest.importorskip("torch.ao.quantization").MinMaxObserver()
    with pytest.raises(UnsupportedLayer, match="records the range"):
        trainer(nn.Sequential(observer, nn.Linear(4, 2))).fit(numbers(odd=True), run_dir=tmp_path)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Embedding(5, 3, max_norm=9.0),
        nn.EmbeddingBag(5, 3, max_norm=9.0),
        nn.InstanceNorm1d(3, track_running_stats=True),
        nn.BatchNorm1d(3),
        nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)),
    ],
)
def test_layers_that_write_are_refused_by_their_type(layer: nn.Module) -> None:
    model = nn.Sequential(layer, nn.Linear(3, 1))
    with pytest.raises(UnsupportedLayer, match="past the noise"):
        probe(model, lambda m, b: b.sum(1), torch.randn(4, 3))


class WritesAt(nn.Module):
    """Writes into a buffer for inputs above a threshold, or for one token."""

    def __init__(self, chosen: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.chosen = chosen
        self.embed, self.count = nn.Embedding(50, 3), torch.zeros(())
        del self.count
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if bool(self.chosen(x).any()):
            self.count += 1
        found: Tensor = x if x.is_floating_point() else self.embed(x).sum(1)
        return found


@pytest.mark.parametrize(
    ("chosen", "batch"),
    [
        (lambda x: x > 1e3, torch.randn(4, 3)),
        (lambda x: x < -1e3, torch.randn(4, 3)),
        (lambda x: x > 1e29, torch.randn(4, 3)),
        (lambda x: x == 49, torch.randint(0, 2, (4, 3))),
    ],
)
def test_the_probe_reaches_large_negative_and_huge_values_and_every_token(chosen: Any, batch: Tensor) -> None:
    with pytest.raises(UnsupportedLayer, match="count"):
        probe(nn.Sequential(WritesAt(chosen), nn.Linear(3, 1)), lambda m, b: m(b).square().sum(1), batch)


def test_the_probe_looks_at_public_rows_too() -> None:
    writes = nn.Sequential(WritesAt(lambda x: (x > 7) & (x < 8)), nn.Linear(3, 1))
    made_up, public = torch.randn(4, 3), torch.full((8, 3), 7.5)
    probe(writes, lambda m, b: m(b).square().sum(1), made_up)
    with pytest.raises(UnsupportedLayer, match="count"):
        probe(writes, lambda m, b: m(b).square().sum(1), made_up, public)


@pytest.mark.parametrize("limit", [1e4, 1e20])
def test_a_loss_that_skips_a_batch_with_an_outlier_mixes_and_is_refused(tmp_path: Path, limit: float) -> None:
    def guarded(model: Any, batch: Tensor) -> Tensor:
        losses: Tensor = (model(batch).squeeze(1) - 1).square()
        return losses * 0 if losses.max() > limit else losses

    with pytest.raises(UnsupportedLayer, match="depends on another"):
        trainer(nn.Linear(4, 1), guarded).fit(numbers(odd=True)[0], run_dir=tmp_path)


# ---- modes


def test_private_passes_run_in_the_modes_of_the_start(tmp_path: Path) -> None:
    """A frozen batch norm stays frozen, though a callback wakes it up as evaluation code often does."""
    model = nn.Sequential(nn.BatchNorm1d(4, affine=False), nn.Linear(4, 2))
    model[0].eval()
    woken = []

    def usual(report: StepReport) -> None:
        model.eval()
        model(torch.zeros(1, 4))
        model.train()
        woken.append(model[0].training)

    before = {name: t.clone() for name, t in model[0].named_buffers()}
    x, y = numbers(odd=True)
    trainer(model, callbacks=[usual]).fit((1e4 * x, y), run_dir=tmp_path)
    assert all(woken)
    assert all(torch.equal(t, before[name]) for name, t in model[0].named_buffers())


# ---- the record itself


def model_with_everything() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.LSTM(3, 3), nn.Dropout())
    model[0].weight.requires_grad_(False)
    model[3].eval()
    model.notes, model.last = [{"a": torch.zeros(2)}], torch.ones(2)  # type: ignore[assignment]
    return model


WRITES: dict[str, Callable[[Any], Any]] = {
    "parameter": lambda m: m[0].bias.data.add_(1),
    "frozen parameter": lambda m: m[0].weight.data.add_(1),
    "sign of a zero": lambda m: m[1].running_mean.data.neg_(),
    "buffer": lambda m: m[1].running_var.mul_(2),
    "buffer assigned": lambda m: setattr(m[1], "running_var", torch.zeros(3)),
    "buffer without memory": lambda m: m[1].running_var.set_(torch.zeros(3)),
    "parameter exchanged": lambda m: setattr(m[0], "bias", nn.Parameter(torch.zeros(3))),
    "buffer registered": lambda m: m[0].register_buffer("new", torch.zeros(3)),
    "module added": lambda m: m.add_module("new", nn.Linear(1, 1)),
    "module exchanged": lambda m: m.__setitem__(3, nn.Identity()),
    "mode": lambda m: m[3].train(),
    "requires_grad": lambda m: m[0].weight.requires_grad_(),
    "grad": lambda m: setattr(m[0].bias, "grad", torch.ones(3)),
    "attribute": lambda m: setattr(m[0], "seen", 1),
    "attribute of a parameter": lambda m: setattr(m[0].bias, "seen", 1),
    "tensor in an attribute": lambda m: m.last.add_(1),
    "list in an attribute": lambda m: m.notes.append(1),
    "tensor in a list in an attribute": lambda m: m.notes[0]["a"].data.add_(1),
    "hook": lambda m: m[0].register_forward_hook(lambda *_: None),
}


def facts(model: Any) -> list[Any]:
    tensors = [*model.named_parameters(), *model.named_buffers(), ("", model.last), ("", model.notes[0]["a"])]
    noted = [(n, id(t), t.data_ptr(), t.view(torch.int32 if t.dtype == torch.float32 else t.dtype).tolist(),
              t.requires_grad, t.grad, dict(vars(t))) for n, t in tensors]  # fmt: skip
    modules = [(name, id(m), m.training, sorted(vars(m)), len(m._forward_hooks)) for name, m in model.named_modules()]
    return [noted, modules, len(model.notes)]


@pytest.mark.parametrize("what", WRITES)
def test_whatever_is_written_is_put_back(what: str) -> None:
    model = model_with_everything()
    before = facts(model)
    with untouched(model):
        WRITES[what](model)
        assert facts(model) != before
    assert facts(model) == before


@pytest.mark.parametrize("what", WRITES)
@pytest.mark.parametrize("between", WRITES)
def test_a_second_record_notes_what_was_done_since_the_first(between: str, what: str) -> None:
    """Also where it need not walk through the model again."""
    model = model_with_everything()
    state = ModelState(model)
    state.record()
    state.put_back(values=True)
    WRITES[between](model)
    if between in ("module added", "module exchanged"):
        with pytest.raises(ConfigError, match="the same modules"):
            state.record()
        return
    state.record()
    before = facts(model)
    assert state.put_back(values=True) == []
    WRITES[what](model)
    state.put_back(values=True)
    assert facts(model) == before


@pytest.mark.parametrize("what", WRITES)
def test_versions_show_all_writes_but_those_past_autograd(what: str) -> None:
    """And notes in attributes, which are put back without a word."""
    model = model_with_everything()
    state = ModelState(model)
    state.record()
    WRITES[what](model)
    past_autograd = ("parameter", "frozen parameter", "sign of a zero", "tensor in a list in an attribute")
    quiet = ("requires_grad", "grad", "attribute", "attribute of a parameter", "list in an attribute", "hook")
    assert bool(state.put_back(values=False)) == (what not in (*past_autograd, *quiet))
    assert bool(state.put_back(values=True)) == (what in past_autograd)
    assert state.put_back(values=True) == []


def test_a_model_that_got_other_modules_is_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))

    def grow(report: StepReport) -> None:
        model[1] = nn.Tanh()

    with pytest.raises(ConfigError, match="same modules"):
        trainer(model, callbacks=[grow]).fit(numbers(odd=False), run_dir=tmp_path)


def test_metrics_of_private_rows_leave_the_model_alone(tmp_path: Path) -> None:
    keeps = Keeps("data")
    made = trainer(nn.Sequential(keeps, nn.Linear(4, 2)), metrics_not_private=True)
    made.evaluate(PrivateData(numbers(odd=True)))
    assert float(keeps.largest) == 30.0


def test_a_backend_that_is_given_as_an_object_is_stamped(tmp_path: Path) -> None:
    """Nothing checks it; the library's own closed form for linear models needs no check."""
    model, linear = nn.Linear(4, 2), nn.Linear(4, 1, bias=False)
    x, y = numbers(odd=False)
    mine = hs.Performance(backend=Vmap(model, classes, (x[:4], y[:4])))
    said = trainer(model, performance=mine).fit((x, y), run_dir=tmp_path / "mine").statement
    assert [reason.split(":")[0] for reason in said["not_private_because"]] == ["backend"]
    assert verify(tmp_path / "mine")["ok"]
    closed = hs.Performance(backend=LinearModel(linear))
    rows = with_row_norms(x, y.to(x.dtype))
    said = trainer(linear, performance=closed).fit(rows, run_dir=tmp_path / "closed").statement
    assert said["not_private_because"] == []

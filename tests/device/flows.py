"""Small runs through the public entry points, each as a function of a device that gives the weights it ends with."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfsilver as hs
from benchmarks.speed.networks import GPT
from halfsilver.federated import InProcess, LocalTraining, PrivateUsers, TensorUsers
from halfsilver.privacy.gradients import rows
from halfsilver.privacy.gradients.book import tune
from halfsilver.tasks.networks import LanguageModel

Weights = dict[str, Tensor]
Flow = Callable[[str], Weights]
Rows = tuple[Tensor, ...]

ROWS, PUBLIC, WORDS, LENGTH = 60, 20, 23, 6
_made = torch.Generator().manual_seed(0)
X, Y = torch.randn(ROWS, 12, generator=_made), torch.randint(3, (ROWS,), generator=_made)
IMAGES = torch.randn(ROWS, 3, 8, 8, generator=_made)
TOKENS = torch.randint(WORDS, (ROWS, LENGTH + 1), generator=_made)
PIECES = hs.Performance(backend="book", micro_batch_size=64)  # a named kernel: "auto" would take another
TABLE, PICTURES = (X, Y), (IMAGES, Y)
TEXT = (TOKENS[:, :-1].contiguous(), TOKENS[:, 1:].contiguous())


def loss(model: Any, batch: Rows) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def text_loss(model: Any, batch: Rows) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="none").view(y.shape).mean(1)


def right(model: Any, batch: Rows) -> Tensor:
    found: Tensor = (model(batch[0]).argmax(1) == batch[1]).float()
    return found


def table_model() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 3))


def picture_model() -> nn.Module:
    layers = nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 3))


def lstm_model() -> nn.Module:
    return LanguageModel(WORDS, 6, 6, 1)


def private_of(columns: Rows) -> Any:
    return tuple(t[PUBLIC:] for t in columns)


def public_of(columns: Rows) -> Any:
    return tuple(t[:PUBLIC] for t in columns)


def plan(units: int = ROWS - PUBLIC, **options: Any) -> hs.PrivacyPlan:
    batch = units / 2
    return hs.PrivacyPlan(steps=3, sampling_rate=0.5, expected_batch_size=batch, noise_multiplier=0.5, **options)


def trainer(model: nn.Module, device: str, loss_fn: Any = loss, **options: Any) -> hs.Trainer:
    """On the device, with the same noise and the same draws on each: pieces of another size would draw other rows."""
    model.to(device)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    settings: dict[str, Any] = {"plan": plan(), "unsafe_seed": 1, "progress": False, "performance": PIECES, **options}
    return hs.Trainer(model, loss_fn, optimizer=optimizer, **settings)


def trained(one: hs.Trainer, private: Any, public: Any = None, folder: str | None = None) -> Weights:
    with tempfile.TemporaryDirectory(prefix="device-") as made:
        one.fit(private, public, run_dir=folder or made, delta=1e-4)
    return weights(one.model)


def weights(model: nn.Module) -> Weights:
    return {name: t.detach().cpu().clone() for name, t in model.state_dict().items()}


# ---- the flows


def mlp(device: str) -> Weights:
    return trained(trainer(table_model(), device), private_of(TABLE), public_of(TABLE))


def cnn(device: str) -> Weights:
    return trained(trainer(picture_model(), device), private_of(PICTURES), public_of(PICTURES))


def lstm(device: str) -> Weights:
    return trained(trainer(lstm_model(), device, text_loss), private_of(TEXT), public_of(TEXT))


def gpt(device: str) -> Weights:
    return trained(trainer(GPT(WORDS, 8, 1, 2, LENGTH), device, text_loss), private_of(TEXT), public_of(TEXT))


def lora(device: str) -> Weights:
    import peft
    import transformers

    from halfsilver.huggingface import causal_loss

    shape: Any = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=WORDS, num_key_value_heads=2, pad_token_id=0, **shape)
    adapter = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"])
    make: Any = transformers.LlamaForCausalLM
    model = peft.get_peft_model(make(config), adapter)
    texts = {"input_ids": TOKENS, "labels": TOKENS.clone()}
    return trained(trainer(model, device, causal_loss, plan=plan(ROWS)), texts)


def whitened_cnn(device: str) -> Weights:
    return trained(trainer(picture_model(), device, geometry=hs.Whitened()), private_of(PICTURES), public_of(PICTURES))


def whitened_lstm(device: str) -> Weights:
    made = trainer(lstm_model(), device, text_loss, geometry=hs.Whitened())
    return trained(made, private_of(TEXT), public_of(TEXT))


def _head(device: str, rows_on: str, table: Rows = TABLE, model: nn.Module | None = None) -> Weights:
    model = (model or table_model()).to(device)
    private, public = ([t.to(rows_on) for t in part] for part in (private_of(table), public_of(table)))
    with tempfile.TemporaryDirectory(prefix="device-") as folder:
        hs.head(
            model, loss, tuple(private), tuple(public), epsilon=4, delta=1e-4, population=len(private[0]),
            run_dir=folder, steps=3, unsafe_seed=1,
        )  # fmt: skip
    return weights(model)


def head_rows_on_cpu(device: str) -> Weights:
    return _head(device, "cpu")


def head_rows_on_device(device: str) -> Weights:
    return _head(device, device)


def users(device: str) -> Weights:
    made = trainer(table_model(), device, plan=plan((ROWS - PUBLIC) // 4, unit="user"))
    private = hs.PrivateData(private_of(TABLE), users=[i // 4 for i in range(ROWS - PUBLIC)])
    return trained(made, private, public_of(TABLE))


def resume(device: str) -> Weights:
    """Stopped after its second step, and gone on with from the checkpoint."""

    def stop(report: Any) -> None:
        if report.step == 2:
            raise KeyboardInterrupt

    with tempfile.TemporaryDirectory(prefix="device-") as folder:
        for callbacks in ([stop], []):
            options = {"plan": plan(spare_steps=1), "checkpoint_seconds": 0.0, "callbacks": callbacks}
            torch.manual_seed(7)
            made = trainer(table_model(), device, **options)
            try:
                trained(made, private_of(TABLE), folder=folder)
            except KeyboardInterrupt:
                assert callbacks
        return weights(made.model)


def release(device: str) -> Weights:
    made = trainer(table_model(), device, metrics={"right": right})
    bounds = hs.Release(noise_multiplier=5.0, bounds={"loss": 5.0, "right": 1.0})
    with tempfile.TemporaryDirectory(prefix="device-") as folder:
        made.fit(private_of(TABLE), run_dir=folder, delta=1e-4)
        means = made.evaluate(private_of(TABLE), release=bounds).means
    return {name: torch.tensor(estimate.value) for name, estimate in means.items()} | weights(made.model)


# ---- rows out of range, which the real device cannot survive


def bad_labels(device: str) -> Weights:
    x, y = private_of(PICTURES)
    return trained(trainer(picture_model(), device), (x, torch.where(y == 1, 7, y)))


def bad_tokens(device: str) -> Weights:
    x, y = private_of(TEXT)
    return trained(trainer(lstm_model(), device, text_loss), (x.index_fill(0, torch.arange(9), WORDS), y))


def bad_labels_of_users(device: str) -> Weights:
    x, y = private_of(TABLE)
    store = TensorUsers((x, y.index_fill(0, torch.arange(5), 9)), users=[i // 4 for i in range(len(x))])
    engine = InProcess(PrivateUsers(store), LocalTraining(lr=0.1))
    return trained(trainer(table_model(), device, plan=plan(10, unit="user")), engine, public_of(TABLE))


def bad_tokens_of_head(device: str) -> Weights:
    x, y = TEXT[0], Y
    bad = x.index_fill(0, torch.arange(PUBLIC, PUBLIC + 9), -3)
    return _head(device, "cpu", (bad, y), nn.Sequential(nn.Embedding(WORDS, 4), nn.Flatten(), nn.Linear(4 * LENGTH, 3)))


def bad_labels_released(device: str) -> Weights:
    x, y = private_of(TABLE)
    made = trainer(table_model(), device)
    bounds = hs.Release(noise_multiplier=5.0, bounds={"loss": 5.0}, by=lambda batch: batch[1].clamp(max=2), classes=3)
    with tempfile.TemporaryDirectory(prefix="device-") as folder:
        made.fit((x, y), run_dir=folder, delta=1e-4)
        means = made.evaluate((x, y.index_fill(0, torch.arange(5), 9)), release=bounds).means
    return {name: torch.tensor(estimate.value) for name, estimate in means.items()}


ESSENTIAL = [
    mlp, cnn, lstm, gpt, whitened_cnn, whitened_lstm, head_rows_on_cpu, head_rows_on_device, users, resume, release,
]  # fmt: skip
OUT_OF_RANGE = [bad_labels, bad_tokens, bad_labels_of_users, bad_tokens_of_head, bad_labels_released]
FLOWS: dict[str, Flow] = {flow.__name__: flow for flow in [*ESSENTIAL, *OUT_OF_RANGE, lora]}


def forget_timings() -> None:
    """Make the next run measure anew: a choice that was made on one device would be kept on the other."""
    tune._choices.clear()
    rows._measured.clear()


def distance(flow: Flow, seed: int) -> float:
    """The largest difference of a number between the run on the device and that on the CPU."""
    found = []
    for device in ("cuda", "cpu"):
        forget_timings()
        torch.manual_seed(seed)
        found.append(flow(device))
    ours, theirs = found
    assert ours.keys() == theirs.keys()
    return max(float((ours[name].double() - theirs[name].double()).abs().max()) for name in ours)

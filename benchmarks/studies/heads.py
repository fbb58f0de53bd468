"""Private heads on features that public rows gave: how the features are made, from the raw files, and what heads reach.

    python -m benchmarks.studies.heads network --seed 0 --out DIR [--width 24] [--epochs N] [--member 0]
    python -m benchmarks.studies.heads head --seed 0 --out DIR [--features network] [--members 1]
    python -m benchmarks.studies.heads search --seed 0 --out DIR [--features network] [--members 1]

`network` trains a small residual network with batch norm on the task's public rows alone (epsilon 0), and writes what a
head needs to DIR:

    TASK-widthW-epochsE-seedS/network.safetensors   the weights
    TASK-widthW-epochsE-seedS/features.safetensors  `train` and `test`: features of all rows in the order of the files,
                                                    float16; `train_logits` and `test_logits`: those of the network
                                                    itself, float32; both are means over the flips of an image
    TASK-widthW-epochsE-seedS/result.json           settings, seed, versions, seconds, accuracy of the network alone

`head` writes what it found:

    TASK-widthW-epochsE-seedS/head-FEATURES.json    or head-FEATURES-membersM.json with M networks
    TASK-patchesK-seedS.safetensors                 with patches, `train` and `test`: random patches along the public
                                                    axes, float16; `variances` of public rows along them

Networks of one seed learn from the same public rows. Each `--member` starts from other weights, in a folder of its
own (TASK-widthW-epochsE-seedS-memberM, none for the first).

`head` trains softmax regressions beside the frozen logits of the networks (their mean) at several epsilons: without a
geometry (warm) and with one (whitened), both with the settings that the estimator has without private rows, and once
without privacy. Features are those of the first `--members` networks, or all of them joined with patches. `search`
scores a grid of settings on the test rows, to see how far the settings of the estimator are from the best ones.

Features of private rows are private: keep DIR where the data are. Each part is written when it is finished, and a
command that is started again resumes where it was stopped. Nothing is chosen by a private or a test row: the test
accuracy is computed once, at the end, for the record.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn

from halfsilver._core import system
from halfsilver._core.random import own_randomness
from halfsilver._core.tensors import Batch
from halfsilver.features import FeatureMap, Frozen, RandomPatches, public_pca
from halfsilver.linear_model import MirrorLogisticRegression
from halfsilver.linear_model.logistic import MethodName
from halfsilver.mirror import OneCycle, fold_batch_norm, pretrain
from halfsilver.runs.folder import versions, write_json
from halfsilver.tasks import cifar10, emnist, files
from halfsilver.tasks.augment import mixed, recoloured, with_hole
from halfsilver.tasks.images import image_loss, mirrored, moved, repeated, take
from halfsilver.tasks.networks import residual_cnn
from halfsilver.tasks.split import Parts, Split, public_share


@dataclass(frozen=True, kw_only=True)
class Task:
    """What the network has to know of a data set."""

    read: Callable[[Path, str], tuple[Tensor, Tensor]]
    module: ModuleType
    channels: int
    classes: int
    augment: Callable[[Batch], Batch]
    views: tuple[Callable[[Tensor], Tensor], ...]
    epochs: int
    patches: int  # filters; 0 for none
    epsilons: tuple[float, ...]
    delta: float


@dataclass(frozen=True, kw_only=True)
class Config:
    """How the network is trained on the public rows.

    Args:
        width: Channels of the first layer.
        epochs: Passes over the public rows.
        lr: The highest learning rate of the cycle.
        member: Which of several networks for the same rows.
    """

    task: str
    seed: int
    member: int = 0
    width: int
    epochs: int
    batch_size: int = 100
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 2e-3
    smoothing: float = 0.05
    average: float = 0.98

    @property
    def training_seed(self) -> int:
        """Of weights, order and augmentation; the split has its own."""
        return self.seed + 1000 * self.member

    @property
    def folder(self) -> str:
        """The name of the network's folder."""
        return f"{self.task}-width{self.width}-epochs{self.epochs}-seed{self.seed}" + (
            f"-member{self.member}" if self.member else ""
        )


_SMOOTHING = Config.smoothing


def _augment_objects(batch: Batch) -> Batch:
    """Moved by up to four pixels, mirrored, recoloured, with a hole, blended in pairs, with smooth labels."""
    images, labels = batch
    changed = with_hole(recoloured(moved(images, 4, mirrored, flip=True), 0.25), 12)
    return mixed(changed, labels, 10, 0.4, _SMOOTHING)


def _augment_letters(batch: Batch) -> Batch:
    """Moved by up to two pixels, blended in pairs, with smooth labels; mirrored letters would be others."""
    images, labels = batch
    return mixed(moved(images, 2, repeated).float(), labels, 47, 0.4, _SMOOTHING)


def public_rows(config: Config, data: Path) -> tuple[Tensor, Tensor]:
    """The public rows of the library's own split."""
    rows = TASKS[config.task].read(data, "train")
    return take(rows, split_of(config, len(rows[1])).public)


def make_network(config: Config) -> nn.Module:
    task = TASKS[config.task]
    with own_randomness(config.training_seed):
        network = residual_cnn(config.width, channels=task.channels, classes=task.classes)
    return network.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def train(config: Config, data: Path, folder: Path, tell: Callable[[str], None]) -> nn.Module:
    """The network after training, from its file if there is one."""
    network, path = make_network(config), folder / "network.safetensors"
    if path.exists():
        network.load_state_dict(load_file(path))
        return network.eval()
    public, task, started = public_rows(config, data), TASKS[config.task], time.process_time()
    sgd = torch.optim.SGD(
        network.parameters(), lr=config.lr, momentum=config.momentum, nesterov=True, weight_decay=config.weight_decay
    )
    pretrain(
        network,
        image_loss(task.module.scale),
        public,
        optimizer=sgd,
        epochs=config.epochs,
        holdout=0.0,
        batch_size=config.batch_size,
        seed=config.training_seed,
        transform=task.augment,
        average=config.average,
        schedule=OneCycle(),
        checkpoint=folder / "training.safetensors",
        after_epoch=lambda epoch, loss, _: tell(
            f"epoch {epoch:3} of {config.epochs}, loss {loss:.3f}, {time.process_time() - started:.0f} s"
        ),
    )
    _keep(path, network.state_dict(), started)
    (folder / "training.safetensors").unlink()
    return network.eval()


def scaled(x: Tensor) -> Tensor:
    """The rows as the network takes them."""
    return cifar10.scale(x)


def scaled_and_flipped(x: Tensor) -> Tensor:
    """The same, mirrored."""
    return cifar10.scale(x).flip(-1)


def scaled_letters(x: Tensor) -> Tensor:
    """The rows as the network for letters takes them."""
    return emnist.scale(x)


TASKS = {
    "cifar10": Task(
        read=files.cifar10,
        module=cifar10,
        channels=3,
        classes=10,
        augment=_augment_objects,
        views=(scaled, scaled_and_flipped),
        epochs=60,
        patches=1024,
        epsilons=(0.5, 1.0, 2.0, 3.51, 8.0),
        delta=1e-5,
    ),
    "emnist": Task(
        read=files.emnist,
        module=emnist,
        channels=1,
        classes=47,
        augment=_augment_letters,
        views=(scaled_letters,),
        epochs=40,
        patches=0,
        epsilons=(0.48, 1.0, 3.0),
        delta=1e-6,
    ),
}


LAYERS = ("block1", "block2", "shrink3", "pool")


def write_features(config: Config, data: Path, folder: Path, network: nn.Module, tell: Callable[[str], None]) -> None:
    """Features and logits of all rows, by the network with its norms folded, which is faster and computes the same."""
    path, task, started = folder / "features.safetensors", TASKS[config.task], time.process_time()
    if path.exists():
        return
    folded = fold_batch_norm(network).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    map = Frozen(folded, layers=(*LAYERS, "head"), views=task.views).fit()
    tensors: dict[str, Tensor] = {}
    for part in ("train", "test"):
        features, logits = [], []
        for rows in by_parts(map, task.read(data, part)[0], partial(_progress, tell, f"features of {part}")):
            features.append(rows[:, : -task.classes].half())
            logits.append(rows[:, -task.classes :])
        tensors |= {part: torch.cat(features), f"{part}_logits": torch.cat(logits)}
    _keep(path, tensors, started)


def write_patches(config: Config, data: Path, folder: Path, tell: Callable[[str], None]) -> None:
    """Patches of public images as filters, along the axes of the public rows."""
    path, task, started = patches_path(config, folder), TASKS[config.task], time.process_time()
    if path.exists() or not task.patches:
        return
    map = public_pca(RandomPatches(filters=task.patches, seed=config.seed)).fit(public_rows(config, data)[0])
    tensors: dict[str, Tensor] = {"variances": map.variances}
    for part in ("train", "test"):
        rows = by_parts(map, task.read(data, part)[0], partial(_progress, tell, f"patches of {part}"))
        tensors[part] = torch.cat([part.half() for part in rows])
    _keep(path, tensors, started)


def patches_path(config: Config, folder: Path) -> Path:
    """Beside the folder: patches are the same whatever network there is."""
    return folder.parent / f"{config.task}-patches{TASKS[config.task].patches}-seed{config.seed}.safetensors"


def by_parts(map: FeatureMap, images: Tensor, tell: Callable[[float], None], rows: int = 5000) -> Iterator[Tensor]:
    """Features of all images, some at a time, with a word on progress after each part."""
    for start in range(0, len(images), rows):
        yield map.transform(images[start : start + rows])
        tell(min(1.0, (start + rows) / len(images)))


def _progress(tell: Callable[[str], None], what: str, share: float) -> None:
    tell(f"{what}: {share:.0%}")


def _keep(path: Path, tensors: dict[str, Tensor], started: float) -> None:
    seconds = f"{time.process_time() - started:.1f}"
    tensors = {name: t.contiguous() for name, t in tensors.items()}
    system.write_atomically(path, save(tensors, metadata={"seconds": seconds}))


def _seconds(path: Path) -> float | None:
    """Processor time that a part took; of the last start, if it was resumed."""
    if not path.exists():
        return None
    with safe_open(path, framework="pt") as file:
        seconds = (file.metadata() or {}).get("seconds")
    return None if seconds is None else float(seconds)


def result(config: Config, data: Path, folder: Path) -> dict[str, Any]:
    """The record of the network alone, before any private step."""
    task = TASKS[config.task]
    labels = task.read(data, "test")[1]
    with safe_open(folder / "features.safetensors", framework="pt") as file:
        logits, width = file.get_tensor("test_logits"), file.get_slice("train").get_shape()[1]
    return {
        "config": asdict(config),
        "versions": versions(),
        "seconds": {
            "network": _seconds(folder / "network.safetensors"),
            "features": _seconds(folder / "features.safetensors"),
        },
        "epsilon": 0,
        "features": width,
        "layers": LAYERS,
        "views": [view.__name__ for view in task.views],
        "test_accuracy": torch.eq(logits.argmax(1), labels).double().mean().item(),
        "test_loss": nn.functional.cross_entropy(logits, labels).item(),
    }


PARTS = ("train", "test")


def head_rows(members: Sequence[Config], out: Path, which: str) -> dict[str, dict[str, np.ndarray]]:
    """Features and logits of train and test rows; blocks have equal public energy."""
    networks = [load_file(out / member.folder / "features.safetensors") for member in members]
    public = split_of(members[0], len(networks[0]["train"])).public
    blocks = [_standardised({part: network[part].float() for part in PARTS}, public) for network in networks]
    if which == "both":
        patches = load_file(patches_path(members[0], out / members[0].folder))
        blocks.append({part: patches[part].float() for part in PARTS})
    for block in blocks:
        size = block["train"][public].square().sum(1).mean().sqrt()
        for part in PARTS:
            block[part] = block[part] / size
    logits = {part: torch.stack([network[f"{part}_logits"] for network in networks]).mean(0) for part in PARTS}
    return {
        part: {
            "x": torch.cat([block[part] for block in blocks], 1).numpy(),
            "logits": logits[part].double().numpy(),
        }
        for part in PARTS
    }


def _standardised(block: dict[str, Tensor], public: Tensor) -> dict[str, Tensor]:
    rows = block["train"][public]
    mean, spread = rows.mean(0), rows.std(0) + 1e-3
    return {part: (x - mean) / spread for part, x in block.items()}


def split_of(config: Config, rows: int) -> Parts:
    """The library's own split."""
    return Split(seed=config.seed, public=public_share(rows), validation=0).parts(rows)


@dataclass(frozen=True)
class Table:
    """Features, frozen logits and labels of one seed, for heads."""

    config: Config
    rows: dict[str, dict[str, np.ndarray]]
    labels: dict[str, np.ndarray]
    public: np.ndarray
    private: np.ndarray

    @classmethod
    def of(cls, members: Sequence[Config], data: Path, out: Path, which: str) -> Table:
        rows = head_rows(members, out, which)
        labels = {part: TASKS[members[0].task].read(data, part)[1].numpy() for part in PARTS}
        parts = split_of(members[0], len(labels["train"]))
        return cls(members[0], rows, labels, parts.public.numpy(), parts.private.numpy())

    def fit(self, method: MethodName, epsilon: float, **options: Any) -> dict[str, Any]:
        """One private head: its settings, and its accuracy and loss on the test rows."""
        task, started, train = TASKS[self.config.task], time.process_time(), self.rows["train"]
        model = MirrorLogisticRegression(
            method=method,
            epsilon=epsilon,
            delta=task.delta,
            n_private=len(self.private),
            classes=range(task.classes),
            **options,
        )
        model.fit(
            train["x"][self.private],
            self.labels["train"][self.private],
            X_public=train["x"][self.public],
            base=train["logits"][self.private],
        )
        names = ("steps", "learning_rate", "max_grad_norm", "damping", "rank")
        return {
            "method": method,
            "epsilon": epsilon,
            **scores(log_probabilities(model, self.rows["test"]), self.labels["test"]),
            **{name: getattr(model.choice_, name) for name in names},
            "seconds": time.process_time() - started,
        }

    def fit_without_privacy(self) -> dict[str, Any]:
        train = self.rows["train"]
        logits = without_privacy(
            train["x"][self.private],
            self.labels["train"][self.private],
            train["logits"][self.private],
            self.rows["test"],
        )
        return {"method": "nonprivate", "epsilon": None, **scores(logits, self.labels["test"])}


def head_results(table: Table, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    """Accuracy and loss on the test rows of each method at each epsilon."""
    start = scores(table.rows["test"]["logits"], table.labels["test"])
    results = [{"method": "public", "epsilon": 0.0, **start}]
    arms: tuple[MethodName, ...] = ("warm", "whitened")
    for method, epsilon in product(arms, TASKS[table.config.task].epsilons):
        results.append(table.fit(method, epsilon))
        tell(f"{results[-1]}")
    results.append(table.fit_without_privacy())
    tell(f"{results[-1]}")
    return results


RATES, DAMPINGS, SEARCHED_AT = (0.5, 1.0, 2.0, 4.0), (1.0, 3.0, 10.0), 2  # the last: the place among the epsilons


def search_results(table: Table, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    """How far the settings without a search are from the best ones: a grid that is scored on the test rows.

    That is no private result. It is what a search without any privacy could choose.
    """
    epsilons = TASKS[table.config.task].epsilons
    epsilon = epsilons[min(SEARCHED_AT, len(epsilons) - 1)]
    results = [table.fit("whitened", epsilon)]
    tell(f"{results[-1]}")
    steps, rate = results[0]["steps"], results[0]["learning_rate"]
    for factor, damping in product(RATES, DAMPINGS):
        results.append(table.fit("whitened", epsilon, steps=steps, learning_rate=factor * rate, damping=damping))
        tell(f"{results[-1]}")
    return results


def log_probabilities(model: MirrorLogisticRegression, rows: dict[str, np.ndarray]) -> np.ndarray:
    """Of the test rows."""
    return np.asarray(np.log(np.clip(model.predict_proba(rows["x"], base=rows["logits"]), 1e-12, None)))


def without_privacy(x: np.ndarray, y: np.ndarray, base: np.ndarray, test: dict[str, np.ndarray]) -> np.ndarray:
    """The logits of a head that L-BFGS fits to the private rows: the ceiling of these features."""
    rows, offset, labels = torch.tensor(x), torch.tensor(base).float(), torch.tensor(y)
    weight = torch.zeros(x.shape[1], base.shape[1], requires_grad=True)
    solver = torch.optim.LBFGS([weight], max_iter=60, line_search_fn="strong_wolfe")

    def closure() -> float:
        solver.zero_grad()
        loss = nn.functional.cross_entropy(rows @ weight + offset, labels) + 1e-6 * weight.square().sum()
        torch.autograd.backward([loss])
        return float(loss.detach())

    solver.step(closure)  # type: ignore[no-untyped-call]
    return np.asarray(test["x"] @ weight.detach().numpy() + test["logits"])


def scores(logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Accuracy and mean loss."""
    x, y = torch.as_tensor(logits), torch.as_tensor(labels)
    return {"accuracy": x.argmax(1).eq(y).double().mean().item(), "loss": nn.functional.cross_entropy(x, y).item()}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("network", "head", "search"))
    parser.add_argument("--task", choices=tuple(TASKS), default="cifar10")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=24)
    parser.add_argument("--epochs", type=int, help="60 for CIFAR-10, 40 for EMNIST, unless given")
    parser.add_argument("--member", type=int, default=0, help="network: which of several to train")
    parser.add_argument("--members", type=int, default=1, help="head: how many networks are joined")
    parser.add_argument("--features", choices=("network", "both"), default="network")
    parser.add_argument("--data", type=Path, default=os.environ.get("HALFSILVER_DATA"))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.data is None:
        parser.error("--data or HALFSILVER_DATA is needed")
    return args


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    config = Config(
        task=args.task,
        seed=args.seed,
        member=args.member,
        width=args.width,
        epochs=args.epochs or TASKS[args.task].epochs,
    )
    folder = args.out / config.folder
    system.make_folder(folder.resolve())
    tell: Callable[[str], Any] = partial(print, flush=True)
    tell(f"{asdict(config)}")
    if args.command != "network":
        if args.features == "both":
            write_patches(config, args.data, folder, tell)
        members = [replace(config, member=member) for member in range(args.members)]
        table = Table.of(members, args.data, args.out, args.features)
        name = f"{args.command}-{args.features}" + (f"-members{args.members}" if args.members > 1 else "")
        record = {
            "config": asdict(config),
            "versions": versions(),
            "features": args.features,
            "members": args.members,
            "delta": TASKS[config.task].delta,
            "results": (head_results if args.command == "head" else search_results)(table, tell),
        }
        write_json(folder / f"{name}.json", record)
        return
    network = train(config, args.data, folder, tell)
    write_features(config, args.data, folder, network, tell)
    write_json(folder / "result.json", result(config, args.data, folder))
    tell((folder / "result.json").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()

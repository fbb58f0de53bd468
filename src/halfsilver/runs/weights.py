"""The weights of a finished run, for whoever wants the model and not the run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from halfsilver._core import checkpoint
from halfsilver.errors import CheckpointCorrupt, ConfigError, require
from halfsilver.runs.folder import RunFolder, read_json


def write_weights(folder: RunFolder, tensors: Mapping[str, Tensor]) -> None:
    """Write the weights beside the checkpoint."""
    checkpoint.write(folder.weights, tensors, {"run_id": read_json(folder.config)["run_id"]})


def load(run_dir: str | Path, model: nn.Module) -> dict[str, Any]:
    """Put the weights of a finished run into a model.

    The weights are those that `Trainer.fit` left: averaged if the run has an average, and without the coordinates of a
    geometry. The file `model.safetensors` in the run folder holds them under the names of the model's own
    ``state_dict``, so `safetensors` alone can read it as well.

    Args:
        run_dir: The run folder.
        model: A model of the same architecture. Its weights are replaced.

    Returns:
        The run's privacy statement.

    Raises:
        ConfigError: There is no finished run, or the model has other weights.
        CheckpointCorrupt: The file is damaged, or belongs to another run.

    >>> import tempfile, torch, halfsilver as hs
    >>> model = torch.nn.Linear(3, 1)
    >>> plan = hs.PrivacyPlan.calibrate(epsilon=2, delta=1e-4, population=400, batch_size=40, epochs=1)
    >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> trainer = hs.Trainer(model, lambda model, batch: model(batch)[:, 0] ** 2, optimizer=sgd, plan=plan)
    >>> folder = tempfile.mkdtemp()
    >>> result = trainer.fit(torch.randn(400, 3), run_dir=folder)
    >>> other = torch.nn.Linear(3, 1)
    >>> hs.load(folder, other)["delta"], torch.equal(other.weight, model.weight)
    (0.0001, True)
    """
    folder = RunFolder(run_dir)
    hint = "Call fit until the run has finished."
    require(folder.weights.exists(), "run_dir", str(run_dir), "to be the folder of a finished run", hint)
    tensors, about = checkpoint.read(folder.weights)
    if about.get("run_id") != read_json(folder.config).get("run_id"):
        raise CheckpointCorrupt(f"{folder.weights} belongs to another run than {folder.config}.")
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise ConfigError(f"The weights of the run in {run_dir} do not fit this model: {error}") from error
    return read_json(folder.statement)

"""The paper's synthetic linear regression: sparse features of two densities, and the exact population risk."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from halfsilver._core.tensors import csr_tensor

PRIVATE_ROWS = 10_000
PUBLIC_ROWS_PER_FEATURE = 1.5
NOISE_VARIANCE = 0.01  # of y, and so the risk of the best model, whatever the dimension

_ENTRY = 0.05
_FIRST, _SECOND = 40, 80  # entries of a row among the first fifth of the features, and among the others


@dataclass(frozen=True)
class Problem:
    """One trial. `private` is made up: this study never sees anyone's data. Features are multiplied by `scales`."""

    dim: int
    theta: Tensor
    scales: Tensor
    private: tuple[Tensor, Tensor]
    public: tuple[Tensor, Tensor]

    def risk(self, estimates: Tensor) -> Tensor:
        """Population mean squared error of each column of `estimates`."""
        return risk((estimates.double().T * self.scales).T, self.theta * self.scales)


def make_problem(dim: int, seed: int, private_rows: int = PRIVATE_ROWS, skew: float = 0.0) -> Problem:
    """theta ~ N(0, I), y ~ N(x theta, 0.01); features as sparse CSR tensors in float32.

    `skew` is 0 in the paper. Above it, the variance of the j-th feature, in an order by chance, goes with j^-skew, and
    its mean over features stays the same.
    """
    rng = np.random.default_rng([dim, seed])
    theta = rng.standard_normal(dim)
    variances = (1.0 + np.random.default_rng(dim).permutation(dim)) ** -skew
    scales = np.sqrt(variances / variances.mean())
    public_rows = int(PUBLIC_ROWS_PER_FEATURE * dim)
    private, public = (_rows(rng, n, dim, theta, scales) for n in (private_rows, public_rows))
    return Problem(dim, torch.from_numpy(theta), torch.from_numpy(scales), private, public)


def _rows(rng: np.random.Generator, n: int, dim: int, theta: np.ndarray, scales: np.ndarray) -> tuple[Tensor, Tensor]:
    fifth = dim // 5
    columns = np.concatenate([_distinct(rng, n, fifth, _FIRST), fifth + _distinct(rng, n, dim - fifth, _SECOND)], 1)
    y = _ENTRY * (theta * scales)[columns].sum(1) + NOISE_VARIANCE**0.5 * rng.standard_normal(n)
    return sparse(columns, dim, _ENTRY * scales), torch.from_numpy(y).float()


def _distinct(rng: np.random.Generator, n: int, size: int, count: int) -> np.ndarray:
    """`count` distinct numbers below `size` in each of n rows, uniformly: the positions of the smallest random keys."""
    return np.sort(np.argpartition(rng.random((n, size), dtype=np.float32), count - 1, axis=1)[:, :count], axis=1)


def sparse(columns: np.ndarray, dim: int, entries_of: np.ndarray) -> Tensor:
    """A CSR tensor with the entries of the features at `columns` of each row."""
    starts = torch.arange(0, columns.size + 1, columns.shape[1])
    entries = torch.from_numpy(entries_of[columns.ravel()]).float()
    return csr_tensor(starts, torch.from_numpy(columns.ravel()), entries, (len(columns), dim))


def row_norms(x: Tensor) -> Tensor:
    """Euclidean norm of each row; all have the same number of entries."""
    found: Tensor = x.values().view(len(x), -1).norm(dim=1)
    return found


def gram(x: Tensor) -> Tensor:
    """X'X / n, dense in float64."""
    from scipy.sparse import csr_array

    rows = csr_array((x.values().numpy(), x.col_indices().numpy(), x.crow_indices().numpy()), shape=tuple(x.shape))
    return torch.from_numpy((rows.T @ rows).toarray()).double() / len(x)


def risk(estimates: Tensor, theta: Tensor) -> Tensor:
    """Population mean squared error of each column of `estimates`, exactly, from the second moments of a row.

    Two entries of one block are both set with probability k (k - 1) / (m (m - 1)), of two blocks independently.
    """
    difference = (estimates.double().T - theta).T
    dim, fifth = len(theta), len(theta) // 5
    one, two = difference[:fifth], difference[fifth:]
    within = _block(one, fifth, _FIRST) + _block(two, dim - fifth, _SECOND)
    across = 2 * (_FIRST / fifth) * (_SECOND / (dim - fifth)) * one.sum(0) * two.sum(0)
    return NOISE_VARIANCE + _ENTRY**2 * (within + across)


def _block(d: Tensor, size: int, count: int) -> Tensor:
    single, both = count / size, count * (count - 1) / (size * (size - 1))
    return (single - both) * d.square().sum(0) + both * d.sum(0).square()

"""Rings as scikit-learn estimators: `RingClassifier` and `RingRegressor`, for pipelines, cross-validation and searches.

Needs scikit-learn, which comes with the extra `sklearn`. A fit is a run like any other: the same settings, the same bits.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ringtmp.api import Ring
from ringtmp.errors import UsageError

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, check_random_state, validate_data
except ImportError as error:
    raise ImportError("RingClassifier and RingRegressor need scikit-learn: pip install 'ringtmp[sklearn]'") from error

#: Samples that go through the trained model at once.
_AT_ONCE = 1024


class _RingEstimator(BaseEstimator):  # type: ignore[misc, unused-ignore]
    """What both share. Parameters are kept as they are given, as scikit-learn wants it, and looked at in `fit`."""

    def __init__(
        self,
        model: nn.Module | Callable[[int, int], nn.Module] | None = None,
        *,
        hidden: Sequence[int] = (64, 64),
        nodes: int = 3,
        epochs: int = 20,
        batch_size: int = 32,
        optimizer: Any = ("adam", {"lr": 0.005}),
        random_state: Any = 0,
        run_dir: str | Path | None = None,
        ring_settings: Mapping[str, Any] | None = None,
        fit_settings: Mapping[str, Any] | None = None,
    ) -> None:
        """`model`: a module, or a function of the number of features and of outputs that returns one; without it, linear
        layers with ReLU, as wide as `hidden` says. `run_dir`: where to keep the run, otherwise it is not kept.
        `ring_settings` and `fit_settings`: more keywords of `Ring` and `fit`."""
        self.model = model
        self.hidden = hidden
        self.nodes = nodes
        self.epochs = epochs
        self.batch_size = batch_size
        self.optimizer = optimizer
        self.random_state = random_state
        self.run_dir = run_dir
        self.ring_settings = ring_settings
        self.fit_settings = fit_settings

    def _trained(self, inputs: np.ndarray, targets: torch.Tensor, outputs: int, loss: str) -> None:
        """Leaves `module_`, `history_` and `summary_`."""
        ring = Ring(self.nodes, **{"progress": False, **(self.ring_settings or {})})
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        if isinstance(self.random_state, int | np.integer):
            seed = int(self.random_state)
        with torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory(prefix="ringtmp-") as folder:
            torch.manual_seed(seed)
            settings = {
                "loss": loss, "optimizer": self.optimizer, "batch_size": min(self.batch_size, len(inputs)), "seed": seed,
                "run_dir": self.run_dir or Path(folder) / "run",
            }  # fmt: skip
            if "steps" not in (self.fit_settings or {}):
                settings["epochs"] = self.epochs
            module = self._made(inputs.shape[1], outputs)
            result = ring.fit(module, (torch.from_numpy(inputs), targets), **{**settings, **(self.fit_settings or {})})
            self.module_, self.history_, self.summary_ = result.model, result.history, result.summary
        self.n_iter_ = len(self.history_.epochs)

    def _made(self, features: int, outputs: int) -> nn.Module:
        if isinstance(self.model, nn.Module):
            return self.model
        if self.model is None:
            sizes = [features, *self.hidden, outputs]
            layers: list[nn.Module] = []
            for size, following in pairwise(sizes):
                layers += [nn.Linear(size, following), nn.ReLU()]
            return nn.Sequential(*layers[:-1])
        if not callable(self.model):
            raise UsageError(
                f"model is a {type(self.model).__name__}: give a module, or a function of the number of features and of "
                "outputs that returns one"
            )
        return self.model(features, outputs)

    def _outputs(self, inputs: Any) -> torch.Tensor:
        check_is_fitted(self, "module_")
        checked = torch.from_numpy(_writable(validate_data(self, inputs, dtype=np.float32, reset=False)))
        with torch.no_grad():
            parts = [self.module_(checked[at : at + _AT_ONCE]) for at in range(0, len(checked), _AT_ONCE)]
            return torch.cat(parts)


class RingClassifier(ClassifierMixin, _RingEstimator):  # type: ignore[misc, unused-ignore]
    """A classifier that a ring trains. The model gives one number per class.

    After `fit`: `classes_`, `module_` (the trained module), `history_`, `summary_`, `n_features_in_`, `n_iter_`.
    """

    def fit(self, X: Any, y: Any) -> RingClassifier:  # noqa: N803
        inputs, labels = validate_data(self, X, y, dtype=np.float32)
        check_classification_targets(labels)
        self.classes_, numbers = np.unique(labels, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"the classifier needs at least two classes; y has only one class, {self.classes_[0]!r}")
        self._trained(
            _writable(inputs), torch.from_numpy(numbers.astype(np.int64)), len(self.classes_), "cross_entropy"
        )
        return self

    def predict_proba(self, X: Any) -> np.ndarray:  # noqa: N803
        found: np.ndarray = torch.softmax(self._outputs(X).double(), 1).numpy()
        return found

    def predict(self, X: Any) -> np.ndarray:  # noqa: N803
        best = self._outputs(X).argmax(1).numpy()
        found: np.ndarray = self.classes_[best]
        return found


class RingRegressor(RegressorMixin, _RingEstimator):  # type: ignore[misc, unused-ignore]
    """A regressor that a ring trains, on the mean squared error. The model gives one number per target.

    After `fit`: `module_` (the trained module), `history_`, `summary_`, `n_features_in_`, `n_iter_`.
    """

    def fit(self, X: Any, y: Any) -> RingRegressor:  # noqa: N803
        inputs, targets = validate_data(self, X, y, dtype=np.float32, y_numeric=True, multi_output=True)
        self._flat = targets.ndim == 1
        columns = np.asarray(targets, dtype=np.float32).reshape(len(targets), -1)
        self._trained(_writable(inputs), torch.from_numpy(_writable(columns)), columns.shape[1], "mse")
        return self

    def predict(self, X: Any) -> np.ndarray:  # noqa: N803
        found: np.ndarray = self._outputs(X).double().numpy()
        return found[:, 0] if self._flat else found

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


def _writable(values: np.ndarray) -> np.ndarray:
    """torch warns of arrays that it may not change, memory maps above all."""
    return values if values.flags.writeable else values.copy()

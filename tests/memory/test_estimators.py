"""RingClassifier and RingRegressor in scikit-learn's own hands: its estimator checks, pipelines, searches."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("sklearn", reason="needs scikit-learn (the extra sklearn)")

from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator, estimator_checks_generator

import ringtmp
from oracle import state_sha256
from ringtmp import Ring, RingClassifier, RingRegressor, UsageError

SMALL: dict[str, Any] = {"nodes": 1, "epochs": 4, "hidden": (8,), "batch_size": 16}
#: The same, and it learns something.
QUICKLY: dict[str, Any] = {**SMALL, "epochs": 10, "optimizer": ("adam", {"lr": 0.03})}


def classes(count: int = 90) -> tuple[np.ndarray, np.ndarray]:
    chance = np.random.default_rng(0)
    labels = chance.integers(0, 3, count)
    inputs = chance.normal(size=(count, 4)) + 3 * np.eye(3, 4)[labels]
    return inputs, np.array(["ash", "birch", "cedar"])[labels]


def test_a_classifier_learns_names_of_classes_in_a_pipeline() -> None:
    inputs, names = classes()
    pipeline = make_pipeline(StandardScaler(), RingClassifier(**QUICKLY)).fit(inputs, names)
    assert pipeline.score(inputs, names) > 0.9
    sure = pipeline.predict_proba(inputs)
    assert sure.shape == (90, 3)
    assert np.allclose(sure.sum(1), 1)
    assert list(pipeline[-1].classes_) == ["ash", "birch", "cedar"]
    assert len(pipeline[-1].history_.epochs) == pipeline[-1].n_iter_ == 10


def test_a_fit_has_the_bits_of_the_ring_it_is(tmp_path: Any) -> None:
    inputs, names = classes()
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    mine = RingClassifier(module, run_dir=tmp_path / "kept", **SMALL).fit(inputs, names)
    numbers = torch.from_numpy(np.unique(names, return_inverse=True)[1].astype(np.int64))
    plain = Ring(nodes=1, progress=False).fit(
        module, (torch.from_numpy(inputs.astype(np.float32)), numbers), loss="cross_entropy", epochs=4, batch_size=16,
        optimizer=("adam", {"lr": 0.005}), run_dir=tmp_path / "plain",
    )  # fmt: skip
    assert state_sha256(mine.module_) == state_sha256(plain.model) == mine.summary_.weights_sha256
    assert (tmp_path / "kept/events.jsonl").exists()


def test_a_regressor_has_one_target_or_several_and_a_search_sets_its_parameters() -> None:
    inputs, _ = classes(64)
    targets = inputs @ np.array([[1.0, 0], [0, 2], [1, 1], [0, 0]])
    made: list[tuple[int, int]] = []

    def model(features: int, outputs: int) -> nn.Module:
        made.append((features, outputs))
        return nn.Linear(features, outputs)

    two = RingRegressor(model, nodes=1, epochs=30, batch_size=16, optimizer=("adam", {"lr": 0.1})).fit(inputs, targets)
    assert made == [(4, 2)]
    assert two.predict(inputs).shape == (64, 2)
    assert two.score(inputs, targets) > 0.9
    search = GridSearchCV(RingRegressor(**SMALL), {"hidden": [(2,), (8,)]}, cv=2).fit(inputs, targets[:, 0])
    assert search.best_estimator_.predict(inputs).shape == (64,)
    copy = clone(search.best_estimator_).set_params(epochs=1, nodes=2)
    assert (copy.get_params()["epochs"], copy.nodes, hasattr(copy, "module_")) == (1, 2, False)


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(UsageError, match="model is a str: give a module, or a function of the number of features"):
        RingClassifier("mlp", **SMALL).fit(*classes())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="only one class"):
        RingClassifier(**SMALL).fit([[1.0], [2.0]], [1, 1])


#: None is expected to fail; the two that need pandas or array API are skipped where those are missing.
QUICK = ("check_no_attributes_set_in_init", "check_estimator_cloneable", "check_do_not_raise_errors_in_init_or_set_param",
         "check_parameters_default_constructible", "check_get_params_invariance", "check_set_params",
         "check_estimators_unfitted", "check_classifiers_one_label")  # fmt: skip


@pytest.mark.parametrize("kind", [RingClassifier, RingRegressor])
def test_scikit_learns_checks_without_training(kind: type) -> None:
    tried = []
    for estimator, check in estimator_checks_generator(kind(**SMALL)):
        name = check.func.__name__
        if name in QUICK:
            check(estimator)
            tried.append(name)
    assert len(tried) >= 6


@pytest.mark.parametrize(
    "kind",
    [pytest.param(RingClassifier, marks=pytest.mark.long), pytest.param(RingRegressor, marks=pytest.mark.nightly)],
)
@pytest.mark.filterwarnings("ignore")
def test_scikit_learns_own_estimator_checks_pass(kind: type) -> None:
    found = check_estimator(kind(**{**SMALL, "epochs": 30 if kind is RingRegressor else 5}), on_fail=None, on_skip=None)
    failed = [(each["check_name"], each["exception"]) for each in found if each["status"] not in ("passed", "skipped")]
    skipped = {each["check_name"] for each in found if each["status"] == "skipped"}
    assert not failed
    assert skipped <= {
        "check_array_api_input",
        "check_classifier_data_not_an_array",
        "check_regressor_data_not_an_array",
    }
    assert len(found) > 45


def test_the_names_are_public_and_the_example_of_the_docs_works() -> None:
    assert ringtmp.RingClassifier is RingClassifier
    text = (Path(__file__).parents[2] / "docs/api.md").read_text()
    (code,) = re.findall(r"<!-- tried by the tests: sklearn -->\n```python\n(.*?)```", text, re.S)
    inputs, targets = classes()
    names: dict[str, Any] = {"inputs": inputs, "targets": targets}
    exec(code.replace("nodes=2", "nodes=1"), names)
    assert names["scores"].min() > 0.8

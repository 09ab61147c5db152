"""The estimators: better than one model per group and than one for all, and usable as scikit-learn expects."""

import contextlib
import pickle
import unittest
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
import scipy.optimize
import torch
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.linear_model import Ridge
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import estimator_checks_generator

from metaleader.losses import cross_entropy, squared_error
from metaleader.sklearn import MetaClassifier, MetaRegressor
from metaleader.sklearn.ensemble import Ensemble, _best_temperature
from metaleader.sklearn.trees import ClassTrees
from metaleader.tasks import Batch

SMALL: dict[str, Any] = {"hidden": (8,), "members": 2, "updates": 150, "learning_rate": 0.03}


def shops(num: int = 40, rows: int = 14, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """y = x0 + a + b x1 + noise, with a and b of each shop."""
    rng = np.random.default_rng(seed)
    g = np.repeat(np.arange(num), rows)
    X = rng.normal(size=(num * rows, 2))
    a, b = rng.normal(size=(2, num))
    return X, 3 * (X[:, 0] + a[g] + b[g] * X[:, 1] + 0.3 * rng.normal(size=len(g))) + 50, g


@pytest.fixture(scope="module")
def fitted() -> MetaRegressor:
    X, y, g = shops()
    late = (g >= 30) & (np.arange(len(g)) % 14 >= 5)  # the last ten shops give five rows each
    return MetaRegressor(**SMALL).fit(X[~late], y[~late], groups=g[~late])


def test_it_predicts_groups_better_than_one_model_and_than_one_per_group(fitted: MetaRegressor) -> None:
    X, y, g = shops()
    late = (g >= 30) & (np.arange(len(g)) % 14 >= 5)
    found, deviation = fitted.predict(X[late], groups=g[late], return_std=True)
    error = np.mean((found - y[late]) ** 2)
    one = Ridge().fit(X[~late], y[~late])
    each = [
        Ridge().fit(X[~late & own], y[~late & own]).predict(X[late & own]) for own in (g == i for i in range(30, 40))
    ]
    assert error < 0.3 * np.mean((one.predict(X[late]) - y[late]) ** 2)
    assert error < 0.8 * np.mean((np.concatenate(each) - y[late]) ** 2)
    assert 0.5 < np.mean(((found - y[late]) / deviation) ** 2) < 2


def test_unknown_groups_get_the_prior(fitted: MetaRegressor) -> None:
    X, _, _ = shops()
    mean, deviation = fitted.predict(X[:5], groups=["new"] * 5, return_std=True)
    np.testing.assert_allclose(fitted.predict(X[:5]), mean)
    known, smaller = fitted.predict(X[:5], groups=np.zeros(5, int), return_std=True)
    assert not np.allclose(known, mean)
    assert (smaller < deviation).all()


def test_targets_that_are_constant() -> None:
    X, _, g = shops(num=20)
    settings: dict[str, Any] = SMALL | {"updates": 30}
    found, deviation = (
        MetaRegressor(**settings).fit(X, np.full(len(g), 3.0), groups=g).predict(X[:5], groups=g[:5], return_std=True)
    )
    np.testing.assert_allclose(found, 3.0, atol=1e-6)
    assert np.isfinite(deviation).all()


def test_data_is_added(fitted: MetaRegressor) -> None:
    X, y, g = shops(num=60)
    model = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_array_equal(model.predict(X, groups=g), fitted.predict(X, groups=g))
    new = g == 50
    before = np.mean((model.predict(X[new], groups=g[new]) - y[new]) ** 2)
    model.partial_fit(X[new], y[new], groups=g[new])
    assert np.mean((model.predict(X[new], groups=g[new]) - y[new]) ** 2) < 0.5 * before


def test_frames_pipelines_and_scorers() -> None:
    X, y, g = shops(num=12, rows=8)
    tiny: dict[str, Any] = SMALL | {"members": 1, "updates": 20}
    frame = pd.DataFrame({"a": X[:, 0], "b": X[:, 1], "shop": g})
    found = MetaRegressor(group="shop", **tiny).fit(frame, y).predict(frame)
    np.testing.assert_allclose(found, MetaRegressor(**tiny).fit(X, y, groups=g).predict(X, groups=g), rtol=1e-6)
    polars = pl.from_pandas(frame)
    np.testing.assert_allclose(MetaRegressor(group="shop", **tiny).fit(polars, y).predict(polars), found, rtol=1e-6)
    assert len(cross_val_score(MetaRegressor(group="shop", **tiny), frame, y, cv=2)) == 2
    pipeline = make_pipeline(StandardScaler(), MetaRegressor(**tiny)).fit(X, y, metaregressor__groups=g)
    assert pipeline.predict(X).shape == y.shape


def ensemble(loss: Any, outputs: int) -> Ensemble:
    return Ensemble(loss, 2, outputs, hidden=(8,), members=4, updates=1, lr=0.01, seed=0, width=4, tasks=2)


def test_the_kinds_of_members() -> None:
    found = [
        [(list(m.network.params()), getattr(m.options.adaptation, "only", "")) for m in made._learners]
        for made in (ensemble(squared_error, 1), ensemble(cross_entropy, 2))
    ]
    network, linear = (["hidden.0.weight", "hidden.0.bias", "head.weight", "head.bias"], ["head.weight", "head.bias"])
    assert found[0] == [(network, None), (network, "bias"), (linear, None), (network, "bias")]
    assert found[1] == [(network, None), (linear, None)]  # and a forest and boosted trees


def labelled(sizes: list[int], classes: int, seed: int = 0) -> dict[str, Batch]:
    rng = np.random.default_rng(seed)
    return {
        name: Batch(
            torch.from_numpy(rng.normal(size=(n, 2)).astype(np.float32)), torch.from_numpy(rng.integers(0, classes, n))
        )
        for name, n in zip("abcd", sizes, strict=False)
    }


def test_trees_are_those_of_scikit_learn_on_inputs_shrunk_shares_and_places_of_groups() -> None:
    batches = labelled([36, 2, 39], classes=3)  # the second group is too small to train on
    labels = np.concatenate([batch.y.numpy() for batch in batches.values()])
    everywhere = np.array([(labels == c).mean() for c in range(4)])  # no row has the fourth class
    rng = np.random.default_rng(7)
    orders = [rng.permutation(3) for _ in range(4)]

    def features(name: str) -> np.ndarray:
        y = batches[name].y.numpy()
        shares = [((y == c).sum() + 3 * everywhere[c]) / (len(y) + 3) for c in range(4)]
        places = [order["abc".index(name)] for order in orders]
        return np.column_stack([batches[name].x.numpy(), np.tile([*shares, *places], (len(y), 1))])

    settings: dict[str, Any] = {"max_features": 0.5, "max_samples": 75, "random_state": 7}
    boosting: dict[str, Any] = {"l2_regularization": 1.0, "early_stopping": False, "random_state": 7}
    rows = {"b": torch.tensor([0, 2]), "new": torch.tensor([1])}
    x = torch.stack([batches["b"].x[0], batches["a"].x[0], batches["b"].x[1]])
    found = ClassTrees(batches, num_classes=4, seed=7).outputs(x, rows).exp()
    at = np.stack([features("b")[0], [*x[1].tolist(), *everywhere, *[np.nan] * 4], features("b")[1]])
    models: list[tuple[Any, float]] = [
        (RandomForestClassifier(**settings), 1 / 101),
        (HistGradientBoostingClassifier(**boosting), 1e-3),
    ]
    for result, (trees, even) in zip(found, models, strict=True):
        trees.fit(np.concatenate([features("a"), features("c")]), np.concatenate([batches[n].y.numpy() for n in "ac"]))
        expected = np.zeros((3, 4))
        expected[:, trees.classes_] = trees.predict_proba(at)
        np.testing.assert_allclose(result, (1 - even) * expected + even / 4)


def test_trees_of_rows_with_one_class() -> None:
    batches = {name: Batch(batch.x, torch.ones_like(batch.y)) for name, batch in labelled([6, 7], classes=2).items()}
    found = ClassTrees(batches, num_classes=2, seed=0).outputs(batches["a"].x, {"a": torch.arange(6)})
    assert (found.exp()[..., 1] > 0.99).all()


def test_boosting_takes_a_bounded_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    fit = HistGradientBoostingClassifier.fit
    monkeypatch.setattr("metaleader.sklearn.trees._BOOSTED_ROWS", 50)
    monkeypatch.setattr(
        HistGradientBoostingClassifier, "fit", lambda self, X, y: (counts.append(X.shape), fit(self, X, y))[1]
    )
    ClassTrees(labelled([40, 30], classes=3), num_classes=3, seed=0)
    assert counts == [(50, 2 + 3 + 4)]


def test_the_temperature_is_that_of_the_smallest_loss() -> None:
    """Labels drawn from softmax(z / 2): a member that says z is too certain."""
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(3 * rng.normal(size=(4000, 3)))
    y = torch.from_numpy((logits.numpy() / 2 + rng.gumbel(size=(4000, 3))).argmax(1))
    shares = torch.full((4000,), 1 / 4000, dtype=torch.float64)
    assert _best_temperature(torch.log_softmax(logits, -1), y, shares) == 2.0
    assert _best_temperature(torch.log_softmax(logits / 2, -1), y, shares) == 1.0


def households(num: int, rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A class per household, but another one where x0 is between two numbers of the household."""
    rng = np.random.default_rng(seed)
    g = np.repeat(np.arange(num), rows)
    X = rng.normal(size=(num * rows, 2))
    usual, other, low = rng.integers(0, 3, num), rng.integers(0, 3, num), rng.normal(size=num)
    between = (X[:, 0] > low[g]) & (X[:, 0] < low[g] + 1)
    return X, np.array(["a", "b", "c"])[np.where(between, other[g], usual[g])], g


def test_trees_are_weighted_saved_and_given_new_data() -> None:
    X, y, g = households(30, 24)
    late = np.arange(len(g)) % 24 >= 16
    settings: dict[str, Any] = SMALL | {"members": 4, "updates": 60}
    model = MetaClassifier(**settings).fit(X[~late], y[~late], groups=g[~late])
    weights = model.ensemble_.weights
    assert len(weights) == 4
    assert weights[-2:].sum() > 0.3
    assert float(weights.sum()) == pytest.approx(1)
    without = MetaClassifier(**{**settings, "members": 3}).fit(X[~late], y[~late], groups=g[~late])
    right, right_without = (np.mean(m.predict(X[late], groups=g[late]) == y[late]) for m in (model, without))
    assert right > right_without
    found = model.predict_proba(X[late], groups=g[late])
    copied = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(copied.predict_proba(X[late], groups=g[late]), found)
    new, labels = X[:12] + 0.5, np.array(["c"] * 12)
    before = model.predict_proba(new, groups=["new"] * 12)
    np.testing.assert_array_equal(model.predict_proba(new), before)  # an unknown group is predicted by the prior
    model.partial_fit(new, labels, groups=["new"] * 12)
    assert model.predict_proba(new, groups=["new"] * 12)[:, 2].mean() > before[:, 2].mean() + 0.2


def test_probabilities_are_about_as_large_as_frequencies() -> None:
    """Labels drawn with known probabilities, on which boosted trees are too certain."""
    rng = np.random.default_rng(0)
    g = np.repeat(np.arange(60), 20)
    X = rng.normal(size=(1200, 2))
    usual = rng.normal(size=60)[g]
    y = (rng.random(1200) < 1 / (1 + np.exp(-(X[:, 0] + usual)))).astype(int)
    late = np.arange(1200) % 20 >= 12
    model = MetaClassifier(**{**SMALL, "members": 4, "updates": 60}).fit(X[~late], y[~late], groups=g[~late])
    found = model.predict_proba(X[late], groups=g[late])
    assert abs(found.max(1).mean() - (found.argmax(1) == y[late]).mean()) < 0.04
    model.ensemble_._temperatures[:] = 1
    found = model.predict_proba(X[late], groups=g[late])
    assert found.max(1).mean() - (found.argmax(1) == y[late]).mean() > 0.06


def test_groups_too_small_to_hold_out_use_no_trees() -> None:
    X, y, g = households(30, 6)
    model = MetaClassifier(**{**SMALL, "members": 4, "updates": 20}).fit(X, y, groups=g)
    assert model.ensemble_.weights.tolist() == [1 / 2] * 2 + [0, 0]
    np.testing.assert_allclose(model.predict_proba(X, groups=g).sum(1), 1)


def test_groups_of_less_than_twelve_rows_are_held_out_if_there_are_no_larger_ones() -> None:
    X, y, g = households(30, 8)
    first, second = (MetaClassifier(**{**SMALL, "members": 4, "updates": 20}).fit(X, y, groups=g) for _ in range(2))
    assert first.ensemble_.weights[-2:].min() > 0
    np.testing.assert_array_equal(first.predict_proba(X, groups=g), second.predict_proba(X, groups=g))


def test_weights_minimise_the_error_and_the_distance_to_those_of_the_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against another optimiser; members with a large error have hardly any weight, equal ones about the same."""
    rng, made, groups = np.random.default_rng(0), ensemble(squared_error, 1), 6
    y, shares = rng.normal(size=60), np.full(60, 1 / 60)
    noise = rng.normal(size=(4, 60)) * np.array([0.5, 0.5, 0.55, 1.5])[:, None] + 0.3 * rng.normal(size=60)
    members = {id(m): torch.from_numpy(y + noise[r])[:, None] for r, m in enumerate(made._learners)}
    target, weight = torch.from_numpy(y)[:, None], torch.from_numpy(shares)
    monkeypatch.setattr(made, "_predicted", lambda learner, _: (members[id(learner)], target, weight))
    found = made._best_weights([Batch(target, target)] * groups).numpy()
    errors = (noise**2 * shares).sum(1)
    known = errors**-8.0 / (errors**-8.0).sum()

    def objective(w: np.ndarray) -> float:
        return float(((w @ noise) ** 2 @ shares) + 2 / groups * (known @ errors) * ((w - known) ** 2).sum())

    limits: Any = {"bounds": [(0, 1)] * 4, "constraints": {"type": "eq", "fun": lambda w: w.sum() - 1}}
    expected = scipy.optimize.minimize(objective, np.full(4, 0.25), tol=1e-12, **limits).x
    np.testing.assert_allclose(found, expected, atol=1e-3)
    assert found[3] < 0.02
    assert found[:3].min() > 0.15


def test_classes_of_groups() -> None:
    """The label is the sign of x, turned round in half of the groups."""
    rng = np.random.default_rng(0)
    g = np.repeat(np.arange(30), 20)
    X = rng.normal(size=(600, 2))
    y = np.where((X[:, 0] > 0) ^ (g % 2 == 0), "yes", "no")
    train = np.arange(600) % 20 < 12
    model = MetaClassifier(**SMALL).fit(X[train], y[train], groups=g[train])
    assert model.score(X[~train], y[~train]) < 0.7  # without groups, one class is as probable as the other
    found = model.predict(X[~train], groups=g[~train])
    assert np.mean(found == y[~train]) > 0.85
    probabilities = model.predict_proba(X[~train], groups=g[~train])
    np.testing.assert_allclose(probabilities.sum(1), 1)
    with pytest.raises(ValueError, match=r"classes \['maybe'\] were not in the data given to fit"):
        model.partial_fit(X[:2], np.array(["maybe", "no"]), groups=g[:2])


def test_bad_input() -> None:
    X, y, g = shops(num=3, rows=4)
    frame = pd.DataFrame({"a": X[:, 0], "shop": g})
    few: dict[str, Any] = SMALL | {"updates": 1}
    model = MetaRegressor(**few)
    with pytest.raises(ValueError, match="groups has 2 values for 12 rows"):
        model.fit(X, y, groups=g[:2])
    with pytest.raises(ValueError, match="missing values"):
        model.fit(X, y, groups=[None, *g[1:]])
    with pytest.raises(ValueError, match="X has no column 'store'"):
        MetaRegressor(group="store").fit(frame, y)
    with pytest.raises(ValueError, match="pass a data frame"):
        MetaRegressor(group="shop").fit(X, y)
    with pytest.raises(ValueError, match="leave groups=None"):
        MetaRegressor(group="shop").fit(frame, y, groups=g)
    with pytest.raises(ValueError, match="one class"):
        MetaClassifier().fit(X, np.zeros(12), groups=g)
    wrong: dict[str, Any] = {"members": 0, "updates": 1.5, "validation": 1.0}
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=f"{name} must be .*, got {value}"):
            MetaRegressor(**{**few, name: value}).fit(X, y, groups=g)


@pytest.mark.parametrize("kind", [MetaRegressor, MetaClassifier])
def test_the_checks_of_scikit_learn(kind: Any) -> None:
    checks: Any = estimator_checks_generator(kind(hidden=(8,), members=1, updates=40, learning_rate=0.05))
    for estimator, check in checks:
        with contextlib.suppress(unittest.SkipTest):  # those of settings that this environment does not have
            check(estimator)


@pytest.mark.parametrize("kind", [int, float, str])
def test_a_group_is_the_same_in_a_list_an_array_and_a_frame(fitted: MetaRegressor, kind: type) -> None:
    X, y, g = shops()
    if kind is str:
        names = np.array([f"shop {i}" for i in g])
        fast: dict[str, Any] = SMALL | {"updates": 2}
        model = MetaRegressor(**fast).fit(X, y, groups=names)
    else:
        names, model = g.astype(kind), fitted
    expected = model.predict(X[:20], groups=names[:20])
    assert not np.allclose(expected, model.predict(X[:20]))
    for same in (
        list(names[:20]),
        names[:20].tolist(),
        pd.Series(names[:20]),
        pd.Series(list(names[:20]), dtype=object),
    ):
        np.testing.assert_array_equal(model.predict(X[:20], groups=same), expected)


def test_groups_of_another_type_are_reported(fitted: MetaRegressor) -> None:
    X, _, g = shops()
    with pytest.warns(UserWarning, match=r"one is '0' here, and fit had groups such as 0"):
        found = fitted.predict(X[:20], groups=g[:20].astype(str))
    np.testing.assert_array_equal(found, fitted.predict(X[:20], groups=[1000] * 20))  # unknown numbers are new groups


def test_scores_with_groups(fitted: MetaRegressor) -> None:
    X, y, g = shops()
    assert fitted.score(X, y, groups=g) > 0.8 > fitted.score(X, y)
    labels = np.where(y > 50, "high", "low")
    model = MetaClassifier(**SMALL).fit(X, labels, groups=g)
    assert model.score(X, labels, groups=g) == np.mean(model.predict(X, groups=g) == labels)


def test_a_constant_column_changes_nothing() -> None:
    X, y, g = shops(num=10)
    fast: dict[str, Any] = SMALL | {"updates": 5}
    model = MetaRegressor(**fast).fit(np.c_[X, np.ones(len(X))], y, groups=g)
    expected = model.predict(np.c_[X, np.ones(len(X))], groups=g)
    np.testing.assert_array_equal(model.predict(np.c_[X, np.full(len(X), 5.0)], groups=g), expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden": 8}, r"hidden must be widths of layers, such as \(64, 32\) or \(\), got 8"),
        ({"learning_rate": -1.0}, "learning_rate must be above 0, got -1.0"),
        ({"random_state": -1}, "random_state must be at least 0, got -1"),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], message: str) -> None:
    X, y, g = shops(num=3)
    with pytest.raises(ValueError, match=message):
        MetaRegressor(**settings).fit(X, y, groups=g)


def test_random_states_of_scikit_learn() -> None:
    X, y, g = shops(num=6)
    small: dict[str, Any] = SMALL | {"updates": 2}
    first, second = (
        MetaRegressor(**small, random_state=np.random.RandomState(3)).fit(X, y, groups=g).predict(X, groups=g)
        for _ in range(2)
    )
    np.testing.assert_array_equal(first, second)
    model = MetaRegressor(**small, random_state=None).fit(X, y, groups=g)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(model)).predict(X, groups=g), model.predict(X, groups=g))


def test_groups_of_one_row_each_and_classes_that_were_not_listed_are_refused() -> None:
    X, y, _ = shops(num=3)
    with pytest.raises(ValueError, match="every group has one row: groups need two rows or more"):
        MetaRegressor(**SMALL).fit(X, y, groups=np.arange(len(X)))
    with pytest.raises(ValueError, match=r"y has classes \['mid'\], which are not in classes=\['hi', 'lo'\]"):
        MetaClassifier(**SMALL).partial_fit(X[:3], ["hi", "lo", "mid"], classes=["hi", "lo"])

import functools

import numpy as np
import pytest
import torch

import metaleader as ml
from metaleader import regret
from metaleader.regret import (
    Hindsight,
    UnconvergedWarning,
    _dynamic,
    _minimise,
    _Minimum,
    cumulative_regret,
    hindsight,
)
from metaleader.streams import QuadraticStream
from metaleader.tasks import rng
from metaleader.theory import linear_regression


def double(batch):
    return ml.Batch(batch.x.double(), batch.y.double())


def doubles(stream):
    """A stream in float64."""
    return [
        ml.Task(task.name, double(task.train), double(task.test))
        for task in map(stream.__getitem__, range(len(stream)))
    ]


def regression_net():
    return torch.nn.Linear(4, 1, bias=False).double()


@pytest.fixture(scope="module")
def tasks():
    return doubles(QuadraticStream(tasks=8, test=50))


@pytest.fixture(scope="module")
def comparator(tasks):
    return hindsight(regression_net, ml.losses.squared_error, tasks, inner_lr=0.05, inner_steps=1, tolerance=1e-4)


def adapted_losses(tasks):
    """f(U(w)) of each task as a quadratic; `squared_error` is twice f, so that its step size is half as large."""
    f, support = (
        linear_regression(
            torch.stack([getattr(t, part).x for t in tasks]), torch.stack([getattr(t, part).y[:, 0] for t in tasks])
        )
        for part in ("test", "train")
    )
    return f.adapted(2 * 0.05, support=support)


def closed_form(tasks):
    """The best in hindsight."""
    meta = adapted_losses(tasks)
    return 2 * meta.value(meta.mean().minimiser())


def test_comparator_of_quadratics_is_the_closed_form(tasks, comparator):
    assert comparator.converged
    assert comparator.datapoints == 20
    assert comparator.data == "8 tasks, adapted on 20 datapoints, measured on 50 held-out ones"
    np.testing.assert_allclose(comparator.losses, closed_form(tasks).numpy(), atol=1e-6)
    assert comparator.gradient_norm < 1e-5


def test_regret_of_a_played_run(tasks, comparator):
    learner = ml.FTML(regression_net, ml.losses.squared_error, inner_lr=0.05, inner_steps=1, meta_steps=2)
    records = list(ml.play(learner, tasks, reveal=10, steps=(1,), regret=True))
    curve = cumulative_regret(records, comparator)
    losses = [record.loss for record in records if record.datapoints == 20]
    assert curve.shape == (8,)
    np.testing.assert_allclose(curve[-1], sum(losses) - float(closed_form(tasks).sum()), atol=1e-5)
    assert curve[-1] > 0


def test_playing_the_comparator_has_no_regret():
    # Batch norm and label smoothing: the comparator's losses must be those that the protocol records.
    draw = rng("test regret", 0)

    def batch(num):
        return ml.Batch(
            torch.from_numpy(draw.standard_normal((num, 5))).float(), torch.from_numpy(draw.integers(3, size=num))
        )

    stream = [ml.Task(str(t), batch(12), batch(9)) for t in range(4)]
    loss = functools.partial(ml.losses.cross_entropy, smoothing=0.1)

    def net():
        return torch.nn.Sequential(
            torch.nn.Linear(5, 6), torch.nn.BatchNorm1d(6, track_running_stats=False), torch.nn.Linear(6, 3)
        )

    with pytest.warns(UnconvergedWarning, match="the regret is underestimated"):
        found = hindsight(net, loss, stream, datapoints=8, inner_steps=3, max_evaluations=30)
    assert not found.converged
    learner = ml.FTML(net, loss, inner_steps=3, meta_steps=0)
    for name, value in learner.params.items():
        value.copy_(found.params[name])
    records = list(ml.play(learner, stream, reveal=4, steps=(3,), regret=True))
    np.testing.assert_allclose(cumulative_regret(records, found), 0, atol=1e-5)


def test_an_unconverged_comparator_makes_the_regret_smaller(tasks, comparator):
    with pytest.warns(UnconvergedWarning):
        early = hindsight(
            regression_net, ml.losses.squared_error, tasks, inner_lr=0.05, inner_steps=1, max_evaluations=5
        )
    assert early.losses.sum() > comparator.losses.sum() + 0.1


def test_comparator_of_the_first_rounds_beats_that_of_all_on_them(tasks, comparator):
    first = hindsight(
        regression_net, ml.losses.squared_error, tasks, rounds=2, inner_lr=0.05, inner_steps=1, start=comparator.params
    )
    assert len(first.losses) == 2
    assert first.losses.sum() < comparator.losses[:2].sum()


def test_dynamic_comparator_of_quadratics_is_the_closed_form(tasks, monkeypatch):
    monkeypatch.setattr("metaleader.regret._ADAM_STEPS", 10)  # L-BFGS suffices for quadratics
    tasks = tasks[:2]
    meta = adapted_losses(tasks)
    start = {"weight": meta.mean().minimiser()[None]}  # saves time
    options = {"inner_lr": 0.05, "inner_steps": 1, "start": start, "dynamic": True, "tolerance": 0.05}
    found = hindsight(regression_net, ml.losses.squared_error, tasks, **options)
    assert found.static is not None
    assert found.converged
    assert found.unconverged == ()
    assert found.params["weight"].shape == (2, 1, 4)
    expected = 2 * meta.value(meta.minimiser()).numpy()
    # The tolerance, 5 %, is a fraction of the static comparator's mean loss.
    assert (found.losses - expected).min() >= -1e-9
    assert (found.losses - expected).max() < 0.05 * found.static.losses.mean()
    assert found.losses.sum() < 0.9 * found.static.losses.sum()
    # The losses are those of the parameters.
    weights = found.params["weight"][:, 0]
    np.testing.assert_allclose(found.losses, 2 * meta.value(weights).numpy(), atol=1e-9)
    learner = ml.FTML(regression_net, ml.losses.squared_error, inner_lr=0.05, inner_steps=1, meta_steps=2)
    records = list(ml.play(learner, tasks, reveal=20, steps=(1,), regret=True))
    assert cumulative_regret(records, found)[-1] > cumulative_regret(records, found.static)[-1]


@pytest.mark.parametrize("max_evaluations", [1, 15])
def test_dynamic_regret_is_at_least_static_regret_also_without_convergence(tasks, max_evaluations):
    options = {"inner_lr": 0.05, "inner_steps": 1, "max_evaluations": max_evaluations}
    with pytest.warns(UnconvergedWarning) as caught:
        found = hindsight(regression_net, ml.losses.squared_error, tasks[:3], dynamic=True, **options)
    assert ["comparator has not" in str(w.message) for w in caught] == [True, False]
    assert "comparators of 3 of 3 rounds have not converged" in str(caught[1].message)
    assert found.static is not None
    assert (found.losses <= found.static.losses).all()
    assert not found.converged
    assert found.unconverged == found.static.unconverged == (0, 1, 2)
    if max_evaluations == 1:
        assert np.array_equal(found.losses, found.static.losses)
        assert all(torch.equal(value[1], found.static.params[name]) for name, value in found.params.items())
    else:
        assert found.losses.sum() < found.static.losses.sum()


def test_rounds_that_have_not_converged_are_marked():
    def minimum(value, converged):
        return _Minimum({"w": torch.tensor([value])}, converged, 0.1 * value, value, 10)

    static = Hindsight({"w": torch.tensor([2.0])}, np.array([4.0, 4.0, 4.0]), 5, "data", True, 0.0, 0.0, 7)
    minima = [minimum(1.0, True), minimum(3.0, False), minimum(0.5, False)]
    # The loss of a round is the square of its parameter.
    found = _dynamic(static, minima, lambda params, by_round: params["w"][:, 0].numpy() ** 2.0)
    assert found.unconverged == (1, 2)
    assert not found.converged
    assert found.static is static
    assert found.losses.tolist() == [1.0, 4.0, 0.25]
    assert found.params["w"].tolist() == [[1.0], [2.0], [0.5]]
    assert found.evaluations == 37
    assert found.gradient_norm == 3.0


def test_refuses_what_is_not_a_regret_record(tasks, comparator):
    learner = ml.FTML(regression_net, ml.losses.squared_error, inner_lr=0.05, inner_steps=1, meta_steps=0)
    online = list(ml.play(learner, tasks, reveal=20, steps=(1,)))
    with pytest.raises(ValueError, match="regret=True"):
        cumulative_regret(online, comparator)
    learner = ml.FTML(regression_net, ml.losses.squared_error, inner_lr=0.05, inner_steps=1, meta_steps=0)
    records = list(ml.play(learner, tasks, reveal=20, steps=(1,), regret=True))
    with pytest.raises(ValueError, match=r"rounds 0\.\.7, measured at 20 datapoints; the records have 7"):
        cumulative_regret(records[:7], comparator)


@pytest.mark.parametrize("shift", [0.0, -5.0, -1.25])
def test_minimiser_of_losses_of_either_sign(shift):
    def objective(params):
        value = (params["w"] - 3.0).square().sum() + 1.25 + shift
        return value, {"w": 2 * (params["w"] - 3.0)}

    found = _minimise(objective, {"w": torch.zeros(2, dtype=torch.float64)}, 1e-6, 5000)
    assert found.converged
    assert found.evaluations < 5000
    torch.testing.assert_close(found.params["w"], torch.full((2,), 3.0, dtype=torch.float64), atol=1e-4, rtol=0)


def test_bad_input(tasks):
    call = functools.partial(hindsight, regression_net, ml.losses.squared_error)
    for rounds in (0, 9):
        with pytest.raises(
            ValueError, match=rf"rounds \(T\) must lie in 1\.\.8, the length of the stream, got {rounds}"
        ):
            call(tasks, rounds=rounds)
    with pytest.raises(ValueError, match="tolerance must be positive"):
        call(tasks, tolerance=0.0)
    for datapoints in (0, 21):
        with pytest.raises(ValueError, match=rf"pass datapoints in 1\.\.20, .* got {datapoints}"):
            call(tasks, datapoints=datapoints)
    short = ml.Task("short", ml.Batch(tasks[0].train.x[:5], tasks[0].train.y[:5]), tasks[0].test)
    with pytest.raises(ValueError, match="5 to 20 training datapoints"):
        call([*tasks, short])
    other = ml.Task("other", tasks[0].train, ml.Batch(tasks[0].test.x[:5], tasks[0].test.y[:5]))
    with pytest.raises(ValueError, match="equally many held-out"):
        call([*tasks, other])
    with pytest.raises(ValueError, match=r"start has \['other'\], the model has \['weight'\]"):
        call(tasks, start={"other": torch.zeros(1)})
    with pytest.raises(ValueError, match="not finite at the start"):
        call(tasks, inner_lr=1e200)


def test_lbfgs_takes_gradients_of_one_task(monkeypatch):
    """Batched over one task, gradients of a layer are transposed in memory, which L-BFGS cannot flatten."""
    stream = ml.streams.SinusoidStream(tasks=1, train=10, test=10)
    net = functools.partial(ml.models.mlp, 1, 1, (8, 8))
    monkeypatch.setattr(regret, "_ADAM_STEPS", 1)
    found = hindsight(net, ml.losses.squared_error, stream, inner_lr=0.01, tolerance=1e6)
    assert found.evaluations > 1 + 3 * 2 + 1 + 1  # at the start, three blocks of Adam, L-BFGS, at the end
    assert np.isfinite(found.losses).all()

"""Predictions for threads that ask at the same time."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from sessions import batch, make

from metaleader.live.together import Together


@pytest.fixture
def learner():
    learner = make()
    for i in range(6):
        learner.observe(*batch(i, rows=2 + i), task=f"customer {i}")
    return learner


class Gate:
    """Holds the first call of `predict`, so that others wait, and counts the batches after it."""

    def __init__(self, learner, monkeypatch):
        self.entered, self.go_on, self.sizes = threading.Event(), threading.Event(), []
        predict, predict_many = learner.predict, learner.predict_many

        def held(x, task=None, **options):
            if not self.entered.is_set():
                self.entered.set()
                assert self.go_on.wait(60)
            return predict(x, task=task, **options)

        def counted(xs):
            self.sizes.append(len(xs))
            return predict_many(xs)

        monkeypatch.setitem(vars(learner), "predict", held)
        monkeypatch.setitem(vars(learner), "predict_many", counted)


def asked(together, gate, questions):
    """The results of calls of which all but the first arrive while the first is computed."""
    results = {}

    def ask(number, x, task):
        try:
            results[number] = together.predict(x, task)
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=ask, args=(i, *question)) for i, question in enumerate(questions)]
    threads[0].start()
    assert gate.entered.wait(60)
    for number, thread in enumerate(threads[1:], 2):
        thread.start()
        while len(together._waiting) < number - 1:
            pass
    gate.go_on.set()
    for thread in threads:
        thread.join(60)
    return [results[i] for i in range(len(questions))]


def test_one_call_is_that_of_the_learner(learner):
    together = Together(learner)
    for i in range(6):
        assert torch.equal(
            together.predict(batch(9)[0], f"customer {i}"), learner.predict(batch(9)[0], f"customer {i}")
        )


def test_calls_that_wait_are_computed_together(learner, monkeypatch):
    together, gate = Together(learner), Gate(learner, monkeypatch)
    questions = [(batch(20 + i, rows=1 + i % 3)[0], f"customer {i % 6}") for i in range(12)]
    found = asked(together, gate, questions)
    assert gate.sizes == [6]  # eleven calls for six tasks
    assert torch.equal(found[0], learner.predict(*questions[0][:1], task="customer 0"))
    for (x, task), y in zip(questions, found, strict=True):
        torch.testing.assert_close(y, learner.predict(x, task=task), rtol=1e-5, atol=1e-5)


def test_a_call_that_fails_leaves_the_others(learner, monkeypatch):
    together, gate = Together(learner), Gate(learner, monkeypatch)
    x = batch(9)[0]
    wrong = [(x, "nobody"), (x[:, :1], "customer 1"), (x[0], "customer 1")]
    found = asked(together, gate, [(x, "customer 0"), *wrong, (x, "customer 2"), (x, "customer 3")])
    assert "nobody" in str(found[1])
    assert "pass x of the shape" in str(found[2])
    torch.testing.assert_close(found[3], learner.predict(x[0], task="customer 1"))  # one datapoint without rows
    for i, task in ((0, "customer 0"), (4, "customer 2"), (5, "customer 3")):
        torch.testing.assert_close(found[i], learner.predict(x, task=task), rtol=1e-5, atol=1e-5)
    assert gate.sizes == [2]


def test_nets_that_are_not_finite_fail_alone(learner, monkeypatch):
    learner.observe(1e30 * batch(1)[0], batch(1)[1], task="bad", update=False)
    together, gate = Together(learner), Gate(learner, monkeypatch)
    x = batch(9)[0]
    found = asked(together, gate, [(x, "customer 0"), (x, "bad"), (x, "customer 1")])
    assert "'bad' is not finite" in str(found[1])
    torch.testing.assert_close(found[2], learner.predict(x, task="customer 1"))


def test_an_interrupt_of_the_thread_that_computes(learner, monkeypatch):
    together, gate = Together(learner), Gate(learner, monkeypatch)

    def interrupted(xs):
        raise KeyboardInterrupt

    monkeypatch.setitem(vars(learner), "predict_many", interrupted)
    monkeypatch.setattr(threading, "excepthook", lambda *_: None)
    x, results = batch(9)[0], []

    def ask(task):
        try:
            together.predict(x, task)
        except BaseException as error:
            results.append(type(error))

    first = threading.Thread(target=ask, args=("customer 0",))
    first.start()
    assert gate.entered.wait(60)
    others = [threading.Thread(target=ask, args=(f"customer {i}",)) for i in (1, 2)]
    for number, thread in enumerate(others, 1):
        thread.start()
        while len(together._waiting) < number:
            pass
    gate.go_on.set()
    for thread in [first, *others]:
        thread.join(60)
    assert sorted(kind.__name__ for kind in results) == ["KeyboardInterrupt", "RuntimeError"]
    monkeypatch.undo()
    assert torch.equal(together.predict(x, "customer 1"), learner.predict(x, task="customer 1"))


def test_an_interrupt_of_a_thread_that_waits(learner, monkeypatch):
    together, gate = Together(learner), Gate(learner, monkeypatch)
    x = batch(9)[0]
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(together.predict, x, "customer 0")
        assert gate.entered.wait(60)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Event, "wait", interrupted_wait)
            with pytest.raises(KeyboardInterrupt):
                together.predict(x, "customer 1")
        last = pool.submit(together.predict, x, "customer 2")
        gate.go_on.set()
        assert len(first.result(60)) == len(last.result(60)) == len(x)
    assert together._waiting == []


def interrupted_wait(self, timeout=None):
    raise KeyboardInterrupt

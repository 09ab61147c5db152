"""Learners after interrupts; the short form of the attack that `make torture` runs in full."""

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torture.interrupts import interrupted_at, lines_of
from torture.learners import MAKE, attack_learners

import metaleader as ml
from metaleader.gradient.attention import plain_attention
from metaleader.system.settings import keeps_settings

# Where an interrupt did harm before: the begin and end of contexts, the bookkeeping of the memory.
CRITICAL = ("learners/observation", "learners/learner.py", "memory/by", "memory/entries", "grad_mode", "attention.py")


@pytest.mark.parametrize("kind", ["toe", "scratch", "n-way"])
def test_a_begin_that_is_interrupted_leaves_the_learner(kind: str) -> None:
    tally = attack_learners([kind], ["begin"], ["metaleader/"])
    assert (tally.tries > 30, tally.failures) == (True, 0), tally.lines


@pytest.mark.parametrize(("kind", "name"), [("bayes", "forget"), ("toe", "observe(task='a')"), ("ftml", "predict")])
def test_calls_that_are_interrupted_leave_the_learner(kind: str, name: str) -> None:
    tally = attack_learners([kind], [name], CRITICAL, 40)
    assert (tally.tries > 10, tally.failures) == (True, 0), tally.lines


@pytest.mark.torture
@pytest.mark.parametrize("kind", MAKE)
def test_calls_may_be_interrupted_at_any_line_of_the_package(kind: str) -> None:
    assert not attack_learners([kind], None, ["metaleader/"]).lines


def test_a_builder_that_raises_leaves_the_round_before() -> None:
    fails = []

    def build() -> nn.Module:
        if fails:
            raise KeyboardInterrupt
        return nn.Linear(1, 1)

    learner = ml.Scratch(build, ml.losses.squared_error, meta_lr=0.1, meta_steps=1, tasks_per_step=1, query=1, seed=0)
    learner.begin("a")
    before = learner.state.flat.clone()
    fails.append(True)
    with pytest.raises(KeyboardInterrupt):
        learner.begin("b")
    assert (learner.task, learner.round) == ("a", 0)
    assert torch.equal(learner.state.flat, before)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_transforms_that_were_left_open_are_left(error: type[BaseException]) -> None:
    @keeps_settings
    def leaves_open() -> None:
        torch._C._set_grad_enabled(False)
        torch._functorch.predispatch._vmap_increment_nesting(3, "error")  # pyright: ignore[reportAttributeAccessIssue]
        raise error

    with pytest.raises(error):
        leaves_open()
    assert torch.is_grad_enabled()
    assert torch.func.grad(lambda x: torch.rand(2).sum() * 0 + x**2)(torch.tensor(3.0)) == 6


def test_plain_attention_is_left_whatever_line_is_interrupted() -> None:
    def call() -> None:
        with plain_attention():
            pass

    before = torch.backends.cuda.flash_sdp_enabled()
    for site in lines_of(call):
        interrupted_at(call, site)
        assert torch.backends.cuda.flash_sdp_enabled() == before, site
    with plain_attention():
        assert not torch.backends.cuda.flash_sdp_enabled()


def test_an_error_of_the_clean_up_after_an_interrupt_is_an_interrupt() -> None:
    @keeps_settings
    def fails() -> None:
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("internal assert")

    with pytest.raises(KeyboardInterrupt):
        fails()


def test_an_error_after_an_interrupt_that_was_handled_stays() -> None:
    @keeps_settings
    def fails() -> None:
        raise ValueError("bad input")

    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        with pytest.raises(ValueError, match="bad input"):
            fails()


def test_an_interrupt_that_torch_turns_into_another_error_is_not_taken_for_bad_data() -> None:
    tally = attack_learners(["bayes"], ["update"], ["torch/_functorch/predispatch", "torch/_functorch/vmap"], 12)
    assert (tally.tries > 5, tally.lines) == (True, [])


# The signal may arrive in a callback of the garbage collector, whose errors Python prints.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_calls_that_are_interrupted_by_a_signal_leave_the_learner() -> None:
    tally = attack_learners(["n-way"], ["observe"], signals=15)
    assert (tally.tries > 0, tally.lines) == (True, [])


def test_a_context_whose_end_was_interrupted_ends_before_the_call_does() -> None:
    done: list[str] = []
    held: list[KeyboardInterrupt] = []

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        try:
            yield
        finally:
            done.append("end")

    @keeps_settings
    def call() -> None:
        with context():
            done.append("body")

    def keeps_the_traceback() -> None:
        try:
            call()
        except KeyboardInterrupt as error:
            held.append(error)
            raise

    sites = lines_of(keeps_the_traceback, ["contextlib.py"])
    for site in sites:
        done.clear()
        interrupted_at(keeps_the_traceback, site)
        assert done in ([], ["body", "end"]), site
    assert len(held) == len(sites) > 5

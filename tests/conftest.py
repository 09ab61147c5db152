"""Settings of all tests: seeds, hypothesis, and no skips where METALEADER_NO_SKIPS=1 forbids them."""

import os
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

# The tensors here are small: a second thread costs more than it brings.
torch.set_num_threads(1)

# Timing on a shared machine says nothing; and a failure must come again on the next run.
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, database=None)
hypothesis.settings.register_profile("default", deadline=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") or os.environ.get("METALEADER_NO_SKIPS") else "default")


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    """The same weights in every test, and no change of the global generator left behind."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.fixture
def inductor() -> None:
    """Code for the CPU needs a C++ compiler and Python's headers."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is missing: torch.compile cannot be used on the CPU")
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        pytest.skip("Python.h is missing: torch.compile cannot be used on the CPU")


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    return _no_skip((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector):
    return _no_skip((yield))


def _no_skip(report: pytest.TestReport | pytest.CollectReport) -> pytest.TestReport | pytest.CollectReport:
    """With METALEADER_NO_SKIPS=1 a skip is a failure: it stands for a system package that should be there."""
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get("METALEADER_NO_SKIPS") == "1":
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"METALEADER_NO_SKIPS=1, but: {why}"
    return report

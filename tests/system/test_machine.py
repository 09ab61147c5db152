"""What a process may ask of its machine."""

import ctypes
import platform
import subprocess
import sys

import pytest

from metaleader.system.machine import keep_memory

FAULTS = """
import resource, sys, torch
from metaleader.system.machine import keep_memory
if sys.argv[1] == "keep":
    keep_memory()
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        torch.zeros(12 * 2**20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_what_is_freed_is_kept():
    """48 MB five times, after five times: new pages of the system each time, or none."""
    found = {}
    for how in ("keep", "give back"):
        done = subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True)
        found[how] = int(done.stdout)
    assert found["keep"] < 20 < found["give back"]


def test_another_c_library(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    keep_memory()

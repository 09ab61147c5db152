"""The benchmark: time, accuracy and memory of an update, on random images of the paper's shapes."""

from metaleader.bench.report import run_bench

__all__ = ["run_bench"]

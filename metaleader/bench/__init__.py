"""The benchmark: what an update costs, how exact it is, and what it needs, on random images of the paper's shapes."""

from metaleader.bench.report import run_bench

__all__ = ["run_bench"]

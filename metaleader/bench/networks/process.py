"""A cell's process seen from outside: started, asked, and killed when it takes too long."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

# Importing libraries and drawing inputs has a limit of its own, since a cell's limit is that of its first update.
_START_LIMIT = 180.0


class Setting(NamedTuple):
    """What all cells of a table share.

    Attributes:
        device: cpu or cuda.
        threads: of each process.
        folder: for inputs, compile caches and logs; empty at first.
        limit: seconds that a first update may take.
        jobs: processes that run at the same time, except while times are taken.
    """

    device: str
    threads: int
    folder: Path
    limit: float
    jobs: int


class Times(NamedTuple):
    """Milliseconds per update of several calls.

    Attributes:
        ms: of each call.
        cpu_ms: of processor time, over all calls.
        gathered_ms: of each call whose datapoints were gathered before; empty for implementations that gather none.
    """

    ms: list[float]
    cpu_ms: float
    gathered_ms: list[float]


class CellProcess:
    """A process of `metaleader.bench.networks.cell`.

    Args:
        setting: of the table.
        network: the name of the case.
        cell: the name of the implementation.
        phase: "cold" ends after the first update; "warm" then waits for commands.

    Attributes:
        result: what the process has reported so far, as it is printed.
    """

    alive: ClassVar[set[CellProcess]] = set()

    def __init__(self, setting: Setting, network: str, cell: str, phase: str) -> None:
        self.setting, self.cell, self.phase = setting, cell, phase
        self.result: dict[str, Any] = {}
        started = time.time()
        specification = {
            "network": network,
            "cell": cell,
            "phase": phase,
            "device": setting.device,
            "threads": setting.threads,
            "inputs": str(setting.folder / f"{network}.safetensors"),
            "started": started,
        }
        command = [sys.executable, "-m", "metaleader.bench.networks.cell", json.dumps(specification)]
        self._log = setting.folder / f"{network}-{cell}-{phase}.log"
        with open(self._log, "w") as log:
            # A session of its own, so that its compilers end with it.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=_environment(setting, cell),
                start_new_session=True,
            )
        self.alive.add(self)
        assert self._process.stdout is not None
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._process.stdout, selectors.EVENT_READ)
        self._unread = b""

    def start(self) -> bool:
        """Wait for the first update; whether it succeeded."""
        ready = self._expect("ready", _START_LIMIT, "start")
        if ready is None:
            return False
        if ready["version"]:
            self.result["version"] = ready["version"]
        first = self._expect("first", self.setting.limit, "first update")
        if first is None:
            return False
        first.pop("event")
        self.result |= {
            f"first_update_{self.phase}_s": first.pop("seconds"),
            f"first_update_{self.phase}_cpu_s": first.pop("cpu_seconds"),
            f"from_start_{self.phase}_s": first.pop("since_start"),
            **first,
        }
        if self.phase == "cold":
            self.close()
        return True

    def times(self, seconds: float) -> Times | None:
        """The times of a few calls; None if the process has failed."""
        self._say(f"times {seconds}")
        reply = self._expect("times", self.setting.limit + seconds, "timing")
        return None if reply is None else Times(reply["ms"], reply["cpu_ms"], reply["gathered_ms"])

    def finish(self) -> None:
        """Take memory and error, and end the process."""
        self._say("end")
        memory = self._expect("memory", self.setting.limit, "memory")
        if memory is not None:
            peak = memory.pop("bytes")
            memory.pop("event")
            self.result |= {"peak_mib": None if peak is None else peak / 2**20, **memory}
            error = self._expect("error", self.setting.limit, "error")
            if error is not None:
                self.result |= {"error_vs_float64": error["median"], "error_tasks": error["tasks"]}
        self.close()

    def close(self) -> None:
        """End the process and all that it started."""
        self.alive.discard(self)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._selector.close()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                if pipe is not None:
                    pipe.close()

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the missing reply says so
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()

    def _expect(self, event: str, limit: float, what: str) -> dict[str, Any] | None:
        """The next event, or None after noting why it does not come."""
        reply = self._read(time.monotonic() + limit)
        if reply is not None and reply["event"] == event:
            return reply
        if reply is not None:
            self.result["failed"] = f"{what}: {reply.get('reason', reply)}"
        elif self._process.poll() is None:
            self.result["failed"] = f"{what}: more than {limit:g} s"
        else:
            lines = self._log.read_text(errors="replace").strip().splitlines() or ["no message"]
            self.result["failed"] = f"{what}: the process ended ({self._process.returncode}): {lines[-1][:200]}"
        self.close()
        return None

    def _read(self, deadline: float) -> dict[str, Any] | None:
        assert self._process.stdout is not None
        while b"\n" not in self._unread:
            left = deadline - time.monotonic()
            if left <= 0 or not self._selector.select(left):
                return None
            chunk = os.read(self._process.stdout.fileno(), 65536)
            if not chunk:
                self._process.wait()
                return None
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)


def _environment(setting: Setting, cell: str) -> dict[str, str]:
    """Threads, and a folder for compile caches that the cold and the warm process of an implementation share."""
    cache = setting.folder / f"cache-{cell}"
    threads = str(setting.threads)
    values = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "METALEADER_CACHE": str(cache / "metaleader"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "JAX_COMPILATION_CACHE_DIR": str(cache / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        # By default JAX takes most of the GPU's memory at once.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        # Triton compiles in this many processes; by default as many as there are cores in every cell.
        "TORCHINDUCTOR_COMPILE_THREADS": str(max(1, (os.cpu_count() or 1) // setting.jobs)),
    }
    if setting.device == "cpu":
        values |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "NPROC": threads}
    return os.environ | values

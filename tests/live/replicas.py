"""A writer and two replicas under load, the writer killed and restarted: `python replicas.py FOLDER KILLS`.

All are servers of `metaleader serve` on 127.0.0.1, in forks of this process, so that torch is imported once. Another
fork observes through the writer, with keys, and repeats a request until it is answered; it predicts at the replicas,
and measures the time until a replica knows an observation. At the end the folder must hold every observation that was
acknowledged, none twice, and the replicas must have its data.
"""

import http.client
import json
import os
import random
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from sessions import ROWS, batch, calls, make

from metaleader.cli.serve import serve
from metaleader.live.calls import Observe, digest
from metaleader.live.session import Session

FILE = "import sessions\n\nlearner = sessions.make\n"
HEADERS = {"content-type": "application/json"}


def free_ports(count):
    taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in taken]
    for one in taken:
        one.close()
    return ports


def forked(function):
    process = os.fork()
    if process == 0:
        try:
            function()
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return process


def started(folder, port, replica):
    process = forked(lambda: serve(folder / "live", experiment=folder / "service.py", port=port, replica=replica))
    deadline = time.monotonic() + 60
    while True:
        try:
            if call(port, "GET", "/v2/health/ready")[0] == 200:
                return process
        except OSError:
            assert os.waitpid(process, os.WNOHANG) == (0, 0), "a server has ended"
        assert time.monotonic() < deadline, "a server does not start"
        time.sleep(0.02)


def call(port, method, path, content=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        body = None if content is None else json.dumps(content)
        connection.request(method, path, body, {**HEADERS, **headers} if body else headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def tensors(event, *names):
    values = dict(zip("xy", batch(event), strict=True))
    inputs = [
        {"name": n, "shape": list(values[n].shape), "datatype": "FP32", "data": values[n].tolist()} for n in names
    ]
    return {"inputs": inputs}


def acknowledged(port, task, event):
    """Observe, again and again until the writer answers."""
    while True:
        try:
            path, key = f"/tasks/{task}/observe", f"event {event}"
            status, answer = call(port, "POST", path, tensors(event, "x", "y"), **{"idempotency-key": key})
            assert status == 200, answer
            return
        except (OSError, http.client.HTTPException):
            time.sleep(0.01)


def load(ports, pipe, stop):
    writer, *replicas = ports
    errors, delays, predictions = [], [], [0] * len(replicas)

    def observe(thread):
        event = thread * 10**6
        while not stop.is_set():
            acknowledged(writer, f"customer-{event % 7}", event)
            os.write(pipe, f"{event}\n".encode())
            event += 1

    def predict(i):
        while not stop.is_set():
            status, answer = call(replicas[i], "POST", "/v2/models/customer-1/infer", tensors(5, "x"))
            if status != 200:
                errors.append(answer)
            predictions[i] += 1
            time.sleep(0.01)

    def probe():
        event = 10**8
        while not stop.is_set():
            acknowledged(writer, f"probe-{event}", event)
            os.write(pipe, f"{event}\n".encode())
            start = time.monotonic()
            for port in replicas:
                while call(port, "GET", f"/v2/models/probe-{event}")[1]["parameters"]["datapoints"] != ROWS:
                    time.sleep(0.005)
                delays.append(time.monotonic() - start)
            event += 1
            time.sleep(0.1)

    def guarded(function, *args):
        try:
            function(*args)
        except BaseException as error:
            errors.append(repr(error))
            stop.set()

    jobs = [(observe, 1), (observe, 2), (probe,), *((predict, i) for i in range(len(replicas)))]
    threads = [threading.Thread(target=guarded, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [], errors[:3]
    assert min(predictions) > 0
    os.write(pipe, f"done {sum(predictions)} {sorted(delays)[len(delays) // 2]} {max(delays)}\n".encode())


def main(folder, kills):
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "service.py").write_text(FILE)
    warm = make()  # the first calls load modules, which the forks then share
    for event in range(3):
        warm.observe(*batch(event), task="a")
    warm.predict_many({"a": batch(0)[0]})
    ports = free_ports(3)
    writer = started(folder, ports[0], False)
    replicas = [started(folder, port, True) for port in ports[1:]]
    reader, pipe = os.pipe()

    def client():
        stop = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
        threading.Thread(target=load, args=(ports, pipe, stop)).start()
        stop.wait()
        for thread in threading.enumerate():
            if thread is not threading.current_thread():
                thread.join()

    loader = forked(client)
    os.close(pipe)
    draw = random.Random(0)
    for _ in range(kills):
        time.sleep(draw.uniform(0.5, 1.5))
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        time.sleep(draw.uniform(0.0, 0.3))
        writer = started(folder, ports[0], False)
    time.sleep(1)
    os.kill(loader, signal.SIGTERM)
    with os.fdopen(reader) as lines:
        *events, summary = lines.read().splitlines()
    assert os.waitpid(loader, 0)[1] == 0
    assert summary.startswith("done"), summary
    listed = call(ports[0], "GET", "/tasks")[1]
    deadline = time.monotonic() + 20
    while any(call(port, "GET", "/tasks")[1]["tasks"] != listed["tasks"] for port in ports[1:]):
        assert time.monotonic() < deadline, "a replica lacks data"
        time.sleep(0.05)
    for process in (writer, *replicas):
        os.kill(process, signal.SIGTERM)
        assert os.waitpid(process, 0)[1] == 0
    stored = [one.key for one in calls(folder / "live") if isinstance(one, Observe) and one.key is not None]
    assert len(set(stored)) == len(stored), "an observation is stored twice"
    missing = {digest("key", f"event {event}") for event in events} - set(stored)
    with Session(folder / "live", make) as session:
        total = sum(session.learner.tasks.values())
        for event in events[:: max(1, len(events) // 20)]:
            task = f"customer-{int(event) % 7}" if int(event) < 10**8 else f"probe-{event}"
            assert session.observe(*batch(int(event)), task=task, key=f"event {event}") is False
    assert missing == set(), f"{len(missing)} acknowledged observations are lost"
    assert total == sum(listed["tasks"].values())
    _, predictions, median, longest = summary.split()
    print(
        f"{kills} kills: {len(events)} observations acknowledged, none lost; {predictions} predictions of two replicas,"
        f" none failed; a replica knows one after {float(median):.2f} s (median), {float(longest):.2f} s (max)"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

"""The calls of a service over HTTP: their effect is that of the session's, and a call that fails changes nothing."""

import errno
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
import safetensors.torch
import torch
from prometheus_client.parser import text_string_to_metric_families
from sessions import ROWS, batch, make, same_state
from starlette.testclient import TestClient
from torch import nn

from metaleader import losses, models
from metaleader.learners import FTML, TOE, BayesianHead
from metaleader.live.replica import Replica
from metaleader.live.serve.app import ROUTES, make_app
from metaleader.live.serve.bodies import JSON, SAFETENSORS
from metaleader.live.serve.guard import read_tokens
from metaleader.live.serve.service import Limits, Service
from metaleader.live.session import Session


@contextmanager
def client(
    folder, factory=make, *, limits=None, source=None, session=None, tokens=(), **options
) -> Iterator[tuple[TestClient, Any]]:
    source = source or Session(folder, factory, **(session or {}))
    service = Service(source, limits or Limits(), **options)
    base = "http://127.0.0.1"
    with TestClient(make_app(service, tokens=tokens), base_url=base, raise_server_exceptions=False) as found:
        yield found, service


def tensor(name, value, datatype="FP32"):
    array = np.asarray(value)
    return {"name": name, "shape": list(array.shape), "datatype": datatype, "data": array.reshape(-1).tolist()}


def body(*tensors, **more):
    return {"inputs": list(tensors), **more}


def datapoints(i, rows=ROWS):
    x, y = batch(i, rows)
    return body(tensor("x", x), tensor("y", y))


def inputs(i, **more):
    return body(tensor("x", batch(i)[0]), **more)


def observe(http, i, task, **headers):
    answer = http.post(f"/tasks/{task}/observe", json=datapoints(i), headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()["stored"]


def output(answer, name="y"):
    assert answer.status_code == 200, answer.text
    (found,) = [item for item in answer.json()["outputs"] if item["name"] == name]
    return torch.tensor(found["data"]).reshape(found["shape"])


def test_predictions_are_those_of_the_session(tmp_path):
    with client(tmp_path) as (http, service):
        for i in range(6):
            assert observe(http, i, f"customer {i % 3}") is True
        session = service.source
        assert session.wait(60)
        for task in ("customer 0", "customer 2"):
            answer = http.post(f"/v2/models/{task}/infer", json=inputs(20, id="request 7"))
            assert torch.equal(output(answer), session.predict(batch(20)[0], task))
            content = answer.json()
            assert (content["model_name"], content["id"]) == (task, "request 7")
            assert content["model_version"] == str(session.learner.step)
            assert content["parameters"] == {"datapoints": 2 * ROWS}
        new = http.post("/v2/models/nobody/infer", json=inputs(20))
        assert new.json()["parameters"] == {"datapoints": 0}
        learner = session.learner
        assert torch.equal(output(new), learner.network.predict(learner.params, batch(20)[0]))
        assert session.learner.tasks == {f"customer {i}": 2 * ROWS for i in range(3)}


def test_observations_are_those_of_the_session(tmp_path):
    """The same calls, in process and over HTTP, as JSON and as safetensors."""
    learner = make()
    with client(tmp_path, session={"updates": "inline"}) as (http, service):
        for i in range(6):
            x, y = batch(i)
            learner.observe(x, y, task=f"customer {i % 3}")
            if i % 2:
                assert observe(http, i, f"customer {i % 3}") is True
            else:
                content = safetensors.torch.save({"x": x, "y": y})
                url, headers = f"/tasks/customer {i % 3}/observe", {"content-type": SAFETENSORS}
                assert http.post(url, content=content, headers=headers).json() == {
                    "task": f"customer {i % 3}",
                    "stored": True,
                }
        assert same_state(service.source.learner, learner)


def test_safetensors_and_json_are_exact(tmp_path):
    with client(tmp_path) as (http, service):
        observe(http, 1, "a")
        service.source.wait()
        x = batch(5)[0]
        expected = service.source.predict(x, "a")
        content = safetensors.torch.save({"x": x})
        answer = http.post("/v2/models/a/infer", content=content, headers={"content-type": SAFETENSORS})
        assert answer.headers["content-type"] == SAFETENSORS
        assert torch.equal(safetensors.torch.load(answer.content)["y"], expected)
        headers = {"content-type": SAFETENSORS, "accept": JSON}
        assert torch.equal(output(http.post("/v2/models/a/infer", content=content, headers=headers)), expected)
        answer = http.post("/v2/models/a/infer", json=inputs(5), headers={"accept": f"text/html, {SAFETENSORS};q=0.9"})
        assert torch.equal(safetensors.torch.load(answer.content)["y"], expected)
        assert http.post("/v2/models/a/infer", json=inputs(5), headers={"accept": "text/html"}).status_code == 406
        # Nested data, and double precision, which is converted to the dtype of the model.
        nested = {"name": "x", "shape": [ROWS, 2], "datatype": "FP64", "data": x.tolist()}
        assert torch.equal(output(http.post("/v2/models/a/infer", json=body(nested))), expected)
        double = safetensors.torch.save({"x": x.double()})
        headers = {"content-type": SAFETENSORS, "accept": JSON}
        assert torch.equal(output(http.post("/v2/models/a/infer", content=double, headers=headers)), expected)


def test_large_bodies(tmp_path):
    """Read in a thread."""
    with client(tmp_path) as (http, service):
        x, y = batch(1, rows=5000)
        assert http.post("/tasks/a/observe", json=body(tensor("x", x), tensor("y", y))).status_code == 200
        assert torch.equal(service.source.learner.memory.named("a").x, x)
        answer = http.post("/tasks/a/observe", json=body(tensor("x", x), tensor("z", y)))
        assert (answer.status_code, "tensor 'z'" in answer.json()["error"]) == (400, True)


def test_a_key_makes_an_observation_once(tmp_path):
    with client(tmp_path) as (http, service):
        assert observe(http, 1, "a", **{"idempotency-key": "event 1"}) is True
        assert observe(http, 1, "a", **{"idempotency-key": "event 1"}) is False
        answer = http.post("/tasks/a/observe", json=datapoints(2), headers={"idempotency-key": "event 1"})
        assert answer.status_code == 409
        assert "used before, for other data" in answer.json()["error"]
        assert service.source.learner.tasks == {"a": ROWS}
        assert service.history.totals()[0] == ROWS


def test_labels_come_later(tmp_path):
    with client(tmp_path) as (http, service):
        observe(http, 1, "a")
        service.source.wait()
        x, y = batch(5)
        predicted = output(http.post("/v2/models/a/infer?name=order 55", json=inputs(5)))
        assert torch.equal(output(http.post("/v2/models/a/infer?name=order 55", json=inputs(5))), predicted)
        assert http.post("/v2/models/a/infer?name=order 55", json=inputs(6)).status_code == 409
        new = http.post("/v2/models/new/infer?name=order 56", json=inputs(6))
        assert new.status_code == 200
        measured = service.history.totals()
        for name, target in (("order 55", y), ("order 56", batch(6)[1])):
            answer = http.post(f"/predictions/{name}/label", json=body(tensor("y", target)))
            assert answer.json() == {"prediction": name, "stored": True}
        assert http.post("/predictions/order 55/label", json=body(tensor("y", y))).json()["stored"] is False
        assert http.post("/predictions/order 57/label", json=body(tensor("y", y))).status_code == 404
        assert service.source.learner.tasks == {"a": 2 * ROWS, "new": ROWS}
        assert torch.equal(service.source.learner.memory.named("a").x[ROWS:], x)
        # The error is that of the prediction which was made.
        rows, loss, _ = service.history.totals()
        assert rows - measured[0] == 2 * ROWS
        other = losses.squared_error(output(new), batch(6)[1]).sum()
        expected = float(losses.squared_error(predicted, y).sum() + other)
        assert loss - measured[1] == pytest.approx(expected, rel=1e-4)


def test_forgetting(tmp_path):
    with client(tmp_path) as (http, service):
        for i in range(4):
            observe(http, i, "ab"[i % 2])
        http.post("/v2/models/a/infer?name=order 1", json=inputs(5))
        assert http.delete("/tasks/a").json() == {"task": "a", "deleted": True}
        assert http.get("/tasks").json() == {"total": 1, "offset": 0, "tasks": {"b": 2 * ROWS}}
        assert [item["task"] for item in http.get("/status").json()["recent"]] == ["b"]
        assert http.post("/predictions/order 1/label", json=body(tensor("y", batch(5)[1]))).status_code == 404
        answer = http.delete("/tasks/a")
        assert (answer.status_code, answer.json()) == (404, {"error": "no data of task 'a'"})
        assert not service._predictions
        http.post("/v2/models/c/infer?name=order 2", json=inputs(5))
        assert http.delete("/tasks/c").status_code == 200
        assert http.post("/predictions/order 2/label", json=body(tensor("y", batch(5)[1]))).status_code == 404
        assert http.delete("/tasks/c").status_code == 404
    assert b'"a"' not in (tmp_path / "service.json").read_bytes()


@pytest.mark.parametrize("task", ["site/3", "künd/e", "a/b/c/", "/a", "a/observe", "b/infer", "a?b#c/d"])
def test_names_with_a_slash(task, tmp_path):
    """Also quoted as %2F, which the server decodes before the address is read."""
    with client(tmp_path) as (http, service):
        for i, name in enumerate((quote(task, safe=""), quote(task))):
            assert observe(http, i, name) is True
            assert service.source.learner.tasks == {task: (i + 1) * ROWS}
            service.source.wait()
            answer = http.post(f"/v2/models/{name}/infer?name={name}", json=inputs(5))
            assert answer.json()["model_name"] == task
            assert answer.json()["parameters"] == {"datapoints": (i + 1) * ROWS}
            assert torch.equal(output(answer), service.source.predict(batch(5)[0], task))
            assert http.get(f"/v2/models/{name}").json()["name"] == task
            assert http.get(f"/v2/models/{name}/ready").json() == {"name": task, "ready": True}
            assert http.post(f"/tasks/{name}/readmit").status_code == 409
        answer = http.post(f"/predictions/{quote(task)}/label", json=body(tensor("y", batch(5)[1])))
        assert answer.json() == {"prediction": task, "stored": True}
        observe(http, 1, "a")
        assert http.delete(f"/tasks/{quote(task)}").json() == {"task": task, "deleted": True}
        assert http.get("/tasks").json()["tasks"] == {"a": ROWS}
        assert http.get("/tasks/").json()["total"] == 1


def test_tasks_set_aside_are_readmitted(tmp_path):
    with client(tmp_path) as (http, service):
        for i in range(4):
            observe(http, i, "ab"[i % 2])
        x, y = batch(9)
        content = body(tensor("x", x * 1e6), tensor("y", y * 1e6))
        assert http.post("/tasks/bad/observe", json=content).status_code == 200
        service.source.wait()
        deadline = time.monotonic() + 30
        while not service.source.learner.set_aside and time.monotonic() < deadline:
            observe(http, 5, "a")
            service.source.wait()
        aside = http.get("/status").json()["set_aside"]
        assert (aside["total"], list(aside["tasks"])) == (1, ["bad"])
        # A net that is not finite is an error of this task alone.
        assert http.post("/v2/models/bad/infer", json=inputs(1)).status_code == 400
        assert http.post("/tasks/a/readmit").status_code == 409
        assert http.post("/tasks/nobody/readmit").status_code == 404
        assert http.post("/tasks/bad/readmit").json() == {"task": "bad", "readmitted": True}


def test_facts(tmp_path):
    with client(tmp_path) as (http, service):
        assert http.get("/v2/models/a").json()["inputs"] == []
        for i in range(5):
            observe(http, i, f"customer {i}")
        assert http.get("/v2").json()["name"] == "metaleader"
        assert http.get("/v2/health/live").json() == {"live": True}
        assert http.get("/v2/health/ready").json() == {"ready": True}
        assert http.get("/v2/models/a/ready").json() == {"name": "a", "ready": True}
        found = http.get("/v2/models/customer 1").json()
        assert found["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}]
        assert found["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [-1, 1]}]
        assert found["parameters"] == {"datapoints": ROWS}
        listed = http.get("/tasks?limit=2&offset=1").json()
        assert listed == {"total": 5, "offset": 1, "tasks": {"customer 1": ROWS, "customer 2": ROWS}}
        assert http.get("/tasks?limit=1e3").status_code == 400
        assert service.source.wait(60)
        time.sleep(0.6)  # the state is read at most every half second
        state = http.get("/status").json()
        expected = {key: value for key, value in service.source.status().items() if key != "set_aside"}
        assert {key: state[key] for key in ("tasks", "datapoints", "record")} == {
            key: expected[key] for key in ("tasks", "datapoints", "record")
        }


def test_metrics(tmp_path):
    with client(tmp_path) as (http, service):
        for i in range(5):
            observe(http, i, f"customer {i % 2}")
        service.source.wait()
        http.post("/v2/models/customer 1/infer", json=inputs(1))
        http.post("/v2/models/customer 1/infer", content=b"{", headers={"content-type": JSON})
        time.sleep(0.6)  # the state is read at most every half second
        text = http.get("/metrics").text
        families = {family.name: family for family in text_string_to_metric_families(text)}
        requests = {
            (s.labels["call"], s.labels["status"]): s.value
            for s in families["metaleader_requests"].samples
            if s.name.endswith("_total")
        }
        assert requests == {("observe", "200"): 5, ("infer", "200"): 1, ("infer", "400"): 1}
        state, value = service.source.status(), {n: f.samples[0].value for n, f in families.items() if f.samples}
        for name, key in (
            ("staleness_observations", "behind"),
            ("staleness_seconds", "staleness"),
            ("journal_lag", "journal_lag"),
            ("disk_bytes", "bytes"),
        ):
            assert value[f"metaleader_{name}"] == state[key], name
        assert value["metaleader_updates"] == state["step"] > 0
        assert value["metaleader_prequential_datapoints"] == 5 * ROWS
        assert value["metaleader_prequential_loss"] == pytest.approx(service.history.totals()[1])
        assert {"metaleader_request_seconds", "metaleader_batch_requests"} <= families.keys()


def test_the_prequential_error_is_that_of_each_observation_before_it_is_stored(tmp_path):
    learner, expected = make(), [0, 0.0, 0.0]
    with client(tmp_path, session={"updates": "inline"}) as (http, service):
        for i in range(8):
            x, y = batch(i)
            task = f"customer {i % 3}"
            unadapted = learner.network.predict(learner.params, x)
            adapted = learner.predict(x, task=task) if i >= 3 else unadapted
            for at, value in enumerate((adapted, unadapted), 1):
                expected[at] += float(losses.squared_error(value, y).sum())
            learner.observe(x, y, task=task)
            observe(http, i, task)
        assert service.history.totals() == pytest.approx((8 * ROWS, *expected[1:]), rel=1e-4)
        curves = http.get("/status").json()["curves"]
        assert [block[0] for block in curves["observations"]] == list(range(1, 9))
        assert [row[0] for row in curves["tasks"]] == [0, 1, 2]
        assert [len([v for v in row[1:] if v is not None]) for row in curves["tasks"]] == [3, 3, 2]
    with client(tmp_path) as (_, service):
        assert service.history.curves() == curves
    with client(tmp_path, measure=False) as (http, service):
        observe(http, 9, "a")
        assert service.history.curves() == curves


def test_requests_that_arrive_together_are_predicted_together(tmp_path):
    sizes = []
    with client(tmp_path, window=0.05) as (http, service):
        for i in range(8):
            observe(http, i, f"customer {i % 4}")
        service.source.wait()
        original = service.source.predict_many
        service.source.predict_many = lambda xs: sizes.append(len(xs)) or original(xs)
        tasks = [f"customer {i % 5}" for i in range(16)]  # customer 4 has no data

        def infer(i):
            content = body(tensor("x", batch(i)[0] if i != 7 else torch.zeros(3, 5)))
            return http.post(f"/v2/models/{tasks[i]}/infer", json=content)

        with ThreadPoolExecutor(16) as threads:
            answers = list(threads.map(infer, range(16)))
        del service.source.predict_many
        assert max(sizes) >= 2  # on a busy machine not all arrive within the window
        for i, answer in enumerate(answers):
            if i == 7:
                assert answer.status_code == 400
                assert "x has rows of float32[5], the data so far has float32[2]" in answer.json()["error"]
                continue
            learner, x = service.source.learner, batch(i)[0]
            known = i % 5 < 4
            alone = learner.predict(x, task=tasks[i]) if known else learner.network.predict(learner.params, x)
            assert torch.allclose(output(answer), alone, atol=1e-5), i


def test_one_net_that_fails_leaves_the_others(tmp_path):
    with client(tmp_path, window=0.05) as (http, service):
        for i in range(3):
            observe(http, i, f"customer {i}")
        x, y = batch(9)
        service.source.observe(x * 1e6, y * 1e6, task="bad", update=False)
        with ThreadPoolExecutor(4) as threads:
            names = ["customer 0", "bad", "customer 1", "customer 2"]
            answers = list(threads.map(lambda n: http.post(f"/v2/models/{n}/infer", json=inputs(5)), names))
        assert [answer.status_code for answer in answers] == [200, 400, 200, 200]
        assert "the net adapted to task 'bad' is not finite" in answers[1].json()["error"]
        # Its observations are stored all the same.
        assert observe(http, 1, "bad") is True


X, Y = tensor("x", [[1.0, 2.0]]), tensor("y", [[1.0]])
MALFORMED = {
    "not JSON": b"{",
    "must be an object": b"[]",
    'a list "inputs"': b'{"inputs": {}}',
    "nested too deeply": b'{"inputs": ' + b"[" * 100_000,
    "not a JSON number": b'{"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [NaN]}]}',
    "not UTF-8": b'{"inputs": "\xff"}',
    "unknown fields 'input'": body(X, Y, input=1),
    "parameters are not supported": body(X, Y, parameters={"a": 1}),
    "id must be a string": body(X, Y, id=7),
    "two tensors named 'x'": body(X, X, Y),
    "there is no tensor 'y'": body(X),
    "there is no tensor 'x'": body(Y),
    "tensor 'z' has no meaning here; send x and y": body(X, Y, tensor("z", [1.0])),
    "there are tensors 'x' and 'x.a'": body(X, {**X, "name": "x.a"}, Y),
    "must be x.0, x.1": body({**X, "name": "x.1"}, Y),
    "must be an object with a name": body(3, Y),
    "datatype must be one of": body({**X, "datatype": "BYTES"}, Y),
    "shape must be a list of at most 16 integers": body({**X, "shape": [-1, 2]}, Y),
    "got [1, 1, 1": body({**X, "shape": [1] * 17, "data": [1.0]}, Y),
    "data must be a list of numbers, got": body({**X, "data": "AAAA"}, Y),
    "data must be numbers of FP32": body({**X, "data": ["1", "2"]}, Y),
    "data must be numbers of INT64": body({**X, "datatype": "INT64", "data": [1.5, 2]}, Y),
    "data has values that UINT8 cannot express": body({**X, "datatype": "UINT8", "data": [1, 256]}, Y),
    "data has values that FP32 cannot express": body({**X, "data": [1, 1e39]}, Y),
    "flat or nested": body({**X, "data": [[1], [1, 2]]}, Y),
    "which is not [2, 2]": body({**X, "shape": [2, 2]}, Y),
    "which is not [1, 2]": body({**X, "data": [[1.0], [2.0]]}, Y),
    "same number of rows": body(X, tensor("y", [[1.0], [2.0]])),
    "at least one": body({**X, "shape": [0, 2], "data": []}, {**Y, "shape": [0, 1], "data": []}),
    "the model fails on x": body(tensor("x", [[1.0]]), Y),
}


@pytest.mark.parametrize("message", list(MALFORMED))
def test_malformed_bodies_change_nothing(message, tmp_path):
    value = MALFORMED[message]
    content = value if isinstance(value, bytes) else json.dumps(value).encode()
    with client(tmp_path) as (http, service):
        record = service.source.status()["record"]
        answer = http.post("/tasks/a/observe", content=content, headers={"content-type": JSON})
        assert answer.status_code == 400, answer.text
        assert message in answer.json()["error"]
        assert service.source.status()["record"] == record
        assert service.source.learner.tasks == {}


def test_malformed_safetensors(tmp_path):
    good = safetensors.torch.save({"x": torch.zeros(1, 2), "y": torch.zeros(1, 1)})
    headers = {"content-type": SAFETENSORS}
    with client(tmp_path) as (http, service):
        for content in (b"", good[:-1], good[:9], b"\xff" * 50, good.replace(b"F32", b"F16")):
            answer = http.post("/tasks/a/observe", content=content, headers=headers)
            assert answer.status_code == 400
            assert "not a file of safetensors" in answer.json()["error"]
        other = safetensors.torch.save({"x": torch.zeros(1, 2, dtype=torch.complex64), "y": torch.zeros(1, 1)})
        assert "send one of BOOL" in http.post("/tasks/a/observe", content=other, headers=headers).json()["error"]
        assert service.source.learner.tasks == {}


def test_other_requests_that_are_refused(tmp_path):
    with client(tmp_path) as (http, service):
        observe(http, 1, "a")
        cases = [
            (405, http.put("/tasks")),
            (404, http.get("/nothing")),
            (404, http.post("/v2/models/a/versions/1/infer", json=inputs(1))),
            (404, http.get("/v2/models/a/versions/1")),
            (404, http.get("/v2/models/a/versions/1/ready")),
            (405, http.post("/tasks//observe", json=datapoints(1))),
            (405, http.get("/tasks/a")),
            (405, http.get("/tasks/a/observe")),
            (405, http.delete("/tasks")),
            (415, http.post("/tasks/a/observe", content=b"x")),
            (415, http.post("/tasks/a/observe", json=datapoints(1), headers={"content-encoding": "gzip"})),
            (400, http.post("/tasks/a%0Ab/observe", json=datapoints(1))),
            (400, http.post("/tasks/a%FFb/observe", json=datapoints(1))),
            (400, http.post(f"/tasks/{'a' * 501}/observe", json=datapoints(1))),
            (400, http.post("/tasks/a/observe", json=datapoints(1), headers={"idempotency-key": "k" * 501})),
            (400, http.post("/v2/models/a/infer?nam=b", json=inputs(1))),
            (400, http.post("/v2/models/a/infer?name=b&name=c", json=inputs(1))),
            (400, http.post("/v2/models/a/infer", json=inputs(1, outputs=[{"name": "z"}]))),
            (400, http.post("/v2/models/a/infer", json=inputs(1, outputs=[{"name": "y"}, {"name": "variance"}]))),
            (400, http.post("/v2/models/a/infer", json=inputs(1, outputs=[]))),
            (403, http.get("/tasks", headers={"host": "example.org"})),
            (403, http.post("/tasks/a/observe", json=datapoints(1), headers={"origin": "https://example.org"})),
        ]
        for i, (status, answer) in enumerate(cases):
            assert answer.status_code == status, (i, answer.text)
            assert list(answer.json()) == ["error"], i
        assert service.source.learner.tasks == {"a": ROWS}
        assert {error["status"] for error in http.get("/status").json()["errors"]} == {400, 403, 405, 415}


def test_limits(tmp_path):
    limits = Limits(body=2000, rows=5, tasks=2)
    with client(tmp_path, limits=limits) as (http, service):
        observe(http, 1, "a")
        observe(http, 2, "b")
        answer = http.post("/tasks/c/observe", json=datapoints(3))
        assert (answer.status_code, "there are 2 tasks" in answer.json()["error"]) == (429, True)
        assert observe(http, 3, "a") is True
        answer = http.post("/tasks/a/observe", json=datapoints(1, rows=6))
        assert (answer.status_code, "6 rows" in answer.json()["error"]) == (413, True)
        answer = http.post("/tasks/a/observe", json=body(X, Y, id="a" * 3000))
        assert (answer.status_code, "more than 2000 bytes" in answer.json()["error"]) == (413, True)
        # Without a length, the body is refused when it has become too long.
        pieces = (b" " * 500 for _ in range(10))
        answer = http.post("/tasks/a/observe", content=pieces, headers={"content-type": JSON})
        assert answer.status_code == 413
        http.delete("/tasks/b")
        observe(http, 4, "c")
        assert service.source.learner.tasks == {"a": 2 * ROWS, "c": ROWS}
    with pytest.raises(ValueError, match="the limit rows must be above 0, got 0"):
        Limits(rows=0)


def test_the_number_of_requests(tmp_path):
    entered, go_on = threading.Event(), threading.Event()
    with client(tmp_path, limits=Limits(requests=2)) as (http, service):
        original = service.source.observe

        def slow(*args, **options):
            entered.set()
            assert go_on.wait(30)
            return original(*args, **options)

        service.source.observe = slow
        with ThreadPoolExecutor(2) as threads:
            waiting = [threads.submit(observe, http, i, "a") for i in range(2)]
            assert entered.wait(30)
            while service.metrics is not None and _running(http) < 2:
                time.sleep(0.01)
            answer = http.get("/tasks")
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
            assert http.get("/v2/health/ready").status_code == 200
            assert http.get("/metrics").status_code == 200
            go_on.set()
            assert [w.result() for w in waiting] == [True, True]
        del service.source.observe
        assert http.get("/tasks").status_code == 200


def _running(http):
    layer = http.app.middleware_stack
    while not hasattr(layer, "_running"):
        layer = layer.app
    return layer._running


def test_tokens(tmp_path):
    secret = "0123456789abcdef0123"
    path = tmp_path / "tokens"
    path.write_text(f"# comment\n\n{secret}\nanother-token-here\n")
    with client(tmp_path / "a", tokens=read_tokens(path)) as (http, _):
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": f"Basic {secret}"},
            {"authorization": "Bearer"},
        ):
            answer = http.post("/tasks/a/observe", json=datapoints(1), headers=headers)
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
            for address in ("/tasks", "/status", "/metrics", "/v2/models/a", "/nothing"):
                assert http.get(address, headers=headers).status_code == 401, address
        for address in ("/", "/openapi.json", "/v2/health/live", "/v2/health/ready"):
            assert http.get(address).status_code == 200, address
        for token in (secret, "another-token-here"):
            answer = http.get("/tasks", headers={"authorization": f"Bearer {token}", "host": "example.org"})
            assert answer.status_code == 200
    for text, message in (("", "has no token"), ("short", "too easy to guess"), (f"{secret} b", "not one word")):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_tokens(path)
    path.write_bytes(b"\xff" * 40)
    with pytest.raises(ValueError, match="is not text"):
        read_tokens(path)


def test_errors_of_the_disk(tmp_path):
    with client(tmp_path) as (http, service):
        observe(http, 1, "a")
        original = service.source._journal.append

        def full(contents):
            raise OSError(errno.ENOSPC, "no room")

        service.source._journal.append = full
        answer = http.post("/tasks/a/observe", json=datapoints(2), headers={"idempotency-key": "k"})
        assert (answer.status_code, "no room" in answer.json()["error"]) == (507, True)
        service.source._journal.append = original
        assert observe(http, 2, "a", **{"idempotency-key": "k"}) is True
        assert service.source.learner.tasks == {"a": 2 * ROWS}
        service.source._writer.failure = RuntimeError("broken")
        assert http.post("/tasks/a/observe", json=datapoints(2)).status_code == 503
        time.sleep(0.6)
        answer = http.get("/v2/health/ready")
        assert (answer.status_code, answer.json()["ready"]) == (503, False)
        assert http.get("/v2/health/live").status_code == 200
        service.source._writer.failure = None


def test_an_unexpected_error_says_nothing_of_the_inside(tmp_path):
    with client(tmp_path) as (http, service):
        service.source.status = lambda: 1 / 0
        answer = http.get("/status")
        assert (answer.status_code, answer.json()) == (500, {"error": "an error of the server; its log has more"})
        del service.source.status


def test_a_replica_predicts_and_refuses_changes(tmp_path):
    with client(tmp_path) as (writer, service):
        for i in range(4):
            observe(writer, i, "ab"[i % 2])
        service.source.wait()
        service.source._updater.write_checkpoint()
        with client(tmp_path, source=Replica(tmp_path, make, poll=0.01)) as (http, _):
            expected = output(writer.post("/v2/models/a/infer", json=inputs(7)))
            assert torch.equal(output(http.post("/v2/models/a/infer", json=inputs(7))), expected)
            changes = [
                http.post("/tasks/a/observe", json=datapoints(1)),
                http.post("/v2/models/a/infer?name=order 1", json=inputs(1)),
                http.post("/predictions/order 1/label", json=body(tensor("y", batch(1)[1]))),
                http.delete("/tasks/a"),
                http.post("/tasks/a/readmit"),
            ]
            for answer in changes:
                assert (answer.status_code, "send the request to the writer" in answer.json()["error"]) == (403, True)
            state = http.get("/status").json()
            assert (state["role"], state["behind"], state["error"]) == ("replica", 0, None)
            assert "metaleader_replica_age_seconds" in http.get("/metrics").text
    assert service.source.status is not None


def test_variances(tmp_path):
    def build():
        model = lambda: models.mlp(2, 1, (6,))  # noqa: E731
        return FTML(model, losses.squared_error, adaptation=BayesianHead(), meta_steps=1, support=2, query=2)

    with client(tmp_path, build) as (http, service):
        observe(http, 1, "a")
        service.source.wait()
        both = [{"name": "y"}, {"name": "variance"}]
        answer = http.post("/v2/models/a/infer", json=inputs(5, outputs=both))
        mean, variance = service.source.predict(batch(5)[0], "a", variance=True)
        assert torch.equal(output(answer), mean)
        assert torch.equal(output(answer, "variance"), variance)
        assert http.post("/v2/models/b/infer", json=inputs(5, outputs=both)).status_code == 400
        assert http.post("/v2/models/a/infer?name=n", json=inputs(5, outputs=both)).status_code == 400


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x):
        a, b = (x["a"], x["b"]) if isinstance(x, dict) else x
        return self.linear(torch.cat([a, b.float()], -1))


@pytest.mark.parametrize("names", [("x.b", "x.a"), ("x.1", "x.0")])
def test_inputs_of_several_tensors(names, tmp_path):
    def build():
        return FTML(Two, losses.squared_error, meta_steps=1, support=2, query=2)

    second, first = names
    parts = [tensor(second, np.arange(3)[:, None], "INT64"), tensor(first, np.ones((3, 2)))]
    with client(tmp_path, build) as (http, service):
        content = body(*parts, {**tensor("y", np.ones(3)), "shape": [3]})
        assert http.post("/tasks/a/observe", json=content).status_code == 200
        assert http.post("/tasks/b/observe", json=content).status_code == 200
        service.source.wait()
        described = http.get("/v2/models/a").json()["inputs"]
        assert {item["name"]: item["datatype"] for item in described} == {second: "INT64", first: "FP32"}
        x = (torch.ones(3, 2), torch.arange(3)[:, None])
        x = dict(zip("ab", x, strict=True)) if names[0] == "x.b" else x
        assert torch.equal(output(http.post("/v2/models/a/infer", json=body(*parts))), service.source.predict(x, "a"))


def test_labels_of_classes(tmp_path):
    def build():
        return TOE(lambda: models.mlp(2, 3, (4,)), losses.cross_entropy, meta_steps=1, query=2)

    with client(tmp_path, build) as (http, service):
        content = body(tensor("x", batch(1)[0]), tensor("y", [0, 2, 1], "INT64"))
        assert http.post("/tasks/a/observe", json=content).status_code == 200
        bad = body(tensor("x", batch(1)[0]), tensor("y", [0, 3, 1], "INT64"))
        answer = http.post("/tasks/a/observe", json=bad)
        assert (answer.status_code, "labels must lie in 0..2" in answer.json()["error"]) == (400, True)
        assert service.source.learner.tasks == {"a": 3}
        assert service.history.totals()[0] == 3


def test_predictions_that_are_not_finite(tmp_path):
    def build():
        return FTML(nn.Linear(2, 1), losses.squared_error, optimizer="sgd", support=2, query=2)

    with client(tmp_path, build) as (http, service):
        service.source.learner.state.flat.fill_(10.0)
        huge = body(tensor("x", np.full((1, 2), 3e38)))
        answer = http.post("/v2/models/a/infer", json=huge)
        assert answer.status_code == 422
        answer = http.post("/v2/models/a/infer", json=huge, headers={"accept": SAFETENSORS})
        assert not safetensors.torch.load(answer.content)["y"].isfinite().all()


def test_the_description_has_every_call(tmp_path):
    with client(tmp_path) as (http, _):
        found = http.get("/openapi.json").json()
    assert found["openapi"].startswith("3.1")
    assert set(found["paths"]) == {route.path_format for route in ROUTES}
    calls = [(path, method, call) for path, methods in found["paths"].items() for method, call in methods.items()]
    assert len({call["operationId"] for _, _, call in calls}) == len(calls)
    for path, _, call in calls:
        in_path = [p["name"] for p in call["parameters"] if p["in"] == "path"]
        assert in_path == [part.strip("{}") for part in path.split("/") if part.startswith("{")]
        assert call["summary"]
        for reference in _references(call):
            assert reference.removeprefix("#/components/schemas/") in found["components"]["schemas"]


def _references(value):
    if isinstance(value, dict):
        return [value["$ref"]] if "$ref" in value else [r for item in value.values() for r in _references(item)]
    return [r for item in value for r in _references(item)] if isinstance(value, list) else []


def test_the_statuses_are_those_of_the_description(tmp_path):
    """Every status that the tests above saw is described; here a few calls stand for them."""
    with client(tmp_path) as (http, _):
        described = http.get("/openapi.json").json()["paths"]
        for method, path, address, content in (
            ("post", "/tasks/{task}/observe", "/tasks/a/observe", {}),
            ("post", "/v2/models/{task}/infer", "/v2/models/a/infer", {}),
            ("post", "/predictions/{name}/label", "/predictions/a/label", body(Y)),
            ("delete", "/tasks/{task}", "/tasks/a", None),
            ("post", "/tasks/{task}/readmit", "/tasks/a/readmit", None),
        ):
            answer = http.request(method.upper(), address, json=content)
            assert str(answer.status_code) in described[path][method]["responses"]

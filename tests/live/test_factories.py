"""Functions that another process finds by name."""

import functools
import json
import subprocess
import sys
from types import ModuleType

import pytest
import sessions

from metaleader.live.factories import code_of, described, restored

SCRIPT = """
import json, sys
from metaleader.live.factories import described

def build(size=1):
    return size

class Holder:
    @staticmethod
    def build():
        return "held"

GUARD
    print(json.dumps([described(build), described(Holder.build)]))
"""


def test_a_function_of_a_module():
    description = described(sessions.make)
    assert description == {"module": "sessions", "name": "make"}
    assert restored(json.loads(json.dumps(description))) is sessions.make


def test_arguments():
    function = functools.partial(functools.partial(sessions.batch, 3), rows=2)
    again = restored(json.loads(json.dumps(described(function))))
    assert again()[0].equal(sessions.batch(3, rows=2)[0])


class Local:
    def __call__(self):
        return sessions.make()


def nested():
    return lambda: sessions.make()


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda: sessions.make(), "not a function at the top level"),
        (nested(), "not a function at the top level"),
        (Local(), "an object of Local, not a function"),
        (functools.partial(sessions.make, seed=object()), "not plain values"),
        (functools.partial(sessions.make, support=(1, 2)), "not plain values"),  # JSON would give a list
    ],
)
def test_functions_without_a_name(function, reason):
    with pytest.raises(ValueError, match=reason):
        described(function)


def test_functions_under_another_name(monkeypatch):
    before = sessions.make
    monkeypatch.setattr(sessions, "make", before.__class__(before.__code__, {}, "make"))
    with pytest.raises(ValueError, match=r"sessions\.make is another function"):
        described(before)


def test_a_module_that_was_not_imported(monkeypatch):
    module = ModuleType("made up")
    exec("def build(): pass", vars(module))
    monkeypatch.setitem(sys.modules, "made up", module)
    with pytest.raises(ValueError, match="cannot be imported"):
        described(module.build)


def run(path, *arguments):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, cwd=path)


def test_a_script(tmp_path):
    (tmp_path / "main.py").write_text(SCRIPT.replace("GUARD", "if __name__ == '__main__':"))
    answer = run(tmp_path, "main.py")
    assert answer.returncode == 0, answer.stderr
    script = str(tmp_path / "main.py")
    found = json.loads(answer.stdout)
    assert found == [{"script": script, "name": "build"}, {"script": script, "name": "Holder.build"}]
    call = f"from metaleader.live.factories import restored; print([restored(d)() for d in {found}])"
    assert run(tmp_path, "-c", call).stdout == "[1, 'held']\n"


def test_a_script_that_would_run_as_a_whole(tmp_path):
    (tmp_path / "main.py").write_text(SCRIPT.replace("GUARD", "if True:"))
    assert "put its calls under `if __name__ == '__main__':`" in run(tmp_path, "main.py").stderr


def test_code_that_was_never_in_a_file(tmp_path):
    answer = run(tmp_path, "-c", SCRIPT.replace("GUARD", "if __name__ == '__main__':"))
    assert "it was not defined in a file" in answer.stderr


def test_the_files_of_a_learner():
    assert code_of(sessions.make()) == {}  # of the library alone
    learner = sessions.make(weights=weights)
    assert list(code_of(learner)) == [__file__]


def weights(num):
    return [1.0] * num

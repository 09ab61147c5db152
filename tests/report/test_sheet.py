"""Contact sheets: they are images, and what they show is what the stream has."""

import matplotlib.image
import numpy as np
import pytest
import torch
import tyro

import metaleader as ml
from metaleader.cli.show import show
from metaleader.report.sheet import contact_sheet
from metaleader.streams import NWayStream, SinusoidStream
from metaleader.streams.nway import Labelled


def pixels(path):
    return np.round(matplotlib.image.imread(path)[..., :3] * 255).astype(int)


def colours(path):
    return set(map(tuple, pixels(path).reshape(-1, 3).tolist()))


def flat_images(colour, num=4):
    x = torch.tensor(colour, dtype=torch.uint8)[None, :, None, None].expand(num, 3, 8, 8)
    return ml.Batch(x, torch.arange(num))


def test_every_task_and_example_is_drawn(tmp_path):
    reds = [(200 + t, 10, 20) for t in range(3)]
    stream = [ml.Task(f"task {t}", flat_images(red), flat_images((30, 40 + t, 50))) for t, red in enumerate(reds)]
    contact_sheet(stream, tmp_path / "sheet.png", tasks=3, examples=2, title="flat")
    found = colours(tmp_path / "sheet.png")
    assert set(reds) <= found
    assert {(30, 40 + t, 50) for t in range(3)} <= found
    wide = pixels(tmp_path / "sheet.png").shape
    contact_sheet(stream, tmp_path / "one.png", tasks=2, examples=4)
    narrow = pixels(tmp_path / "one.png").shape
    assert wide[0] > narrow[0]
    assert wide[1] < narrow[1]
    assert (201, 10, 20) not in colours(tmp_path / "one.png")  # two of three: the first and the last


RED = np.array([214, 40, 40])  # the arrows


def grey_poses(num):
    angle = torch.linspace(0, 6, num)
    x, y = torch.full((num, 1, 40, 40), 0.2), torch.stack([angle / 6, -angle / 6, angle.sin(), angle.cos()], 1)
    return ml.Batch(x, y)


def test_float_and_grey_images(tmp_path):
    contact_sheet([ml.Task("object", grey_poses(3), grey_poses(2))], tmp_path / "grey.png")
    found = colours(tmp_path / "grey.png")
    assert (51, 51, 51) in found
    assert tuple(RED) not in found  # no camera, no arrows


class Seen(list):
    """A stream with a camera that sees every pose at the same two places of an image."""

    def camera(self, t):
        return self

    def arrows(self, labels):
        return np.broadcast_to([[0.25, 0.3], [0.75, 0.3]], (len(labels), 2, 2))


def test_poses_are_drawn_where_the_camera_sees_them(tmp_path):
    contact_sheet(Seen([ml.Task("object", grey_poses(3), grey_poses(2))]), tmp_path / "pose.png", examples=3)
    sheet = pixels(tmp_path / "pose.png")
    grey = (sheet == 51).all(2)
    rows = np.flatnonzero(grey.sum(1) > 80)  # not those with anti-aliased text alone
    assert len(rows) == 80  # twice the 40 pixels of the image
    # The left edges are where grey begins in a row that no arrow touches.
    lefts = np.flatnonzero(np.diff(grey[rows[0]].astype(int)) == 1) + 1
    assert len(lefts) == 5
    for left in lefts:
        image = sheet[rows[0] : rows[0] + 80, left : left + 80]
        red_rows, red_columns = np.nonzero(np.abs(image - RED).sum(2) < 60)
        assert abs(red_columns.min() - 20) <= 3
        assert abs(red_columns.max() - 60) <= 3
        assert abs(red_rows.mean() - 24) <= 1
        assert np.ptp(red_rows[red_columns > 50]) > np.ptp(red_rows[red_columns < 30])  # the head is at the tip


def test_n_way_streams_with_names_and_curves(tmp_path):
    data = Labelled(
        np.zeros((12, 3, 4, 4), np.uint8), np.arange(12) % 4, np.zeros((4, 3, 4, 4), np.uint8), np.arange(4)
    )
    contact_sheet(NWayStream(data, 2, 3, names=["a", "b_c", "d", "e"]), tmp_path / "ways.png", tasks=9)
    contact_sheet(SinusoidStream(tasks=5, train=9), tmp_path / "curves.png", tasks=5)
    for name in ("ways.png", "curves.png"):
        assert pixels(tmp_path / name).std() > 10


def test_what_cannot_be_drawn():
    task = ml.Task("wide", ml.Batch(torch.zeros(3, 5), torch.zeros(3)), ml.Batch(torch.zeros(3, 5), torch.zeros(3)))
    with pytest.raises(ValueError, match="only images"):
        contact_sheet([task], "unused.png")
    with pytest.raises(ValueError, match="a sheet needs a task"):
        contact_sheet([], "unused.png")
    with pytest.raises(ValueError, match="a sheet needs a task and an example, got 1 and 0"):
        contact_sheet([task], "unused.png", examples=0)


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tyro.cli(show, args=["sinusoid", "--order", "amplitude", "--tasks", "2"])
    assert capsys.readouterr() == ("sinusoid.png\n", "sinusoid, 60 tasks, by amplitude\n")
    assert (tmp_path / "sinusoid.png").stat().st_size > 5000
    out = tmp_path / "digits.png"
    tyro.cli(show, args=["--out", str(out), "--order", "colour", "--tasks", "1", "--examples", "3"])
    assert (214, 40, 40) in colours(out)  # by colour: the first task is red
    with pytest.raises(ValueError, match="did you mean 'cifar100'"):
        tyro.cli(show, args=["cifar10"])


def test_sinusoids_by_amplitude_are_the_same_tasks():
    def amplitudes(order):
        stream = SinusoidStream(tasks=12, order=order)
        return [float(stream[t].name.split()[0]) for t in range(12)]

    assert amplitudes("amplitude") == sorted(amplitudes("random")) != amplitudes("random")
    with pytest.raises(ValueError, match="order"):
        SinusoidStream(order="frequency")

import numpy as np
import pytest

from metaleader.streams.pose.camera import (
    HALF_FRAME,
    MARGIN,
    REACH,
    SCALES,
    Camera,
    View,
    draw_labels,
    draw_view,
    fit_camera,
)
from metaleader.tasks import rng


def reachable(radius, height):
    """The table's corners and a fine sampling of all that the object can touch."""
    corners = np.array([[x, y] for x in (-1, 1) for y in (-1, 1)], float)
    angles = np.linspace(0, 2 * np.pi, 360)
    disc = radius * np.column_stack([np.cos(angles), np.sin(angles)])
    reach = (REACH * corners[:, None] + disc).reshape(-1, 2)
    flat = np.concatenate([corners, reach, reach])
    return np.column_stack([flat, np.repeat([0.0, 0.0, height], [4, len(reach), len(reach)])])


def test_the_camera_sees_everything_and_could_not_stand_nearer():
    draw = rng("test pose camera")
    for _ in range(50):
        view = View("a 01", 0, 1.0, draw.uniform(0, 2 * np.pi), draw.uniform(0.3, 1.4))
        radius, height = draw.uniform(0.05, 0.6, 2)
        camera = fit_camera(view, radius, height)
        np.testing.assert_allclose(camera.axes @ camera.axes.T, np.eye(3), atol=1e-12)
        np.testing.assert_allclose(np.cross(camera.axes[0], camera.axes[1]), camera.axes[2], atol=1e-12)
        assert camera.axes[2, 2] == pytest.approx(np.sin(view.elevation))
        assert np.arctan2(camera.axes[2, 1], camera.axes[2, 0]) % (2 * np.pi) == pytest.approx(view.azimuth)

        points = reachable(radius, height)
        inside = camera.project(points)
        assert inside.min() >= MARGIN - 1e-9
        assert inside.max() <= 1 - MARGIN + 1e-9
        # Nearer by a fiftieth, no shift sideways could bring all of it into the frame.
        nearer = Camera(camera.position - 0.02 * np.linalg.norm(camera.position) * camera.axes[2], camera.axes)
        assert np.ptp(nearer.project(points), axis=0).max() > 1 - 2 * MARGIN


def test_projection_by_hand():
    # Three units above the origin, the top of the image towards +y: a unit aside is 1 / (3 tan 20 degrees) half frames.
    camera = Camera(np.array([0.0, 0.0, 3.0]), np.eye(3))
    half = 0.5 / (3 * HALF_FRAME)
    points = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [0.5, 0.5, 1.5]], float)
    expected = [[0.5, 0.5], [0.5 + half, 0.5], [0.5, 0.5 - half], [0.5 + half, 0.5 - half]]
    np.testing.assert_allclose(camera.project(points), expected)
    assert np.degrees(2 * np.arctan(HALF_FRAME)) == pytest.approx(40)


def test_arrows_start_at_the_object_and_point_to_its_front():
    camera = Camera(np.array([0.0, 0.0, 3.0]), np.eye(3))
    # An object's front is at -y; turned by 90 degrees, at +x. A prediction's sine and cosine need not be normal.
    arrows = camera.arrows(np.array([[0, 0, 0, 1], [1, -1, 1, 0], [0, 0, 0, 0.1]], float))
    tips = [[0, -SCALES[1], 0], [REACH + SCALES[1], -REACH, 0], [0, -SCALES[1], 0]]
    np.testing.assert_allclose(arrows[:, 0], camera.project(np.array([[0, 0, 0], [REACH, -REACH, 0], [0, 0, 0]])))
    np.testing.assert_allclose(arrows[:, 1], camera.project(np.array(tips)))
    assert np.isfinite(camera.arrows(np.zeros((1, 4)))).all()


def test_labels_are_uniform_poses():
    labels = draw_labels(0, 3, 1, 20_000)
    assert labels.dtype == np.float32
    assert np.abs(labels[:, :2]).max() <= 1
    np.testing.assert_allclose((labels[:, 2:] ** 2).sum(1), 1, atol=1e-6)
    # A constant predictor has the error (1/3 + 1/3 + 1/2 + 1/2) / 4.
    assert labels.var(0).mean() == pytest.approx(5 / 12, abs=0.01)
    turns = np.sort(np.arctan2(labels[:, 2], labels[:, 3]) / (2 * np.pi) + 0.5)
    assert np.abs(turns - np.linspace(0, 1, len(turns))).max() < 0.02
    # Fewer images are a part of more; other views have other poses.
    np.testing.assert_array_equal(draw_labels(0, 3, 1, 7), labels[:7])
    for other in ((1, 3, 1), (0, 4, 1), (0, 3, 2)):
        assert not np.allclose(draw_labels(*other, 7), labels[:7])


def test_no_object_leaves_the_table():
    assert REACH + SCALES[1] <= 1
    views = [draw_view(seed, "a 01", 0, 0) for seed in range(200)]
    assert draw_view(5, "a 01", 0, 0) == views[5]
    assert all(SCALES[0] <= view.scale <= SCALES[1] for view in views)
    assert np.ptp([view.azimuth for view in views]) > 6

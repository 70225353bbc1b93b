"""Pictures of models: what is drawn is what the models give."""

import numpy as np
import torch

from vflsec.papers.model_pictures import draw_density, project_on_circle


def test_rows_are_scaled_to_the_unit_circle_of_their_principal_plane():
    """Rows on two axes of four: the plane is theirs, and lengths are lost."""
    rows = np.array([[3.0, 0, 0, 0], [-6.0, 0, 0, 0], [3.0, 0, 0, 0], [0, 1.0, 0, 0], [0, -1.0, 0, 0]])
    flat = project_on_circle(rows)
    assert np.allclose(np.linalg.norm(flat, axis=1), 1)
    assert np.allclose(np.abs(flat[0]), [1, 0])
    assert np.allclose(flat[0], -flat[1])
    assert np.allclose(np.abs(flat[3]), [0, 1])


def test_each_model_has_a_density_of_two_classes():
    classes = torch.randn(30, 5, generator=torch.Generator().manual_seed(0)).split(15)
    figure = draw_density({"first": classes, "second": classes}, title="Two classes")
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["first", "second"]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["class 0", "class 1"]

"""House style: what figures of different claims have in common."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib import pyplot as plt

from reslab import plotting
from reslab.stats import mean_of

VALUES = [1.0, 2.0, 4.0]


@pytest.mark.parametrize("sideways", [False, True])
def test_interval_is_that_of_the_mean_with_a_dot_a_seed(sideways: bool) -> None:
    with plotting.figure(1, 1) as (_, axes):
        plotting.interval(axes[0], 7, VALUES, plotting.colour("Full"), sideways=sideways)
        bar, dots = ([list(line.get_xdata()), list(line.get_ydata())] for line in axes[0].lines)
    across, along = (1, 0) if sideways else (0, 1)
    mean = mean_of(VALUES)
    assert (bar[across], bar[along]) == ([7, 7], [mean.low, mean.high])
    assert (dots[across], dots[along]) == ([7, 7, 7], VALUES)


@pytest.mark.parametrize("scale", ["linear", "log", "symlog"])
@pytest.mark.parametrize("below", [False, True])
def test_a_legend_beside_the_data_gets_room_of_its_own(scale: str, below: bool) -> None:
    with plotting.figure(1, 1) as (_, axes):
        axes[0].set_yscale(scale)
        axes[0].plot([1, 2, 3], [1, 10, 100], label="data")
        plotting.legend_beside(axes[0], room=0.4, below=below)
        heights = axes[0].transAxes.inverted().transform(axes[0].transData.transform([(1, 1), (3, 100)]))[:, 1]
    assert (heights[0] > 0.4) if below else (heights[1] < 0.6)


def test_a_legend_beside_the_data_may_have_other_words_and_is_not_there_for_nothing() -> None:
    with plotting.figure(1, 2) as (_, (one, other)):
        one.plot([1, 2], label="Post-LN")
        plotting.legend_beside(one, labels=["Post-LN (12 blocks)"])
        other.plot([1, 2])
        plotting.legend_beside(other)
    assert [text.get_text() for text in one.get_legend().get_texts()] == ["Post-LN (12 blocks)"]
    assert other.get_legend() is None


@pytest.mark.parametrize("top", [1.0, 1.05, 1.1])
def test_nothing_reaches_beyond_the_figure(top: float) -> None:
    """Whose labels need more room once the axes have another size: -0.25 where there was -0.5."""
    with plotting.figure(2, 3) as (drawn, axes):
        for one in axes:
            one.set(xlabel="depth (blocks)", ylabel="token cosine after the last block")
        axes[3].set_ylim(-0.6, top)
        plotting.title(drawn, "title", "cpu")
    assert min(one.get_tightbbox(None).x0 for one in axes) > 0
    assert max(one.get_tightbbox(None).x1 for one in axes) < drawn.bbox.width


def test_interval_leaves_out_what_was_not_measured() -> None:
    """A dot for each seed that was, and no bar."""
    with plotting.figure(1, 1) as (_, axes):
        plotting.interval(axes[0], 0, [1.0, math.nan, 2.0], plotting.colour("Full"))
        [dots] = axes[0].lines
    assert list(dots.get_ydata()) == [1, 2]


@pytest.mark.parametrize(("scale", "shown"), [("cpu", "A claim"), ("smoke", "A claim (smoke scale: not meaningful)")])
def test_title_marks_smoke_scale(scale: str, shown: str) -> None:
    with plotting.figure(1, 2) as (drawn, _):
        plotting.title(drawn, "A claim", scale)
    assert drawn.get_suptitle() == shown


DRAW = """
from pathlib import Path
import sys
from reslab import plotting
held = [object() for _ in range(int(sys.argv[2]))]  # other addresses for all that follows
with plotting.figure(2, 3) as (drawn, axes):
    for number, one in enumerate(axes):
        one.plot([0, 10**number], label="$R^2$")
        one.set(title="a title " * number, ylabel="label " * number)
        one.legend()
    axes[5].imshow([[0, 1]])
    plotting.title(drawn, "title", "cpu")
plotting.save(drawn, Path(sys.argv[1]))
"""


def test_another_process_draws_the_same_bytes(tmp_path: Path) -> None:
    for number in (0, 99_999):
        path = str(tmp_path / f"{number}.png")
        subprocess.run([sys.executable, "-c", DRAW, path, str(number)], check=True)
    assert (tmp_path / "0.png").read_bytes() == (tmp_path / "99999.png").read_bytes()


def test_no_layout_is_solved_for_in_the_order_of_addresses() -> None:
    """Matplotlib's constrained layout is: margins then differ between processes."""
    with plotting.figure(1, 2) as (drawn, _):
        pass
    assert drawn.get_layout_engine() is None or "Constrained" not in type(drawn.get_layout_engine()).__name__


def test_a_figure_is_closed_but_can_still_be_drawn() -> None:
    """Open ones are shown a second time by notebooks."""
    with plotting.figure(1, 1) as (drawn, _):
        pass
    assert drawn.number not in plt.get_fignums()
    drawn.canvas.draw()

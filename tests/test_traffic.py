"""Residual traffic: counts against formulas, plans against rows counted one by one, passes against the stack."""

import pytest
import torch

from reslab import traffic
from reslab.residuals import ConnectionConfig


@pytest.mark.parametrize("streams", [1, 2, 4, 8])
def test_hyper_connections_move_8n_plus_2(streams: int) -> None:
    assert traffic.hyper_connections(streams) == 8 * streams + 2


@pytest.mark.parametrize(("sublayers", "group"), [(128, 16), (64, 8), (12, 4)])
def test_two_phase_full_moves_group_plus_groups(sublayers: int, group: int) -> None:
    """S + N of the paper: 24 at 128 sublayers in 8 groups of 16."""
    assert traffic.two_phase_full(sublayers, group) == pytest.approx(group + sublayers / group)


def test_two_phase_full_with_a_shorter_last_group() -> None:
    """Three sublayers in groups of two: (2 x 0 + 2) + (1 + 3), then (2 x 2 + 1) + 1."""
    assert traffic.two_phase_full(3, 2) == pytest.approx((2 + 4 + 5 + 1) / 3)


@pytest.mark.parametrize(("sublayers", "blocks"), [(128, 8), (96, 8), (64, 4)])
def test_two_phase_block(sublayers: int, blocks: int) -> None:
    assert traffic.two_phase_block(sublayers, blocks) == pytest.approx(blocks / (sublayers / blocks) + 5)


def test_plain_form_reads_every_source() -> None:
    """Four sublayers: reads of 1, 2, 3, 4 and 5 sources, and as many results."""
    assert traffic.of_connection(ConnectionConfig("attnres", kernel="naive"), 4) == 1 + 2 + 3 + 4 + 5 + 5
    assert traffic.of_connection(ConnectionConfig("add"), 4) == 12


def test_the_bank_moves_less_than_the_plain_form() -> None:
    plain = traffic.of_connection(ConnectionConfig("attnres", kernel="naive"), 128)
    bank = traffic.of_connection(ConnectionConfig("attnres"), 128)
    assert bank is not None
    assert plain is not None
    assert bank < plain / 4


def test_no_plan_no_count() -> None:
    assert traffic.of_connection(ConnectionConfig("hyper"), 4) is None
    assert traffic.of_connection(ConnectionConfig("attnres", value_rank=2), 4) is None


def test_passes_run_the_stream_alone() -> None:
    compared = {"standard": ConnectionConfig("add"), "Full": ConnectionConfig("attnres")}
    passes = traffic.stream_passes(compared, sublayers=4, tokens=8, width=16, device="cpu")
    for run in passes.values():
        [lap] = run()
        assert lap > 0
    assert torch.is_grad_enabled()

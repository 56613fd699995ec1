"""Operations by formula against PyTorch's own counter, and traffic against the published figures."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from reslab.flops import forward_flops, modelled_cost, stream_traffic, training_flops
from reslab.residuals import ConnectionConfig
from reslab.schema import UserError
from variants import config, decoder, tokens


def counted(kind: str) -> int:
    """What the counter finds in a forward pass over a full context, a token."""
    model, inputs = decoder(kind), tokens()
    assert inputs.shape[1] == model.config.context
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(inputs)
    return counter.get_total_flops() // inputs.numel()


@pytest.mark.parametrize("kind", ["add", "rescaled"])
def test_decoder_is_counted_as_by_pytorch(kind: str) -> None:
    assert forward_flops(config(kind)) == counted(kind)


@pytest.mark.parametrize(("kind", "reads"), [("attnres full", [1, 2, 3, 4, 5, 6, 7]), ("attnres odd block", None)])
def test_a_read_is_two_products(kind: str, reads: list[int] | None) -> None:
    """Scores and sum as matrix products, which the counter sees; the rest of the model is that of `add`."""
    width, batch = 16, 5
    total = 0
    for n in reads or [1, 2, 2, 2, 3, 3, 3]:
        sources, query = torch.randn(batch, n, width), torch.randn(batch, width, 1)
        with FlopCounterMode(display=False) as counter:
            weights = torch.bmm(sources, query).softmax(1)
            torch.bmm(weights.transpose(1, 2), sources)
        total += counter.get_total_flops() // batch
    assert forward_flops(config(kind)) - forward_flops(config("add")) == total


def test_static_weights_need_no_scores() -> None:
    base = forward_flops(config("add"))
    assert 2 * (forward_flops(config("attnres static")) - base) == forward_flops(config("attnres full")) - base


@pytest.mark.parametrize("kind", ["denseformer", "attnres input query", "attnres key rank", "attnres value rank"])
def test_what_is_not_counted_is_refused(kind: str) -> None:
    with pytest.raises(UserError, match="not counted"):
        forward_flops(config(kind))


def test_traffic_and_cost() -> None:
    """The standard stream moves 3 d a sublayer; Full in groups less than each read by itself, n d + d and d written."""
    full, add = config("attnres full", depth=24), config("add", depth=24)
    assert stream_traffic(add) == 3 * 16 * 48
    alone = sum(range(1, 50)) + 49 + 48
    assert stream_traffic(add) < stream_traffic(full) < 16 * alone
    block = stream_traffic(config(ConnectionConfig("attnres", block=4), depth=24))
    assert stream_traffic(add) < block < stream_traffic(full)
    assert modelled_cost(add, 0.0) == forward_flops(add)
    assert modelled_cost(add, 2.0) == forward_flops(add) + 8 * stream_traffic(add)
    assert training_flops(add, 10, 4) == 3 * forward_flops(add) * 10 * 4 * add.context

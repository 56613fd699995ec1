"""Attention over depth: against a plain computation, at its start, and what earlier implementations got wrong."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from reslab.models.decoder import Decoder
from reslab.residuals import AttnRes, ConnectionConfig, ResidualSettings, Site, Stack
from reslab.residuals.depth_attention import Sources, align_to_sources
from reslab.schema import UserError
from variants import VARIANTS, decoder, perturbed, tokens

S = 6
"""Sublayers of the stacks here."""

Reads = list[Tensor]


class Recorded(nn.Module):
    """A branch [..., d] -> [..., d] that keeps what it sees and what it puts out."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.seen: list[Tensor] = []
        self.put_out: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        self.put_out.append(self.linear(x).tanh())
        return self.put_out[-1]


def stack(connection: ConnectionConfig, sublayers: int = S) -> Stack:
    """Without norms, so that what is read is what the branch sees; every parameter away from its start."""
    torch.manual_seed(0)
    branches = [{"f": Recorded()} for _ in range(sublayers)]
    made = Stack(branches, 8, ResidualSettings(connection=connection, placement="none"), nn.Identity).double()
    perturbed(made, 0.5)
    return made


def run(model: Stack) -> tuple[Tensor, Reads, Reads]:
    """The embedding [2, 5, 8], all reads (the output last), and the sources v_0 to v_S."""
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    out = model(x)
    branches = [s.branch for s in model.sublayers()]
    assert all(isinstance(b, Recorded) for b in branches)
    seen = [b.seen[-1] for b in branches if isinstance(b, Recorded)]
    return x, [*seen, out], [x, *(b.put_out[-1] for b in branches if isinstance(b, Recorded))]


# --- against a plain computation ------------------------------------------------------------------


def rms(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def sources_before(v: Sequence[Tensor], l: int, block: int) -> list[Tensor]:  # noqa: E741
    """b_0 = v_0, then the sum of each block of the first l outputs, the last one begun (index from 0)."""
    outputs = list(v[1 : l + 1])
    return [v[0], *(torch.stack(outputs[i : i + block]).sum(0) for i in range(0, l, block))]


def plain_read(model: Stack, reader: AttnRes, v: Sequence[Tensor], index: int) -> Tensor:
    """h from a stack of the sources, straight from the definition."""
    o: Any = reader.options
    sources = sources_before(v, index, o.block)
    n = len(sources)
    kept = [i for i in range(n) if (o.window is None or i >= n - o.window) and (n - 1 - i) % o.stride == 0]
    kept = sorted({0, *kept}) if o.window_embedding else kept
    ends: Any = model.ends
    values = [
        ends.expand(ends.compress(s)) if o.value_rank and i not in (0, n - 1) else s for i, s in enumerate(sources)
    ]
    V = torch.stack([values[i] for i in kept])  # [n, B, T, d]
    G = o.heads
    if o.query == "none":
        logits = reader.weights.logits[:, kept].T[:, None, None, :]
    else:
        q = reader.weights.query
        if o.query == "input":
            q = q + reader.weights.query_map(rms(sources[-1]))
        if o.key_rank:
            whole = torch.stack([sources[i] for i in kept])
            K = ends.key_map(rms(whole) if o.key_norm else whole).unflatten(-1, (G, -1))
        else:
            K = V.unflatten(-1, (G, -1))
            K = rms(K) if o.key_norm else K
        logits = (q.unflatten(-1, (G, -1)) * K).sum(-1)
    weights = logits.sigmoid() if o.activation == "sigmoid" else logits.softmax(0)
    return (weights[..., None] * V.unflatten(-1, (G, -1))).sum(0).flatten(-2)


ATTNRES = {name: c for name, c in VARIANTS.items() if c.kind == "attnres"}


@pytest.mark.parametrize("name", ATTNRES)
def test_every_read_is_the_definition(name: str) -> None:
    model = stack(ATTNRES[name])
    if ATTNRES[name].options.value_rank is not None:  # type: ignore[attr-defined]
        make_orthogonal(model)
    _, reads, v = run(model)
    readers = [s.connection for s in model.sublayers()] + [model.ends.get_submodule("output")]
    for index, (reader, read) in enumerate(zip(readers, reads, strict=True)):
        assert isinstance(reader, AttnRes)
        torch.testing.assert_close(read, plain_read(model, reader, v, index), rtol=1e-9, atol=1e-9)


def make_orthogonal(model: Stack) -> None:
    """As at the start: then a compressed key's length is that of the source it stands for."""
    compress, expand = (model.ends.get_parameter(f"{name}.weight") for name in ("compress", "expand"))
    with torch.no_grad():
        nn.init.orthogonal_(compress)
        expand.copy_(compress.T)


def test_compression_to_full_rank_is_none() -> None:
    whole, compressed = stack(ConnectionConfig("attnres")), stack(ConnectionConfig("attnres", value_rank=8))
    make_orthogonal(compressed)
    compressed.load_state_dict(compressed.state_dict() | whole.state_dict())
    torch.testing.assert_close(run(compressed)[1][-1], run(whole)[1][-1])


def test_block_of_one_is_full_and_a_large_window_is_everything() -> None:
    out = run(stack(ConnectionConfig("attnres")))[1][-1]
    for options in ({"block": 1}, {"window": S + 1}, {"stride": 1}, {"heads": 1}):
        assert torch.equal(run(stack(ConnectionConfig("attnres", **options)))[1][-1], out)


def test_one_block_is_the_standard_stream_with_the_embedding_apart() -> None:
    model = stack(ConnectionConfig("attnres", block=S))
    _, _, v = run(model)
    stream = model.ends.start(v[0])
    for sublayer, update in zip(model.sublayers(), v[1:], strict=True):
        stream = sublayer.connection.write(stream, update)
    assert len(stream.values) == 2
    torch.testing.assert_close(stream.values[1], torch.stack(v[1:]).sum(0))


def test_seed_articles_form() -> None:
    """h_l = sum_i a_i h_i + f(h_{l-1}) over the outputs h, not the updates v."""
    model = stack(ConnectionConfig("state_attention"))
    x, reads, v = run(model)
    states = [x]
    for index, sublayer in enumerate(model.sublayers()):
        torch.testing.assert_close(reads[index], states[-1])
        query = sublayer.connection.get_parameter("weights.query")
        H = torch.stack(states)
        weights = (rms(H) * query).sum(-1, keepdim=True).softmax(0)
        states.append((weights * H).sum(0) + v[index + 1])
    torch.testing.assert_close(reads[-1], states[-1])


# --- at the start ---------------------------------------------------------------------------------


def sources_read(model: Stack) -> list[int]:
    """How many sources each sublayer and the output read."""
    counts: list[int] = []
    stream = model.ends.start(torch.randn(2, 8))
    for sublayer in model.sublayers():
        connection = sublayer.connection
        assert isinstance(connection, AttnRes)
        counts.append(len(connection.depth_weights(stream)))
        stream = connection.write(stream, torch.randn(2, 8))
    output = model.ends.get_submodule("output")
    assert isinstance(output, AttnRes)
    return [*counts, len(output.depth_weights(stream))]


@pytest.mark.parametrize(
    ("options", "sublayers", "counts"),
    [
        ({"block": 2}, 4, [1, 2, 2, 3, 3]),
        ({}, 4, [1, 2, 3, 4, 5]),
        ({"block": 3}, 7, [1, 2, 2, 2, 3, 3, 3, 4]),  # the last block holds the remainder
        ({"block": 4}, 4, [1, 2, 2, 2, 2]),
        ({"window": 2}, 5, [1, 2, 3, 3, 3, 3]),
        ({"window": 2, "window_embedding": False}, 5, [1, 2, 2, 2, 2, 2]),
        ({"stride": 2}, 5, [1, 2, 2, 3, 3, 4]),
        ({"stride": 2, "window": 3}, 5, [1, 2, 2, 3, 3, 3]),
    ],
)
def test_number_of_sources(options: dict[str, Any], sublayers: int, counts: list[int]) -> None:
    torch.manual_seed(0)
    branches = [{"f": nn.Linear(8, 8)} for _ in range(sublayers)]
    settings = ResidualSettings(connection=ConnectionConfig("attnres", **options))
    assert sources_read(Stack(branches, 8, settings, nn.Identity)) == counts


@pytest.mark.parametrize("name", ATTNRES)
def test_queries_start_at_zero_after_building(name: str) -> None:
    """Public report: a global init pass overwrote the zero queries."""
    model = decoder(ATTNRES[name])
    own = {n: p for n, p in model.named_parameters() if ".weights." in n}
    assert len(own) >= 7
    assert all(torch.count_nonzero(p) == 0 for p in own.values())
    stream = model.stack.ends.start(torch.randn(2, 16))
    for sublayer in model.stack.sublayers():
        connection = sublayer.connection
        assert isinstance(connection, AttnRes)
        weights = connection.depth_weights(stream)
        equal = 0.5 if ATTNRES[name].options.activation == "sigmoid" else 1 / len(weights)  # type: ignore[attr-defined]
        assert all(torch.equal(w, torch.full_like(w, equal)) for w in weights)
        stream = connection.write(stream, torch.randn(2, 16))


def test_one_source_leaves_the_query_without_a_gradient() -> None:
    model = decoder("attnres full")
    model(tokens()).square().sum().backward()
    gradients = [s.connection.get_parameter("weights.query").grad for s in model.stack.sublayers()]
    assert gradients[0] is not None
    assert torch.count_nonzero(gradients[0]) == 0
    assert all(g is not None and torch.count_nonzero(g) == 16 for g in gradients[1:])


# --- what earlier implementations got wrong -------------------------------------------------------


@pytest.mark.parametrize("name", ["attnres full", "attnres block", "attnres odd block"])
def test_gradients_reach_the_embedding_and_every_source(name: str) -> None:
    """Public report: detached blocks, a missing b_0."""
    model = stack(ATTNRES[name])
    x = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
    out = model(x)
    outputs = [s.branch.put_out[-1] for s in model.sublayers() if isinstance(s.branch, Recorded)]
    readers = [s.connection for s in model.sublayers()] + [model.ends.get_submodule("output")]
    v = [x, *outputs]
    for source in v:
        (gradient,) = torch.autograd.grad(out.square().sum(), source, retain_graph=True)
        assert gradient.abs().min() > 0
    assert len(readers) == len(v)


def test_running_sum_leaves_stored_sources_unchanged() -> None:
    """Public report: an in-place add on the partial sum."""
    kind = stack(ConnectionConfig("attnres", block=3))
    stream = kind.ends.start(torch.randn(2, 8, dtype=torch.float64))
    history: list[tuple[Sources, list[Tensor]]] = []
    for sublayer in kind.sublayers():
        history.append((stream, [value.clone() for value in stream.values]))
        stream = sublayer.connection.write(stream, torch.randn(2, 8, dtype=torch.float64))
    for earlier, values in history:
        assert all(torch.equal(a, b) for a, b in zip(earlier.values, values, strict=True))


@pytest.mark.parametrize("name", ATTNRES)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    model = stack(ATTNRES[name])
    x = torch.randn(1, 2, 8, dtype=torch.float64, requires_grad=True, generator=torch.Generator().manual_seed(3))
    queries = [p for n, p in model.named_parameters() if ".weights." in n][-2:]
    assert torch.autograd.gradcheck(lambda *inputs: model(inputs[0]), (x, *queries), atol=1e-5)


def saved_tensors(model: nn.Module, x: Tensor) -> list[Tensor]:
    """What autograd keeps for the backward pass; each storage once."""
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    return list(kept.values())


@pytest.mark.parametrize("name", ["attnres full", "attnres block", "attnres heads", "attnres sigmoid"])
def test_no_stack_of_the_sources_is_saved_for_the_backward_pass(name: str) -> None:
    """Public report: [tokens, sources, d] in float32 was saved at every layer."""
    torch.manual_seed(0)
    branches = [{"f": nn.Linear(64, 64)} for _ in range(S)]
    model = Stack(branches, 64, ResidualSettings(connection=ATTNRES[name]), nn.Identity)
    saved = saved_tensors(model, torch.randn(10, 64))
    assert max(t.untyped_storage().nbytes() for t in saved) <= 64 * 64 * 4  # a weight matrix; a source is 10 x 64
    assert max(t.numel() for t in saved if t.shape[:1] == (10,)) <= 10 * 64


@pytest.mark.parametrize(("name", "alike"), [("attnres full", False), ("state_attention", True)])
def test_sources_are_outputs_not_the_cumulative_stream(name: str, alike: bool) -> None:
    """Public report: with the cumulative h for v neighbouring sources have a cosine near 0.95."""
    model = decoder(name, width=64, depth=12, context=32, vocabulary=40)
    streams: list[Any] = []
    for block in model.blocks:
        block.register_forward_hook(lambda module, inputs, output: streams.append(output))
    with torch.no_grad():
        model(tokens(4, 32))
    kept = streams[-1].values if name == "attnres full" else streams[-1].states
    cosines = [float(F.cosine_similarity(a, b, dim=-1).mean()) for a, b in pairwise(kept[8:])]
    assert (min(cosines) > 0.7) if alike else (max(cosines) < 0.3)


def test_output_is_a_mix_over_depth_not_the_last_state() -> None:
    model = decoder("attnres full")
    perturbed(model)
    last = model.stack.sublayers()[-1].branch
    seen: list[Tensor] = []
    last.register_forward_hook(lambda module, inputs, output: seen.append(output))
    hidden: list[Tensor] = []
    model.norm.register_forward_pre_hook(lambda module, inputs: hidden.append(inputs[0]))
    model(tokens())
    assert not torch.allclose(hidden[0], seen[0], atol=1e-2)
    query = model.stack.ends.get_parameter("output.weights.query")
    before = model(tokens())
    with torch.no_grad():
        query.add_(1.0)
    assert not torch.allclose(model(tokens()), before, atol=1e-3)


# --- when layers are missing or repeated ----------------------------------------------------------


def test_weights_align_with_the_embedding_and_the_newest() -> None:
    weights = torch.tensor([0.0, 1, 2, 3, 4])
    assert align_to_sources(weights, 5, -9.0) is weights
    assert align_to_sources(weights, 3, -9.0).tolist() == [0, 3, 4]
    assert align_to_sources(weights, 2, -9.0).tolist() == [0, 4]
    assert align_to_sources(weights, 1, -9.0).tolist() == [4]
    assert align_to_sources(weights, 7, -9.0).tolist() == [0, -9, -9, 1, 2, 3, 4]
    assert align_to_sources(weights[:1], 3, -9.0).tolist() == [-9, -9, 0]


STATIC_IN_A_WINDOW = ConnectionConfig("attnres", query="none", window=2, window_embedding=False)

BANKS = {n: c for n, c in VARIANTS.items() if not c.type.plain_stream} | {"static in a window": STATIC_IN_A_WINDOW}


@pytest.mark.parametrize("name", BANKS)
@pytest.mark.parametrize("order", [[0, 2], [0, 2, 1], [0, 1, 1, 2], [2], [1, 2], [1, 0, 2], [0, 0, 1, 2], [2, 1, 0]])
def test_blocks_can_be_skipped_swapped_and_repeated(name: str, order: list[int]) -> None:
    model = decoder(BANKS[name])
    perturbed(model)
    whole = model(tokens())
    model.stack.blocks = nn.ModuleList([model.blocks[i] for i in order])
    changed = model(tokens())
    assert changed.isfinite().all()
    assert not torch.equal(changed, whole)


def test_skipping_a_block_skips_its_source() -> None:
    model = decoder("attnres block")
    stream = model.stack.ends.start(torch.randn(2, 16))
    kept = [model.stack.sublayers()[i] for i in (0, 1, 4, 5)]
    for sublayer in kept:
        stream = sublayer.connection.write(stream, torch.ones(2, 16))
    assert len(stream.values) == 3
    assert all(torch.equal(value, torch.full((2, 16), 2.0)) for value in stream.values[1:])


@pytest.mark.parametrize(("window", "kept"), [(1, 2), (2, 3), (4, 5), (9, 7)])
@pytest.mark.parametrize("options", [{}, {"key_rank": 4}, {"value_rank": 4}, {"query": "none"}])
def test_a_window_keeps_no_more_than_it_reads(options: dict[str, Any], window: int, kept: int) -> None:
    model = decoder(ConnectionConfig("attnres", window=window, **options))
    stream = model.stack.ends.start(torch.randn(2, 16))
    for sublayer in model.stack.sublayers():
        stream = sublayer.connection.write(stream, torch.randn(2, 16))
    assert len(stream.values) == kept
    assert len(stream.keys) == (0 if "query" in options else kept)


def test_scores_need_nothing_new_from_old_sources() -> None:
    """What a source's keys need is computed when it is written: a later read saves no copy of it."""
    torch.manual_seed(0)
    full = Stack(
        [{"f": nn.Linear(64, 64)} for _ in range(12)],
        64,
        ResidualSettings(connection=ATTNRES["attnres full"]),
        nn.Identity,
    )
    plain = Stack([{"f": nn.Linear(64, 64)} for _ in range(12)], 64, ResidualSettings(), nn.Identity)
    x = torch.randn(100, 64)

    def wide_ones(model: nn.Module) -> int:
        return sum(t.numel() == 100 * 64 for t in saved_tensors(model, x))

    assert wide_ones(full) < wide_ones(plain) + 2.5 * 12  # a source, its read and its product; not 12 * 12 / 2


def test_parameters_of_the_variants() -> None:
    """Full: one vector a sublayer and one for the output, 2L + 1 in all."""
    plain = sum(p.numel() for p in decoder("add").parameters())
    d, reads = 16, 2 * 3 + 1

    def extra(name: str) -> int:
        return sum(p.numel() for p in decoder(name).parameters()) - plain

    assert extra("attnres full") == extra("attnres block") == extra("attnres window") == reads * d
    assert extra("attnres key rank") == reads * 4 + 4 * d
    assert extra("attnres value rank") == reads * d + 2 * 4 * d
    assert extra("attnres input query") == reads * (d + d * d)
    assert extra("attnres static") == sum(range(1, reads + 1))
    assert extra("attnres static block heads") == 2 * (1 + 2 + 2 + 3 + 3 + 4 + 4)


def test_site_knows_how_many_sources_come_before() -> None:
    options: Any = ConnectionConfig("attnres", block=3).options
    assert [options.sources_before(index) for index in range(8)] == [1, 2, 2, 2, 3, 3, 3, 4]
    assert AttnRes(Site(4, 8, 16), options).weights.query.shape == (16,)
    assert math.isclose(options.query_rate, 1.0)
    assert isinstance(decoder("attnres full"), Decoder)


def test_queries_may_start_at_random() -> None:
    """Of the std that is asked for, without a change to any other weight."""
    plain = decoder("attnres full", width=64)
    random = decoder(ConnectionConfig("attnres", query_std=1.0), width=64)
    queries = torch.cat([p.detach() for name, p in random.named_parameters() if name.endswith("query")])
    assert float(queries.std()) == pytest.approx(1, abs=0.15)
    others = [(n, p) for n, p in plain.named_parameters() if not n.endswith("query")]
    assert all(torch.equal(p, random.get_parameter(n)) for n, p in others)
    with pytest.raises(UserError, match="query_std with query: none has no queries"):
        ConnectionConfig("attnres", query="none", query_std=1.0)

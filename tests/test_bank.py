"""Depth attention across layers by one memory of rows: against plain PyTorch, its plan, what autograd may ask of it."""

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from reslab.kernels.depth_attention import cpu_bank
from reslab.kernels.depth_attention.bank import Bank, implementation
from reslab.kernels.depth_attention.plan import MOST, Plan
from reslab.models.decoder import Decoder
from reslab.residuals import AttnRes, ConnectionConfig, ResidualSettings, Stack
from reslab.residuals.depth_attention import AttnResOptions, Banked, Sources
from reslab.schema import UserError
from variants import VARIANTS, decoder, perturbed

FUSED = {
    name: VARIANTS[f"attnres {name}"]
    for name in ("full", "block", "odd block", "window", "window alone", "stride", "key rank", "plain keys")
}
DEEP = 12
"""Blocks of a stack in which reads and rows come in groups."""


def plain(connection: ConnectionConfig) -> ConnectionConfig:
    """The same in plain PyTorch."""
    return ConnectionConfig("attnres", **{**connection.options.model_dump(), "kernel": "naive"})


def text(length: int, seed: int = 0) -> Tensor:
    return torch.randint(40, (1, length), generator=torch.Generator().manual_seed(seed))


def both(name: str, **changed: Any) -> list[Decoder]:
    """Two decoders of the same weights in float64, by a bank and in plain PyTorch."""
    models = [decoder(connection, **changed).double() for connection in (FUSED[name], plain(FUSED[name]))]
    for model in models:
        perturbed(model)
    return models


def gradients(model: nn.Module, loss: Tensor, **how: Any) -> list[Tensor]:
    """Of all parameters; zero where there is none."""
    model.zero_grad()
    loss.backward(**how)
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


def outcome(model: Decoder, length: int) -> list[Tensor]:
    """Logits, and all gradients of a loss on them."""
    logits = model(text(length))
    return [logits.detach(), *gradients(model, (logits * torch.linspace(-1, 1, 40).to(logits)).square().sum())]


def assert_close(found: Sequence[Tensor], exact: Sequence[Tensor], tolerance: float = 1e-11) -> None:
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def assert_equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def plan_of(sublayers: int, keep: bool = True, **options: Any) -> Plan:
    return AttnResOptions(**options).plan(sublayers, keep)


def embedded(model: Decoder, length: int = 7) -> Tensor:
    x = model.token_embedding(text(length))
    assert isinstance(x, Tensor)
    return x


def reads_of(model: Decoder, x: Tensor, stop: int | None = None) -> tuple[list[Tensor], Any]:
    """What each of the first `stop` sublayers reads, without norms, and the stream after them."""
    stream, reads = model.stack.ends.start(x), []
    for sublayer in model.stack.sublayers()[:stop]:
        reads.append(sublayer.connection.read(stream))
        stream = sublayer.connection.write(stream, sublayer.branch(reads[-1]))
    return reads, stream


def reads_of_stack(stack: Stack, x: Tensor) -> tuple[list[Tensor], Any]:
    """As `reads_of`, with the read itself as what is put out: attention does not take a text of no tokens."""
    stream, reads = stack.ends.start(x), []
    for sublayer in stack.sublayers():
        reads.append(sublayer.connection.read(stream))
        stream = sublayer.connection.write(stream, reads[-1] * 1.5)
    return reads, stream


# --- against plain PyTorch ------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [3, DEEP])
@pytest.mark.parametrize("name", FUSED)
def test_values_and_gradients_are_those_of_plain_pytorch(name: str, depth: int) -> None:
    fused, naive = both(name, depth=depth, context=130)
    for length in (1, 17, 130):
        assert_close(outcome(fused, length), outcome(naive, length))


def test_deep_stacks_have_groups() -> None:
    for name in ("full", "block", "odd block", "key rank", "plain keys"):
        options: Any = FUSED[name].options
        plan = options.plan(2 * DEEP, True)
        assert max(len(group.members) for group in plan.mixing) > 2, name
        assert max(len(group.members) for group in plan.pulling) > 2, name


@pytest.mark.parametrize("name", FUSED)
def test_no_tokens(name: str) -> None:
    fused, naive = both(name, depth=DEEP)
    found = []
    for model in (fused, naive):
        x = torch.zeros(2, 0, 16, dtype=torch.float64, requires_grad=True)
        reads, stream = reads_of_stack(model.stack, x)
        out = model.stack.ends.finish(stream)
        assert out.shape == x.shape
        found.append(gradients(model, out.sum() + reads[3].sum()))
        assert x.grad is not None
        assert x.grad.shape == x.shape
    assert_equal(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["full", "odd block", "stride", "key rank"])
@pytest.mark.parametrize("width", [16, 20])
def test_error_is_that_of_rounding(name: str, dtype: torch.dtype, width: int) -> None:
    """At most twice as far from float64 as plain PyTorch in the same dtype."""
    kinds = {"fused": FUSED[name], "rounded": plain(FUSED[name]), "exact": plain(FUSED[name])}
    found: dict[str, dict[str, Tensor]] = {}
    for kind, connection in kinds.items():
        model = decoder(connection, depth=8, width=width, context=33)
        perturbed(model)
        model = model.to(dtype)
        if kind == "exact":
            model = model.double()
        logits, *by_parameter = outcome(model, 33)
        names = [n for n, _ in model.named_parameters()]
        parts: dict[str, list[Tensor]] = {"logits": [logits], "queries": [], "others": []}
        for n, gradient in zip(names, by_parameter, strict=True):
            parts["queries" if ".weights." in n else "others"].append(gradient)
        found[kind] = {part: torch.cat([g.double().flatten() for g in each]) for part, each in parts.items()}
    for part, exact in found["exact"].items():
        floor = max(float((found["rounded"][part] - exact).norm()), float(torch.finfo(dtype).eps * exact.norm()), 1e-30)
        assert float((found["fused"][part] - exact).norm()) <= 2 * floor, part


def test_any_strides_offsets_and_leading_shapes() -> None:
    def run(kernel: str) -> list[Tensor]:
        stack = linear_stack(kernel=kernel)
        base = torch.randn(16 * 3 * 5 + 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        base.requires_grad_()
        out = stack(base[1:].view(16, 3, 5).permute(1, 2, 0))  # [3, 5, 16], not contiguous, begins at an odd place
        shifted = stack(base[1:].view(5, 3, 16))
        single = stack(base[:16])
        loss = out.square().sum() + shifted.square().sum() + single.square().sum()
        return [out.detach(), shifted.detach(), single.detach(), *gradients(stack, loss), by_base(base)]

    assert_close(run("auto"), run("naive"))


def by_base(base: Tensor) -> Tensor:
    assert base.grad is not None
    return base.grad


def linear_stack(sublayers: int = 6, width: int = 16, **options: Any) -> Stack:
    torch.manual_seed(0)
    settings = ResidualSettings(connection=ConnectionConfig("attnres", **options), placement="none")
    stack = Stack([{"f": nn.Linear(width, width)} for _ in range(sublayers)], width, settings, nn.Identity).double()
    perturbed(stack)
    return stack


def test_nan_stays_in_its_token() -> None:
    fused = linear_stack()
    x = torch.randn(9, 16, dtype=torch.float64)
    clean = fused(x)
    x[4, 3] = torch.nan
    out = fused(x)
    assert out[4].isnan().all()
    others = [t for t in range(9) if t != 4]
    assert torch.equal(out[others], clean[others])


# --- the plan -------------------------------------------------------------------------------------

PLANS = {
    "full 6": plan_of(6),
    "full 24": plan_of(24),
    "full 48": plan_of(48),
    "blocks of 6": plan_of(48, block=6),
    "window": plan_of(24, window=9),
    "window alone": plan_of(24, window=9, window_embedding=False),
    "stride": plan_of(24, stride=2),
    "stride and blocks": plan_of(24, stride=3, block=2),
    "one sublayer": plan_of(1),
}


@pytest.mark.parametrize("name", PLANS)
def test_every_read_and_every_row_is_in_one_group(name: str) -> None:
    plan = PLANS[name]
    assert [read for group in plan.mixing for read in group.members] == list(range(len(plan.reads)))
    for groups, needs in ((plan.mixing, plan.reads), (plan.pulling, plan.readers)):
        for group in groups:
            assert len(group.members) <= MOST
            assert bool(group.common) == (len(group.members) > 1)
            for member, own in zip(group.members, group.own, strict=True):
                assert sorted((*group.common, *own)) == sorted(needs[member])
    assert sorted(row for group in plan.pulling for row in group.members) == list(range(len(plan.joins)))


@pytest.mark.parametrize("name", PLANS)
def test_what_is_common_is_there_in_time(name: str) -> None:
    """Rows before the first read of a group, reads after the last row of one."""
    plan = PLANS[name]
    for group in plan.mixing:
        assert all(row <= group.members[0] for row in group.common)
    for group in plan.pulling:
        assert all(read >= group.members[-1] for read in group.common)


@pytest.mark.parametrize(("sublayers", "published"), [(48, 8.8), (96, 11.9)])
def test_full_moves_no_more_than_the_best_windows_of_one_size(sublayers: int, published: float) -> None:
    """Rows a read of a sublayer, to the digits that are published: 8.69 and 11.91. The output's read is not counted."""
    whole = plan_of(sublayers)
    plan = Plan.of(whole.reads[:sublayers], whole.joins[:sublayers], True)
    assert round(plan.rows_mixed / sublayers, 1) <= published


@pytest.mark.parametrize("options", [{}, {"block": 2}, {"stride": 2}, {"window": 4}])
def test_no_partition_of_the_reads_costs_less(options: dict[str, Any]) -> None:
    plan = plan_of(8, **options)
    sets = [set(rows) for rows in plan.reads]

    def cost(start: int, stop: int) -> float:
        if stop - start == 1:
            return len(sets[start])
        common = set.intersection(*sets[start:stop])
        if not common or stop - start > MOST:
            return float("inf")
        return len(common) + sum(2 + len(rows - common) for rows in sets[start:stop])

    count = len(sets)
    costs = []
    for cuts in range(2 ** (count - 1)):
        ends = [0, *(i + 1 for i in range(count - 1) if cuts >> i & 1), count]
        costs.append(sum(cost(start, stop) for start, stop in pairwise(ends)))
    assert plan.rows_mixed == min(costs) + count


def test_direct_reads_where_they_cost_less() -> None:
    for plan in (plan_of(2), plan_of(3), plan_of(4, block=2), plan_of(24, window=2), plan_of(6, block=6)):
        assert all(len(group.members) == 1 for group in plan.mixing)
    full = plan_of(48)
    assert full.rows_mixed < sum(map(len, full.reads)) + len(full.reads)


def test_blocks_are_read_in_two_phases() -> None:
    plan = plan_of(48, block=6)
    several = [group for group in plan.mixing if len(group.members) > 1]
    assert len(several) >= 5
    assert all(len(own) <= 2 for group in several for own in group.own)
    assert plan.rows_mixed < sum(map(len, plan.reads)) + len(plan.reads)


def test_backward_cost_grows_less_than_with_the_square() -> None:
    """Where nothing is shared, a row's share doubles with the sublayers."""
    per_row = [plan_of(sublayers).rows_pulled / sublayers for sublayers in (24, 48, 96)]
    assert per_row[1] < 1.3 * per_row[0]
    assert per_row[2] < 1.35 * per_row[1]


@pytest.mark.parametrize("name", FUSED)
def test_without_gradients_rows_go_when_plain_pytorch_lets_them_go(name: str) -> None:
    fused, naive = both(name, depth=DEEP)
    with torch.no_grad():
        x, kept = embedded(fused), []
        streams = [model.stack.ends.start(x) for model in (fused, naive)]
        for sublayers in zip(fused.stack.sublayers(), naive.stack.sublayers(), strict=True):
            reads = [s.connection.read(stream) for s, stream in zip(sublayers, streams, strict=True)]
            streams = [s.connection.write(stream, reads[1]) for s, stream in zip(sublayers, streams, strict=True)]
            history: Any = streams[0].bank.history
            kept.append((sum(row is not None for row in history.rows.kept), len(streams[1].values)))
    assert all(a <= b for a, b in kept)


# --- what autograd may ask ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["full", "odd block", "stride"])
def test_gradients_of_an_early_read(name: str) -> None:
    def run(model: Decoder, stop: int | None) -> list[Tensor]:
        reads, _ = reads_of(model, embedded(model), stop)
        return gradients(model, reads[9].square().sum())

    fused, naive = both(name, depth=DEEP)
    for stop in (None, 10, 13):  # 10: nothing is written after it
        assert_close(run(fused, stop), run(naive, stop))


@pytest.mark.parametrize("name", ["full", "odd block"])
def test_losses_in_turn(name: str) -> None:
    def run(model: Decoder) -> list[Tensor]:
        reads, stream = reads_of(model, embedded(model))
        early = gradients(model, reads[7].square().sum(), retain_graph=True)
        late = gradients(model, model.stack.ends.finish(stream).square().sum(), retain_graph=True)
        return [*early, *late, *gradients(model, reads[20].sum())]

    fused, naive = both(name, depth=DEEP)
    assert_close(run(fused), run(naive))


def test_a_loss_on_the_way_and_the_rest_of_the_pass_after_it() -> None:
    def run(model: Decoder) -> list[Tensor]:
        sublayers = model.stack.sublayers()
        reads, stream = reads_of(model, embedded(model), 10)
        early = gradients(model, reads[9].square().sum(), retain_graph=True)
        for sublayer in sublayers[10:]:
            stream = sublayer.connection.write(stream, sublayer.branch(sublayer.connection.read(stream)))
        return [*early, *gradients(model, model.stack.ends.finish(stream).square().sum())]

    fused, naive = both("full", depth=DEEP)
    assert_close(run(fused), run(naive))


def test_gradients_of_some_inputs_only() -> None:
    def run(model: Decoder) -> list[Tensor]:
        x = embedded(model).detach().requires_grad_()
        reads, stream = reads_of(model, x)
        loss = model.stack.ends.finish(stream).square().sum()
        query = model.stack.sublayers()[8].connection.get_parameter("weights.query")
        weight = next(model.stack.sublayers()[17].branch.parameters())
        return [torch.autograd.grad(loss, each, retain_graph=True)[0] for each in (x, query, weight, reads[11])]

    fused, naive = both("full", depth=DEEP)
    assert_close(run(fused), run(naive))


def test_backward_twice() -> None:
    model, _ = both("full", depth=DEEP)
    loss = model(text(7)).square().sum()
    first = gradients(model, loss, retain_graph=True)
    assert_equal(gradients(model, loss, retain_graph=True), first)
    assert_equal(gradients(model, loss), first)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_a_stream_ends_with_its_backward_pass() -> None:
    model, _ = both("full")
    _, stream = reads_of(model, embedded(model))
    model.stack.ends.finish(stream).sum().backward()
    for use in (lambda: stream.values, lambda: model.stack.ends.finish(stream)):
        with pytest.raises(UserError, match=r"released when its backward pass ended; .* retain_graph=True"):
            use()


def test_second_derivatives_are_refused() -> None:
    x = torch.randn(3, 16, dtype=torch.float64, requires_grad=True)
    with pytest.raises(UserError, match=r"second derivatives .*kernel='naive'"):
        torch.autograd.grad(linear_stack()(x).square().sum(), x, create_graph=True)
    (gradient,) = torch.autograd.grad(linear_stack(kernel="naive")(x).square().sum(), x, create_graph=True)
    assert torch.autograd.grad(gradient.square().sum(), x)[0].abs().min() > 0


def test_a_refused_backward_pass_can_be_followed_by_another() -> None:
    stack = linear_stack()
    x = torch.randn(3, 16, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(stack(x).square().sum(), x)
    loss = stack(x).square().sum()
    with pytest.raises(UserError, match="second derivatives"):
        torch.autograd.grad(loss, x, create_graph=True)
    assert torch.equal(torch.autograd.grad(loss, x)[0], expected)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("width", [8, 16])
@pytest.mark.parametrize("block", [1, 2])
def test_an_update_changed_in_place_is_refused(block: int, width: int, enabled: bool) -> None:
    stack = linear_stack(width=width, block=block)
    with torch.set_grad_enabled(enabled):
        stream = stack.ends.start(torch.randn(3, width, dtype=torch.float64))
        for sublayer in stack.sublayers()[:2]:
            update = sublayer.branch(sublayer.connection.read(stream)) * 1
            stream = sublayer.connection.write(stream, update)
        with torch.no_grad():
            update.add_(1)
        with pytest.raises(UserError, match=r"changed in place after it had joined the stream.*change a copy"):
            stack.sublayers()[2].connection.read(stream)


def test_a_kept_update_changed_later_is_refused() -> None:
    stack = linear_stack()
    stream, updates = stack.ends.start(torch.randn(3, 16, dtype=torch.float64)), []
    for sublayer in stack.sublayers():
        updates.append(sublayer.branch(sublayer.connection.read(stream)) * 1)
        stream = sublayer.connection.write(stream, updates[-1])
    loss = stack.ends.finish(stream).sum()
    with torch.no_grad():
        updates[1].add_(1)
    with pytest.raises(UserError, match="changed in place"):
        loss.backward()


def test_two_passes_at_once() -> None:
    def run(model: Decoder) -> list[Tensor]:
        streams = [model.stack.ends.start(model.token_embedding(text(7, seed))) for seed in (0, 1)]
        for sublayer in model.stack.sublayers():
            streams = [sublayer(stream) for stream in streams]
        a, b = (model.stack.ends.finish(stream).square().sum() for stream in streams)
        model.zero_grad()
        b.backward()
        a.backward()
        return [torch.zeros(0) if p.grad is None else p.grad for p in model.parameters()]

    fused, naive = both("full", depth=DEEP)
    assert_close(run(fused), run(naive))


def test_a_model_used_twice_in_one_graph() -> None:
    def run(model: Decoder) -> list[Tensor]:
        x = embedded(model)
        out = model.stack(model.stack(x).tanh() + x)
        return [out.detach(), *gradients(model, out.square().sum())]

    fused, naive = both("odd block", depth=DEEP)
    assert_close(run(fused), run(naive))


@pytest.mark.parametrize("name", ["full", "odd block", "window alone"])
def test_checkpointing_changes_no_bit(name: str) -> None:
    model, _ = both(name, depth=DEEP)
    expected = outcome(model, 7)
    model.stack.checkpointing = True
    assert_equal(outcome(model, 7), expected)
    loss = model(text(7)).square().sum()
    assert_equal(gradients(model, loss, retain_graph=True), gradients(model, loss))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("inner", [True, False])
def test_a_checkpoint_around_a_whole_pass(inner: bool, reentrant: bool) -> None:
    def run(model: Decoder) -> list[Tensor]:
        model.stack.checkpointing = inner
        out = checkpoint(model.stack, embedded(model), use_reentrant=reentrant)
        assert isinstance(out, Tensor)
        return gradients(model, out.square().sum())

    fused, naive = both("full", depth=DEEP)
    assert_close(run(fused), run(naive))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_around_a_stream_written_twice(reentrant: bool) -> None:
    """A pass that itself begins in a backward pass."""

    def run(model: Decoder) -> list[Tensor]:
        def branched(x: Tensor) -> Tensor:
            _, stream = reads_of(model, x, 3)
            ends = []
            for scale in (1.0, -2.0):
                branch = stream
                for sublayer in model.stack.sublayers()[3:]:
                    update = scale * sublayer.branch(sublayer.connection.read(branch))
                    branch = sublayer.connection.write(branch, update)
                ends.append(model.stack.ends.finish(branch))
            return ends[0] + ends[1].square()

        out = checkpoint(branched, embedded(model), use_reentrant=reentrant)
        assert isinstance(out, Tensor)
        return gradients(model, out.square().sum())

    fused, naive = both("full")
    assert_close(run(fused), run(naive))


def test_a_look_without_gradients_changes_nothing() -> None:
    def run(model: Decoder) -> list[Tensor]:
        stream: Any = model.stack.ends.start(embedded(model))
        seen: list[Tensor] = []
        for sublayer in model.stack.sublayers():
            connection = sublayer.connection
            assert isinstance(connection, AttnRes)
            with torch.no_grad():
                seen += [connection.read(stream), *connection.depth_weights(stream)]
            stream = sublayer(stream)
        return [*seen, *gradients(model, model.stack.ends.finish(stream).square().sum())]

    fused, naive = both("full", depth=DEEP)
    assert_close(run(fused), run(naive))


@pytest.mark.parametrize("name", FUSED)
def test_values_without_gradients_are_the_same(name: str) -> None:
    model, _ = both(name, depth=DEEP)
    expected = model(text(7))
    with torch.no_grad():
        assert torch.equal(model(text(7)), expected)
    with torch.inference_mode():
        assert torch.equal(model(text(7)), expected)


FREEZES: dict[str, Callable[[str], bool]] = {
    "embedding": lambda name: "embedding" in name,
    "queries": lambda name: ".weights." in name,
    "some queries": lambda name: ".weights." in name and ".1." in name,
    "branches": lambda name: "branch" in name,
    "every other branch": lambda name: "branch" in name and "attention" in name,
    "all but the last block": lambda name: "blocks.11." not in name,
    "all but the first block": lambda name: "blocks.0." not in name,
    "all but queries": lambda name: ".weights." not in name,
    "all but the head": lambda name: "head" not in name,
}


@pytest.mark.parametrize("frozen", FREEZES)
@pytest.mark.parametrize("name", ["full", "odd block"])
def test_frozen_parameters(name: str, frozen: str) -> None:
    models = both(name, depth=DEEP)
    for model in models:
        for n, parameter in model.named_parameters():
            parameter.requires_grad_(not FREEZES[frozen](n))
    fused, naive = (outcome(model, 7) for model in models)
    assert_close(fused, naive)
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        assert (a.grad is None) == (b.grad is None)


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("without", [{0}, {1}, {1, 2}, {3}])
def test_some_layers_without_gradients(name: str, without: set[int]) -> None:
    def run(model: Decoder) -> list[Tensor]:
        stream: Any = model.stack.ends.start(embedded(model))
        for number, block in enumerate(model.blocks):
            with torch.set_grad_enabled(number not in without):
                stream = block(stream)
        return gradients(model, model.stack.ends.finish(stream).square().sum())

    fused, naive = both(name, depth=4)
    assert_close(run(fused), run(naive))


@pytest.fixture
def _no_collector() -> Iterator[None]:
    """What a reference cycle keeps would stay."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collector")
def test_the_memory_of_a_pass_goes_with_its_loss() -> None:
    model, _ = both("full")
    for backward in (False, True):
        _, stream = reads_of(model, embedded(model))
        loss = model.stack.ends.finish(stream).sum()
        bank, history = weakref.ref(stream.bank), weakref.ref(stream.bank.history)
        if backward:
            loss.backward()
            assert history() is None
        del stream, loss, _
        assert bank() is None
        assert history() is None


# --- layers out of turn ---------------------------------------------------------------------------

ORDERS = [[0, 2], [0, 2, 1], [0, 1, 1, 2], [2], [1, 2], [1, 0, 2], [0, 0, 1, 2], [2, 1, 0], [0, 1], [0, 1, 2, 2]]


@pytest.mark.parametrize("name", FUSED)
def test_layers_skipped_swapped_and_repeated(name: str) -> None:
    models = both(name)
    for order in ORDERS:
        found: list[list[Tensor]] = []
        for model in models:
            with rearranged(model, order):
                found.append(outcome(model, 7))
                with torch.no_grad():
                    assert_close([model(text(7))], found[-1][:1], 1e-10)
        assert_close(found[0], found[1], 1e-10)


@contextmanager
def rearranged(model: Decoder, order: Sequence[int]) -> Iterator[None]:
    blocks = model.stack.blocks
    model.stack.blocks = nn.ModuleList([blocks[i] for i in order])
    yield
    model.stack.blocks = blocks


@pytest.mark.parametrize("name", ["full", "odd block", "stride", "window"])
def test_deep_stacks_that_stop_early(name: str) -> None:
    """Rows of a group were never written."""
    models = both(name, depth=DEEP)
    for order in (list(range(7)), list(range(1)), [*range(5), *range(6, DEEP)], [*range(9), *range(6, DEEP)]):
        found: list[list[Tensor]] = []
        for model in models:
            with rearranged(model, order):
                found.append(outcome(model, 7))
                model.stack.checkpointing = True
                assert_equal(outcome(model, 7), found[-1])
                model.stack.checkpointing = False
        assert_close(found[0], found[1], 1e-10)


@pytest.mark.parametrize(
    ("name", "enabled"),
    [*((name, True) for name in FUSED), ("full", False), ("key rank", False), ("plain keys", False)],
)
def test_a_stream_written_twice(name: str, enabled: bool) -> None:
    def run(model: Decoder) -> list[Tensor]:
        _, stream = reads_of(model, embedded(model), 3)
        sublayers = model.stack.sublayers()
        ends = []
        for scale in (1.0, -2.0):
            branched = stream
            for sublayer in sublayers[3:]:
                h = sublayer.connection.read(branched)
                branched = sublayer.connection.write(branched, scale * sublayer.branch(h))
            ends.append(model.stack.ends.finish(branched))
        if not enabled:
            return ends
        return [*(end.detach() for end in ends), *gradients(model, ends[0].square().sum() + ends[1].sum())]

    fused, naive = both(name, depth=4)
    with torch.set_grad_enabled(enabled):
        assert_close(run(fused), run(naive))


@pytest.mark.parametrize("name", ["block", "window alone"])
def test_a_stream_that_is_gone_without_gradients(name: str) -> None:
    """Where an earlier stream's rows were not to be read again."""
    model, _ = both(name)
    with torch.no_grad():
        _, old = reads_of(model, embedded(model), 3)
        stream = old
        for sublayer in model.stack.sublayers()[3:]:
            stream = sublayer.connection.write(stream, sublayer.connection.read(stream))
        with pytest.raises(UserError, match=r"of an earlier stream is gone.*kernel='naive'"):
            model.stack.sublayers()[3].connection.read(old)


# --- the same bits --------------------------------------------------------------------------------


def bits(dtype: torch.dtype = torch.float32, width: int = 24, tokens: int = 300, block: int = 1) -> list[Tensor]:
    """Reads, and gradients of rows and queries, of rows that are leaves: nothing but the kernels computes."""
    sublayers = 20
    plan = plan_of(sublayers, block=block)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    rows = [random(tokens, width).to(dtype).requires_grad_() for _ in range(sublayers + 1)]
    queries = random(sublayers + 1, width).requires_grad_()
    weights = [random(tokens, width).to(dtype) for _ in range(sublayers + 1)]
    bank, token = Bank.start(plan, rows[0], queries, 1e-6, True)
    reads = [bank.read(token, 0)]
    for row in range(1, sublayers + 1):
        token = bank.write(token, row, rows[row])
        reads.append(bank.read(token, row))
    found = torch.autograd.grad(reads, [*rows, queries], weights)
    return [*(read.detach() for read in reads), *found]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_again_and_on_any_number_of_threads(dtype: torch.dtype) -> None:
    expected = bits(dtype)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert_equal(bits(dtype), expected)
        assert torch.get_num_threads() == threads


def test_passes_in_several_threads_at_once() -> None:
    expected = bits(tokens=150)
    with ThreadPoolExecutor(3) as pool:
        for found in pool.map(lambda _: bits(tokens=150), range(6)):
            assert_equal(found, expected)


@pytest.fixture
def poison() -> Iterator[Callable[[], None]]:
    """From its call on, fresh memory is filled with NaN."""
    yield lambda: torch.use_deterministic_algorithms(True)
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("width", "block"), [(16, 1), (24, 1), (24, 3)])
def test_nothing_depends_on_fresh_memory(width: int, block: int, poison: Callable[[], None]) -> None:
    expected = bits(width=width, tokens=37, block=block)
    assert all(part.isfinite().all() for part in expected)
    poison()
    assert torch.empty(3).isnan().all()
    assert_equal(bits(width=width, tokens=37, block=block), expected)


def test_unwritten_rows_add_nothing(poison: Callable[[], None]) -> None:
    """Where a group of rows is pulled of which some were never written."""
    fused, _ = both("full", depth=DEEP)
    with rearranged(fused, range(7)):
        expected = outcome(fused, 7)
        poison()
        assert_equal(outcome(fused, 7), expected)


@pytest.mark.parametrize(("width", "copied"), [(16, False), (32, False), (24, True)])
def test_whole_tiles_are_kept_without_copies(width: int, copied: bool) -> None:
    stack = linear_stack(width=width)
    x = torch.randn(3, width, dtype=torch.float64)
    stream, updates = stack.ends.start(x), [x]
    for sublayer in stack.sublayers():
        updates.append(sublayer.branch(sublayer.connection.read(stream)))
        stream = sublayer.connection.write(stream, updates[-1])
    assert isinstance(stream, Banked)
    assert isinstance(stream.bank.history, cpu_bank.CpuHistory)
    for row, update in zip(stream.bank.history.rows.kept, updates, strict=True):
        assert row is not None
        assert (row.data_ptr() != update.data_ptr()) == copied


# --- what computes, and wrong input ---------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_what_computes_each_variant(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def counted(method: str) -> Callable[..., Any]:
        inner = getattr(cpu_bank.CpuHistory, method)

        def run(*arguments: Any) -> Any:
            calls.append(method)
            return inner(*arguments)

        return run

    for method in ("mix", "pull"):
        monkeypatch.setattr(cpu_bank.CpuHistory, method, counted(method))
    model = decoder(name)
    model(text(7)).sum().backward()
    fused = name.removeprefix("attnres ") in {*FUSED, "slow query"}
    assert (calls.count("mix"), calls.count("pull")) == ((7, 7) if fused else (0, 0))
    if name.startswith("attnres"):
        ends: Any = model.stack.ends
        assert ends.implementation(torch.randn(2, 16)) == ("numba" if fused else "naive")


@pytest.mark.parametrize(("x", "found"), [(torch.ones(2, 16, dtype=torch.int64), "torch.int64"), (None, "a NoneType")])
@pytest.mark.parametrize("kernel", ["auto", "naive"])
def test_what_is_no_stream_has_no_implementation(x: Any, found: str, kernel: str) -> None:
    ends: Any = decoder(ConnectionConfig("attnres", kernel=kernel)).stack.ends
    with pytest.raises(UserError, match=f"x is {found}; give a floating-point tensor"):
        ends.implementation(x)


def test_what_has_no_kernel_is_plain() -> None:
    assert implementation(torch.empty(2, 16, device="meta")) is None
    model = decoder(plain(FUSED["full"]))
    ends: Any = model.stack.ends
    assert ends.implementation(torch.randn(2, 16)) == "naive"
    assert isinstance(ends.start(torch.randn(2, 16)), Sources)
    fused: Any = decoder(FUSED["full"]).stack.ends
    assert fused.implementation(torch.empty(2, 16, device="meta")) == "naive"
    alone = AttnRes(fused.output.site, fused.options)
    assert not isinstance(alone.read(Sources((torch.randn(2, 16),), (torch.ones(2, 1),), -1, fused)), Banked)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize(
    "x",
    [torch.ones(5, 8, dtype=torch.int64), torch.empty(5, 8, device="meta"), torch.ones(5, 8, dtype=torch.complex64)],
)
def test_rows_that_nothing_keeps_are_refused(x: Tensor, enabled: bool) -> None:
    said = rf"rows that are {x.dtype} on {x.device}; give float32, bfloat16 or float16"
    with torch.set_grad_enabled(enabled), pytest.raises(UserError, match=said):
        Bank.start(plan_of(2, keep=enabled), x, torch.ones(3, 8, device=x.device), 1e-6, True)


@pytest.mark.parametrize("enabled", [True, False])
def test_steps_out_of_turn_are_refused(enabled: bool) -> None:
    x, queries = torch.randn(5, 8), torch.zeros(3, 8)
    with torch.set_grad_enabled(enabled):
        bank, token = Bank.start(plan_of(2, keep=enabled), x, queries, 1e-6, True)
        for row in (-1, 2, 5):
            with pytest.raises(UserError, match=f"row {row} does not come next; 1 of 3 rows are written"):
                bank.write(token, row, x)
        with pytest.raises(UserError, match="read 2 needs row 2; 1 rows are written"):
            bank.read(token, 2)
        for read in (-1, 3):
            with pytest.raises(UserError, match=f"there is no read {read}; the plan has reads 0 to 2"):
                bank.read(token, read)


def test_queries_are_floating_point() -> None:
    with pytest.raises(UserError, match=r"queries are torch.int64; give floating-point ones"):
        Bank.start(plan_of(2), torch.randn(5, 8), torch.zeros(3, 8, dtype=torch.int64), 1e-6, True)


def test_float64_on_cuda_is_refused_by_the_bank() -> None:
    with torch._subclasses.fake_tensor.FakeTensorMode():
        x = torch.empty(5, 8, device="cuda", dtype=torch.float64)
        with pytest.raises(UserError, match=r"torch\.float64 on cuda:0; give float32"):
            Bank.start(plan_of(2), x, torch.empty(3, 8, device="cuda"), 1e-6, True)


def test_what_ran_is_said() -> None:
    """By the bank alone where layers take their turn, and that the plain form took over where they do not."""
    model = decoder(FUSED["full"], depth=3)
    ends: Any = model.stack.ends
    assert ends.ran == frozenset()
    for order, ran in (([0, 1, 2], {"numba"}), ([0, 2], {"numba", "naive"}), ([0, 1, 1, 2], {"numba", "naive"})):
        with rearranged(model, order):
            model(text(7)).sum().backward()
        assert ends.ran == ran, order
        with torch.no_grad(), rearranged(model, order):
            model(text(7))
        assert ends.ran == ran, order
    model(text(7))
    assert ends.ran == {"numba"}
    of_plain: Any = decoder(plain(FUSED["full"])).stack.ends
    of_plain.finish(of_plain.start(torch.randn(2, 16)))
    assert of_plain.ran == {"naive"}


def test_a_layer_in_another_grad_mode_is_said_to_be_plain() -> None:
    model = decoder(FUSED["full"], depth=3)
    ends: Any = model.stack.ends
    stream: Any = ends.start(embedded(model))
    for number, block in enumerate(model.blocks):
        with torch.set_grad_enabled(number != 1):
            stream = block(stream)
    ends.finish(stream).sum().backward()
    assert ends.ran == {"numba", "naive"}


@pytest.mark.parametrize("eps", [-1e-6, float("nan")])
def test_eps_below_zero_is_refused(eps: float) -> None:
    with pytest.raises(UserError, match=r"eps is .*; give 0 or more"):
        Bank.start(plan_of(2), torch.randn(5, 8), torch.randn(3, 8), eps, True)


@pytest.mark.parametrize("shape", [(2, 8), (3, 7), (8,), (3, 8, 1)])
def test_queries_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=r"3 reads of rows of width 8 on cpu need \[3, 8\] there"):
        Bank.start(plan_of(2), torch.randn(5, 8), torch.randn(*shape), 1e-6, True)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize(
    ("update", "message"),
    [
        (torch.randn(4, 8), r"\[4, 8\] torch.float32 on cpu does not join rows that are \[5, 8\] torch.float32"),
        (torch.randn(5, 9), r"\[5, 9\] .* does not join rows"),
        (torch.randn(5, 8).double(), r"torch.float64 .* does not join rows that are \[5, 8\] torch.float32"),
    ],
)
def test_an_update_of_another_form_is_refused(update: Tensor, message: str, enabled: bool) -> None:
    with torch.set_grad_enabled(enabled):
        plan = plan_of(2, keep=enabled)
        bank, token = Bank.start(plan, torch.randn(5, 8), torch.randn(3, 8).requires_grad_(), 1e-6, True)
        bank.read(token, 0)
        with pytest.raises(UserError, match=message):
            bank.write(token, 1, update)

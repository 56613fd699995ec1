"""The depth-attention operation against its definition in float64, and what PyTorch asks of an operation."""

import ast
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from depth_attention_floor import EPS, Parts, assert_within, of_read
from reslab.kernels.depth_attention import cpu, cpu_bank, depth_attention, implementation, naive, simd
from reslab.kernels.depth_attention.op import _backward, _forward
from reslab.schema import UserError

KERNELS = [cpu_bank.write, cpu_bank.mix_common, cpu_bank.mix, cpu_bank.keep_gradient, cpu_bank.pull]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HUGE = {torch.float32: 1e15, torch.bfloat16: 1e15, torch.float16: 1e4}
"""Times which a row and its gradients still fit."""


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def made(count: int, tokens: int, width: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> list[Tensor]:
    """A query [d] whose scores have about `scale`, and sources [T, d] that are leaves."""
    query = scale * width**-0.5 * random(width, seed=99)
    sources = [random(tokens, width, seed=i).to(dtype) for i in range(count)]
    return [query.requires_grad_(), *(source.requires_grad_() for source in sources)]


def with_gradients(run: Any, leaves: list[Tensor], grad: Tensor) -> list[Tensor]:
    """What `run` makes of query and sources, and its gradients, in float64."""
    out = run(leaves[0], leaves[1:])
    return [part.detach().double() for part in (out, *torch.autograd.grad(out, leaves, grad.to(out.dtype)))]


def of_definition(leaves: list[Tensor], dtype: torch.dtype, grad: Tensor) -> list[Tensor]:
    copies = [leaf.detach().to(dtype).requires_grad_() for leaf in leaves]
    return with_gradients(lambda query, sources: naive.depth_attention(query, sources, EPS)[0], copies, grad)


def with_zeros(dtype: torch.dtype) -> list[Tensor]:
    """Leaves with a row of zeros in one source, and another source of zeros."""
    leaves = made(4, 6, 16, dtype)
    with torch.no_grad():
        leaves[1][2] = 0
        leaves[2].zero_()
    return leaves


def with_huge_values(dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Leaves with a row of huge values at one token, and a gradient of h with that token and one without it.

    The latter shows what the other tokens add to the query's gradient.
    """
    leaves, grads = made(4, 6, 16, dtype), [random(6, 16, seed=7).to(dtype) for _ in range(2)]
    with torch.no_grad():
        leaves[3][4] *= HUGE[dtype]
    grads[1][4] = 0
    return leaves, grads


def assert_at_the_rounding_floor(leaves: list[Tensor], grad: Tensor | None = None) -> None:
    """No row of h and dv, nor dw, is farther from float64 than twice what rounding costs."""
    dtype = leaves[1].dtype
    given_back = random(*leaves[1].shape, seed=7).to(dtype) if grad is None else grad
    h, dw, *dv = with_gradients(lambda query, sources: depth_attention(query, sources, EPS), leaves, given_back)
    assert_within(Parts(h, dw, torch.stack(dv)), of_read(leaves, given_back), dtype)


# --- values and gradients -------------------------------------------------------------------------


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    count=st.integers(1, 12),
    tokens=st.integers(1, 70),
    width=st.integers(1, 70),
    dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from([0.0, 1.0, 30.0]),
)
def test_random_shapes(count: int, tokens: int, width: int, dtype: torch.dtype, scale: float) -> None:
    assert_at_the_rounding_floor(made(count, tokens, width, dtype, scale))


@pytest.mark.parametrize(
    ("count", "width"), [(1, 7186), (2, 7186), (2, 1000), (29, 80), (129, 3), (129, 64), (5, 1), (1, 1), (29, 1000)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_awkward_shapes(count: int, width: int, dtype: torch.dtype) -> None:
    assert_at_the_rounding_floor(made(count, 5, width, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_of_ten_thousand(dtype: torch.dtype) -> None:
    leaves = made(6, 9, 16, dtype, scale=1e4)
    assert_at_the_rounding_floor(leaves)
    assert depth_attention(leaves[0], leaves[1:]).isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_zeros(dtype: torch.dtype) -> None:
    assert_at_the_rounding_floor(with_zeros(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_huge_values(dtype: torch.dtype) -> None:
    leaves, grads = with_huge_values(dtype)
    for grad in grads:
        assert_at_the_rounding_floor(leaves, grad)


def test_one_source_is_passed_through() -> None:
    leaves = made(1, 6, 16)
    out = depth_attention(leaves[0], leaves[1:])
    torch.testing.assert_close(out, leaves[1], rtol=1e-6, atol=0)
    by_query, by_source = torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert torch.count_nonzero(by_query) == 0
    torch.testing.assert_close(by_source, torch.ones_like(by_source))


def test_equal_scores_are_the_mean() -> None:
    leaves = made(5, 6, 16, scale=0.0)
    torch.testing.assert_close(depth_attention(leaves[0], leaves[1:]), torch.stack(leaves[1:]).mean(0))


def test_gain_is_that_of_the_keys() -> None:
    leaves, gain = made(3, 6, 16), random(16, seed=3).requires_grad_()
    direct = naive.depth_attention(leaves[0] * gain, leaves[1:], EPS)[0]
    found = depth_attention(leaves[0], leaves[1:], EPS, gain)
    for a, b in zip(*(torch.autograd.grad(out.sum(), [*leaves, gain]) for out in (found, direct)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_any_strides_and_leading_shapes() -> None:
    query = random(8)
    sources = [random(8, 3, 5, seed=i).permute(1, 2, 0) for i in range(3)]  # [3, 5, 8], not contiguous
    found = depth_attention(query, sources)
    assert found.shape == (3, 5, 8)
    torch.testing.assert_close(found, naive.depth_attention(query, sources, EPS)[0])
    same = [random(4, 8).expand(2, 4, 8), random(2, 4, 16)[..., ::2]]
    torch.testing.assert_close(depth_attention(query, same), naive.depth_attention(query, same, EPS)[0])


def test_no_tokens() -> None:
    leaves = made(3, 0, 8)
    out = depth_attention(leaves[0], leaves[1:])
    assert out.shape == (0, 8)
    by_query, *_ = torch.autograd.grad(out.sum(), leaves)
    assert torch.count_nonzero(by_query) == 0


@pytest.fixture
def _poisoned_memory() -> Iterator[None]:
    """Fresh memory is filled with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_poisoned_memory")
def test_all_of_the_output_is_written() -> None:
    leaves = made(3, 70, 16)
    out = depth_attention(leaves[0], leaves[1:])
    assert out.isfinite().all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), leaves))


def test_same_bits_again_and_on_any_number_of_threads() -> None:
    leaves, grad = made(7, 333, 80), random(333, 80, seed=7)

    def bits(threads: int) -> list[Tensor]:
        torch.set_num_threads(threads)
        return with_gradients(lambda query, sources: depth_attention(query, sources), leaves, grad)

    first = bits(1)
    for threads in (1, 2, 4):
        assert all(torch.equal(a, b) for a, b in zip(first, bits(threads), strict=True))


# --- what PyTorch asks of an operation ------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(dtype: torch.dtype) -> None:
    leaves = made(3, 5, 8, dtype)
    torch.library.opcheck(_forward, (leaves[0], leaves[1:], EPS))
    _, *saved = _forward(leaves[0], leaves[1:], EPS)
    detached = [leaf.detach() for leaf in leaves]
    grad = random(5, 8).to(dtype)
    torch.library.opcheck(_backward, (grad, detached[0], detached[1:], [part.detach() for part in saved], EPS))


def test_the_fused_path_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def counted(name: str) -> Any:
        plain = getattr(cpu, name)

        def run(*arguments: Any) -> Any:
            calls.append(name)
            return plain(*arguments)

        return run

    for name in ("forward", "backward"):
        monkeypatch.setattr(cpu, name, counted(name))
    leaves = made(3, 5, 8)
    depth_attention(leaves[0], leaves[1:]).sum().backward()
    assert calls == ["forward", "backward"]
    assert implementation(leaves[1]) == "numba"
    assert implementation(leaves[1].double()) == "naive"


def test_double_precision_has_exact_derivatives() -> None:
    leaves = [leaf.detach().double().requires_grad_() for leaf in made(3, 2, 4)]
    assert torch.autograd.gradcheck(lambda query, *sources: depth_attention(query, sources), leaves)
    assert torch.autograd.gradgradcheck(lambda query, *sources: depth_attention(query, sources), leaves)


def test_second_derivatives_are_those_of_the_definition() -> None:
    leaves = made(3, 5, 8)

    def second(run: Any) -> list[Tensor]:
        first = torch.autograd.grad(run(leaves[0], leaves[1:]).square().sum(), leaves, create_graph=True)
        return list(torch.autograd.grad(torch.stack([part.square().sum() for part in first]).sum(), leaves))

    direct = second(lambda query, sources: naive.depth_attention(query, sources, EPS)[0])
    for a, b in zip(second(depth_attention), direct, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_compiles_without_a_break_and_once_for_all_token_counts() -> None:
    compilations = []

    def backend(graph: Any, inputs: Any) -> Any:
        compilations.append(graph)
        return graph.forward

    def layer(query: Tensor, sources: list[Tensor]) -> Tensor:
        return 2 * depth_attention(query, sources).relu()

    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    for tokens in (5, 6, 7, 64, 65):
        leaves = [leaf.detach() for leaf in made(3, tokens, 8)]
        plain, fused = layer(leaves[0], leaves[1:]), compiled(leaves[0], leaves[1:])
        assert torch.equal(plain, fused)
    assert len(compilations) <= 2  # the first size, then any
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_gradients_of_compiled_code() -> None:
    leaves = made(3, 5, 8)
    compiled = torch.compile(
        lambda query, sources: depth_attention(query, sources), backend="aot_eager", fullgraph=True
    )
    plain = torch.autograd.grad(depth_attention(leaves[0], leaves[1:]).square().sum(), leaves)
    traced = torch.autograd.grad(compiled(leaves[0], leaves[1:]).square().sum(), leaves)
    for a, b in zip(plain, traced, strict=True):
        torch.testing.assert_close(a, b)
    torch._dynamo.reset()


def test_under_autocast_and_checkpointing() -> None:
    leaves = made(3, 5, 8)
    plain = depth_attention(leaves[0], leaves[1:])
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(depth_attention(leaves[0], leaves[1:]), plain)
    again = checkpoint(lambda query, *sources: depth_attention(query, sources), *leaves, use_reentrant=False)
    assert isinstance(again, Tensor)
    for a, b in zip(*(torch.autograd.grad(out.square().sum(), leaves) for out in (plain, again)), strict=True):
        assert torch.equal(a, b)


def test_no_stack_of_the_sources_is_saved() -> None:
    leaves = made(6, 50, 32)
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        depth_attention(leaves[0], leaves[1:])
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    own = {leaf.untyped_storage().data_ptr() for leaf in leaves}
    assert sum(size for address, size in storages.items() if address not in own) <= 4 * 50 * 3 * 6


# --- wrong input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "sources", "message"),
    [
        (random(8), [], "there is no source"),
        (random(8), [random(5, 8), random(4, 8)], r"source 1 is \[4, 8\] .*, source 0 \[5, 8\]"),
        (random(8), [random(5, 8), random(5, 8).double()], "source 1 is .*float64"),
        (random(7), [random(5, 8)], r"query is \[7\], sources have width 8"),
        (random(8), [torch.ones(5, 8, dtype=torch.int64)], "source 0 is torch.int64; give a floating-point one"),
    ],
)
def test_wrong_input_is_refused(query: Tensor, sources: list[Tensor], message: str) -> None:
    with pytest.raises(UserError, match=message):
        depth_attention(query, sources)


@pytest.mark.parametrize("source", [torch.ones(5, 8, dtype=torch.int64), None, [1.0] * 8, torch.ones(())])
def test_what_runs_is_told_of_what_is_taken_alone(source: Any) -> None:
    """As the operation refuses it, in the same words."""
    with pytest.raises(UserError) as said:
        implementation(source)
    with pytest.raises(UserError) as refused:
        depth_attention(random(8), [source])
    assert str(said.value) == str(refused.value).replace("source 0", "the source")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gain": torch.ones(5, 8)}, r"gain is \[5, 8\], sources have width 8"),
        ({"gain": torch.ones(1)}, r"gain is \[1\], sources have width 8"),
        ({"gain": torch.ones(8, device="meta")}, "gain is torch.float32 on meta, sources are torch.float32 on cpu"),
        ({"query": torch.ones(8, device="meta")}, "query is torch.float32 on meta, sources are torch.float32 on cpu"),
        ({"query": torch.ones(8, dtype=torch.int64)}, "query is torch.int64 on cpu"),
        ({"eps": -1.0}, "eps is -1.0; give a number, 0 or more"),
        ({"eps": float("nan")}, "eps is nan; give a number, 0 or more"),
        ({"eps": "x"}, "eps is 'x'; give a number, 0 or more"),
        ({"query": None}, r"query is a NoneType; give a tensor \[8\]"),
        ({"gain": 1.0}, r"gain is a float; give a tensor \[8\]"),
        ({"sources": [torch.ones(4, 8), [1.0] * 8]}, "source 1 is a list; give a tensor"),
        ({"sources": torch.ones(3, 4, 8)}, "sources is a Tensor; give a list of tensors"),
        ({"sources": (torch.ones(4, 8) for _ in range(2))}, "sources is a generator; give a list of tensors"),
        ({"sources": [torch.ones(())]}, r"source 0 is \[\]; give \[..., d\] with d of 1 or more"),
        ({"sources": [torch.ones(4, 0)], "query": torch.ones(0)}, r"source 0 is \[4, 0\]; give"),
    ],
)
def test_what_a_kernel_would_read_past_is_refused(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"query": torch.ones(8), "sources": [torch.ones(4, 8)] * 3} | change
    with pytest.raises(UserError, match=message):
        depth_attention(**given)


# --- memory of kernels ----------------------------------------------------------------------------


SIMD: Any = simd


def _two_arrays(count: Any) -> Any:
    first = np.empty(count, np.float32)
    one = first.ctypes.data
    for k in range(count):
        SIMD.store_one(one, k, np.float32(1), np.float32(0))
    second = np.empty(count, np.float32)
    other = second.ctypes.data
    for k in range(count):
        SIMD.store_one(other, k, np.float32(2), np.float32(0))
    found = SIMD.load_one(one, 0, np.float32(0))
    SIMD.alive(first)
    SIMD.alive(second)
    return one != other, found


def test_an_array_of_a_kernel_lives_until_it_is_said_to() -> None:
    """Numba frees an array after its last mention, which the use of its address is not."""
    assert numba.njit(_two_arrays)(64) == (True, 1.0)


@pytest.mark.parametrize("kernel", [cpu.attend, cpu.differentiate, *KERNELS], ids=lambda kernel: kernel.__name__)
def test_every_array_of_a_kernel_lives_to_its_end(kernel: Callable[..., None]) -> None:
    [body] = ast.parse(inspect.getsource(kernel)).body
    assert isinstance(body, ast.FunctionDef)
    made, kept = set(), set()
    for node in ast.walk(body):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "alive":
            kept.add(ast.unparse(node.args[0]))
        elif isinstance(node, ast.Attribute) and node.attr == "ctypes":
            made.add(ast.unparse(node.value))
    assert made == kept
    assert all("alive" in ast.unparse(statement) for statement in body.body[-len(made) :] if made)

"""Depth attention across layers: one memory of all rows for a forward and a backward pass.

Forward, a row is scored for all later queries when it is written, and neighbouring reads go through what they have in
common once (`plan`). Backward, gradients are pulled: what a read has got is kept, and just before the sublayer that
wrote a row is differentiated, that row gathers from all its reads; nothing is added up in between. Algebraically the
same as `naive`. A history (`cpu_bank`) owns the memory and computes; this module orders and differentiates.
"""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from reslab.kernels.depth_attention.op import triton_module
from reslab.kernels.depth_attention.plan import Plan
from reslab.schema import UserError

__all__ = ["Bank", "implementation"]


class History(Protocol):
    """The memory of a pass; see `cpu_bank.CpuHistory`."""

    def write(self, row: int, update: Tensor) -> None: ...
    def mix(self, read: int) -> Tensor: ...
    def row(self, row: int) -> Tensor | None: ...
    def begin_backward(self) -> None: ...
    def receive(self, read: int, gradient: Tensor, h: Tensor) -> None: ...
    def receive_nothing(self, read: int) -> None: ...
    def pull(self, row: int, above: Tensor | None, extra: Tensor | None) -> Tensor: ...
    def query_gradient(self) -> Tensor: ...


def implementation(x: Tensor) -> str | None:
    """What runs a bank of rows like x: `numba` on the CPU, `triton` on CUDA, None where nothing does."""
    if x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        return "numba"
    if x.device.type == "cuda" and x.dtype in (torch.float32, torch.bfloat16, torch.float16):
        return "triton"
    return None


def _history(plan: Plan, like: Tensor, queries: Tensor, eps: float, normed: bool) -> History:
    if implementation(like) == "triton":
        return triton_module("triton_bank").TritonHistory(plan, like, queries, eps, normed)
    from reslab.kernels.depth_attention.cpu_bank import CpuHistory  # it takes a second to import

    return CpuHistory(plan, like, queries, eps, normed)


def _in_backward() -> int:
    """Number of the backward pass that runs, -1 where none does."""
    return torch._C._current_graph_task_id()


_GONE = (
    "depth attention: this pass's rows were released when its backward pass ended; run the forward pass again, or pass "
    "retain_graph=True to the first backward"
)


class Bank:
    """The rows of one pass over a stack, of a `plan`; like x [..., d]. Made by `start`."""

    def __init__(self, plan: Plan, x: Tensor, name: str) -> None:
        self.plan, self.shape = plan, x.shape
        self.like = x.new_empty(0)
        self.history: History | None = None
        self.name = name
        self.written = 0
        self.reads: set[int] = set()
        self.begun_in, self.backward_pass = _in_backward(), -1
        self.arrived: set[int] = set()
        self.above: dict[int, Tensor] = {}
        self.extra: dict[int, Tensor] = {}

    # --- forward

    @classmethod
    def start(cls, plan: Plan, x: Tensor, queries: Tensor, eps: float, normed: bool) -> "tuple[Bank, Tensor]":
        """A bank and its first token: each step takes one and gives the next, which orders the steps for autograd.

        x [..., d] is the embedding, row 0; `queries` [L, d] those of all reads. Keys are rows divided by their rms
        where `normed`. A UserError says what does not fit, or that rows like x have no `implementation`.
        """
        name = implementation(x)
        if name is None:
            raise UserError(
                f"depth attention: nothing keeps a bank of rows that are {x.dtype} on {x.device}; give float32, "
                f"bfloat16 or float16 on the CPU or CUDA, or float64 on the CPU, or build the model with "
                f"ConnectionConfig('attnres', kernel='naive')"
            )
        if not queries.is_floating_point():
            raise UserError(f"depth attention: queries are {queries.dtype}; give floating-point ones")
        needed = [len(plan.reads), x.shape[-1]]
        if not eps >= 0:
            raise UserError(f"depth attention: eps is {eps}; give 0 or more")
        if list(queries.shape) != needed or queries.device != x.device:
            raise UserError(
                f"depth attention: queries are {list(queries.shape)} on {queries.device}; {needed[0]} reads of rows of "
                f"width {needed[1]} on {x.device} need {needed} there"
            )
        bank = cls(plan, x, name)
        if torch.is_grad_enabled():
            return bank, _Start.apply(x, queries, bank, eps, normed)
        bank.begin(x, queries, eps, normed)
        return bank, x.new_empty(0)

    def takes_read(self, read: int, count: int) -> bool:
        """Whether a read of the first `count` rows is the one planned, and has not been yet."""
        fits = count == read + 1 and (self.plan.keep or not torch.is_grad_enabled())
        return fits and (read not in self.reads or self._computed_again())

    def takes_row(self, row: int, count: int) -> bool:
        """Whether a row after the first `count` is the one planned, and is not there yet.

        One without gradients among others with them is not: nothing would pull what it adds to those of the queries.
        """
        fits = count == row and self.plan.keep == torch.is_grad_enabled()
        return fits and (row == self.written or self._computed_again())

    def _computed_again(self) -> bool:
        """Whether a checkpoint computes layers of this pass again, which may itself have begun in a backward pass."""
        running = _in_backward()
        return running >= 0 and (running != self.begun_in or running == self.backward_pass)

    def begin(self, x: Tensor, queries: Tensor, eps: float, normed: bool) -> None:
        self.history = _history(self.plan, self.flat(x), queries, eps, normed)
        self.put(0, x)

    def flat(self, x: Tensor) -> Tensor:
        if x.shape != self.shape or x.dtype != self.like.dtype or x.device != self.like.device:
            raise UserError(
                f"depth attention: {list(x.shape)} {x.dtype} on {x.device} does not join rows that are "
                f"{list(self.shape)} {self.like.dtype} on {self.like.device}"
            )
        return x.reshape(-1, self.shape[-1])

    def alive(self) -> History:
        if self.history is None:
            raise UserError(_GONE)
        return self.history

    def put(self, row: int, update: Tensor) -> None:
        """Once only: where a checkpoint computes a layer again, the row is there and the same."""
        if row == self.written:
            self.alive().write(row, self.flat(update.detach()))
            self.written += 1

    def write(self, token: Tensor, row: int, update: Tensor) -> Tensor:
        """`update` [..., d] becomes a row; the token after it."""
        if not 0 <= row <= min(self.written, len(self.plan.joins) - 1):
            raise UserError(
                f"depth attention: row {row} does not come next; {self.written} of {len(self.plan.joins)} rows are "
                f"written"
            )
        if torch.is_grad_enabled():
            return _Write.apply(token, update, self, row)
        self.put(row, update)
        return token

    def read(self, token: Tensor, read: int) -> Tensor:
        """h [..., d]."""
        if not 0 <= read < len(self.plan.reads):
            raise UserError(
                f"depth attention: there is no read {read}; the plan has reads 0 to {len(self.plan.reads) - 1}"
            )
        if max(self.plan.reads[read]) >= self.written:
            raise UserError(
                f"depth attention: read {read} needs row {max(self.plan.reads[read])}; {self.written} rows are written"
            )
        self.reads.add(read)
        if torch.is_grad_enabled():
            return _Read.apply(token, self, read)
        return self.alive().mix(read).to(self.like.dtype).resize_(self.shape)

    def row(self, token: Tensor, row: int) -> Tensor:
        """A row by itself, [..., d]; its gradients join those that are pulled."""
        if torch.is_grad_enabled():
            return _Row.apply(token, self, row)
        return self.copy(row)

    def copy(self, row: int) -> Tensor:
        found = self.alive().row(row)
        if found is None:
            raise UserError(
                f"depth attention: row {row} of an earlier stream is gone, as nothing was to read it again; go on from "
                f"the newest stream, run with gradients, or build with ConnectionConfig('attnres', kernel='naive')"
            )
        return found.resize_(self.shape)

    # --- backward

    def in_backward(self) -> History:
        """The memory, ready for this backward pass."""
        history = self.alive()
        if torch.is_grad_enabled():
            raise UserError(
                "depth attention: second derivatives do not go through the rows of a pass; build the model with "
                "ConnectionConfig('attnres', kernel='naive')"
            )
        if self.backward_pass != _in_backward():
            self.backward_pass = _in_backward()
            self.arrived, self.above, self.extra = set(), {}, {}
            history.begin_backward()
        return history

    def pull(self, row: int) -> Tensor:
        """The gradient [..., d] of what `write` was given."""
        history = self.in_backward()
        for read in set(self.plan.readers[row]) - self.arrived:
            history.receive_nothing(read)
            self.arrived.add(read)
        gradient = history.pull(row, self.above.pop(row + 1, None), self.extra.pop(row, None))
        if self.plan.joins[row]:
            self.above[row] = gradient
        return gradient.view(self.shape)

    def release(self) -> None:
        """After a backward pass that does not keep its graph."""
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            self.history, self.above, self.extra = None, {}, {}


class _Start(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, queries: Tensor, bank: Bank, eps: float, normed: bool) -> Tensor:
        bank.begin(x, queries, eps, normed)
        ctx.bank, ctx.dtype = bank, queries.dtype
        return bank.like.new_empty(0)

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> tuple[Tensor | None, ...]:
        bank = ctx.bank
        by_row = bank.pull(0)
        by_query = bank.in_backward().query_gradient().to(ctx.dtype)
        bank.release()
        return by_row, by_query, None, None, None


class _Write(Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, update: Tensor, bank: Bank, row: int) -> Tensor:
        bank.put(row, update)
        ctx.bank, ctx.row = bank, row
        return token.new_empty(0)

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> tuple[Tensor | None, ...]:
        return None, ctx.bank.pull(ctx.row), None, None


class _Read(Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, bank: Bank, read: int) -> Tensor:
        exact = bank.alive().mix(read)
        h = exact.to(bank.like.dtype).resize_(bank.shape)  # no view, which nobody could change in place
        ctx.bank, ctx.read = bank, read
        ctx.save_for_backward(h if h.dtype == exact.dtype else exact)
        return h

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (h,) = ctx.saved_tensors
        bank = ctx.bank
        bank.in_backward().receive(ctx.read, bank.flat(gradient), h)
        bank.arrived.add(ctx.read)
        return None, None, None


class _Row(Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, bank: Bank, row: int) -> Tensor:
        ctx.bank, ctx.row = bank, row
        return bank.copy(row)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        bank = ctx.bank
        bank.in_backward()
        known = bank.extra.get(ctx.row)
        flat = bank.flat(gradient).contiguous()
        bank.extra[ctx.row] = flat if known is None else known + flat
        return None, None, None

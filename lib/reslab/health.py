"""Is every residual branch of a model at work? A probe by hooks for any model, the project's own or another's.

A branch is a place where an update f is added to a stream x. Letters: B batch, T tokens, d width. ::

    with ResidualHealth(model) as health:
        for batch in data:
            loss(model, batch).backward()
    print(health.summary())
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from reslab.branches import Branch, known_branches, named_branches, unknown_blocks, what_to_pass
from reslab.probes import effective_rank, token_cosine
from reslab.schema import Settings, UserError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

__all__ = ["COLUMNS", "Fault", "HealthRule", "ResidualHealth", "State"]

State = Literal["healthy", "rewriting", "dead", "overflow", "non-finite"]


class HealthRule(Settings):
    """From a branch's measures to its state. A convention, not a law: set the thresholds for your model.

    The often-told band of healthy ratios, 0.01 to 0.1, has no primary source we could find, so it is not used.
    """

    dead_below: float = Field(default=1e-3, ge=0)
    """A ratio |f| / |x| below it: the branch adds next to nothing to what is there.

    So are the branches after one that is a thousand times too loud: the fault is the first that is rewriting.
    """
    rewriting_above: float = Field(default=1.0, gt=0)
    """A ratio above it: the branch adds more than there was."""
    overflow_above: float = Field(default=0.5, gt=0)
    """A largest value above this fraction of what its dtype can hold."""

    def state(self, *, finite: bool, largest: float, ratio: float) -> State:
        """The first that holds: non-finite, overflow, dead, rewriting; otherwise healthy."""
        if not finite:
            return "non-finite"
        if largest > self.overflow_above:
            return "overflow"
        if ratio < self.dead_below:
            return "dead"
        return "rewriting" if ratio > self.rewriting_above else "healthy"


# --- measures -------------------------------------------------------------------------------------


@dataclass
class _Row:
    """What is known of one branch at one recorded step: plain numbers, nothing of the model."""

    step: int
    name: str
    ratio: float
    update_norm: float
    stream_norm: float
    token_cosine: float
    effective_rank: float
    largest: float
    stream_finite: bool
    finite: bool
    layer: int = 0
    block_influence: float = math.nan
    gradient_norm: float = math.nan


COLUMNS = (
    "step",
    "layer",
    "name",
    "ratio",
    "update_norm",
    "stream_norm",
    "token_cosine",
    "effective_rank",
    "gradient_norm",
    "block_influence",
    "state",
    "finite",
    "largest",
)
"""Columns of `ResidualHealth.table`."""


class _Tokens:
    """A copy of a stream or update in float32 (float64 stays), scaled so that no norm overflows or vanishes."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype = tensor.dtype
        tensor = _wide(tensor)
        low, high = torch.aminmax(tensor)  # both not a number where a value is
        self.largest = float(torch.maximum(-low, high))
        exponent = math.frexp(self.largest)[1] if self.finite else 0
        self.scale = 2.0 ** max(-126, min(exponent, 126))  # a power of two scales without rounding
        self.scaled = tensor / self.scale
        self.norms = torch.linalg.vector_norm(self.scaled, dim=-1)

    @property
    def unscaled(self) -> Tensor:
        return self.scaled * self.scale

    @property
    def norm(self) -> float:
        return self.scale * float(self.norms.mean())

    @property
    def finite(self) -> bool:
        return math.isfinite(self.largest)

    @property
    def share(self) -> float:
        """The largest magnitude relative to what the dtype can hold."""
        return self.largest / torch.finfo(self.dtype).max


def _wide(x: Tensor) -> Tensor:
    return x.detach() if x.dtype in (torch.float32, torch.float64) else x.detach().float()


def _ratio(f: _Tokens, x: _Tokens) -> float:
    """Mean of |f| / |x| over tokens with x != 0, such as all but padding; over none, infinite, or 0 where f is 0."""
    counted = x.norms != 0
    if not counted.any():
        return 0.0 if f.largest == 0 else math.inf
    return float((f.norms[counted] / x.norms[counted]).mean()) * (f.scale / x.scale)


def _block_influence(x: _Tokens, y: _Tokens) -> float:
    """1 - mean cosine between a token before and after, over tokens where neither is zero."""
    counted = (x.norms != 0) & (y.norms != 0)
    dots = (x.scaled * y.scaled).sum(-1)
    return 1 - float((dots[counted] / x.norms[counted] / y.norms[counted]).mean())


def _token_measures(x: _Tokens, sequences: int, tokens_first: bool) -> tuple[float, float]:
    """Token cosine and effective rank, which know no scale; not numbers unless x has axes B, T and d."""
    if x.scaled.ndim != 3 or not x.finite:
        return math.nan, math.nan
    values = x.scaled.transpose(0, 1) if tokens_first else x.scaled
    return token_cosine(values), effective_rank(values[:sequences]) if sequences else math.nan


def _tensor_in(value: Any) -> Tensor | None:
    """The first floating-point tensor of a module's input or output."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        return next((found for found in map(_tensor_in, value) if found is not None), None)
    return None


@dataclass
class _Visit:
    """One passage through a branch, from where the stream is seen on."""

    shape: torch.Size
    x: _Tokens
    """A copy, for the branch may change its input in place."""
    place: int
    """Where its row goes."""
    update: _Tokens | None = None
    """f, until the next stream is seen."""
    row: _Row | None = None


@dataclass
class _Pass:
    """A forward pass while it is recorded."""

    step: int
    rows: list[_Row | None] = field(default_factory=list)
    """One for each time a stream was seen, in order; None until the update is."""
    open: dict[Branch, _Visit] = field(default_factory=dict)


@dataclass(frozen=True)
class Fault:
    """The branch in which values first overflow or are not finite."""

    step: int
    layer: int
    name: str
    state: State
    stream_finite: bool
    """x was finite going in, so that this branch is the origin; otherwise something before it is."""

    def __str__(self) -> str:
        origin = "the stream going in was finite" if self.stream_finite else "the stream going in was so already"
        return f"step {self.step}: {self.name} (layer {self.layer}) is the first that is {self.state}; {origin}"


def _in_backward() -> bool:
    """A backward pass is under way: activation checkpointing computes a forward pass again."""
    return torch._C._current_graph_task_id() != -1


class _Eager:
    """While any is not ended, compiled blocks run uncompiled: what was compiled calls no hook that was set after it."""

    count = 0
    stance: Any = None

    def __init__(self) -> None:
        if not _Eager.count:
            _Eager.stance = torch.compiler.set_stance("force_eager")
        _Eager.count += 1

    def end(self) -> None:
        _Eager.count -= 1
        if not _Eager.count:
            _Eager.stance.__exit__(None, None, None)


def _note_gradient(row: _Row, gradient: Tensor) -> None:
    row.gradient_norm = _Tokens(gradient.detach().reshape(1, -1)).norm


# --- the probe ------------------------------------------------------------------------------------


class ResidualHealth:
    """Measures every residual branch of `model` on every `every`-th forward pass, the first included.

    Measures, each of one branch at one step; x is the stream going in, f the update as it joins
    the stream (a learnt scale included), token norms are over the last
    axis. Means are over all tokens, padding included; ratio and block influence leave out tokens where x is zero.

    - `update_norm`, `stream_norm`: mean token norm of f and of x; `ratio`: mean of |f| / |x|.
    - `token_cosine`, `effective_rank`: of x [B, T, d] as in `reslab.probes`, the latter of the first `sequences`
      sequences; not numbers for a stream of another shape, nor the latter with `sequences` 0.
    - `gradient_norm`: Frobenius norm of the gradient of what `backward` was last called on by f, before a connection
      weighs it; not a number without.
    - `block_influence`: 1 - mean cosine between x and the next stream (Men et al. 2024, ShortGPT, arXiv 2403.03853);
      the next stream is x + f, or the normed sum where a norm follows (Post-LN) or what the connection makes of it.
      Where a connection keeps more than one tensor, x + f stands for it.
    - `largest`: the largest magnitude in x and f (in the block's output, for `branches` by name) relative to what
      its dtype can hold; `finite`: no value there is infinite or not a number.
    - `state`: by `rule`, see `HealthRule`.

    The branches of the blocks in `reslab.branches.RECIPES` are found by themselves. Others are given as `branches`:
    names of modules that take the stream and return it, as "layers.0", or patterns as "layers.*" (a star stays within
    its part of the name); then f is the output less the input. A block that runs twice in a pass has two rows.

    The model's outputs and gradients stay the same bit for bit, with one exception: where nn.TransformerEncoderLayer
    takes its fused inference path (evaluation mode without gradients), that is switched off in passes that are
    recorded, for it hides the stream; outputs then differ by rounding, and at padded positions. Forward passes that
    recompute for activation checkpointing are not counted. A forward pass that fails leaves no record.
    A recorded pass costs some 2 to 7 ms a branch of 64 to 128 tokens and as wide on a CPU core, less than half of it
    for the singular values, which grow with T^2 d: for long sequences raise `every` or set `sequences` to 0.

    A UserError says so when no branch is found, a name matches none, or (in the forward pass, after the probe has
    taken itself off the model) a branch has an update of another shape than its stream.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        branches: str | Sequence[str] | None = None,
        every: int = 20,
        sequences: int = 2,
        rule: HealthRule | None = None,
    ) -> None:
        if every < 1:
            raise UserError(f"every is {every}; give 1 to record each forward pass, or more")
        if not isinstance(model, nn.Module):
            raise UserError(f"model is a {type(model).__name__}; give an nn.Module")
        if getattr(model, "_compiled_call_impl", None) is not None:
            raise UserError(
                f"{type(model).__name__} is compiled as a whole, in place, and hides what happens inside; measure it "
                f"before compile(), or compile its blocks alone"
            )
        if rule is not None and not isinstance(rule, HealthRule):
            raise UserError(f"rule is a {type(rule).__name__}; give a HealthRule, e.g. HealthRule(dead_below=1e-4)")
        if sequences < 0:
            raise UserError(f"sequences is {sequences}; give how many to take effective ranks of, 0 for none")
        self.rule = rule or HealthRule()
        self._model, self._every, self._sequences = model, every, sequences
        if branches is None:
            self._branches = known_branches(model)
            if not self._branches:
                raise UserError(f"{type(model).__name__} has no block that is known; {what_to_pass(model)}")
        else:
            self._branches = named_branches(model, [branches] if isinstance(branches, str) else branches)
        self._unknown = unknown_blocks(model) if branches is None else []
        self._hides_stream = any(isinstance(module, nn.TransformerEncoderLayer) for module in model.modules())
        self._rows: list[_Row] = []
        self._passes = 0
        self._pass: _Pass | None = None
        self._inner: list[RemovableHandle] = []
        self._eager: _Eager | None = None
        self._restore_fast_path = False
        # The order matters: `_finish` is not called when the forward pass fails, `_end` always is.
        self._outer = [
            model.register_forward_pre_hook(self._begin, with_kwargs=True),
            model.register_forward_hook(self._finish),
            model.register_forward_hook(self._end, always_call=True),
        ]

    def __enter__(self) -> "ResidualHealth":
        if not self._outer:
            raise UserError("this probe was removed, and keeps what it recorded; attach a new ResidualHealth(model)")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def remove(self) -> None:
        """Take all hooks off the model. What was recorded stays; a second call does nothing."""
        self._stop()
        for handle in self._outer:
            handle.remove()
        self._outer = []

    # hooks on the model: which passes are recorded

    def _begin(self, model: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        if _in_backward():
            return
        self._stop()  # the pass before was cut short by an interrupt (Ctrl-C), where PyTorch calls no hook
        step = self._passes
        self._passes += 1
        if step % self._every:
            return
        self._pass = _Pass(step)
        if self._hides_stream and torch.backends.mha.get_fastpath_enabled():
            torch.backends.mha.set_fastpath_enabled(False)
            self._restore_fast_path = True
        self._eager = _Eager()
        for branch in self._branches:
            self._watch(branch)
            if branch.stream is model:  # hooks that are added now come too late for this pass
                self._see_stream(branch, model, inputs, named)

    def _watch(self, branch: Branch) -> None:
        see_stream, see_update = partial(self._see_stream, branch), partial(self._see_update, branch)
        self._inner.append(branch.stream.register_forward_pre_hook(see_stream, with_kwargs=True))
        self._inner.append(branch.update.register_forward_hook(see_update))
        if branch.after is not None:
            self._inner.append(branch.after.register_forward_hook(partial(self._see_after, branch)))

    def _finish(self, model: nn.Module, inputs: Any, output: Any) -> None:
        if self._pass is None or _in_backward():
            return
        for branch in self._branches:
            if branch.after is model:  # the hook for it would run after this one
                self._see_after(branch, model, inputs, output)
        rows = [row for row in self._pass.rows if row is not None]
        for layer, row in enumerate(rows):
            row.layer = layer
        self._rows += rows

    def _end(self, *_: Any) -> None:
        if not _in_backward():
            self._stop()

    def _stop(self) -> None:
        """Leave the model as between two recorded passes; what was not finished is forgotten."""
        self._pass = None
        for handle in self._inner:
            handle.remove()
        self._inner = []
        if self._eager is not None:
            self._eager.end()
            self._eager = None
        if self._restore_fast_path:
            torch.backends.mha.set_fastpath_enabled(True)
            self._restore_fast_path = False

    # hooks on the branches, during a recorded pass alone

    @torch.no_grad()
    def _see_stream(self, branch: Branch, module: nn.Module, inputs: Any, named: dict[str, Any]) -> None:
        if self._pass is None or _in_backward():
            return
        x = _tensor_in((inputs, named))
        if x is None:
            raise self._unfit(branch, "its input has no floating-point tensor")
        if x.numel():
            self._pass.open[branch] = _Visit(x.shape, _Tokens(x), len(self._pass.rows))
            self._pass.rows.append(None)

    def _see_update(self, branch: Branch, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._pass is None or _in_backward():
            return
        visit = self._pass.open.get(branch)
        if visit is None or visit.row is not None:
            return
        seen = _tensor_in(output)
        if seen is None:
            raise self._unfit(branch, "its output has no floating-point tensor")
        if seen.shape != visit.shape:
            raise self._unfit(branch, f"its input is {list(visit.shape)} and its output {list(seen.shape)}")
        visit.row = self._pass.rows[visit.place] = self._measure(branch, visit, seen)
        if seen.requires_grad:
            seen.register_hook(partial(_note_gradient, visit.row))
        if branch.whole:
            self._close(branch, visit, seen)
        elif branch.after is None:
            self._close(branch, visit, None)

    @torch.no_grad()
    def _close(self, branch: Branch, visit: _Visit, after: Tensor | None) -> None:
        """The next stream is `after`, or x + f."""
        assert self._pass is not None
        assert visit.row is not None
        assert visit.update is not None
        y = _Tokens(visit.x.unscaled + visit.update.unscaled if after is None else after)
        visit.row.block_influence = _block_influence(visit.x, y)
        del self._pass.open[branch]

    def _see_after(self, branch: Branch, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._pass is None or _in_backward():
            return
        visit = self._pass.open.get(branch)
        if visit is None or visit.row is None:
            return
        plain = isinstance(output, Tensor) and output.shape == visit.shape
        self._close(branch, visit, output if plain else None)

    @torch.no_grad()
    def _measure(self, branch: Branch, visit: _Visit, output: Tensor) -> _Row:
        assert self._pass is not None
        x, seen = visit.x, _Tokens(output if branch.weigh is None else branch.weigh(output))
        f = visit.update = _Tokens(_wide(output) - x.unscaled) if branch.whole else seen
        cosine, rank = _token_measures(x, self._sequences, branch.tokens_first)
        return _Row(
            step=self._pass.step,
            name=branch.name,
            ratio=_ratio(f, x),
            update_norm=f.norm,
            stream_norm=x.norm,
            token_cosine=cosine,
            effective_rank=rank,
            largest=max(x.share, seen.share),
            stream_finite=x.finite,
            finite=x.finite and seen.finite,
        )

    def _unfit(self, branch: Branch, fault: str) -> UserError:
        self.remove()
        what = f"{branch.name} ({type(branch.update).__name__})"
        return UserError(
            f"{what} cannot be measured as a residual branch: {fault}; "
            f"give branches=[...] with modules that return a stream of the shape they take"
        )

    # what was recorded

    def table(self) -> "pd.DataFrame":
        """One row a branch and recorded step, in the order they ran, with the columns `COLUMNS`.

        `step` counts forward passes from 0; `layer` is the branch's place in its pass, from 0. Gradient norms are
        there once `backward` was called.
        """
        import pandas as pd

        rows = [{**vars(row), "state": self._state(row)} for row in self._rows]
        return pd.DataFrame(rows, columns=list(COLUMNS))

    def summary(self) -> str:
        """The latest recorded step in one line: how many branches are in which state, and which are not healthy.

        Also which lists of blocks beside them are not measured.
        """
        rows = self._latest()
        if not rows:
            return f"no forward pass of {type(self._model).__name__} recorded yet"
        states = [self._state(row) for row in rows]
        counts = Counter(states)
        told = []
        for state in ("healthy", "rewriting", "dead", "overflow", "non-finite"):
            if counts[state]:
                names = [_told(row, state) for row, its in zip(rows, states, strict=True) if its == state]
                listed = "" if state == "healthy" else f" ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
                told.append(f"{counts[state]} {state}{listed}")
        noun = "branch" if len(rows) == 1 else "branches"
        unknown = f"; not measured, for the block is not known: {', '.join(self._unknown)}" if self._unknown else ""
        return f"{len(rows)} {noun} at step {rows[0].step}: {', '.join(told)}{unknown}"

    def first_fault(self) -> Fault | None:
        """The first branch, in forward order, of the first recorded step that has overflow or non-finite values."""
        for row in self._rows:
            if (state := self._state(row)) in ("overflow", "non-finite"):
                return Fault(row.step, row.layer, row.name, state, row.stream_finite)
        return None

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Ratio by layer on a log axis, a line a recorded step and sort of branch, dark to light over the steps.

        The rule's thresholds are dashed; sorts (attention, mlp, ...) differ by their markers.
        Ratios under a tenth of `dead_below` are drawn there; those that are not finite are gaps. Layers that had
        overflow or values that are not finite, at any step, are crossed.
        """
        from reslab import plotting

        if ax is not None:
            return self._draw(ax)
        with plotting.figure(1, 1) as (_, axes):
            return self._draw(axes[0])

    def _draw(self, ax: "Axes") -> "Axes":
        import seaborn as sns
        from matplotlib.ticker import MaxNLocator

        from reslab import plotting

        steps = sorted({row.step for row in self._rows})
        sorts = dict(zip(dict.fromkeys(_sort(row.name) for row in self._rows), cycle("os^v"), strict=False))
        labelled = {steps[round(i * (len(steps) - 1) / 4)] for i in range(5)} if steps else set()
        for step, colour in zip(steps, sns.color_palette("cividis", len(steps)), strict=True):
            for sort, marker in sorts.items():
                rows = [row for row in self._rows if row.step == step and _sort(row.name) == sort]
                label = f"step {step}" if step in labelled and sort == next(iter(sorts)) else None
                heights = [self._height(row) for row in rows]
                ax.plot([row.layer for row in rows], heights, color=colour, marker=marker, markersize=4, label=label)
        faults = {row.layer for row in self._rows if self._state(row) in ("overflow", "non-finite")}
        if faults:
            height = [self.rule.rewriting_above] * len(faults)
            ax.plot(sorted(faults), height, "x", color=plotting.COLOURS["no skip"], label="overflow or not finite")
        if self._rows:
            ax.set_xlim(-0.5, max(row.layer for row in self._rows) + 0.5)
        for sort, marker in sorts.items() if len(sorts) > 1 else ():
            ax.plot([], [], color=plotting.COLOURS["control"], linestyle="", marker=marker, label=sort)
        for limit, name in ((self.rule.dead_below, "dead below"), (self.rule.rewriting_above, "rewriting above")):
            ax.axhline(limit, color=plotting.COLOURS["control"], linestyle="--", linewidth=1)
            ax.annotate(name, (1, limit), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8)
        ax.set(yscale="log", xlabel="layer", ylabel="|update| / |stream|", title="Residual branches")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        if steps:
            ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
        return ax

    def _height(self, row: _Row) -> float:
        return max(row.ratio, self.rule.dead_below / 10) if math.isfinite(row.ratio) else math.nan

    def _latest(self) -> list[_Row]:
        return [row for row in self._rows if row.step == self._rows[-1].step]

    def _state(self, row: _Row) -> State:
        return self.rule.state(finite=row.finite, largest=row.largest, ratio=row.ratio)


def _sort(name: str) -> str:
    """What a branch is, such as attention or mlp: its name without the layer it belongs to."""
    last = name.rpartition(".")[2]
    return "" if last.isdigit() else last


def _told(row: _Row, state: State) -> str:
    """The branch's name with the number that put it in its state."""
    if state == "non-finite":
        return row.name
    return f"{row.name} {row.largest:.2g} of its dtype" if state == "overflow" else f"{row.name} {row.ratio:.3g}"

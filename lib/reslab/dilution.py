"""What a layer reads, taken apart by where it comes from: how much is left of the embedding and of each earlier layer.

What a sublayer or the head reads is a sum of parts, x = sum_i c_i, one from each source before it: i = 0 the embedding
u_0, i = 1 ... S the sublayers' updates u_i. The parts are exact, trained or not:

- a stream that updates are added to: c_i = u_i, alike in all reads (equal weights);
- a norm on the stream (Post-LN): given what it divides by, a norm is linear, so that each part goes through it as
  g (c_i - mean c_i) / std(x); its bias is a part of no source;
- attention over depth (Full): c_i = a_i u_i with the read's own weights a_i of each token.

Letters: S sublayers, L = S/2 blocks of two, d width, E the mean over tokens. The share of a source in a read is
E|c_i|^2 / E|x|^2. At initial weights updates are at right angles to each other on average, and shares sum to 1; in a
trained model parts may cancel or reinforce each other, and they sum to something else.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from reslab.depth_weights import token_weights
from reslab.probes import evaluating, outputs_of, stacks, streams
from reslab.residuals import Add, AttnRes, Residual, Stack
from reslab.schema import UserError

__all__ = ["Dilution", "dilution", "part_behind_norm"]

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Dilution:
    """Mean squares (over tokens and channels) of what is read and put out in a model of S sublayers, two a block."""

    reads: Values
    """E|x|^2 / d of what each sublayer and, last, the head reads; S + 1 values."""
    outputs: Values
    """E|u|^2 / d of each sublayer's update as it joins the stream; S values."""
    parts: Values
    """[S + 1 reads, S + 1 sources] E|c|^2 / d of each source's part; not a number where the source comes later."""
    unexplained: float
    """|x - sum of all parts| / |x| of what the head reads: rounding, if all is well."""

    def share(self, *sources: int) -> Values:
        """Summed share of these sources (0 the embedding) in each of the S + 1 reads; NaN where one comes later."""
        shares: Values = self.parts[:, list(sources)].sum(1) / self.reads
        return shares

    @property
    def block_reads(self) -> Values:
        """rms of what each block's first sublayer and the head read, L + 1 values."""
        return np.sqrt(self.reads[::2])

    @property
    def block_outputs(self) -> Values:
        """rms of the two updates of each block, the square root of the sum of their mean squares; L values."""
        return np.sqrt(self.outputs[::2] + self.outputs[1::2])

    @property
    def ratios(self) -> Values:
        """By block, what it puts out over what it reads; L values."""
        return self.block_outputs / self.block_reads[:-1]

    @property
    def growth(self) -> float:
        """Mean square of what the head reads over that of what the first sublayer reads."""
        return float(self.reads[-1] / self.reads[0])

    @property
    def embedding_left(self) -> float:
        """Mean square of the embedding's part at the head over that at the first sublayer."""
        return float(self.parts[-1, 0] / self.parts[0, 0])


def dilution(model: nn.Module, inputs: Tensor | tuple[Tensor, ...]) -> Dilution:
    """Takes apart what each sublayer of `model` reads of `inputs`, without gradients; the model stays as it is.

    A UserError unless it is a model of this package with one stack of two sublayers a block, whose connection adds
    (`add` and what derives from it) with a norm before the sublayer, on the stream (`post`) or nowhere, or is `attnres`
    in its Full form with one head.
    """
    stack = _known_stack(model)
    sublayers = stack.sublayers()
    head = model.get_submodule("norm")
    with (
        torch.no_grad(),
        evaluating(model),
        streams([*(sublayer.norm_input for sublayer in sublayers), head]) as reads,
        streams([stack.norm_start, *(sublayer.norm_update for sublayer in sublayers)]) as put_out,
        streams([sublayer.norm_output for sublayer in sublayers]) as sums,
    ):
        outputs_of(model, inputs)
    with torch.no_grad():
        weighed = [s.connection.weigh(update) for s, update in zip(sublayers, put_out[1:], strict=True)]
        sources = [put_out[0], *weighed]
        table = np.full((len(reads), len(sources)), np.nan)
        last: list[Tensor] = []
        rest = torch.zeros_like(reads[-1])
        for number, (parts, without_source) in enumerate(_parts(model, inputs, sublayers, sources, sums)):
            table[number, : len(parts)] = [_mean_square(part) for part in parts]
            last, rest = parts, without_source
        difference = reads[-1] - sum(last, start=rest)
    return Dilution(
        reads=np.array([_mean_square(read) for read in reads]),
        outputs=np.array([_mean_square(source) for source in sources[1:]]),
        parts=table,
        unexplained=float(difference.double().norm() / reads[-1].double().norm()),
    )


def _mean_square(x: Tensor) -> float:
    return float(x.double().square().mean())


def _known_stack(model: nn.Module) -> Stack:
    """The model's stack, if its reads can be taken apart."""
    found = stacks(model)
    if len(found) == 1 and len(found[0].sublayers()) == 2 * len(found[0].blocks):
        stack = found[0]
        fits = isinstance(stack.norm_start, nn.Identity) and all(map(_known, stack.sublayers()))
        if fits:
            return stack
    raise UserError(
        "what is read can be taken apart in a model of one stack, two sublayers a block, with placement pre, post or "
        "none and a connection that adds, or with 'attnres' in its Full form; give such a model"
    )


def _known(sublayer: Residual) -> bool:
    connection = sublayer.connection
    if isinstance(connection, AttnRes):
        options = connection.options
        whole = options.window is None and options.value_rank is None
        return options.block == options.stride == options.heads == 1 and whole
    on_stream = isinstance(sublayer.norm_output, nn.Identity | nn.LayerNorm | nn.RMSNorm)
    return (
        isinstance(connection, Add)
        and on_stream
        and isinstance(sublayer.norm_update, nn.Identity)
        and sublayer.skip_scale == 1
    )


def _parts(
    model: nn.Module,
    inputs: Tensor | tuple[Tensor, ...],
    sublayers: Sequence[Residual],
    sources: Sequence[Tensor],
    sums: Sequence[Tensor],
) -> Iterator[tuple[list[Tensor], Tensor]]:
    """By read, the part of each source before it, and what comes from no source (the biases of norms)."""
    none = torch.zeros_like(sources[0])
    if isinstance(sublayers[0].connection, AttnRes):
        for weights in token_weights(model, inputs):
            yield [weight * source for weight, source in zip(weights, sources[: len(weights)], strict=True)], none
        return
    parts = [sources[0]]
    yield parts, none
    for sublayer, source, total in zip(sublayers, sources[1:], sums, strict=True):
        norm = sublayer.norm_output
        parts = [part_behind_norm(norm, total, part) for part in (*parts, source)]
        none = part_behind_norm(norm, total, none)
        if isinstance(norm, nn.LayerNorm) and norm.bias is not None:
            none = none + norm.bias
        yield parts, none


def part_behind_norm(norm: nn.Module, total: Tensor, part: Tensor) -> Tensor:
    """What becomes of `part` of `total`, both [..., d], behind a norm on `total`, without the norm's bias.

    g (part - mean part) / sqrt(var(total) + eps) for a LayerNorm, g part / sqrt(E total^2 + eps) for an RMSNorm, and
    `part` itself for an Identity. Parts that sum to the total sum to what the norm puts out, less its bias.
    """
    if isinstance(norm, nn.LayerNorm):
        scale = total.var(-1, correction=0, keepdim=True).add(norm.eps).rsqrt()
        part = part - part.mean(-1, keepdim=True)
    elif isinstance(norm, nn.RMSNorm):
        eps = torch.finfo(total.dtype).eps if norm.eps is None else norm.eps
        scale = total.square().mean(-1, keepdim=True).add(eps).rsqrt()
    else:
        return part
    return part * scale if norm.weight is None else part * scale * norm.weight

"""The logit lens: the next-token prediction that a model would make if it stopped at a layer.

nostalgebraist 2020, "interpreting GPT: the logit lens"; Belrose et al. 2023, arXiv 2303.08112, who call what is
measured here the plain logit lens and find its prediction to be biased in early layers.

Letters: B batch, T tokens, d width, V vocabulary, P places at which the stream is seen.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from reslab.probes import evaluating
from reslab.schema import UserError

__all__ = ["lens_divergence", "logit_lens"]


def logit_lens(
    model: nn.Module,
    places: Iterable[nn.Module],
    norm: nn.Module,
    head: Callable[[Tensor], Tensor],
    *inputs: Any,
    **options: Any,
) -> Tensor:
    """Logits [P, B, T, V] of `model(*inputs, **options)` at the input of each of `places` and, last, of `norm`.

    `places` are modules whose first input is the stream [B, T, d]: the blocks of most models. With all L blocks there
    are P = L + 1 places: after the embedding, and after every block. `norm` is the norm between the last block and
    `head`. It is computed anew at each place, with the statistics of the stream there. For GPT-2
    `model.transformer.h, model.transformer.ln_f, model.lm_head`; for a `Decoder` of whatever connection
    `model.stack.block_inputs(), model.norm, model.head`, where the stream is what each block's first sublayer reads.
    Where a model changes its logits after the head (a cap, a factor), `head` is a function that does so too.

    Computed in evaluation mode and without gradient; modes, hooks and gradients are afterwards as before, also after
    an exception. All logits are held at once: P B T V numbers.

    A UserError when a place is not run exactly once or its input is no tensor, and when the last place's logits are
    not those that the model gives (a tensor, or its output's `logits`).
    """
    at_inputs = [*places, norm]
    with torch.no_grad(), evaluating(model):
        with _first_inputs(at_inputs) as seen:
            output = model(*inputs, **options)
        streams = [_stream(place, module, at) for at, (module, place) in enumerate(zip(at_inputs, seen, strict=True))]
        # Some models keep the stream in a higher precision than their last norm and head.
        logits = torch.stack([head(norm(stream.to(streams[-1].dtype))) for stream in streams])
    _check_last(logits[-1], getattr(output, "logits", output))
    return logits


def lens_divergence(logits: Tensor) -> list[float]:
    """KL(last || place) in nats for each place of `logits` [P, B, T, V], mean over tokens; the last is 0.

    At least in float32, whatever the model's precision. With log-probabilities of -inf it is not a number.
    """
    precise = torch.promote_types(logits.dtype, torch.float32)
    # Place by place, so that only one copy in the higher precision is held.
    last = F.log_softmax(logits[-1], dim=-1, dtype=precise)
    places = (F.log_softmax(place, dim=-1, dtype=precise) for place in logits)
    return [float(F.kl_div(place, last, reduction="none", log_target=True).sum(-1).mean()) for place in places]


@contextmanager
def _first_inputs(modules: Sequence[nn.Module]) -> Iterator[list[list[Any]]]:
    """For each of `modules` the first inputs it was called with; a tensor is copied, as it may be changed in place."""
    seen: list[list[Any]] = [[] for _ in modules]

    def keep_in(place: list[Any]) -> Callable[..., None]:
        def keep(module: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
            first = next(iter([*inputs, *options.values()]), None)
            place.append(first.clone() if isinstance(first, Tensor) else first)

        return keep

    with ExitStack() as on_exit:
        for module, place in zip(modules, seen, strict=True):
            on_exit.callback(module.register_forward_pre_hook(keep_in(place), with_kwargs=True).remove)
        on_exit.enter_context(torch.compiler.set_stance("force_eager"))  # compiled code calls no hook set after it
        yield seen


def _stream(place: list[Any], module: nn.Module, at: int) -> Tensor:
    where = f"logit_lens: place {at} ({type(module).__name__})"
    if len(place) != 1:
        raise UserError(f"{where} ran {len(place)} times; give modules that run once in a forward pass")
    if not isinstance(place[0], Tensor):
        raise UserError(
            f"{where} has a {type(place[0]).__name__} as its first input, not a tensor;"
            " give a module whose input is the stream, such as the first norm in the block (stack.block_inputs())"
        )
    return place[0]


def _check_last(last: Tensor, own: Any) -> None:
    if isinstance(own, Tensor) and own.shape == last.shape:
        scale = float(own.abs().nan_to_num().max())
        if torch.allclose(last, own.to(last.dtype), rtol=1e-3, atol=1e-3 * scale, equal_nan=True):
            return
    raise UserError(
        "logit_lens: what norm and head make of the last place is not what the model returns;"
        " give the model's final norm and its head, with whatever it does to the logits afterwards"
    )

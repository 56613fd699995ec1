"""Layers skipped, swapped or repeated in a trained model, without touching a weight.

What happens to a residual network when a layer is missing or runs at another depth: Veit et al. 2016
(arXiv 1605.06431) delete and reorder blocks of ResNets; Lad et al. 2024 (arXiv 2406.19384) and Sun et al. 2024
(arXiv 2407.09298) skip, swap, reorder and repeat the layers of language models.

For any model that runs the blocks of an `nn.ModuleList` or `nn.Sequential` one after the other, among them
`model.blocks` of a `Decoder`, `model.transformer.h` of GPT-2 and `model.model.layers` of Llama:

    with skipped(model.blocks, {3, 7}):
        loss = F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())

Letter: L blocks. Blocks are counted from 0, in the order in which the container has them on entry.

Where a connection has weights for each earlier output, it decides itself which is whose in the new arrangement.

A block at another depth than its own is a stand-in: another module with the very same parameters and buffers (so
training in the context trains the model), with a copy of the attributes, and with the hooks that the block had on
entry. What is later set on a stand-in (a mode, a hook) goes with it when the context ends; so call `eval()` outside.

Hugging Face's blocks know their slot in the key-value cache, and its models read the number and types of their layers
from their config: both are kept in step, so that generation with and without cache agree. A cache from outside the
context does not fit inside. Call such a model with `output_hidden_states=True` once before the context, if ever: it
sets its hooks for this at the first such call, on the blocks it has then.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from numbers import Integral
from typing import Any

from torch import nn

from reslab.schema import UserError

__all__ = ["Blocks", "arranged", "repeated", "skipped", "swapped"]

Blocks = nn.ModuleList | nn.Sequential

_POSITION = re.compile(r"layer_(idx|id|index)$")
"""Names of the attributes by which a module finds its slot in the cache."""


@contextmanager
def arranged(blocks: Blocks, order: Sequence[int]) -> Iterator[None]:
    """Within the context `blocks` holds the blocks `order[0]`, `order[1]`, ...; one may be missing or repeated.

    Afterwards, also after an exception, it holds the same modules as before, none of them changed. Contexts nest: the
    inner one counts the blocks as the outer one has arranged them.

    A UserError for an empty order, for an index that is no integer in 0 .. L - 1, and for blocks that this module does
    not know how to keep in step: an encoder-decoder of Hugging Face, layers that read the cache of another layer, a
    config that is out of reach or counts other layers, a block whose `forward` was replaced.
    """
    _check(blocks, order)
    held, originals = blocks._modules, list(blocks)
    _check_positions(blocks)
    configs = _configs(blocks)
    modules = [originals[i] if i == at else _stand_in(originals[i], i, at) for at, i in enumerate(order)]
    with ExitStack() as on_exit:
        on_exit.callback(setattr, blocks, "_modules", held)
        blocks._modules = {str(at): module for at, module in enumerate(modules)}
        for config in configs:
            for name, value in _arranged_entries(config, order).items():
                on_exit.callback(setattr, config, name, getattr(config, name))
                setattr(config, name, value)
        yield


@contextmanager
def skipped(blocks: Blocks, which: int | Collection[int]) -> Iterator[None]:
    """The block or blocks `which` do not run: the stream passes them unchanged. Errors: see `arranged`."""
    if not isinstance(which, Integral | Collection):
        raise UserError(f"skipped: which is a {type(which).__name__}; give a block's number, or a set of them")
    gone = list(which) if isinstance(which, Collection) else [which]
    if gone:
        _check(blocks, gone)
    with arranged(blocks, [i for i in range(len(blocks)) if i not in gone]):
        yield


@contextmanager
def swapped(blocks: Blocks, first: int, second: int) -> Iterator[None]:
    """The blocks `first` and `second` run in each other's place. Errors: see `arranged`; a swap with itself."""
    _check(blocks, [first, second])
    if first == second:
        raise UserError(f"swapped: block {first} is to be swapped with itself; give two different blocks")
    order = list(range(len(blocks)))
    order[first], order[second] = second, first
    with arranged(blocks, order):
        yield


@contextmanager
def repeated(blocks: Blocks, index: int, times: int = 2) -> Iterator[None]:
    """The block `index` runs `times` times in a row, all in all. Errors: see `arranged`; `times` below 1."""
    _check(blocks, [index])
    if not _is_whole(times):
        raise UserError(f"repeated: times is {times!r}; give a whole number, at least 1")
    if times < 1:
        raise UserError(f"repeated: times is {times}, must be at least 1; use skipped() to leave a block out")
    with arranged(blocks, [i for i in range(len(blocks)) for _ in range(times if i == index else 1)]):
        yield


def _check(blocks: Blocks, order: Sequence[int]) -> None:
    if not isinstance(blocks, nn.ModuleList | nn.Sequential):
        raise UserError(
            f"blocks is a {type(blocks).__name__}; give the model's own nn.ModuleList or nn.Sequential of them"
        )
    if not isinstance(order, Sequence):
        raise UserError(f"arranged: order is a {type(order).__name__}; give a list of blocks' numbers, such as [0, 2]")
    if not order:
        raise UserError("arranged: no block is left to run; keep at least one")
    for i in order:
        if not _is_whole(i):
            raise UserError(f"{i!r} ({type(i).__name__}) is no block's number; give a whole one, counted from 0")
        if not 0 <= i < len(blocks):
            raise UserError(f"there is no block {i} among {len(blocks)} blocks; count from 0 to {len(blocks) - 1}")


def _is_whole(number: Any) -> bool:
    """An integer, also one of NumPy's; True and False are none."""
    return isinstance(number, Integral) and not isinstance(number, bool)


def _stand_in(block: nn.Module, old: int, new: int) -> nn.Module:
    """A module with the parameters and buffers of `block`, which is at `old`, that takes itself to be at `new`."""
    copies: dict[nn.Module, nn.Module] = {}

    def copy(module: nn.Module) -> nn.Module:
        if module in copies:
            return copies[module]
        state = vars(module).copy()
        if "forward" in state:
            raise UserError(
                f"block {old}: the forward of its {type(module).__name__} was replaced on the object, so that a"
                " stand-in would run the original; undo that (or use a hook) before the blocks are arranged"
            )
        copies[module] = stand_in = type(module).__new__(type(module))
        # Hooks are copied, as one that is set on one of two repeats must not run for both.
        state |= {name: value.copy() for name, value in state.items() if "_hooks" in name and isinstance(value, dict)}
        state["_compiled_call_impl"] = None  # what `module.compile()` made runs the original
        state |= dict.fromkeys(_positions(module), new)
        state["_modules"] = {name: child and copy(child) for name, child in module._modules.items()}
        stand_in.__dict__.update(state)  # past nn.Module's __setattr__, which would need its __init__
        return stand_in

    return copy(block)


def _positions(module: nn.Module) -> list[str]:
    return [name for name, value in vars(module).items() if _POSITION.search(name) and type(value) is int]


def _check_positions(blocks: Blocks) -> None:
    for i, block in enumerate(blocks):
        for module in block.modules():
            for name in _positions(module):
                if getattr(module, name) != i:
                    raise UserError(
                        f"block {i}: the {name} of its {type(module).__name__} is {getattr(module, name)}, another"
                        " layer; only blocks that number themselves by their place in the model can be arranged"
                    )


def _configs(blocks: Blocks) -> list[Any]:
    """The Hugging Face configs that say how many layers the model runs; the model and its blocks share the object."""
    found = [vars(module).get("config") for module in blocks.modules()]
    configs: list[Any] = list({id(c): c for c in found if hasattr(c, "num_hidden_layers")}.values())
    for config in configs:
        name = type(config).__name__
        if getattr(config, "is_encoder_decoder", False):
            raise UserError(f"{name}: an encoder-decoder, whose two stacks share a config; arrange decoders only")
        if config.num_hidden_layers != len(blocks):
            raise UserError(
                f"{name}: num_hidden_layers is {config.num_hidden_layers}, but there are {len(blocks)} blocks;"
                " set it to the number of blocks that the model runs, and arrange all of them"
            )
    if not configs and any(_positions(module) for module in blocks.modules()):
        raise UserError(
            f"the blocks ({type(next(iter(blocks))).__name__}) number themselves for a cache, but have no config by"
            " which the model's number of layers could be kept in step; arrange a model whose blocks hold their config"
        )
    return configs


def _arranged_entries(config: Any, order: Sequence[int]) -> dict[str, Any]:
    """The number of layers, and what the config lists layer by layer (`layer_types`), in the new order."""
    entries: dict[str, Any] = {
        name: type(value)(value[i] for i in order)
        for name, value in vars(config).items()
        if "layer" in name and isinstance(value, list | tuple) and len(value) == config.num_hidden_layers
    }
    return entries | {"num_hidden_layers": len(order)}

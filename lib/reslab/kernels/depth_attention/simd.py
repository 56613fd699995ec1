"""Vectors of eight numbers for Numba kernels: loads and stores in any float format, sums, exponentials.

Kernels get memory as addresses and a `tag`, a scalar whose type names the format (`tag_of`): float32, float64, and for
bfloat16 and float16, which NumPy or Numba lack, uint16 and int16. Arithmetic is in float32, or float64 for float64.
"""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core.datamodel import models
from numba.core.extending import register_model
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin

__all__ = [
    "FAST", "LANES", "alive", "exp", "first", "fma", "integer", "integers", "jump", "load", "load_one", "load_part",
    "maximum", "minus", "prefetch", "real", "settle", "splat", "store", "store_one", "store_part", "stream",
    "tag_of", "total", "totals",
]  # fmt: skip

LANES = 8

FAST = {"reassoc", "contract", "arcp", "nsz"}
"""All that lets sums be reordered, and nothing that assumes away infinities."""

_TAGS = {torch.float32: np.float32, torch.float64: np.float64, torch.bfloat16: np.uint16, torch.float16: np.int16}


def tag_of(dtype: torch.dtype) -> Any:
    """The scalar that stands for a tensor's format."""
    return _TAGS[dtype](0)


class _Vector(types.Type):
    """Eight float32 or float64."""

    def __init__(self, element: Any) -> None:
        self.element = element
        super().__init__(name=f"vector8({element})")


@register_model(_Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _llvm(kind.element))


def _number(element: Any) -> Any:
    return ir.DoubleType() if element == types.float64 else ir.FloatType()


def _llvm(element: Any) -> Any:
    return ir.VectorType(_number(element), LANES)


_VECTORS = {element: _Vector(element) for element in (types.float32, types.float64)}
_FLAGS = tuple(sorted(FAST))
_IN_ORDER = ("nsz",)
"""For what is rounded where it stands. Numba gives all it may to operations that have no flag."""

_INT = ir.IntType(32)


def _wide(tag: Any) -> Any:
    """The vector type that memory of this format is read as."""
    return _VECTORS[types.float64 if tag == types.float64 else types.float32]


def _memory(tag: Any) -> Any:
    """What lies in memory."""
    return {types.uint16: ir.IntType(16), types.int16: ir.HalfType()}.get(tag) or _number(tag)


def _bytes(tag: Any) -> int:
    return int(tag.bitwidth) // 8


def _pointer(builder: Any, address: Any, offset: Any, tag: Any, pointee: Any) -> Any:
    size = ir.Constant(offset.type, _bytes(tag))
    return builder.inttoptr(builder.add(address, builder.mul(offset, size)), pointee.as_pointer())


def _widened(builder: Any, raw: Any, tag: Any) -> Any:
    """Bits of a format to float32: bfloat16 are the upper half of one."""
    if tag == types.uint16:
        integers = ir.VectorType(_INT, LANES)
        shifted = builder.shl(builder.zext(raw, integers), ir.Constant(integers, [16] * LANES))
        return builder.bitcast(shifted, _llvm(types.float32))
    return builder.fpext(raw, _llvm(types.float32)) if tag == types.int16 else raw


def _narrowed(builder: Any, value: Any, tag: Any) -> Any:
    """Rounded to nearest, ties to even; NaN stays NaN."""
    if tag == types.int16:
        return builder.fptrunc(value, ir.VectorType(ir.HalfType(), LANES))
    if tag != types.uint16:
        return value
    integers = ir.VectorType(_INT, LANES)

    def constant(number: int) -> Any:
        return ir.Constant(integers, [number] * LANES)

    bits = builder.bitcast(value, integers)
    odd = builder.and_(builder.lshr(bits, constant(16)), constant(1))
    rounded = builder.add(bits, builder.add(odd, constant(0x7FFF)))
    nan = builder.fcmp_unordered("uno", value, value)
    chosen = builder.select(nan, constant(0x7FC00000), rounded)
    return builder.trunc(builder.lshr(chosen, constant(16)), ir.VectorType(ir.IntType(16), LANES))


def _mask(builder: Any, count: Any) -> Any:
    """Lanes below `count`."""
    few = builder.trunc(count, _INT)  # narrow lanes compare faster
    return builder.icmp_signed(
        "<", ir.Constant(ir.VectorType(_INT, LANES), list(range(LANES))), _splatted(builder, few)
    )


def _splatted(builder: Any, number: Any) -> Any:
    kind = ir.VectorType(number.type, LANES)
    start = builder.insert_element(ir.Constant(kind, ir.Undefined), number, ir.Constant(_INT, 0))
    lanes = ir.Constant(ir.VectorType(_INT, LANES), [0] * LANES)
    return builder.shuffle_vector(start, ir.Constant(kind, ir.Undefined), lanes)


def _call(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    module = builder.module
    function = module.globals.get(name) or ir.Function(module, kind, name)
    return builder.call(function, arguments)


def _suffix(kind: Any) -> str:
    return f"v{LANES}" + {"float": "f32", "double": "f64", "half": "f16", "i16": "i16"}[str(kind.element)]


# --- memory ---------------------------------------------------------------------------------------


@intrinsic
def load(typing: Any, address: Any, offset: Any, tag: Any) -> Any:
    """Eight numbers, `offset` numbers behind `address`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.VectorType(_memory(tag), LANES)
        pointer = _pointer(builder, arguments[0], arguments[1], tag, kind)
        return _widened(builder, builder.load(pointer, align=_bytes(tag)), tag)

    return _wide(tag)(types.int64, types.int64, tag), generate


@intrinsic
def load_one(typing: Any, address: Any, offset: Any, tag: Any) -> Any:
    """One number, of float32 or float64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(_pointer(builder, arguments[0], arguments[1], tag, _number(tag)), align=_bytes(tag))

    return _wide(tag).element(types.int64, types.int64, tag), generate


@intrinsic
def integer(typing: Any, address: Any, index: Any) -> Any:
    """One of the int64 numbers at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, index = arguments
        return builder.load(_pointer(builder, address, index, types.int64, ir.IntType(64)), align=8)

    return types.int64(types.int64, types.int64), generate


@intrinsic(prefer_literal=True)
def integers(typing: Any, address: Any, count: Any) -> Any:
    """The first `count` of the int64 numbers at an address, as a tuple."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        places = [builder.gep(pointer, [ir.Constant(ir.IntType(64), k)]) for k in range(count.literal_value)]
        return context.make_tuple(builder, signature.return_type, [builder.load(place) for place in places])

    return types.UniTuple(types.int64, count.literal_value)(types.int64, count), generate


@intrinsic
def real(typing: Any, number: Any, tag: Any) -> Any:
    """An int64 as the number that arithmetic is in."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.sitofp(arguments[0], _number(tag))

    return _wide(tag).element(types.int64, tag), generate


@intrinsic
def store_one(typing: Any, address: Any, offset: Any, value: Any, tag: Any) -> Any:
    """One number to memory, of float32 or float64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = _pointer(builder, arguments[0], arguments[1], tag, _number(tag))
        builder.store(arguments[2], pointer, align=_bytes(tag))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, _wide(tag).element, tag), generate


@intrinsic
def jump(typing: Any, kernel: Any, arguments: Any, start: Any, stop: Any) -> Any:
    """Call what was compiled at an address."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 3)
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), values[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@intrinsic
def alive(typing: Any, array: Any) -> Any:
    """Keeps an array until here. A kernel that goes on with its address alone would go on with freed memory."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return context.get_dummy_value()

    return types.void(array), generate


@intrinsic
def prefetch(typing: Any, address: Any, offset: Any, tag: Any) -> Any:
    """Begin to bring memory to the cache; of no consequence where it is not there."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = _pointer(builder, arguments[0], arguments[1], tag, _memory(tag))
        anything = builder.bitcast(pointer, ir.IntType(8).as_pointer())
        read, keep, data = (ir.Constant(_INT, number) for number in (0, 2, 1))
        _call(builder, "llvm.prefetch.p0", ir.VoidType(), [anything, read, keep, data])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, tag), generate


@intrinsic
def load_part(typing: Any, address: Any, offset: Any, count: Any, tag: Any) -> Any:
    """As `load`, of the first `count` only; the others are 0."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.VectorType(_memory(tag), LANES)
        pointer = _pointer(builder, arguments[0], arguments[1], tag, kind)
        align = ir.Constant(_INT, _bytes(tag))
        zeros = ir.Constant(kind, None)
        raw = _call(
            builder,
            f"llvm.masked.load.{_suffix(kind)}.p0",
            kind,
            [pointer, align, _mask(builder, arguments[2]), zeros],
        )
        return _widened(builder, raw, tag)

    return _wide(tag)(types.int64, types.int64, types.int64, tag), generate


@intrinsic
def store(typing: Any, address: Any, offset: Any, value: Any, tag: Any) -> Any:
    """Eight numbers to memory, rounded to its format."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        raw = _narrowed(builder, arguments[2], tag)
        builder.store(raw, _pointer(builder, arguments[0], arguments[1], tag, raw.type), align=_bytes(tag))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, value, tag), generate


@intrinsic
def stream(typing: Any, address: Any, offset: Any, value: Any, tag: Any) -> Any:
    """As `store`, to whole vectors of memory that are not read again soon: past the caches."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        raw = _narrowed(builder, arguments[2], tag)
        pointer = _pointer(builder, arguments[0], arguments[1], tag, raw.type)
        instruction = builder.store(raw, pointer, align=LANES * _bytes(tag))
        instruction.set_metadata("nontemporal", builder.module.add_metadata([_INT(1)]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, value, tag), generate


@intrinsic
def settle(typing: Any) -> Any:
    """What `stream` has written is there for all threads."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def store_part(typing: Any, address: Any, offset: Any, count: Any, value: Any, tag: Any) -> Any:
    """The first `count` of eight numbers to memory."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        raw = _narrowed(builder, arguments[3], tag)
        pointer = _pointer(builder, arguments[0], arguments[1], tag, raw.type)
        align = ir.Constant(_INT, _bytes(tag))
        name = f"llvm.masked.store.{_suffix(raw.type)}.p0"
        _call(builder, name, ir.VoidType(), [raw, pointer, align, _mask(builder, arguments[2])])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, value, tag), generate


# --- arithmetic -----------------------------------------------------------------------------------


@intrinsic
def splat(typing: Any, number: Any) -> Any:
    """Eight times the same."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _splatted(builder, arguments[0])

    return _VECTORS[number](number), generate


@intrinsic
def first(typing: Any, value: Any, count: Any) -> Any:
    """The first `count` lanes as they are, 0 in the others, whatever they hold."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.select(_mask(builder, arguments[1]), arguments[0], ir.Constant(arguments[0].type, None))

    return value(value, types.int64), generate


@intrinsic
def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a b + c, of vectors."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        product = builder.fmul(arguments[0], arguments[1], flags=_FLAGS)
        return builder.fadd(product, arguments[2], flags=_FLAGS)

    return a(a, a, a), generate


@intrinsic
def minus(typing: Any, a: Any, b: Any) -> Any:
    """a - b, in this order and rounded here; a product in a is rounded before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fsub(*arguments, flags=_IN_ORDER)

    return a(a, a), generate


@intrinsic
def maximum(typing: Any, a: Any, b: Any) -> Any:
    """Lane by lane."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        larger = builder.fcmp_ordered(">", arguments[0], arguments[1])
        return builder.select(larger, arguments[0], arguments[1])

    return a(a, a), generate


@intrinsic
def total(typing: Any, value: Any) -> Any:
    """The sum of the eight."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _summed(builder, arguments[0])

    return value.element(value), generate


def _summed(builder: Any, value: Any) -> Any:
    """Neighbours are added, and their sums again, as in `totals`: the order does not depend on the machine."""
    for width in (4, 2, 1):
        even, odd = (ir.Constant(ir.VectorType(_INT, width), list(range(a, 2 * width, 2))) for a in (0, 1))
        halves = (builder.shuffle_vector(value, value, half) for half in (even, odd))
        value = builder.fadd(*halves, flags=_IN_ORDER)
    return builder.extract_element(value, ir.Constant(_INT, 0))


@intrinsic
def totals(typing: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any) -> Any:
    """The sums of eight vectors, as one vector."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        even, odd = (ir.Constant(ir.VectorType(_INT, LANES), list(range(a, 2 * LANES, 2))) for a in (0, 1))
        vectors = list(arguments)
        while len(vectors) > 1:  # neighbours are added, and two vectors of sums become one
            vectors = [
                builder.fadd(builder.shuffle_vector(x, y, even), builder.shuffle_vector(x, y, odd), flags=_FLAGS)
                for x, y in zip(vectors[::2], vectors[1::2], strict=True)
            ]
        return vectors[0]

    return a(*[a] * LANES), generate


LOWEST = -87.0
"""exp of less is 0 here: float32 has no normal number for it."""

_LN2 = (0.693359375, -2.12194440e-4)
"""In two parts, the first with few bits, so that a whole multiple of it is exact (Cody and Waite 1980)."""

_POWERS = (1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0)
"""Taylor's series, enough for float32 where |x| <= ln(2) / 2."""


@intrinsic
def exp(typing: Any, value: Any) -> Any:
    """e^x of each."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if value.element == types.float64:
            return _call(builder, f"llvm.exp.v{LANES}f64", arguments[0].type, arguments)
        return _exp32(builder, arguments[0])

    return value(value), generate


def _exp32(builder: Any, x: Any) -> Any:
    """2^k e^f, with f = x - k ln 2 by its series."""
    kind, integers = x.type, ir.VectorType(_INT, LANES)

    def constant(number: float) -> Any:
        return ir.Constant(kind, [float(np.float32(number))] * LANES)

    def multiply_add(a: Any, b: Any, c: Any) -> Any:
        return builder.fadd(builder.fmul(a, b, flags=("contract",)), c, flags=("contract",))

    small = builder.fcmp_ordered("<", x, constant(LOWEST))
    x = builder.select(small, constant(0), x)
    k = _call(builder, f"llvm.rint.v{LANES}f32", kind, [builder.fmul(x, constant(1 / np.log(2)))])
    f = multiply_add(k, constant(-_LN2[1]), multiply_add(k, constant(-_LN2[0]), x))
    series = constant(_POWERS[0])
    for power in _POWERS[1:]:
        series = multiply_add(series, f, constant(power))
    exponent = builder.add(builder.fptosi(k, integers), ir.Constant(integers, [127] * LANES))
    scale = builder.bitcast(builder.shl(exponent, ir.Constant(integers, [23] * LANES)), kind)
    return builder.select(small, constant(0), builder.fmul(series, scale))


def _operator(symbol: Callable[..., Any], method: str) -> None:
    """`symbol` between two vectors."""

    @infer_global(symbol)
    class _Typed(AbstractTemplate):
        def generic(self, arguments: Any, keywords: Any) -> Any:
            if len(arguments) == 2 and all(isinstance(argument, _Vector) for argument in arguments):
                return signature(arguments[0], *arguments)
            return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return getattr(builder, method)(*arguments, flags=_FLAGS)

    lower_builtin(symbol, _Vector, _Vector)(generate)


for _symbol, _method in ((operator.add, "fadd"), (operator.sub, "fsub"), (operator.mul, "fmul")):
    _operator(_symbol, _method)

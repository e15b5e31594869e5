"""How kernels become LLVM code: records go by their address, and what is settled on entry is read there, once.

Numba hands a named tuple over word by word: a record of sixty arrays is four hundred arguments, taken apart and put together again
at every call, which is most of what LLVM then has to read and to forget.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from llvmlite import ir as llvm
from numba.core import cgutils, datamodel, ir, types
from numba.core.analysis import compute_cfg_from_blocks
from numba.core.compiler_machinery import register_pass
from numba.core.cpu import CPUContext
from numba.core.datamodel.models import StructModel
from numba.core.errors import CompilerError
from numba.core.lowering import Lower
from numba.core.targetconfig import ConfigStack
from numba.core.typed_passes import NativeLowering
from numba.core.typing import Context

WORD = llvm.IntType(64)
ADDRESS = llvm.IntType(8).as_pointer()
# Of Numba's arrays.
DATA, SHAPE = 4, 5


def _words(kind: Any) -> int:
    """Words enough for a value of this LLVM type."""
    if isinstance(kind, llvm.ArrayType):
        return int(kind.count) * _words(kind.element)
    return sum(map(_words, kind.elements)) if isinstance(kind, llvm.LiteralStructType) else 1


class _RecordModel(StructModel):  # type: ignore[misc]
    """A named tuple is the address of its members, each at a whole word; records in it are addresses as well.

    It lies in the frame that made it, so only a copy of it can be returned.
    """

    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, [(f"f{i}", member) for i, member in enumerate(kind)])
        starts = [0]
        for model in self._models:
            starts.append(starts[-1] + _words(model.get_value_type()))
        *self._starts, self._size = starts

    def get_value_type(self) -> Any:
        return ADDRESS

    def get_argument_type(self) -> Any:
        return ADDRESS

    def as_argument(self, builder: Any, value: Any) -> Any:
        return value

    def from_argument(self, builder: Any, value: Any) -> Any:
        return value

    def as_data(self, builder: Any, value: Any) -> Any:
        data = llvm.Constant(self.get_data_type(), llvm.Undefined)
        for i, model in enumerate(self._models):
            data = builder.insert_value(data, model.as_data(builder, self.get(builder, value, i)), i)
        return data

    def from_data(self, builder: Any, value: Any) -> Any:
        return self.pack(
            builder, [model.from_data(builder, builder.extract_value(value, i)) for i, model in enumerate(self._models)]
        )

    as_return, from_return = as_data, from_data

    def load_from_data_pointer(self, builder: Any, pointer: Any, align: int | None = None) -> Any:
        return self.from_data(builder, builder.load(pointer, align=align))

    def pack(self, builder: Any, values: Sequence[Any]) -> Any:
        """A new record in this frame."""
        room = cgutils.alloca_once(builder, llvm.ArrayType(WORD, self._size))
        address = builder.bitcast(room, ADDRESS)
        for i, value in enumerate(values):
            builder.store(value, self._member(builder, address, i))
        return address

    def get(self, builder: Any, value: Any, position: int) -> Any:
        """A member."""
        return builder.load(self._member(builder, value, position))

    def _member(self, builder: Any, address: Any, position: int) -> Any:
        place = builder.gep(address, [llvm.Constant(WORD, 8 * self._starts[position])], inbounds=True)
        return builder.bitcast(place, self._models[position].get_value_type().as_pointer())


class _Context(CPUContext):  # type: ignore[misc]
    """Numba's own, in which named tuples have `_RecordModel`."""

    def make_tuple(self, builder: Any, kind: Any, values: Sequence[Any]) -> Any:
        if isinstance(kind, types.BaseNamedTuple):
            return self.data_model_manager[kind].pack(builder, values)
        return super().make_tuple(builder, kind, values)

    def get_getattr(self, kind: Any, attribute: str) -> Any:
        if isinstance(kind, types.BaseNamedTuple):
            return _member_of
        return super().get_getattr(kind, attribute)


def _holds_records(kind: Any) -> bool:
    return isinstance(kind, types.BaseNamedTuple) or (isinstance(kind, types.BaseTuple) and any(map(_holds_records, kind)))


def _member_of(context: Any, builder: Any, kind: Any, value: Any, attribute: str) -> Any:
    return context.data_model_manager[kind].get(builder, value, kind.fields.index(attribute))


@lru_cache(maxsize=1)
def _models() -> Any:
    own = datamodel.default_manager.copy()
    for kind in (types.NamedTuple, types.NamedUniTuple):
        own.register(kind, _RecordModel)
    return own


def with_records(context: Any) -> Any:
    """This context of Numba's with records by their address."""
    own = copy.copy(context)
    own.__class__ = _Context
    own.data_model_manager = _models()
    return own


class _Typing(Context):  # type: ignore[misc]
    """Numba's own, which asks every template of a function again at every call of it, such as each `array[index]`.

    It would also compile a kernel anew for every constant that it is called with.
    """

    def resolve_function_type(self, func: Any, args: Any, kws: Any) -> Any:
        if isinstance(func, types.Dispatcher):
            return super().resolve_function_type(func, tuple(map(types.unliteral, args)), kws)
        if kws or not isinstance(func, types.Function):
            return super().resolve_function_type(func, args, kws)
        key = (func, tuple(args), ConfigStack.top_or_none())
        if key not in self.known:
            found = super().resolve_function_type(func, args, kws)
            if found is None:
                return None
            self.known[key] = found
        return self.known[key]


@lru_cache(maxsize=1)
def with_memory(context: Any) -> Any:
    """This typing context of Numba's with a memory; the same one again, by which Numba finds what it has compiled."""
    own = copy.copy(context)
    own.__class__, own.known = _Typing, {}
    return own


class _Lower(Lower):  # type: ignore[misc]
    """What follows from the arguments alone (members of records, shapes) is read on entry, when somebody needs it, and has no slot.

    A record does not change while a function runs, but LLVM would have to prove that.
    """

    def pre_lower(self) -> None:
        super().pre_lower()
        self._entry = self.builder.basic_block
        self._values: dict[str, Any] = {}
        self._members: dict[tuple[str, str], Any] = {}
        self._parts: dict[tuple[Any, ...], Any] = {}
        definitions: dict[str, list[Any]] = {}
        for block in self.blocks.values():
            for each in block.find_insts(ir.Assign):
                definitions.setdefault(each.target.name, []).append(each.value)
        self._definition = {name: found[0] for name, found in definitions.items() if len(found) == 1}
        self._settled: dict[str, bool] = {}
        self._refuse_records_made_in_loops()

    def _refuse_records_made_in_loops(self) -> None:
        """The next one would lie where the last one does, which somebody may still read."""
        made = {
            label
            for label, block in self.blocks.items()
            for each in block.find_insts(ir.Assign)
            if isinstance(each.value, ir.Expr) and each.value.op == "call" and _holds_records(self.typeof(each.target.name))
        }
        if made and any(made & loop.body for loop in compute_cfg_from_blocks(self.blocks).loops().values()):
            raise CompilerError(f"{self.func_ir.func_id.func_name} makes a record in a loop; make it before, or in a function.")

    def _is_settled(self, name: str) -> bool:
        """Whether a variable has one value, which is known on entry."""
        if name not in self._settled:
            self._settled[name] = False
            self._settled[name] = self._settles(name, self._definition.get(name))
        return self._settled[name]

    def _settles(self, name: str, value: Any) -> bool:
        if isinstance(value, ir.Arg):
            return self.typeof(f"arg.{value.name}") == self.typeof(name)
        if isinstance(value, ir.Var):
            return self._is_settled(value.name) and self.typeof(name) == self.typeof(value.name)
        if (
            not isinstance(value, ir.Expr)
            or value.op not in ("getattr", "static_getitem")
            or not self._is_settled(value.value.name)
        ):
            return False
        kind = self.typeof(value.value.name)
        if value.op == "static_getitem":
            return isinstance(kind, types.BaseTuple) and isinstance(value.index, int) and value.index >= 0
        return isinstance(kind, types.BaseNamedTuple) or (isinstance(kind, types.Array) and value.attr == "shape")

    def _alloca_var(self, name: str, kind: Any) -> None:
        if not self._is_settled(name):
            super()._alloca_var(name, kind)

    def lower_inst(self, inst: Any) -> None:
        if not (isinstance(inst, ir.Assign) and self._is_settled(inst.target.name)):
            super().lower_inst(inst)

    def loadvar(self, name: str) -> Any:
        if not self._is_settled(name):
            return super().loadvar(name)
        if name not in self._values:
            value = self._definition[name]
            with self.builder.goto_block(self._entry):
                self._values[name] = self._once(name, value)
        return self._values[name]

    def _once(self, name: str, value: Any) -> Any:
        if isinstance(value, ir.Var):
            return self.loadvar(value.name)
        if isinstance(value, ir.Expr) and value.op == "getattr":
            key = (self._source(value.value.name), value.attr)
            if key not in self._members:
                self._members[key] = self.lower_expr(self.typeof(name), value)
            return self._members[key]
        if isinstance(value, ir.Expr):
            return self._item(value)
        return self.fnargs[value.index]

    def lower_expr(self, kind: Any, value: Any) -> Any:
        if value.op in ("getitem", "static_getitem", "getattr"):
            whole = self.typeof(value.value.name)
            if value.op == "static_getitem" and isinstance(whole, types.BaseNamedTuple):
                return self._item(value)
            if value.op == "getattr" and isinstance(whole, types.Array) and value.attr == "shape":
                return self._part(value.value.name, SHAPE)
            if value.op != "getattr" and isinstance(whole, types.Array):
                place = self._place(value.value, value.index if value.op == "getitem" else value.index_var)
                if place is not None:
                    return self.context.cast(
                        self.builder, self.context.unpack_value(self.builder, whole.dtype, place), whole.dtype, kind
                    )
        return super().lower_expr(kind, value)

    def lower_setitem(self, target: Any, index: Any, value: Any, signature: Any) -> Any:
        kind = self.typeof(target.name)
        place = self._place(target, index) if isinstance(kind, types.Array) else None
        if place is None:
            return super().lower_setitem(target, index, value, signature)
        found = self.context.cast(self.builder, self.loadvar(value.name), self.typeof(value.name), kind.dtype)
        return self.context.pack_value(self.builder, kind.dtype, found, place)

    def _place(self, array: Any, index: Any) -> Any:
        """Where an entry of an array lies; None where Numba has to say, as for slices."""
        kind = self.typeof(array.name)
        if index is None or kind.layout != "C" or not kind.aligned or self.context.enable_boundscheck:
            return None
        kinds = self.typeof(index.name)
        one = not isinstance(kinds, types.BaseTuple)
        kinds = [kinds] if one else list(kinds)
        if len(kinds) != kind.ndim or not all(isinstance(each, types.Integer) for each in kinds):
            return None
        found = self.loadvar(index.name)
        indices = [found] if one else [self.builder.extract_value(found, i) for i in range(kind.ndim)]
        at = None
        for axis, (each, its, said) in enumerate(zip(indices, kinds, self._said(index.name, kind.ndim), strict=True)):
            length = self._length(array.name, axis)
            each = self._from_the_start(each if said is None else llvm.Constant(WORD, said), its, length)
            at = each if at is None else self.builder.add(self.builder.mul(at, length), each)
        return self.builder.gep(self._part(array.name, DATA), [at])

    def _said(self, name: str, count: int) -> list[int | None]:
        """Of the parts of an index those that stand in the source, such as the last one of `[x, -1]`."""
        value = self._definition.get(name)
        if isinstance(value, ir.Expr) and value.op == "build_tuple":
            return [self._said(part.name, 1)[0] for part in value.items]
        said = value.value if isinstance(value, ir.Const | ir.Global | ir.FreeVar) else None
        return list(said) if isinstance(said, tuple) else [said] * count

    def _from_the_start(self, index: Any, kind: Any, length: Any) -> Any:
        """A constant index may count from the end. Others do not: to ask each for its sign took a third of a projection's time."""
        if isinstance(index, llvm.Constant):
            return self.builder.add(index, length) if index.constant < 0 else index
        return self.context.cast(self.builder, index, kind, types.intp if kind.signed else types.uintp)

    def _part(self, name: str, part: int) -> Any:
        """The data or the shape of an array."""
        if not self._is_settled(name):
            return self.builder.extract_value(self.loadvar(name), part)
        key = (self._source(name), part)
        if key not in self._parts:
            with self.builder.goto_block(self._entry):
                self._parts[key] = self.builder.extract_value(self.loadvar(name), part)
        return self._parts[key]

    def _length(self, name: str, axis: int) -> Any:
        if not self._is_settled(name):
            return self.builder.extract_value(self._part(name, SHAPE), axis)
        key = (self._source(name), "length", axis)
        if key not in self._parts:
            shape = self._part(name, SHAPE)
            with self.builder.goto_block(self._entry):
                self._parts[key] = self.builder.extract_value(shape, axis)
        return self._parts[key]

    def lower_binop(self, kind: Any, expr: Any, op: Any) -> Any:
        """Of numbers; what Numba tries first, implementations for constants, is there for powers."""
        signature = self.fndesc.calltypes[expr]
        if op is operator.pow or not all(isinstance(each, types.Number | types.Boolean) for each in signature.args):
            return super().lower_binop(kind, expr, op)
        values = [
            self.context.cast(self.builder, self.loadvar(each.name), self.typeof(each.name), wanted)
            for each, wanted in zip((expr.lhs, expr.rhs), signature.args, strict=True)
        ]
        function = self.context.typing_context.resolve_value_type(op)
        try:
            implementation = self.context.get_function(function, signature)
        except KeyError:  # these operands are the first of their kind
            function.get_call_type(self.context.typing_context, signature.args, {})
            implementation = self.context.get_function(function, signature)
        found = implementation(self.builder, values)
        return self.context.cast(self.builder, found, signature.return_type, kind)

    def _item(self, value: Any) -> Any:
        kind, whole = self.typeof(value.value.name), self.loadvar(value.value.name)
        if isinstance(kind, types.BaseNamedTuple):
            return self.context.data_model_manager[kind].get(self.builder, whole, value.index)
        return self.builder.extract_value(whole, value.index)

    def _source(self, name: str) -> str:
        """Where a settled value comes from: a name that is the same for all that are the same."""
        value = self._definition[name]
        if isinstance(value, ir.Var):
            return self._source(value.name)
        if isinstance(value, ir.Expr) and value.op == "getattr":
            return f"{self._source(value.value.name)}.{value.attr}"
        return name

    def storevar(self, value: Any, name: str, argidx: int | None = None) -> None:
        self._alloca_var(name, self.typeof(name))
        if name in self._singly_assigned_vars:
            self._blk_local_varmap[name] = value
        else:
            self.builder.store(value, self.getvar(name))

    def delvar(self, name: str) -> None:
        """Nothing is counted, so nothing is given back."""


@register_pass(mutates_CFG=True, analysis_only=False)
class KernelLowering(NativeLowering):  # type: ignore[misc]
    """Numba's, with the above."""

    _name = "kernel_lowering"

    @property
    def lowering_class(self) -> Any:
        """What lowers a function."""
        return _Lower

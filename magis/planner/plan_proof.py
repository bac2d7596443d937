"""Proof that a graph, whoever made it, is a plan of a step: both are executed symbolically and compared.

    y = relu(x); z = mul(y, 2)      ->      y = relu_(x)  |  store y, load y  |  loop { join(relu(part(x))) }

The contents of a storage are a *term*: the call that computed them, applied to the terms of its inputs. A call's term
holds all that its result depends on: operator, literals, contents of its tensors at that moment, generator state.
In-place and out variants have the terms of their functional operators, loops are rewritten as whole calls
(``magis.fission.proof``); host copies, recomputations and waits change no term. A plan may contain calls of the step
only; it must return equal terms and leave equal terms in weights, optimizer state, buffers and generators.

Writes are read off the operator's schema, views off the step: the graph's own claims are not trusted. Where rules
merged calls, the plan is compared with the merged form, rebuilt from the captured step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

from magis.cost.shapes import bytes_of, describe
from magis.errors import VerifyError
from magis.fission.part_sums import ROUND, is_rounding
from magis.fission.proof import Likely, whole_calls
from magis.graph import ARRIVED, Arg, Const, Graph, Loop, Op, Ref, Storage, Value, every_op
from magis.graph.hazards import fills, is_pure_view
from magis.graph.loop_rules import LOOP, MERGES, PART, merged_dtype
from magis.ops.generators import DRAW_STATE, GET_STATE
from magis.ops.operators import op_info
from magis.ops.plain_calls import commutes, plain_form, refs, text_of, written

Layout: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], str, int, tuple[str, ...]]
"""Shape, strides, dtype, storage offset, and conjugate/negative bits of a view."""
Moves: TypeAlias = dict[tuple[str, str], tuple[tuple[int, ...], tuple[int, ...]]]
"""Operator and literals of a call -> storages of generators that the call reads, and of those that it advances."""
_BORDER = (PART, *MERGES)
_OF_PLANS = ("magis.store", "magis.load", "magis.wait", ARRIVED, "magis.rng_save", "magis.rng_enter", "magis.rng_leave")
_WINDOW = "aten.as_strided.default"


def prove(graph: Graph, step: Graph, *, drawn: bool = False) -> None:
    """Raise VerifyError unless a verified graph computes the step's results by the step's own calls. ``drawn``: random
    draws on the host feed the step, so contents of constants are not compared."""
    terms = Terms()
    known = Followed(step, terms, drawn=drawn)
    ours = {plain_form(op)[0].target for op in step.ops}
    for op, _ in every_op(graph):
        if op.target not in (*_OF_PLANS, *_BORDER, LOOP, _WINDOW, ROUND) and plain_form(op)[0].target not in ours:
            raise VerifyError(f"it holds {op.target}, which its step has not")
    found = Followed(graph, terms, drawn=drawn, step=known)
    if len(found.results) != len(known.results):
        raise VerifyError(f"it returns {len(found.results)} tensors, the step {len(known.results)}")
    for number, (one, other) in enumerate(zip(found.results, known.results, strict=True)):
        if one != other:
            raise VerifyError(f"its result {number} is another one than the step's")
    for name, contents in known.left.items():
        if found.left.get(name) != contents:
            raise VerifyError(f"it leaves {name} otherwise than the step")
    for term, op in known.effects.items():
        if term not in found.calls:
            raise VerifyError(f"it leaves out {op.target}")


class Terms:
    """Table that numbers terms: equal terms have equal numbers."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], int] = {}

    def __call__(self, *parts: object) -> int:
        return self._known.setdefault(parts, len(self._known))


class Followed:
    """A graph, executed symbolically. The first operator that ``step``, if given, does not have raises VerifyError."""

    def __init__(self, graph: Graph, terms: Terms, *, drawn: bool, step: Followed | None = None) -> None:
        self._terms, self._step = terms, step
        self._values, self._storages = dict(graph.values), dict(graph.storages)
        self._contents: dict[int, int] = {}  # storage -> term of its contents
        self._repeats: dict[int, int] = {}  # recomputed operator of the step -> term of its call
        self.calls: set[int] = set()
        self.made: set[tuple[object, ...]] = set()
        """Call term, output position and layout of every tensor that a call returns."""
        self.effects: dict[int, Op] = {}
        """Calls by term that return nothing, or are custom operators, which may have side effects."""
        self.likely: Likely = frozenset((value.shape, value.dtype) for value in graph.values.values())
        names = self._note_inputs(graph, drawn=drawn)
        # Generators that a call reads and advances, for all calls with equal operator and literals
        self.moves: Moves = self._generator_moves(graph) if step is None else step.moves
        self.own: dict[tuple[Arg, ...], int] = _own_generators(graph) if step is None else step.own
        self._sums: dict[int, tuple[int, Layout, int]] = {}
        """Term of a loop's float32 sum -> term, layout and bytes of the sum in half precision."""
        self._states: dict[int, int] = {}  # storage of a saved state -> term of the generator state
        for op in graph.ops:
            if op.body is not None:
                self._follow_loop(op, op.body)
            elif op.target in _OF_PLANS:
                self._follow_own(op)
            elif not (self._is_window(op) or self._try_round(op)):
                self._follow_call(op)
        self.results = [(self._contents_of(value), _layout(self._values[value])) for value in graph.outputs]
        self.left = {name: self._contents.get(storage) for name, storage in names.items()}
        """Final contents of input and generator storages, by name."""

    # -- what is there before the step ------------------------------------------------------------------------------

    def _note_inputs(self, graph: Graph, *, drawn: bool) -> dict[str, int]:
        """Record the contents of storages that exist before the step; return these storages by input names."""
        on: dict[int, list[tuple[str, str, Layout]]] = {}
        for number in graph.inputs:
            value = graph.values[number]
            data = "" if drawn or number not in graph.constants else repr(graph.constants[number])
            on.setdefault(value.storage, []).append((value.name, data, _layout(value)))
        names: dict[str, int] = {}
        for storage in graph.storages.values():
            if storage.id in on:
                given = tuple(sorted(on[storage.id]))
                kind = "state" if storage.kind == "host" else storage.kind  # moved, wherever it is
                self._contents[storage.id] = self._terms("given", kind, storage.nbytes, given)
                names[", ".join(name for name, _, _ in given)] = storage.id
            elif storage.kind == "generator":
                self._contents[storage.id] = self._terms("generator", storage.id)
                names[f"generator {storage.id}"] = storage.id
            elif storage.persistent:
                raise VerifyError(f"storage {storage.id} is there before the step, but nothing lies on it")
        if len(names) < len(self._contents):
            raise VerifyError("two of its inputs have one name")
        if self._step is not None:
            expected = self._step.left.keys()
            for name in sorted(names.keys() ^ expected):
                raise VerifyError(f"it works {'on' if name in names else 'without'} {name}, its step does not")
        return names

    def _generator_moves(self, graph: Graph) -> Moves:
        found: dict[tuple[str, str], tuple[set[int], set[int]]] = {}
        for op in graph.ops:
            moved = {s for s, _ in op.writes if graph.storages[s].kind == "generator"}
            read = {s for s, _ in op.reads if graph.storages[s].kind == "generator"}
            plain, _ = plain_form(op)
            drawn = moved | (read if op.target in (GET_STATE, DRAW_STATE) else set())
            if drawn:
                entry = found.setdefault((plain.target, text_of(plain)), (set(), set()))
                entry[0].update(drawn)
                entry[1].update(moved)
        return {key: (tuple(sorted(drawn)), tuple(sorted(moved))) for key, (drawn, moved) in found.items()}

    # -- one operator after the other -------------------------------------------------------------------------------

    def _reject(self, op: Op, text: str) -> None:
        """Raise VerifyError for an operator if there is a step to compare with; the step itself is always accepted."""
        if self._step is not None:
            raise VerifyError(f"operator {op.id} ({op.target}) {text}")

    def _contents_of(self, value: int) -> int:
        """Return the term of a value's current contents."""
        looks = self._values[value]
        if looks.storage not in self._contents:
            raise VerifyError(f"value {value} lies on storage {looks.storage}, which holds nothing then")
        return self._terms("window", self._contents[looks.storage], _layout(looks))

    def _is_window(self, op: Op) -> bool:
        """Return True for an as_strided view with explicit sizes, as plans open views on tensors loaded from the
        host."""
        match op.args, op.outputs:
            case (Ref(base), tuple(shape), tuple(stride), int(offset)), (int(made),) if op.target == _WINDOW:
                taken, value = self._values[base], self._values[made]
                same = value.storage == taken.storage and _layout(value) == (shape, stride, taken.dtype, offset, ())
                plain = not (op.kwargs or op.writes or op.many or taken.bits)
                return self._step is not None and same and plain
        return False

    def _follow_call(self, op: Op, *, whole: bool = False) -> None:
        """Execute an operator symbolically; ``whole``: on fresh memory, for a call that a loop runs in parts."""
        plain, over = plain_form(op)
        taken, text = plain.inputs(), text_of(plain)
        terms = [self._contents_of(value) for value in taken]
        if op.target.startswith("aten.") and is_pure_view(self._values, op):  # it reads no contents
            terms = [self._terms("lies", _layout(self._values[value])) for value in taken]
        elif commutes(plain, self._values):
            terms.sort()
        drawn, moved = self.moves.get((plain.target, text), ((), ()))
        states = tuple(self._contents[storage] for storage in drawn)
        outputs = tuple(value is not None for value in op.outputs)
        term = self._terms("call", plain.target, text, tuple(terms), states, op.phase, op.many, outputs)
        if self._step is not None and term not in self._step.calls:
            self._reject(op, "is no call of the step: its operator, a literal or the contents of a tensor are others")
        if not whole and self._repeats.setdefault(op.id if op.origin is None else op.origin, term) != term:
            self._reject(op, f"repeats operator {op.origin}, which is another call")
        if op.writes or not whole:
            self._note_writes(op, over, term)
        for storage in moved:
            self._contents[storage] = self._terms("moved", term, storage)
        fresh: dict[int, int] = {}
        for position, value in enumerate(op.outputs):
            if value is not None:
                looks = self._note_result(op, (term, position), value, taken, over, fresh)
                self.made.add((term, position, looks))
                if self._step is not None and (term, position, looks) not in self._step.made:
                    self._reject(op, f"makes value {value} with other sizes, or on other memory, than the step")
        self.calls.add(term)
        if not op.made() or not op.target.startswith("aten."):
            self.effects[term] = op

    def _note_writes(self, op: Op, over: int | None, term: int) -> None:
        """Record the new contents of storages that a call writes, and check them against its declared writes."""
        statistics = [value for at in op_info(op.target).undeclared_writes(op.args) for value in refs(op.args[at])]
        declared = [over] if over is not None else written(op)
        changed = {self._values[value].storage for value in (*declared, *statistics)}
        said = {storage for storage, _ in op.writes if self._storages[storage].kind != "generator"}
        if said != changed:
            self._reject(op, f"says that it writes {sorted(said)} of the storages, and writes {sorted(changed)}")
        for number, value in enumerate((*declared, *statistics)):
            looks = self._values[value]
            new = self._terms("made", term, 0 if over is not None and number == 0 else ("written", number))
            if number >= len(declared) or not fills(looks, self._storages[looks.storage]):
                new = self._terms("into", self._contents.get(looks.storage), _layout(looks), new)
            self._contents[looks.storage] = new

    def _note_result(
        self, op: Op, made: tuple[int, int], number: int, taken: Sequence[int], over: int | None, fresh: dict[int, int]
    ) -> tuple[object, ...]:
        """Record the contents of a call's output if its storage is new; return a key of where the output lies."""
        value = self._values[number]
        storage, looks = self._storages[value.storage], _layout(value)
        kind = "temporary" if storage.kind == "state" else storage.kind  # what is left in states is compared at the end
        alone = "fresh", looks, storage.nbytes, kind
        if over is not None and self._values[over].storage == storage.id:
            if looks != _layout(self._values[over]):
                self._reject(op, f"makes value {number}, which is not what it writes over")
            return alone if fills(value, storage) else ("through", looks)
        for position, base in enumerate(taken):
            if self._values[base].storage == storage.id:
                return "on", position, looks
        if storage.id in fresh:
            return "with", fresh[storage.id], looks
        if storage.id in self._contents:
            self._reject(op, f"makes value {number} on storage {storage.id}, which holds something else")
        fresh[storage.id] = made[1]
        self._contents[storage.id] = self._terms("made", *made)
        return alone

    # -- what plans are made of -------------------------------------------------------------------------------------

    def _follow_own(self, op: Op) -> None:
        match op.target, op.args, op.outputs:
            case "magis.store", (Ref(value), Ref(host)), (int(copy),) if self._try_store_back(op, value, host, copy):
                return
            case _ if op.kwargs or op.writes or op.many or op.random:
                pass
            case "magis.store", (Ref(value),), (int(copy),) if self._try_copy(value, copy, "host"):
                return
            case "magis.load", (Ref(value),), (int(copy),) if self._try_copy(value, copy, "temporary"):
                return
            case "magis.wait", (Ref(value), Ref(copy)), () if self._try_free(value, copy):
                return
            case "magis.arrived", (Ref(), *rest), () if all(isinstance(each, Ref) for each in rest):
                return
            case "magis.rng_save", own, (int(kept),) if self._try_save_state(own, kept):
                return
            case "magis.rng_enter", (Ref(state), *own), (int(kept),) if self._try_save_state(own, kept):
                if self._try_set_state(own, state):
                    return
            case "magis.rng_leave", (Ref(state), *own), () if self._try_set_state(own, state):
                return
        self._reject(op, "is not called as plans call it")

    def _try_copy(self, source: int, made: int, kind: str) -> bool:
        one, other = self._values[source], self._values[made]
        before, after = self._storages[one.storage], self._storages[other.storage]
        alike = _layout(one) == _layout(other) and before.nbytes == after.nbytes and fills(one, before)
        if not alike or after.kind != kind or after.id in self._contents or before.id not in self._contents:
            return False
        self._contents[after.id] = self._contents[before.id]
        return True

    def _try_store_back(self, op: Op, source: int, host: int, made: int) -> bool:
        """Copy moved state back into its host memory; return False for other memory."""
        one, other, new = (self._values[each] for each in (source, host, made))
        before, after = self._storages[one.storage], self._storages[other.storage]
        alike = _layout(one) == _layout(other) == _layout(new) and fills(one, before) and fills(other, after)
        there = {after.id} == {new.storage, *(storage for storage, _ in op.writes)} and after.kind == "host"
        if op.kwargs or op.many or op.random or not (alike and there) or before.id not in self._contents:
            return False
        self._contents[after.id] = self._contents[before.id]
        return True

    def _try_free(self, value: int, copy: int) -> bool:
        """Free the device memory of a tensor stored to the host; return False if there is no equal host copy."""
        storage, host = self._storages[self._values[value].storage], self._values[copy].storage
        kept = self._contents.pop(storage.id, None) if storage.kind == "temporary" else None
        return kept is not None and kept == self._contents.get(host)

    def _try_save_state(self, own: Sequence[Arg], number: int) -> bool:
        """Save a generator's state; return False if there is no such generator."""
        generator, storage = self.own.get(tuple(own)), self._values[number].storage
        if generator is None or storage in self._contents:
            return False
        self._states[storage] = self._contents[generator]
        self._contents[storage] = self._terms("state", self._contents[generator])
        return True

    def _try_set_state(self, own: Sequence[Arg], number: int) -> bool:
        """Restore a saved generator state; return False if none is saved."""
        generator, storage = self.own.get(tuple(own)), self._values[number].storage
        if generator is None or storage not in self._states:
            return False
        self._contents[generator] = self._states[storage]
        return True

    # -- loops ------------------------------------------------------------------------------------------------------

    def _follow_loop(self, op: Op, loop: Loop) -> None:
        """Execute the whole calls equivalent to a loop symbolically, then record the loop's outputs."""
        self._check_body(loop.graph)
        known = dict(self._values)
        results: dict[int, int] = {}
        for each in whole_calls(op, known, self.likely if self._step is None else self._step.likely):
            if each.target == "magis.alias":
                results[each.made()[0]] = results.get(each.inputs()[0], each.inputs()[0])
            else:
                plain, _ = plain_form(each)
                writes = tuple((self._values[value].storage, 0) for value in written(plain))
                self._follow_call(self._with_sizes(replace(plain, reads=(), writes=writes)), whole=True)
        left: dict[int, int] = {}
        for number, source in results.items():
            value, whole = self._values[number], self._values[source]
            storage, other = self._storages[value.storage], self._storages[whole.storage]
            contents, dtype = self._contents[other.id], merged_dtype(whole.dtype, "sum")
            looks, nbytes = _layout(whole), other.nbytes
            if value.dtype == dtype != whole.dtype:
                contents = self._terms("in float32", contents)
                self._sums[contents] = self._contents[other.id], looks, nbytes
                looks, nbytes = _layout(replace(whole, dtype=dtype)), bytes_of(whole.shape, dtype)
            if _layout(value) != looks or storage.nbytes != nbytes or not fills(whole, other):
                self._reject(op, f"makes value {number} with other sizes than the step")
            left[storage.id] = contents
        for storage_id, _ in op.writes:  # the loop overwrites this memory
            self._contents[storage_id] = self._terms("used up", op.id)
        self._contents |= left

    def _try_round(self, op: Op) -> bool:
        """Round a loop's float32 sum to the dtype that it has in the step; return False for other operators."""
        source = self._values[op.inputs()[0]] if len(op.inputs()) == 1 else None
        term = None if source is None else self._contents.get(source.storage)
        if source is None or term not in self._sums:
            return False
        contents, looks, nbytes = self._sums[term]
        value = self._values[op.made()[0]] if len(op.made()) == 1 else source
        storage, whole = self._storages[value.storage], _layout(replace(value, dtype=source.dtype)) == _layout(source)
        if not (whole and is_rounding(op, looks[2])) or (_layout(value), storage.nbytes) != (looks, nbytes):
            self._reject(op, "takes a loop's float32 sum, which is to be rounded first")
        if storage.id in self._contents or storage.kind != "temporary":
            self._reject(op, f"makes value {value.id} on storage {storage.id}, which holds something else")
        self._contents[storage.id] = contents
        return True

    def _with_sizes(self, op: Op) -> Op:
        """Return an operator after recording its outputs with the shapes that it computes."""
        taken = op.inputs()
        for number, made in zip(op.outputs, describe(op, self._values), strict=True):
            if number is None or made is None:
                continue
            if made.base is None:
                storage, offset = max(self._storages) + 1, made.offset
                self._storages[storage] = Storage(storage, made.nbytes, "temporary")
            else:
                base = self._values[taken[made.base]]
                storage, offset = base.storage, made.offset_on(base)
            self._values[number] = Value(number, made.shape, made.stride, made.dtype, storage, offset, bits=made.bits)
        return op

    def _check_body(self, body: Graph) -> None:
        """Check that the operators of a loop body write what they declare, and read no value whose storage was written
        after the value was made. So every value has one content, as rewriting the loop as whole calls requires."""
        writes: dict[int, int] = {}  # storage -> number of writes
        opened: dict[int, int] = {}  # value -> number of writes to its storage before it was made
        for op in body.ops:
            if op.body is not None:
                self._check_body(op.body.graph)
            for value in op.inputs()[op.target in MERGES :]:
                if writes.get(body.values[value].storage, 0) != opened.get(value, 0):
                    self._reject(op, f"takes value {value} of a loop, whose memory was written since")
            if op.body is None and op.target not in (*_OF_PLANS, *_BORDER):
                _, over = plain_form(op)
                changed = {body.values[value].storage for value in ([over] if over is not None else written(op))}
                if changed != {storage for storage, _ in op.writes} or op_info(op.target).undeclared_writes(op.args):
                    self._reject(op, "writes otherwise than it says")
            for storage, _ in op.writes:
                writes[storage] = writes.get(storage, 0) + 1
            opened |= {value: writes.get(body.values[value].storage, 0) for value in op.made()}


def _layout(value: Value) -> Layout:
    return value.shape, value.stride, value.dtype, value.offset, value.bits


def _own_generators(graph: Graph) -> dict[tuple[Arg, ...], int]:
    """Return generator storages by the generator arguments of calls; an empty tuple is the device's default."""
    found: dict[tuple[Arg, ...], int] = {}
    for op in graph.ops:
        if op.random:
            given = (*op.args, *(arg for _, arg in op.kwargs))
            named = tuple(arg for arg in given if isinstance(arg, Const) and arg.kind == "generator")
            for storage, _ in op.writes:
                if graph.storages[storage].kind == "generator":
                    found[named] = storage
    return found

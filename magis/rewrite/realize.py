"""Realization: a plan's schedule of events written as a graph of operators.

    node again      -> the operator's recomputation on fresh storages
    take over       -> its in-place variant (``add`` -> ``add_``, ``gelu_backward`` -> out variant)
    random again    -> restores the first generator state (``magis.rng_save``, ``rng_enter``, ``rng_leave``)
    store/wait/load -> ``magis.store``, ``magis.wait``, ``magis.load`` (swaps)
    arrive          -> ``magis.arrived`` (wait for a collective)

Views are reopened, where first needed, on the current copy of their storage. Storage versions are carried over from the
source graph, so that ``verify`` proves that each operator of the result reads the contents that it read in the source.
"""

from __future__ import annotations

from dataclasses import replace

from magis.errors import VerifyError
from magis.graph import ARRIVED, BESIDE, Arg, Const, Graph, Op, Ref, Storage, Value, with_inputs
from magis.graph.hazards import is_pure_view
from magis.ops.generators import STATE_BYTES
from magis.simulate.compiled_problem import Compiled, Group, redo_form, reusable, take_over_form
from magis.simulate.problem import ARRIVE, BLOCK, FIRST, LOAD, REDO, STORE, WAIT, Events

GENERATOR_BYTES = STATE_BYTES["cpu"]
"""Bytes of the CPU generator's state (``torch.get_rng_state().nbytes``); a GPU's has 16."""


def realize(compiled: Compiled, events: Events) -> Graph:
    """Return the graph of a schedule of events."""
    again = {int(arg) for kind, arg in zip(events.kind, events.arg, strict=True) if kind == REDO}
    builder = _Builder(compiled.graph)
    for index in range(len(events)):
        kind, arg = int(events.kind[index]), int(events.arg[index])
        if kind in (FIRST, REDO):
            taken = int(events.reuse[index])
            storage = compiled.storages[taken] if taken >= 0 else None
            renewed = {compiled.storages[s] for s in events.renews(index).tolist()} if kind == REDO else None
            group = compiled.nodes[arg]
            if arg in again and any(op.random for op in group):
                builder.with_generator(group, arg, renewed)
            else:
                builder.group(group, renewed, storage)
        elif kind == BLOCK:
            for op in compiled.blocks[arg]:
                builder.node(op, None, None)
        elif kind == STORE:
            builder.store(compiled.storages[arg])
        elif kind == WAIT:
            builder.wait(compiled.storages[arg])
        elif kind == LOAD:
            builder.load(compiled.storages[arg])
        elif kind == ARRIVE:
            builder.arrive(compiled.storages[arg])
    return builder.graph()


class _Builder:
    """Emitter of operators; tracks the current copy of every storage and the views open on it."""

    def __init__(self, source: Graph) -> None:
        self._source = source
        self._storages: dict[int, Storage] = {
            key: storage for key, storage in source.storages.items() if storage.kind != "temporary"
        }
        self._values = {value: source.values[value] for value in source.inputs}
        self._ops: list[Op] = []
        self._fresh_storage = max(source.storages, default=0) + 1
        self._fresh_value = max(source.values, default=0) + 1
        self._maker = {value: op for op in source.ops for value in op.made()}
        # Current copy of a temporary storage, and the version of the memory at which its contents start.
        self._copy: dict[int, tuple[int, int]] = {}
        self._open: dict[tuple[int, int], int] = {}
        self._host: dict[int, tuple[int, int]] = {}
        self._loaded: dict[int, int] = {}  # copy loaded from the host -> value that covers it
        self._main: dict[int, int] = {}  # storage -> source value that covers it
        self._final = {storage: version for op in source.ops for storage, version in op.writes}
        self._sent: dict[int, Op] = {}  # storage -> the last collective that outputs it
        # node -> values of the states before its first run, of each generator that it draws from
        self._saved: dict[int, tuple[int, ...]] = {}

    # -- events -------------------------------------------------------------------------------------------------

    def group(self, group: Group, renewed: set[int] | None, taken: int | None) -> None:
        """Emit the operators of a node; operators of a recomputed node read each other's recomputed outputs."""
        if renewed is None or len(group) == 1:
            for number, op in enumerate(group):
                self.node(op, renewed, None if number else taken)
            return
        made = {self._source.values[value].storage for op in group for value in op.made()}
        others = {storage: self._copy.pop(storage, None) for storage in made - renewed}
        for number, op in enumerate(group):
            self.node(op, made, None if number else taken)
        for storage, copy in others.items():
            self._copy.pop(storage, None)
            if copy is not None:
                self._copy[storage] = copy

    def node(self, op: Op, renewed: set[int] | None, taken: int | None) -> None:
        """Emit ``op``, over the storage ``taken`` if given; a recomputation if ``renewed``: storages to be made
        current."""
        form = op if renewed is None else redo_form(op, self._source)
        mapping = {value: self._current_value(value) for value in form.inputs()}
        reads = tuple(self._version(read) for read in form.reads)
        writes = tuple(self._version(write) for write in form.writes)
        if taken is not None:
            self._take_over(op, form, mapping, reads, taken)
            return
        # Storages for the outputs: those renewed, or all the first time, become current copies. A recomputation also
        # makes outputs that are not needed: another copy is in memory, or its readers are done.
        given = {self._source.values[value].storage for value in op.inputs()}
        copies: dict[int, int] = {}
        for value in op.made():
            storage = self._source.values[value].storage
            if storage in given or storage in copies or self._source.storages[storage].kind != "temporary":
                continue
            copies[storage] = self._new_storage(self._source.storages[storage].nbytes, "temporary")
            self._main.setdefault(storage, value)
            if renewed is None or storage in renewed:
                self._copy[storage] = (copies[storage], 0)
        outputs = tuple(None if value is None else self._output_value(value, copies) for value in op.outputs)
        self._emit(form, mapping, reads, writes, outputs)
        if op.target in BESIDE:
            self._sent[self._source.values[op.made()[0]].storage] = self._ops[-1]

    def with_generator(self, group: Group, node: int, renewed: set[int] | None) -> None:
        """Emit a random node that is recomputed: save generator states at first, restore them for recomputations."""
        # The generators that it draws from, each once: a step's own by name, the default one as ().
        drawn: dict[tuple[Const, ...], None] = {}
        for op in group:
            if op.random:
                given = (*op.args, *(arg for _, arg in op.kwargs))
                drawn[tuple(arg for arg in given if isinstance(arg, Const) and arg.kind == "generator")] = None
        saved = Value(0, (GENERATOR_BYTES,), (1,), "uint8", 0)
        states = tuple(
            self._new_value(replace(saved, storage=self._new_storage(GENERATOR_BYTES, "host"))) for _ in drawn
        )
        if renewed is None:
            self._saved[node] = states
        for position, (state, own) in enumerate(zip(states, drawn, strict=True)):
            if renewed is None:
                self._emit_own("magis.rng_save", own, (state,))
            else:
                self._emit_own("magis.rng_enter", (Ref(self._saved[node][position]), *own), (state,))
        self.group(group, renewed, None)
        if renewed is not None:
            for state, own in zip(states, drawn, strict=True):
                self._emit_own("magis.rng_leave", (Ref(state), *own), ())

    def store(self, storage: int) -> None:
        """Emit the copy of a storage to the host."""
        value = self._current_value(self._main[storage])
        host_storage = self._new_storage(self._source.storages[storage].nbytes, "host")
        host = self._new_value(replace(self._source.values[self._main[storage]], storage=host_storage))
        self._host[storage] = (host, value)
        self._emit_own(
            "magis.store", (Ref(value),), (host,), reads=(self._version((storage, self._final.get(storage, 0))),)
        )

    def wait(self, storage: int) -> None:
        """Emit the wait for a copy to the host, which frees the device copy."""
        host, value = self._host[storage]
        self._emit_own("magis.wait", (Ref(value), Ref(host)), ())
        del self._copy[storage]

    def load(self, storage: int) -> None:
        """Emit the copy of a storage from the host to a new device copy."""
        host, _ = self._host[storage]
        copy = self._new_storage(self._source.storages[storage].nbytes, "temporary")
        self._copy[storage] = (copy, -self._final.get(storage, 0))
        value = self._new_value(replace(self._source.values[self._main[storage]], storage=copy))
        self._loaded[copy] = value
        self._emit_own("magis.load", (Ref(host),), (value,))

    def arrive(self, storage: int) -> None:
        """Emit the wait for the collective that outputs a storage."""
        message = self._sent[storage]
        (made,) = message.made()
        sent = {self._values[value].storage for value in message.inputs()}
        reads = ((self._values[made].storage, 0), *(read for read in message.reads if read[0] in sent))
        self._emit_own(ARRIVED, (Ref(made), *map(Ref, message.inputs())), (), reads=reads)

    def graph(self) -> Graph:
        outputs = tuple(self._current_value(value) for value in self._source.outputs)
        return replace(
            self._source, storages=self._storages, values=self._values, ops=tuple(self._ops), outputs=outputs
        )

    # -- values -------------------------------------------------------------------------------------------------

    def _current_value(self, source: int) -> int:
        """Return the value on the current copy for ``source`` of the source graph; reopen its view if needed."""
        storage = self._source.values[source].storage
        if self._source.storages[storage].kind != "temporary":
            if source in self._values:
                return source
        else:
            if storage not in self._copy:
                raise VerifyError(f"the schedule uses storage {storage} while no copy of it is in memory")
            known = self._open.get((source, self._copy[storage][0]))
            if known is not None:
                return known
        op = self._maker[source]
        if not is_pure_view(self._source.values, op):
            return self._loaded_as(source, op)
        mapping = {value: self._current_value(value) for value in op.inputs()}
        outputs = tuple(None if value is None else self._output_value(value, {}) for value in op.outputs)
        self._emit(op, mapping, (), (), outputs)
        return outputs[op.outputs.index(source)] or 0

    def _loaded_as(self, source: int, op: Op) -> int:
        """Return the output ``source`` of ``op``, in-place or not, on a copy loaded from the host."""
        value = self._source.values[source]
        copy, _ = self._copy.get(value.storage, (value.storage, 0))
        whole = self._values.get(self._loaded.get(copy, -1))
        if whole is None or (whole.dtype, whole.bits) != (value.dtype, value.bits):
            # The argument with the output's layout: the view of another dtype that the operator wrote to.
            for taken in op.inputs() if op.writes and whole is not None else ():
                if replace(self._source.values[taken], id=value.id, name=value.name) == value:
                    self._open[source, copy] = self._current_value(taken)
                    return self._open[source, copy]
            raise VerifyError(f"the schedule uses value {source} ({op.target}) before it is made")
        looks = (value.shape, value.stride, value.offset)
        if looks == (whole.shape, whole.stride, whole.offset):
            self._open[source, copy] = whole.id
            return whole.id
        new = self._output_value(source, {})
        self._emit_own("aten.as_strided.default", (Ref(whole.id), *looks), (new,))
        return new

    def _output_value(self, source: int, copies: dict[int, int]) -> int:
        """Add the value of an output of the source's operator; ``copies``: its storages -> fresh storages."""
        value = self._source.values[source]
        if self._source.storages[value.storage].kind != "temporary":
            if source in self._values:
                return self._new_value(value)
            self._values[source] = value
            return source
        copy = copies[value.storage] if value.storage in copies else self._copy[value.storage][0]
        new = self._new_value(replace(value, storage=copy))
        self._open[source, copy] = new
        return new

    def _take_over(
        self,
        op: Op,
        form: Op,
        mapping: dict[int, int],
        reads: tuple[tuple[int, int], ...],
        taken: int,
    ) -> None:
        """Emit the variant of ``op`` that writes its output over the input on storage ``taken``."""
        (source,) = op.made()
        victim = next(v for v in reusable(self._source, op) if self._source.values[v].storage == taken)
        copy = self._copy[taken][0]
        version = dict(reads)[copy] + 1
        new = self._new_value(replace(self._source.values[source], storage=copy))
        form = take_over_form(form, victim)
        self._emit(form, mapping, reads, ((copy, version),), (new,))
        del self._copy[taken]
        storage = self._source.values[source].storage
        self._copy[storage] = (copy, version)
        self._main.setdefault(storage, source)
        self._open[source, copy] = new

    def _version(self, pair: tuple[int, int]) -> tuple[int, int]:
        storage, version = pair
        copy, base = self._copy.get(storage, (storage, 0))
        return copy, version + base

    # -- making -------------------------------------------------------------------------------------------------

    def _new_storage(self, nbytes: int, kind: str) -> int:
        new = self._fresh_storage
        self._fresh_storage += 1
        self._storages[new] = Storage(new, nbytes, kind)
        return new

    def _new_value(self, like: Value) -> int:
        new = self._fresh_value
        self._fresh_value += 1
        self._values[new] = replace(like, id=new)
        return new

    def _emit(
        self,
        op: Op,
        mapping: dict[int, int],
        reads: tuple[tuple[int, int], ...],
        writes: tuple[tuple[int, int], ...],
        outputs: tuple[int | None, ...],
    ) -> None:
        self._ops.append(
            replace(
                with_inputs(op, mapping),
                id=len(self._ops),
                outputs=outputs,
                reads=reads,
                writes=writes,
                origin=op.id,
            )
        )

    def _emit_own(
        self, target: str, args: tuple[Arg, ...], outputs: tuple[int, ...], reads: tuple[tuple[int, int], ...] = ()
    ) -> None:
        self._ops.append(Op(len(self._ops), target, args, (), outputs, reads=reads))

"""Synthetic training steps of realistic shape: forward, backward and weight updates of networks that nobody runs.

A small tape records the forward operators and derives the backward ones, as autograd does, with the tensors that
each keeps. Costs follow a roofline (5 us launch, 20 TFLOP/s, 800 GB/s), so that sizes and times keep realistic
proportions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from magis.simulate.problem import BlockRow, NodeRow, Problem, StorageRow, build_problem

Backward = Callable[[int], None]


@dataclass
class Tape:
    """Builds a Problem operator by operator; activations are storages of float32."""

    nodes: list[NodeRow] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    ends: set[int] = field(default_factory=set)
    blocks: list[BlockRow] = field(default_factory=list)
    grads: dict[int, int] = field(default_factory=dict)
    tape: list[tuple[int, Backward]] = field(default_factory=list)
    persistent: int = 0
    weights: int = 0
    marks: list[int] = field(default_factory=list)
    """Block outputs: what per-block checkpointing keeps."""

    def op(
        self,
        inputs: list[int],
        outputs: list[int],
        flops: float = 0.0,
        *,
        weight: int | None = None,
        weight_bytes: int = 0,
        random: bool = False,
        ws: int = 0,
        reuse: bool = False,
    ) -> list[int]:
        """One node; outputs are given by their bytes, the result by their ids."""
        inputs = list(dict.fromkeys(inputs))
        made = list(range(len(self.sizes), len(self.sizes) + len(outputs)))
        self.sizes += outputs
        moved = sum(self.sizes[i] for i in inputs) + sum(outputs) + weight_bytes
        ns = 5000 + round(max(flops / 20e3, moved / 800))
        same = tuple(i for i in inputs if len(made) == 1 and self.sizes[i] == outputs[0]) if reuse else ()
        self.nodes.append(
            NodeRow(
                inputs=tuple(inputs),
                outputs=tuple(made),
                ns=ns,
                ws=ws,
                redo_ns=ns,
                redo_ws=ws,
                redo_ok=not random,
                reuse=same,
                preads=() if weight is None else (weight,),
            )
        )
        return made

    def grad_to(self, tensor: int, grad: int) -> None:
        """Add to the gradient of a tensor."""
        if tensor in self.grads:
            grad = self.op([self.grads[tensor], grad], [self.sizes[tensor]], reuse=True)[0]
        self.grads[tensor] = grad

    def weight(self, nbytes: int) -> int:
        self.persistent += 3 * nbytes  # with two moments
        self.weights += 1
        return self.weights - 1

    def update(self, weight: int, nbytes: int, grad: int) -> None:
        self.blocks.append(BlockRow((grad,), (weight,), ns=20000 + 7 * nbytes // 800, ws=nbytes, tensor=nbytes))

    def linear(self, x: int, rows: int, fan_in: int, fan_out: int, *, conv: int = 1, ws: int = 0) -> int:
        """A matrix product, or a convolution with ``conv`` taps."""
        flops = 2.0 * rows * fan_in * fan_out * conv
        nbytes = 4 * fan_in * fan_out * conv
        weight = self.weight(nbytes)
        y = self.op([x], [4 * rows * fan_out], flops, weight=weight, weight_bytes=nbytes, ws=ws)[0]

        def backward(g: int) -> None:
            if conv > 1:
                gx, gw = self.op([g, x], [self.sizes[x], nbytes], 2 * flops, weight=weight, weight_bytes=nbytes, ws=ws)
            else:
                gx = self.op([g], [self.sizes[x]], flops, weight=weight, weight_bytes=nbytes)[0]
                gw = self.op([g, x], [nbytes], flops)[0]
            self.update(weight, nbytes, gw)
            self.grad_to(x, gx)

        self.tape.append((y, backward))
        return y

    def pointwise(self, x: int, *, keep_input: bool = True) -> int:
        """GELU (its backward pass reads its input) or ReLU (reads its output)."""
        y = self.op([x], [self.sizes[x]], reuse=True)[0]
        self.tape.append((y, lambda g: self.grad_to(x, self.op([g, x if keep_input else y], [self.sizes[x]])[0])))
        return y

    def norm(self, x: int, rows: int) -> int:
        """A normalization: output and two statistics; its backward pass reads input and statistics."""
        y, mean, scale = self.op([x], [self.sizes[x], 4 * rows, 4 * rows], reuse=False)
        weight = self.weight(8192)

        def backward(g: int) -> None:
            gx, gw = self.op([g, x, mean, scale], [self.sizes[x], 8192], weight=weight)
            self.update(weight, 8192, gw)
            self.grad_to(x, gx)

        self.tape.append((y, backward))
        return y

    def dropout(self, x: int) -> int:
        y, mask = self.op([x], [self.sizes[x], self.sizes[x] // 4], random=True)
        self.tape.append((y, lambda g: self.grad_to(x, self.op([g, mask], [self.sizes[x]])[0])))
        return y

    def add(self, x: int, y: int) -> int:
        z = self.op([x, y], [self.sizes[x]], reuse=True)[0]

        def backward(g: int) -> None:
            self.grad_to(x, g)
            self.grad_to(y, g)

        self.tape.append((z, backward))
        return z

    def matmul(self, a: int, b: int, nbytes: int, flops: float) -> int:
        c = self.op([a, b], [nbytes], flops)[0]

        def backward(g: int) -> None:
            self.grad_to(a, self.op([g, b], [self.sizes[a]], flops)[0])
            self.grad_to(b, self.op([g, a], [self.sizes[b]], flops)[0])

        self.tape.append((c, backward))
        return c

    def concat(self, x: int, y: int) -> int:
        z = self.op([x, y], [self.sizes[x] + self.sizes[y]])[0]

        def backward(g: int) -> None:
            self.grad_to(x, self.op([g], [self.sizes[x]])[0])
            self.grad_to(y, self.op([g], [self.sizes[y]])[0])

        self.tape.append((z, backward))
        return z

    def pool(self, x: int, factor: float) -> int:
        """Pooling (factor below 1) or up-sampling."""
        y = self.op([x], [max(512, int(self.sizes[x] * factor) // 512 * 512)])[0]
        self.tape.append((y, lambda g: self.grad_to(x, self.op([g, x], [self.sizes[x]])[0])))
        return y

    def finish(self, y: int, *, xfer_ns_per_byte: float = 0.0) -> Problem:
        """Loss, backward pass, and the problem."""
        loss = self.op([y], [512])[0]
        self.ends.add(loss)
        self.grads[y] = self.op([y], [self.sizes[y]])[0]
        while self.tape:
            out, backward = self.tape.pop()
            if out in self.grads:
                backward(self.grads[out])
        storages = [StorageRow(size, to_end=i in self.ends) for i, size in enumerate(self.sizes)]
        return build_problem(
            self.nodes,
            storages,
            self.blocks,
            persistent_bytes=self.persistent,
            xfer_ns_per_byte=xfer_ns_per_byte,
        )


def transformer(
    layers: int, *, batch: int = 8, seq: int = 256, width: int = 512, dropout: bool = True, vocab: int = 8192,
    xfer_ns_per_byte: float = 0.0,
) -> tuple[Problem, list[int]]:  # fmt: skip
    """An encoder with explicit attention, and its block outputs."""
    tape = Tape()
    rows, heads = batch * seq, width // 64
    x = tape.op([], [4 * rows * width])[0]
    for _ in range(layers):
        h = tape.norm(x, rows)
        q, k, v = (tape.linear(h, rows, width, width) for _ in range(3))
        scores = tape.matmul(q, k, 4 * batch * heads * seq * seq, 2.0 * rows * seq * width)
        p = tape.pointwise(scores, keep_input=False)
        p = tape.dropout(p) if dropout else p
        h = tape.linear(tape.matmul(p, v, 4 * rows * width, 2.0 * rows * seq * width), rows, width, width)
        x = tape.add(x, tape.dropout(h) if dropout else h)
        h = tape.linear(tape.norm(x, rows), rows, width, 4 * width)
        h = tape.linear(tape.pointwise(h), rows, 4 * width, width)
        x = tape.add(x, tape.dropout(h) if dropout else h)
        tape.marks.append(x)
    y = tape.linear(tape.norm(x, rows), rows, width, vocab)
    return tape.finish(y, xfer_ns_per_byte=xfer_ns_per_byte), tape.marks


def resnet(
    stages: tuple[int, ...] = (3, 4, 6, 3), *, batch: int = 32, side: int = 56, width: int = 64,
    xfer_ns_per_byte: float = 0.0,
) -> tuple[Problem, list[int]]:  # fmt: skip
    """A chain of residual bottleneck blocks, and their outputs."""
    tape = Tape()
    x = tape.op([], [4 * batch * side * side * width * 4])[0]
    for stage, blocks in enumerate(stages):
        inner = width << stage
        for block in range(blocks):
            rows = batch * (side >> stage) ** 2
            outer = 4 * inner
            if stage and not block:
                x = tape.linear(tape.pool(x, 0.25), rows, outer // 2, outer)
            h = tape.pointwise(tape.norm(tape.linear(x, rows, outer, inner), inner), keep_input=False)
            h = tape.linear(h, rows, inner, inner, conv=9, ws=4 * rows * inner)
            h = tape.pointwise(tape.norm(h, inner), keep_input=False)
            h = tape.norm(tape.linear(h, rows, inner, outer), inner)
            x = tape.pointwise(tape.add(x, h), keep_input=False)
            tape.marks.append(x)
    y = tape.linear(tape.pool(x, 0.02), batch, 2048, 1000)
    return tape.finish(y, xfer_ns_per_byte=xfer_ns_per_byte), tape.marks


def unet(
    depth: int = 4, *, batch: int = 8, side: int = 128, width: int = 32, xfer_ns_per_byte: float = 0.0
) -> tuple[Problem, list[int]]:
    """Down, up, and the skips between."""
    tape = Tape()

    def double(x: int, rows: int, fan_in: int, fan_out: int) -> int:
        for _ in range(2):
            x = tape.linear(x, rows, fan_in, fan_out, conv=9, ws=4 * rows * fan_out)
            x = tape.pointwise(tape.norm(x, fan_out), keep_input=False)
            fan_in = fan_out
        tape.marks.append(x)
        return x

    x = tape.op([], [4 * batch * side * side * 4])[0]
    skips = []
    fan_in = 4
    for level in range(depth + 1):
        rows = batch * (side >> level) ** 2
        x = double(x, rows, fan_in, width << level)
        fan_in = width << level
        if level < depth:
            skips.append(x)
            x = tape.pool(x, 0.25)
    for level in range(depth - 1, -1, -1):
        rows = batch * (side >> level) ** 2
        x = tape.concat(tape.pool(x, 4.0), skips[level])
        x = double(x, rows, 3 * (width << level), width << level)
    y = tape.linear(x, batch * side * side, width, 2)
    return tape.finish(y, xfer_ns_per_byte=xfer_ns_per_byte), tape.marks

"""Functions with a backward of their own, which forwards may call: source, by name."""

from __future__ import annotations

__all__ = ["PRELUDE"]

PRELUDE = {
    "Scaled": """\
class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * ctx.factor + 0.01 * x, None
""",
    "StraightThrough": """\
class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad
""",
    "InPlaceTanh": """\
class InPlaceTanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        x.tanh_()
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (1 - x * x)
""",
    "TwoResults": """\
class TwoResults(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        signs = x.sign()
        ctx.mark_non_differentiable(signs)
        ctx.save_for_backward(signs)
        return x.abs(), signs

    @staticmethod
    def backward(ctx, grad, _signs):
        return grad * ctx.saved_tensors[0]
""",
    "SavesOutput": """\
class SavesOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = torch.sigmoid(x)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, grad):
        (out,) = ctx.saved_tensors
        return grad * out * (1 - out)
""",
}

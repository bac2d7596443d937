"""What scripts of loops may refer to: source, by name."""

from __future__ import annotations

__all__ = ["CLASSES"]

CLASSES = {
    "Block": """\
class Block(nn.Module):
    def __init__(self, width, p):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(p)
        self.scale = 1.0

    def forward(self, x):
        return x + self.scale * self.drop(self.down(F.gelu(self.up(self.norm(x)))))
""",
    "Attention": """\
class Attention(nn.Module):
    def __init__(self, width, p):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.p = p

    def forward(self, x):
        q, k, v = (part.unsqueeze(1) for part in self.qkv(x).chunk(3, -1))
        p = self.p if self.training else 0.0
        return x + self.out(F.scaled_dot_product_attention(q, k, v, dropout_p=p).squeeze(1))
""",
    "Smoothed": """\
class Smoothed(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.pace = 0.1

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.detach().flatten(0, -2).mean(0), self.pace)
                self.calls += 1
        return x - self.mean
""",
    "Counted": """\
class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * (1 + 1 / self.calls)
""",
    "Twice": """\
class Twice(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))
""",
    "Checkpointed": """\
class Checkpointed(nn.Module):
    def __init__(self, width, p):
        super().__init__()
        self.fc = nn.Linear(width, width)
        self.drop = nn.Dropout(p)
        self.reentrant = False

    def forward(self, x):
        return x + checkpoint(lambda t: self.drop(torch.tanh(self.fc(t))), x, use_reentrant=self.reentrant)
""",
    "Signed": """\
class Signed(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad.sign())
""",
    "gradients": """\
def gradients(model):
    return [p.grad for p in model.parameters() if p.grad is not None]
""",
    "outside": """\
def outside(model, optimizer):
    inside = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return [p for p in model.parameters() if id(p) not in inside]
""",
    "SETTINGS": 'SETTINGS = {"scale": 1.0}\n',
}

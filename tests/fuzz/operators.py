"""What forwards are made of: templates of statements, by kind. `tests.fuzz.maker` fills in operands and runs them.

`{x}` is a tensor of the forward, mostly a recent one; `{y}` one of the same shape, `{c}` a complex one, `{i}` one of
integers, `{w}` a parameter of shape `x.shape[-1]`, `{m}` one of shape (x.shape[-1], width), `{same}` one of x's shape,
`{b}` and `{full}` buffers of the shapes of `{w}` and `{same}`, `{d}` and `{e}` dimensions of x, `{cut}` an index, `{s}`
a number, `{p}` a probability, `{width}` a width, `{layer:...}` a sub-module (`{last}` is x.shape[-1], `{second}`
x.shape[1]). A template that does not fit its operands fails in eager mode at once, and another one is drawn.
"""

from __future__ import annotations

__all__ = ["HOST", "TEMPLATES"]

POINTWISE = r"""
torch.tanh({x})
torch.sigmoid({x}) * {x}
F.relu({x})
F.gelu({x})
F.silu({x})
F.leaky_relu({x}, 0.1)
F.softplus({x})
torch.sin({x})
torch.exp(-{x}.abs())
({x} * {x} + 1).sqrt()
{x} + {y}
{x} * {y}
{x} - {s} * {y}
{x} / ({y}.abs() + 1)
{x} * {s}
{s} - {x}
{x} / 2
2 ** -{x}.abs()
{x} + torch.tensor({s})
{x} * torch.tensor({s}, dtype={x}.dtype)
{x} * {w} + {w}
{x} * {same}
torch.addcmul({x}, {y}, {x}, value=0.5)
torch.lerp({x}, {y}, 0.3)
torch.where({x} > 0, {x}, {y} * 0.1)
torch.where({y} > {x}, {s}, {x})
{x}.masked_fill({y} > 0.5, 0.0)
{x}.clamp(-0.5, 0.5)
torch.maximum({x}, {y})
{x} * ({y} > 0)
torch.atan2({x}, {y}.abs() + 1)
F.glu(torch.cat([{x}, {x}], -1))
{x}.sign() * {x}.abs().log1p()
{x}.pow(2).add(1).rsqrt()
torch.hypot({x}, {same})
F.hardswish({x})
torch.logaddexp({x}, {y})
"""

PRODUCTS = r"""
{x} @ {m}
F.linear({x}, {m}.t(), {bias})
{layer:nn.Linear({last}, {width})}({x})
{layer:nn.Linear({last}, {width}, bias=False)}({x})
torch.einsum("...i,ij->...j", {x}, {m})
{x} @ {x}.transpose(-1, -2)
torch.softmax({x} @ {y}.transpose(-1, -2), -1) @ {x}
torch.addmm({x}, {x}, {square})
torch.bmm({x}, {x}.transpose(1, 2))
torch.outer({x}.flatten()[:5], {w})
torch.tensordot({x}, {m}, 1)
F.bilinear({x}, {x}, {three})
torch.linalg.norm({x}, dim=-1, keepdim=True) * {x}
torch.cdist({x}, {y} + 1)
torch.baddbmm({x} @ {x}.transpose(1, 2), {x}, {x}.transpose(1, 2), beta=0.5)
"""

NORMS = r"""
{layer:nn.LayerNorm({last})}({x})
F.layer_norm({x}, {x}.shape[-1:])
{layer:nn.RMSNorm({last})}({x})
{layer:nn.BatchNorm1d({second})}({x})
{layer:nn.BatchNorm1d({second}, momentum=None)}({x})
{layer:nn.BatchNorm1d({second}, affine=False, track_running_stats=False)}({x})
{layer:nn.BatchNorm2d({second})}({x})
{layer:nn.InstanceNorm1d({second}, affine=True)}({x})
{layer:nn.GroupNorm(1, {second})}({x})
F.normalize({x}, dim={d})
F.local_response_norm({x}, 2)
torch.softmax({x}, {d})
F.log_softmax({x}, {d})
"""

PICTURES = r"""
{layer:nn.Conv2d({second}, 4, 3, padding=1)}({x})
{layer:nn.Conv2d({second}, {second}, 3, padding=1, groups={second})}({x})
{layer:nn.Conv2d({second}, 4, 3, stride=2, padding=1, bias=False)}({x})
{layer:nn.ConvTranspose2d({second}, 3, 2, stride=2)}({x})
{layer:nn.Conv1d({second}, 4, 3, padding=1)}({x})
{layer:nn.Conv2d({second}, 4, 3, padding="same", padding_mode="circular")}({x})
F.max_pool2d({x}, 2)
F.avg_pool2d({x}, 3, 1, 1)
F.adaptive_avg_pool2d({x}, 2)
F.interpolate({x}, scale_factor=2, mode="nearest")
F.interpolate({x}, scale_factor=2, mode="bilinear")
F.pad({x}, (1, 1), value={s})
F.pad({x}, (1, 0, 0, 1), mode="reflect")
F.pixel_unshuffle({x}, 2)
F.unfold({x}, 2, stride=2)
{x}.to(memory_format=torch.channels_last)
F.max_pool1d({x}, 2)
"""

ATTENTION = r"""
F.scaled_dot_product_attention({x}.unsqueeze(1), {x}.unsqueeze(1), {x}.unsqueeze(1)).squeeze(1)
F.scaled_dot_product_attention({x}.unsqueeze(1), {x}.unsqueeze(1), {x}.unsqueeze(1), is_causal=True).squeeze(1)
{layer:nn.MultiheadAttention({last}, 1, batch_first=True)}({x}, {x}, {x}, need_weights=False)[0]
{layer:nn.TransformerEncoderLayer({last}, 1, 8, 0.1, batch_first=True)}({x})
torch.softmax(({x} @ {x}.mT).masked_fill(torch.ones({x}.shape[-2], {x}.shape[-2]).triu(1).bool(), -1e9), -1) @ {x}
torch.softmax({x} @ {x}.mT + torch.full(({x}.shape[-2],) * 2, float("-inf")).triu(1), -1) @ {x}
"""

REDUCTIONS = r"""
{x}.sum({d}, keepdim=True) + {x}
{x}.mean({d})
{x} - {x}.mean({d}, keepdim=True)
{x} / ({x}.std({d}, keepdim=True) + 1)
{x}.amax({d}, keepdim=True) * {x}
{x}.max({d}).values
{x}.median({d})[0]
{x}.sort({d})[0]
{x}.topk(2, {d})[0]
torch.topk({x}, 2, {d})
torch.sort({x}, {d}, descending=True)
{x}.cumsum({d})
{x}.clamp(-1, 1).cumprod({d})
{x}.cummax({d})[0]
{x}.gather({d}, {x}.argmax({d}, keepdim=True))
{x}.gather({d}, {x}.argsort({d}))
{x}.logsumexp({d})
{x}.norm(dim={d})
{x}.var({d})
torch.var_mean({x}, {d})
{x}.sum()
{x}.mean() * {x}
{x}.diff(dim={d})
{x}.prod({d})
{x}.argmax({d})
{x} > {x}.mean()
{x}.softmax({d}).argsort({d})
"""

VIEWS = r"""
{x}.transpose({d}, {e})
{x}.mT
{x}[{cut}]
{x}[{cut}]
{x}.select({d}, 0)
{x}.narrow({d}, 1, 1)
{x}.unsqueeze({d})
{x}.squeeze({d})
{x}.flatten({d})
{x}.view(-1)
{x}.reshape(-1)
{x}.reshape({x}.shape[0], -1)
{x}.view(*{x}.shape[:-1], 2, -1)
{x}.expand(2, *{x}.shape)
{x}.unsqueeze(0).expand(2, *[-1] * {x}.dim()).mean(0)
{x}.unfold({d}, 2, 1)
{x}.unfold({d}, 2, 2)
{x}.diagonal(0, {d}, {e})
{x}.as_strided(({x}.shape[0], 2), ({x}.stride(0), 1))
torch.as_strided({x}, (2, 2), (1, 1), 1)
{x}.chunk(2, {d})
{x}.split(2, {d})
{x}.unbind({d})
{x}.movedim({d}, {e})
{x}.permute(*reversed(range({x}.dim())))
{x}.unflatten(-1, (2, -1))
{x}.detach()
{x}.contiguous()
{x}.clone()
{x}.view_as({x})
torch.broadcast_to({x}, (2, *{x}.shape))
{x}.tensor_split(2, {d})
"""

COPIES = r"""
torch.cat([{x}, {y}], {d})
torch.cat([{x}, {x}], {d})
torch.stack([{x}, {y}], {d})
{x}.flip({d})
torch.roll({x}, 1, {d})
{x}.repeat(2, *[1] * ({x}.dim() - 1))
{x}.repeat_interleave(2, {d})
{x}.index_select({d}, torch.tensor([0, 1, 0]))
{x}[torch.tensor([0, 1, 1])]
{x}[..., torch.arange({last} - 1, -1, -1)]
{x}.tril()
torch.diag_embed({x}.flatten()[:4])
{x}.index_add({d}, torch.tensor([0, 1]), {x}.narrow({d}, 0, 2))
{x}.scatter({d}, {x}.argmax({d}, keepdim=True), 0.0)
{x}.scatter_add({d}, {x}.argsort({d}), {y})
torch.zeros_like({x}).index_copy({d}, torch.tensor([1, 0]), {x}.narrow({d}, 0, 2))
torch.zeros_like({x}).scatter_reduce({d}, {x}.argsort({d}), {x}, "mean")
torch.meshgrid({x}.flatten()[:3], {x}.flatten()[:2], indexing="ij")
torch.kron({x}[:2], torch.eye(2, dtype={x}.dtype))
"""

IN_PLACE = r"""
{x}.add_({y})
{x}.mul_({s})
{x}.mul_({y})
{x}.add_({w}, alpha=0.5)
{x}.copy_({y} * 0.5)
{x}.relu_()
{x}.tanh_()
{x}.clamp_(-1, 1)
{x}.masked_fill_({y} > 0.3, 0.1)
{x}.zero_()
{x}.fill_({s})
{x}[{cut}] = {s}
{x}[{cut}] *= {s}
{x}[{cut}].add_(1)
{x}[{cut}] = {x}[{cut}].flip(0)
{x}[0] = {x}[1]
{x}.t().mul_({s})
{x}.unsqueeze(0).add_({s})
{x}.index_add_({d}, torch.tensor([0, 1]), {x}.narrow({d}, 0, 2).clone())
{x}.index_fill_({d}, torch.tensor([0]), {s})
{x}.index_put_((torch.tensor([0, 1, 0]),), {x}[:1] * 0.5, accumulate=True)
{x}.scatter_add_({d}, {x}.argsort({d}), {y}.clone())
{x}.scatter_({d}, {x}.argmax({d}, keepdim=True), {s})
{x}.diagonal(0, {d}, {e}).mul_(2)
{x}.addcmul_({y}, {y}, value=0.1)
{x}.lerp_({y}, 0.3)
{x}.sub_({x}.mean({d}, keepdim=True))
{x}.transpose_({d}, {e})
{x}.unsqueeze_({d})
{x}.chunk(2, {d})[0].mul_(2)
{x}.view(-1)[::2].neg_()
{x}.cumsum_({d})
{x}.resize_as_({x})
"""

FRESH_IN_PLACE = r"""
({x} * 1.0).relu_()
({x} + {y}).mul_({s})
F.relu({x} * 2, inplace=True)
torch.zeros_like({x}).copy_({x})
torch.empty_like({x}).fill_({s}).add_({x})
{x}.new_zeros(2, *{x}.shape).add_({x})
{x}.clone().masked_fill_({x} > 0, 0.5)
torch.zeros_like({x}).scatter_add_({d}, {x}.argsort({d}), {x})
F.dropout({x} * 1.0, {p}, self.training, inplace=True)
{x}.clone().index_put_((torch.tensor([0, 1]),), {x}[:1])
"""

RANDOM = r"""
F.dropout({x}, {p}, self.training)
{layer:nn.Dropout({p})}({x})
{x} + 0.1 * torch.randn_like({x})
{x} * torch.rand({last})
{x} * torch.bernoulli(torch.full_like({x}, 0.7))
{x} * torch.bernoulli(torch.sigmoid({x}))
{x}[torch.randperm({x}.shape[0])]
{x} + torch.randint(0, 3, {x}.shape)
{x} + torch.empty_like({x}).uniform_(-0.1, 0.1)
{x} + torch.empty_like({x}).normal_()
F.rrelu({x}, training=self.training)
F.alpha_dropout({x}, {p}, self.training)
F.feature_dropout({x}, {p}, self.training)
F.gumbel_softmax({x}, dim={d})
{x}.gather({d}, torch.multinomial({x}.abs() + 0.1, 2, True))
torch.normal({x}, 0.1)
torch.poisson({x}.abs()) * {x}
{x} + torch.rand({x}.shape, generator=torch.Generator().manual_seed(3))
"""

COMPLEX = r"""
torch.complex({x}, {y})
torch.view_as_complex({x}.contiguous().view(*{x}.shape[:-1], -1, 2))
torch.polar({x}.abs() + 0.1, {y})
torch.fft.fft({x})
torch.fft.rfft({x}, dim={d})
torch.fft.ifft(torch.fft.fft({x}) * {w}).real
torch.fft.irfft(torch.fft.rfft({x}, norm="ortho") * 0.5, n={last}, norm="ortho")
{x} * 1j
{x}.to(torch.complex64)
"""

OF_COMPLEX = r"""
torch.view_as_real({c})
{c}.real
{c}.imag
{c}.abs()
{c}.angle()
{c}.conj()
{c}.conj() * {c}
({c}.conj() @ {c}.mT).real
{c}.mH
{c} * {cw}
{c} @ {cm}
{c}.resolve_conj()
torch.fft.ifft({c})
{c} / ({c}.abs() + 1)
{c} * (0.5 + 1j)
{c}.conj().imag
{c}.mul_(1j)
{c}.real.mul_(2)
torch.view_as_real({c}).add_(1)
{c}.exp().real
{c}.sgn()
{c}.cumsum(-1)
{c}.transpose(0, -1).conj()
torch.stack([{c}, {c}.conj()])
{c}.sum(0).conj()
{c}.pow(2)
torch.where({c}.real > 0, {c}, {c}.conj())
"""

CASTS = r"""
{x}.to(torch.float64)
{x}.double().cumsum(-1).to({x}.dtype)
{x}.to(torch.bfloat16)
{x}.bfloat16().float()
{x}.float()
{x}.to({y}.dtype)
{x}.half().to({x}.dtype)
{x} + {x}.double()
{x}.to({mixed}.dtype) * {mixed}
{x} + {mixed}
({x} > 0).to({x}.dtype) * {x}
{x}.detach().round().long()
{x}.type(torch.float32)
"""

INTEGERS = r"""
{layer:nn.Embedding(12, {width})}({i} % 12)
{layer:nn.Embedding(12, {width}, padding_idx=0)}({i} % 12)
{layer:nn.EmbeddingBag(12, {width}, mode="mean")}({i} % 12)
F.one_hot({i} % 5, 5).float()
F.embedding({i} % 6, {table})
{table}[{i} % 6]
({i} % 3 == 1).float()
{i} + 1
{i} * {i}
{i}.float() * {s}
{i} // 2
torch.bincount({i}.flatten() % 4, minlength=4).float()
{i}.cumsum(0)
{i}.clamp(0, 3)
{i} & 1
{table}.index_select(0, ({i} % 6).flatten())
"""

BLOCKS = r"""
checkpoint(lambda t: torch.tanh(t @ {m}), {x}, use_reentrant=False)
checkpoint(lambda t: F.gelu(t) * t, {x}, use_reentrant=True)
checkpoint(lambda t: F.dropout(F.gelu(t), {p}, self.training), {x}, use_reentrant=False)
checkpoint({layer:nn.Sequential(nn.Linear({last}, 8), nn.Dropout({p}), nn.Tanh())}, {x}, use_reentrant=False)
checkpoint({layer:nn.Sequential(nn.Linear({last}, 8), nn.Dropout({p}), nn.Tanh())}, {x}, use_reentrant=True)
checkpoint({layer:nn.BatchNorm1d({last})}, {x}, use_reentrant=False)
Scaled.apply({x}, {s})
StraightThrough.apply({x})
InPlaceTanh.apply({x} * 1.0)
TwoResults.apply({x})[0] * {x}
SavesOutput.apply({x})
{layer:nn.Sequential(nn.Linear({last}, {last}), nn.ReLU(inplace=True), nn.Linear({last}, {width}))}({x})
torch.vmap(torch.sin)({x})
"""

STATE = r"""
with torch.no_grad():\n    {b}.mul_(0.9).add_({x}.detach().reshape(-1, {last}).mean(0), alpha=0.1)
with torch.no_grad():\n    {full}.copy_({x})
{b}.add_(1)
{b}.lerp_({x}.detach().reshape(-1, {last})[0], 0.1)
{h} = {x} * {b}
{h} = {x} + {b}.sum()
{full}.mul_(0.5)
{full}.add_({x}.detach())
{h} = {x} + {full}.clone()
with torch.no_grad():\n    {h} = {x} * 2
with torch.no_grad():\n    {x}.mul_({s})
if self.training:\n    {h} = {x} * {s}
self.calls = self.calls + 1
{h} = {x} * (1.0 / (self.calls + 1))
for part in {x}.unbind(0)[:3]:\n    {x} = {x} + part.mean()
{count}.add_(1)
{h} = {x} / {count}
with torch.no_grad():\n    {same}.clamp_(-1, 1)
{h} = {x}.detach().requires_grad_() * {x}
"""

HOST = r"""
{x} * float({x}.mean())
{x} if {x}.sum() > 0 else -{x}
{x}[{x} > 0]
{x}.nonzero().float()
"""
"""Depends on data: soundly refused, hence drawn seldom."""

TEMPLATES: dict[str, tuple[int, tuple[str, ...]]] = {
    name: (weight, tuple(line.replace("\\n", "\n") for line in text.strip().splitlines()))
    for name, weight, text in (
        ("pointwise", 22, POINTWISE),
        ("products", 14, PRODUCTS),
        ("norms", 7, NORMS),
        ("pictures", 6, PICTURES),
        ("attention", 4, ATTENTION),
        ("reductions", 9, REDUCTIONS),
        ("views", 16, VIEWS),
        ("copies", 8, COPIES),
        ("in place", 12, IN_PLACE),
        ("fresh in place", 5, FRESH_IN_PLACE),
        ("random", 7, RANDOM),
        ("complex", 3, COMPLEX),
        ("of complex", 4, OF_COMPLEX),
        ("casts", 5, CASTS),
        ("integers", 3, INTEGERS),
        ("blocks", 4, BLOCKS),
        ("state", 6, STATE),
    )
}

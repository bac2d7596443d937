"""What a training loop does between steps. `{linear}`, `{dropout}`, `{norm}`, `{leaf}`, `{any}`: modules of the net."""

from __future__ import annotations

__all__ = ["BEFORE", "EVENTS", "LATER"]

OPTIMIZER = r"""
updater.param_groups[0]["lr"] = 0.02
updater.param_groups[0]["lr"] *= 0.5
updater.param_groups[-1]["weight_decay"] = 0.05
updater.param_groups[0]["momentum"] = 0.5
updater.param_groups[0]["betas"] = (0.7, 0.9)
updater.param_groups[0]["maximize"] = True
updater.param_groups[0]["nesterov"] = True
updater.param_groups[0]["amsgrad"] = True
updater.param_groups[0]["dampening"] = 0.2
updater.param_groups[0]["eps"] = 1e-3
updater.param_groups[0]["foreach"] = True
updater.register_step_pre_hook(lambda opt, args, kwargs: (torch._foreach_mul_(gradients(model), 0.5), None)[1])
updater.register_step_post_hook(lambda opt, args, kwargs: [p.data.mul_(0.9) for p in model.parameters()])
updater.add_param_group({"params": outside(model, updater), "lr": 0.03})
extra = nn.Parameter(torch.ones(3)); updater.add_param_group({"params": [extra]})
updater.param_groups.pop()
updater.param_groups[0]["params"].pop()
updater.state.clear()
updater.state.pop(next(iter(updater.state)), None)
torch._foreach_mul_([t for state in updater.state.values() for t in state.values() if torch.is_tensor(t)], 0.5)
for p, state in updater.state.items():\n    updater.state[p] = copy.deepcopy(state)
updater.step = lambda old=updater.step: (torch._foreach_clamp_max_(gradients(model), 0.01), old())[1]
updater.zero_grad(set_to_none=False)
updater.zero_grad()
"""

SAVED = r"""
saved = copy.deepcopy(model.state_dict()), copy.deepcopy(updater.state_dict())
saved = copy.deepcopy(model.state_dict()), copy.deepcopy(updater.state_dict())
updater.load_state_dict(copy.deepcopy(updater.state_dict()))
model.load_state_dict({k: v * 0.9 if v.is_floating_point() else v for k, v in model.state_dict().items()})
model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
"""

MODES = r"""
{any}.requires_grad_(False)
{any}.requires_grad_(False)
model.requires_grad_(True)
{any}.eval()
{any}.eval()
model.eval()
model.train()
{linear}.weight.requires_grad_(False)
{dropout}.p = 0.3
{dropout}.p = 0.0
{norm}.momentum = 0.5
{norm}.momentum = None
{norm}.eps = 0.1
{norm}.track_running_stats = False
{scaled}.scale = 0.5
{scaled}.extra = 3
"""

MODULES = r"""
handle = {leaf}.register_forward_hook(lambda module, args, out: out * 0.5)
handle = {linear}.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
handle = {any}.register_forward_hook(lambda module, args, out: None)
handle = {linear}.register_full_backward_hook(lambda module, given, taken: (given[0] * 2, *given[1:]))
handle = {linear}.weight.register_hook(lambda grad: grad * 2)
handle = {linear}.weight.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))
{linear}.forward = lambda x, old={linear}.forward: torch.tanh(old(x))
{leaf}.forward = lambda x, old={leaf}.forward: old(x)
model.forward = lambda x, old=model.forward: old(x) * 2
model.append(nn.Tanh())
model[1] = nn.Sigmoid()
model.insert(1, nn.Dropout(0.2))
del model[1]
{linear}.bias = None
{linear}.weight = nn.Parameter({linear}.weight.detach() * 0.5)
{linear}.weight = nn.Parameter({linear}.weight.detach().t().contiguous().t())
{linear}.weight.data = {linear}.weight.data.clone()
{linear}.weight.data = {linear}.weight.data.t().contiguous().t() * 0.5
{linear}.weight.data.mul_(0.9)
{norm}.running_mean = torch.zeros_like({norm}.running_mean)
{norm}.running_var.fill_(2.0)
{norm}.num_batches_tracked.zero_()
with torch.no_grad():\n    {linear}.weight.mul_(0.9)
with torch.no_grad():\n    [p.clamp_(-0.5, 0.5) for p in model.parameters()]
nn.init.normal_({linear}.weight)
{linear}.weight.grad = torch.ones_like({linear}.weight)
[setattr(p, "grad", torch.ones_like(p)) for p in model.parameters()]
import torch.nn.utils.prune as prune; prune.l1_unstructured({linear}, "weight", 0.3)
nn.utils.parametrizations.weight_norm({linear})
model.to(torch.float32)
model.double().float()
model.to(memory_format=torch.channels_last)
model.zero_grad()
{linear}.weight = {linear}.weight
{linear}.tag = "named"
"""

BATCHES = r"""
step(N, rows=8)
step(N, rows=8)
step(N, rows=24)
step(N, how="strided")
step(N, how="strided")
step(N, how="sliced")
step(N, how="expanded")
step(N, how="same")
step(N, how="same")
step(N, how="overlapping")
step(N, rows=8, how="strided")
"""

AROUND = r"""
torch.manual_seed(5)
torch.rand(3)
model(batch(99)[0][0])
evaluated = model.eval()(batch(99)[0][0]).sum().item(); model.train()
with torch.no_grad():\n    model(batch(99)[0][0])
loss_fn(model(*batch(99)[0]), *batch(99)[1]).backward(); model.zero_grad()
torch.set_num_threads(1)
SETTINGS["scale"] = 0.5
clones = [p.detach().clone() for p in model.parameters()]; [p.data.copy_(c) for p, c in zip(model.parameters(), clones)]
ema = copy.deepcopy(model)
"""

EVENTS: dict[str, tuple[int, tuple[str, ...]]] = {
    name: (weight, tuple(line.replace("\\n", "\n") for line in text.strip().splitlines()))
    for name, weight, text in (
        ("optimizer", 8, OPTIMIZER),
        ("saved", 2, SAVED),
        ("modes", 6, MODES),
        ("modules", 9, MODULES),
        ("batches", 5, BATCHES),
        ("around", 3, AROUND),
    )
}
"""What may happen, by kind, with how often."""

LATER = {
    "handle": "handle.remove()",
    "saved": "model.load_state_dict(saved[0]); updater.load_state_dict(saved[1])",
}
"""What may follow an event that assigns to a name."""

BEFORE = (
    ("scheduler = torch.optim.lr_scheduler.StepLR(updater, 1, 0.5)", "scheduler.step()"),
    ("scheduler = torch.optim.lr_scheduler.ExponentialLR(updater, 0.8)", "scheduler.step()"),
    ("scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(updater, 4)", "scheduler.step()"),
    ("scheduler = torch.optim.lr_scheduler.LambdaLR(updater, lambda n: 1 / (n + 1))", "scheduler.step()"),
    ("scheduler = torch.optim.lr_scheduler.OneCycleLR(updater, 0.1, total_steps=20)", "scheduler.step()"),
    ("scheduler = torch.optim.lr_scheduler.CyclicLR(updater, 0.001, 0.1, 2, cycle_momentum=False)", "scheduler.step()"),
    ("scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(updater, patience=0)", "scheduler.step(1.0)"),
    ("swa = torch.optim.swa_utils.AveragedModel(model)", "swa.update_parameters(model)"),
)
"""What a loop may make before its first step, and do with it after a step."""

"""Networks of strangers for tests of plans: a stand-in for a Hugging Face decoder, and these themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from magis.capture import OptimizerSpec, Workload
from magis.ops.optimizers import torch_optimizer

RULE = OptimizerSpec("momentum", lr=0.05, momentum=0.9)


class Config:
    """Carries the plans that `LlamaConfig` carries."""

    base_model_tp_plan = {  # noqa: RUF012
        **{f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
        "layers.*.self_attn.q_norm": "replicated_with_grad_allreduce",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_up_proj": "packed_colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
    base_model_pp_plan = {  # noqa: RUF012
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }


class Attention(nn.Module):
    """Twice as many heads of queries as of keys and values; a norm of each head."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.config, self.head_dim = Config(), width // heads
        few = width // 2
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(width, width), nn.Linear(width, few), nn.Linear(width, few)
        self.o_proj, self.q_norm = nn.Linear(width, width, bias=False), nn.RMSNorm(self.head_dim)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        query, key, value = (
            part(hidden_states).view(*hidden_states.shape[:-1], -1, self.head_dim)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key, value = (each.transpose(1, 2) for each in (self.q_norm(query), key, value))
        mixed = functional.scaled_dot_product_attention(
            query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1), attn_mask=attention_mask
        )
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


class Mlp(nn.Module):
    """Gate and value in one projection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.gate_up_proj(x).chunk(2, -1)
        out: Tensor = self.down_proj(functional.silu(gate) * value)
        return out


class Layer(nn.Module):
    """[batch, length, width] -> the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.self_attn, self.mlp = Attention(width, 4), Mlp(width)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        x = hidden_states + self.self_attn(hidden_states=self.before(hidden_states), attention_mask=attention_mask)
        out: Tensor = x + self.mlp(self.between(x))
        return out


class Decoder(nn.Module):
    """The part under the head, which scales what it embeds and makes the mask for all layers."""

    def __init__(self, width: int, layers: int, words: int) -> None:
        super().__init__()
        self.config = Config()
        self.embed_tokens, self.norm = nn.Embedding(words, width), nn.LayerNorm(width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids) * 2.0
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        for layer in self.layers:
            x = layer(x, attention_mask=mask)
        out: Tensor = self.norm(x)
        return out


class Model(nn.Module):
    """Token numbers, int64 [batch, length] -> logits [batch, length, words]."""

    _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}  # noqa: RUF012

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.model, self.lm_head = Decoder(32, 3, 66), nn.Linear(32, 66, bias=False)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        out: Tensor = self.lm_head(self.model(input_ids))
        return out


def _loss(output: Any, target: Tensor) -> Tensor:
    logits = output if isinstance(output, Tensor) else output.logits
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def trained(name: str, module: nn.Module) -> Workload:
    """Return a network of 66 words with eight samples."""
    text = torch.randint(0, 66, (8, 17))
    return Workload(name, module.train(), (text[:, :-1].contiguous(),), (text[:, 1:].contiguous(),), _loss, RULE)


def plain() -> Workload:
    torch.manual_seed(0)
    return trained("plain", Model(tied=False))


def tied() -> Workload:
    torch.manual_seed(0)
    return trained("tied", Model(tied=True))


class FeedForward(nn.Module):
    """[samples, width] -> the same."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.up(x).relu())
        return out


class Feed(nn.Module):
    """Feed-forwards alone, whose loss is a full tensor that shrinks."""

    tp_plan: Any = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}  # noqa: RUF012
    pp_plan: Any = {"enter": (["x"], ["h"]), "blocks": (["h"], ["h"]), "leave": (["h"], ["y"])}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(32, 32), nn.Linear(32, 32)
        self.blocks = nn.ModuleList(FeedForward() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.leave(x)
        return out


def feed(kind: type[Feed] = Feed) -> Workload:
    torch.manual_seed(0)
    batch = ((torch.randn(64, 32),), (torch.randn(64, 32),))
    return Workload("feed", kind(), *batch, functional.mse_loss, RULE)


def _hugging_face(kind: str, **sizes: Any) -> Workload:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64,
        vocab_size=66, max_position_embeddings=32, use_cache=False, **sizes,
    )  # fmt: skip
    return trained(kind, getattr(transformers, f"{kind}ForCausalLM")(config))


def llama() -> Workload:
    return _hugging_face("Llama", tie_word_embeddings=True)


def qwen() -> Workload:
    """Has norms of each head."""
    return _hugging_face("Qwen3", head_dim=8)


def mistral() -> Workload:
    """Sees eight tokens before a token, so that every forward makes a mask."""
    return _hugging_face("Mistral", sliding_window=8)


def losses_alone(work: Workload) -> list[float]:
    """The losses of three steps in a single process."""
    optimizer = torch_optimizer(work.optimizer, dict(work.module.named_parameters()))
    assert optimizer is not None
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = work.loss_fn(work.module(*work.inputs), *work.targets)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found

"""Tiny models of each kind that strategies are applied to, and data for them."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

VOCAB, HIDDEN, HEADS, LAYERS, SEQUENCE = 64, 32, 4, 4, 16


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.n_heads = HEADS
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out_proj = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        batch, length, _ = x.shape
        parts = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (part.view(batch, length, self.n_heads, -1).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(3 * HIDDEN, HIDDEN)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))


class Experts(nn.Module):
    def __init__(self, count=4):
        super().__init__()
        self.num_experts = count
        self.up = nn.Parameter(torch.empty(count, HIDDEN, 2 * HIDDEN))
        self.down = nn.Parameter(torch.empty(count, 2 * HIDDEN, HIDDEN))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.normal_(self.up, std=0.2)
        nn.init.normal_(self.down, std=0.2)

    def forward(self, x, index, weight):
        result = torch.zeros_like(x)
        for expert in range(self.num_experts):
            token, choice = torch.where(index == expert)
            y = F.silu(x[token] @ self.up[expert]) @ self.down[expert]
            y = y * weight[token, choice, None]
            result = result.index_add(0, token, y.to(result.dtype))
        return result


class Moe(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(HIDDEN, 4, bias=False)
        self.experts = Experts()

    def forward(self, x):
        flat = x.reshape(-1, HIDDEN)
        weight, index = self.gate(flat).softmax(-1).topk(2, dim=-1)
        return self.experts(flat, index, weight).view_as(x)


class Block(nn.Module):
    def __init__(self, moe=False):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attention = Attention()
        self.mlp = Moe() if moe else Mlp()

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Plain(nn.Module):
    """A transformer without a configuration; its output layer is tied."""

    def __init__(self, moe=False):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.position = nn.Embedding(64, HIDDEN)
        self.blocks = nn.ModuleList([Block(moe) for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.1)

    def forward(self, tokens):
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Positioned(Plain):
    """A transformer whose data has positions that all samples share."""

    def forward(self, tokens, positions):
        x = self.embed(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def plain():
    return Plain()


def positioned():
    return Positioned()


def moe():
    return Plain(moe=True)


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=LAYERS,
            num_attention_heads=HEADS, num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.1,
        )
    )  # fmt: skip


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB, n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS, n_positions=64, initializer_range=0.1,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=LAYERS,
            num_attention_heads=HEADS, num_key_value_heads=2, max_position_embeddings=64, num_local_experts=4,
            num_experts_per_tok=2, initializer_range=0.1, sliding_window=None,
        )
    )  # fmt: skip


def next_token_loss(data, output):
    return F.cross_entropy(output.flatten(0, 1).float(), data.roll(-1, dims=1).flatten())


OF_CONFIG = ("llama", "gpt2", "mixtral")


def problem(name, samples, sequence=SEQUENCE):
    """The model, its data set, how it is called and its loss."""
    torch.manual_seed(0)
    model = globals()[name]()
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB, (samples, sequence), generator=generator)
    if name in OF_CONFIG:
        data = [{"input_ids": row, "labels": row} for row in tokens]
        return SimpleNamespace(model=model, data=data, form="unpack_dict", loss=None)
    if name == "positioned":
        loss = lambda data, output: next_token_loss(data["tokens"], output)  # noqa: E731
        return SimpleNamespace(model=model, data=list(tokens), form="unpack_dict", loss=loss)
    return SimpleNamespace(model=model, data=list(tokens), form=None, loss=next_token_loss)

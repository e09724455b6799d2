"""A training pass through the modules of a Hugging Face `GlmMoeDsaForCausalLM`.

The Hugging Face model stays the only holder of parameters, so a trained model is a checkpoint as it is. What differs is
how they are applied: whole batches of long documents, no cache, and the selection of the sparse layers as a boolean
mask, so that ordinary autograd goes through attention. The indexers get their own loss: the Kullback-Leibler divergence
between their scores and the attention of the layers that use them.

On CUDA, index scores and the top-k mask are two Triton kernels (`recall_kernels.py`) and masked attention is
FlexAttention; elsewhere both are plain PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BLOCK = 128  # FlexAttention's tile


@dataclass(slots=True)
class PassOutput:
    """Final hidden states `[batch, tokens, hidden]` and what the losses need; lists are in layer order."""

    hidden: Tensor
    expert_loads: list[Tensor] = field(default_factory=list)  # share of the tokens that chose each expert
    index_losses: list[Tensor] = field(default_factory=list)  # one mean divergence per index group
    coverage: list[Tensor] = field(default_factory=list)  # attention mass on the selected positions


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of interleaved pairs; the result holds the first halves, then the second halves, as in transformers."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.cat([even * cos - odd * sin, odd * cos + even * sin], -1)


def project(layer: nn.Module, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """First half of a layer, per token: `x [N, hidden]` to (normed x, query residual, q, k, v `[N, heads, 64]`)."""
    attention = layer.self_attn
    normed = layer.input_layernorm(x)
    residual = attention.q_a_layernorm(attention.q_a_proj(normed))
    q = attention.q_b_proj(residual).unflatten(-1, (attention.num_heads, attention.qk_head_dim))
    q_nope, q_rope = q.split([attention.qk_nope_head_dim, attention.qk_rope_head_dim], -1)
    latent, k_rope = attention.kv_a_proj_with_mqa(normed).split([attention.kv_lora_rank, attention.qk_rope_head_dim], -1)
    kv = attention.kv_b_proj(attention.kv_a_layernorm(latent)).unflatten(-1, (attention.num_heads, -1))
    k_nope, v = kv.split([attention.qk_nope_head_dim, attention.v_head_dim], -1)
    q = torch.cat([q_nope, rotate(q_rope, cos[:, None], sin[:, None])], -1)
    k = torch.cat([k_nope, rotate(k_rope, cos, sin)[:, None].expand_as(k_nope)], -1)
    return normed, residual, q, k, v


def finish(layer: nn.Module, x: Tensor, attended: Tensor) -> tuple[Tensor, Tensor | None]:
    """Second half of a layer, per token: output projection and MLP. Also returns the experts' loads, if any."""
    x = x + layer.self_attn.o_proj(attended)
    normed = layer.post_attention_layernorm(x)
    if not hasattr(layer.mlp, "experts"):
        return x + layer.mlp(normed), None
    routed, load = all_experts(layer.mlp, normed)
    return x + routed + layer.mlp.shared_experts(normed), load


def all_experts(moe: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Run every token through every expert; those it did not choose weigh nothing. Right for a handful of experts."""
    gate, experts, config = moe.gate, moe.experts, moe.config
    with torch.autocast(x.device.type, enabled=False):
        affinity = F.linear(x.float(), gate.weight).sigmoid()
        chosen = (affinity + gate.e_score_correction_bias).topk(config.num_experts_per_tok, -1).indices
        mask = torch.zeros_like(affinity).scatter(-1, chosen, 1.0)
        weights = affinity * mask
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * config.routed_scaling_factor
    gate_up = F.linear(x, experts.gate_up_proj.flatten(0, 1)).unflatten(-1, (experts.num_experts, -1))
    gated, up = gate_up.chunk(2, -1)
    active = F.silu(gated) * up * weights[..., None].to(gate_up.dtype)
    return F.linear(active.flatten(-2), experts.down_proj.transpose(0, 1).flatten(1)), mask.mean(0)


def index_keys(indexer: nn.Module, normed: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`[batch, tokens, index_head_dim]`."""
    keys = indexer.k_norm(indexer.wk(normed))
    width = indexer.qk_rope_head_dim
    return torch.cat([rotate(keys[..., :width], cos, sin), keys[..., width:]], -1)


def index_queries(indexer: nn.Module, normed: Tensor, residual: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Queries `[batch, rows, index_heads, index_head_dim]` and scaled head weights `[batch, rows, index_heads]` fp32."""
    queries = indexer.wq_b(residual).unflatten(-1, (indexer.n_heads, indexer.head_dim))
    width = indexer.qk_rope_head_dim
    rotated = rotate(queries[..., :width], cos.unsqueeze(-2), sin.unsqueeze(-2))
    with torch.autocast(normed.device.type, enabled=False):
        weights = F.linear(normed.float(), indexer.weights_proj.weight)
    return torch.cat([rotated, queries[..., width:]], -1), weights * (indexer.n_heads * indexer.head_dim) ** -0.5


def index_scores(queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """`[batch, rows, tokens]` fp32: the weighted sum over heads of the rectified dot products."""
    dots = F.relu(torch.einsum("brhd,btd->brht", queries, keys.to(queries.dtype)))
    return torch.einsum("brh,brht->brt", weights.to(dots.dtype), dots).float()


@torch.no_grad()
def top_k_mask(indexer: nn.Module, normed: Tensor, residual: Tensor, cos: Tensor, sin: Tensor, top_k: int) -> Tensor:
    """`[batch, tokens, tokens]` bool: the positions each row attends to, never later ones."""
    keys = index_keys(indexer, normed, cos, sin)
    queries, weights = index_queries(indexer, normed, residual, cos, sin)
    if normed.is_cuda:
        from recall_kernels import causal_top_k_mask

        return causal_top_k_mask(queries, weights, keys.to(queries.dtype), top_k)
    num_tokens = keys.shape[1]
    later = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=keys.device).triu(1)
    scores = index_scores(queries, weights, keys).masked_fill(later, float("-inf"))
    best = scores.topk(min(top_k, num_tokens), -1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True) & ~later


class TrainingPass:
    """Applies one model to batches of documents. Holds no parameters; caches rotary and block tables.

    Args:
        model: a `GlmMoeDsaForCausalLM` in fp32.
        compiled: compile the two halves of a layer and use FlexAttention (CUDA).
    """

    def __init__(self, model: nn.Module, compiled: bool) -> None:
        self.model, self.layers = model, model.model.layers
        config = model.config
        theta, width = config.rope_parameters["rope_theta"], config.qk_rope_head_dim
        device = model.model.embed_tokens.weight.device
        frequencies = theta ** -(torch.arange(0, width, 2, device=device).float() / width)
        angles = torch.outer(torch.arange(config.max_position_embeddings, device=device).float(), frequencies)
        self._cos, self._sin = angles.cos(), angles.sin()
        self._project, self._finish, self._flex = project, finish, None
        if compiled:
            from torch._dynamo import config as dynamo_config
            from torch.nn.attention.flex_attention import flex_attention

            dynamo_config.recompile_limit = 64
            self._project, self._finish = torch.compile(project, dynamic=False), torch.compile(finish, dynamic=False)
            self._flex = torch.compile(flex_attention, dynamic=False)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, block_mask: object) -> Tensor:
        if mask is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if block_mask is None:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])
        return self._flex(q, k, v, block_mask=block_mask)

    def _block_mask(self, mask: Tensor) -> object:
        """Every tile on or below the diagonal is visited, and inside it `mask` decides."""
        from torch.nn.attention.flex_attention import BlockMask

        num_blocks = mask.shape[-1] // BLOCK
        counts = torch.arange(1, num_blocks + 1, device=mask.device, dtype=torch.int32)[None, None]
        indices = torch.arange(num_blocks, device=mask.device, dtype=torch.int32).repeat(1, 1, num_blocks, 1)
        return BlockMask.from_kv_blocks(
            counts,
            indices,
            BLOCK_SIZE=BLOCK,
            mask_mod=lambda batch, head, row, column: mask[batch, row, column],
        )

    def __call__(
        self, ids: Tensor, *, top_k: int | None = None, index_rows: Tensor | None = None, freeze_body: bool = False
    ) -> PassOutput:
        """Run `ids [batch, tokens]`.

        Args:
            top_k: positions a row attends to; dense causal attention when None.
            index_rows: `[batch, rows]` positions on which the indexers are trained; no index loss when None.
            freeze_body: keep no graph of anything but the indexers.
        """
        batch, num_tokens = ids.shape
        cos, sin = self._cos[:num_tokens], self._sin[:num_tokens]
        x = self.model.model.embed_tokens(ids).flatten(0, 1)
        if torch.is_autocast_enabled(ids.device.type):
            cos, sin, x = cos.bfloat16(), sin.bfloat16(), x.bfloat16()
        cos_flat, sin_flat = cos.repeat(batch, 1), sin.repeat(batch, 1)
        output = PassOutput(hidden=x)
        mask = block_mask = group = None
        for i, layer in enumerate(self.layers):
            indexer = layer.self_attn.indexer
            with torch.set_grad_enabled(torch.is_grad_enabled() and not freeze_body):
                # Tokens lie flat here, so that one compiled graph serves every document length.
                normed, residual, *qkv = self._project(layer, x, cos_flat, sin_flat)
                normed, residual = normed.unflatten(0, ids.shape), residual.unflatten(0, ids.shape)
                q, k, v = (t.unflatten(0, ids.shape).transpose(1, 2) for t in qkv)
                if top_k is not None and indexer is not None:
                    mask = top_k_mask(indexer, normed, residual, cos, sin, top_k)
                    block_mask = self._block_mask(mask) if self._flex is not None else None
                attended = self._attend(q, k, v, mask, block_mask).transpose(1, 2).flatten(2).flatten(0, 1)
                x, load = self._finish(layer, x, attended)
            if load is not None:
                output.expert_loads.append(load.detach())
            if index_rows is None:
                continue
            if indexer is not None:
                group = IndexGroup(indexer, normed.detach(), residual.detach(), index_rows)
            group.add_attention(q.detach(), k.detach())
            if i + 1 == len(self.layers) or self.layers[i + 1].self_attn.indexer is not None:
                loss, coverage = group.loss(cos, sin, self.model.config.index_topk)
                output.index_losses.append(loss)
                output.coverage.append(coverage)
        output.hidden = self.model.model.norm(x).unflatten(0, ids.shape)
        return output

    def logits(self, hidden: Tensor) -> Tensor:
        """`[..., vocab]`; embeddings are tied."""
        return F.linear(hidden, self.model.model.embed_tokens.weight.to(hidden.dtype))


class IndexGroup:
    """A layer with an indexer and the layers that reuse its selection: sums their attention, then scores it."""

    def __init__(self, indexer: nn.Module, normed: Tensor, residual: Tensor, rows: Tensor) -> None:
        self.indexer, self.normed, self.residual, self.rows = indexer, normed, residual, rows
        self.visible = torch.arange(normed.shape[1], device=rows.device) <= rows[..., None]
        self.attention: Tensor | float = 0.0

    @torch.no_grad()
    def add_attention(self, q: Tensor, k: Tensor) -> None:
        """Add one layer's head-averaged dense attention of the chosen rows, `[batch, rows, tokens]`."""
        index = self.rows[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[-1])
        dots = (q.gather(2, index) @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
        self.attention = self.attention + dots.masked_fill(~self.visible[:, None], float("-inf")).softmax(-1).mean(1)

    def loss(self, cos: Tensor, sin: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        """KL(attention || softmax of the index scores), and the attention mass on the `top_k` best scores."""
        target = self.attention / self.attention.sum(-1, keepdim=True)

        def pick(x: Tensor) -> Tensor:
            return x.gather(1, self.rows[..., None].expand(-1, -1, x.shape[-1]))

        keys = index_keys(self.indexer, self.normed, cos, sin)
        queries, weights = index_queries(self.indexer, pick(self.normed), pick(self.residual), cos[self.rows], sin[self.rows])
        scores = index_scores(queries, weights, keys).masked_fill(~self.visible, float("-inf"))
        log_share = F.log_softmax(scores, -1).masked_fill(~self.visible, 0.0)
        loss = (target * (target.clamp_min(1e-9).log() - log_share)).sum(-1).mean()
        best = scores.detach().topk(min(top_k, scores.shape[-1]), -1).indices
        return loss, target.gather(-1, best).sum(-1).mean()

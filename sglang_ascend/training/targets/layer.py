"""The trainable MTP layer of every family: transformers' decoder layer behind a projection.

Names and dtypes of its tensors in a checkpoint are those that SGLang 0.5.23 reads.
"""

from __future__ import annotations

import re

import torch
from torch import nn

from sglang_ascend.training.interface import ChainCache, chain_mask
from sglang_ascend.training.targets.device import CPU
from sglang_ascend.training.targets.families import Target

Tensor = torch.Tensor
ROUTER_BIAS = "e_score_correction_bias"  # stays in fp32: its steps are below bf16's
STACKED = {
    "mlp.experts.gate_up_proj": ("gate_proj", "up_proj"),
    "mlp.experts.down_proj": ("down_proj",),
}
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(\w+)\.weight")


class MTPLayer(nn.Module):
    """Implements `interface.ChainLayer`; embedding and head are the target's and not held."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.target = target
        config, family = target.model_config, target.family
        with torch.device("meta"):  # its classes are wanted, not its weights
            model = target.model_class(config).model
        size = config.hidden_size
        norm = type(model.norm)
        self.token_norm = norm(size, eps=config.rms_norm_eps)
        self.hidden_norm = norm(size, eps=config.rms_norm_eps)
        self.projection = nn.Linear(2 * size, size, bias=False)
        # transformers gives experts by a layer's index: this one's is behind the target's last.
        index = config.num_hidden_layers if family.mtp_is_sparse else 0
        self.block = type(model.layers[0])(config, index)
        self.final_norm = norm(size, eps=config.rms_norm_eps)
        self.rotary = type(model.rotary_emb)(config)
        self.to(target.device)

    def initialize(self, target_norm: Tensor, scale: float, generator: torch.Generator) -> None:
        """Matrices ~ N(0, 1/fan_in), residual outputs smaller; the last norm is `scale` times the
        target's, so that the frozen head starts near uniform instead of confidently wrong.

        The CPU's `generator` draws for any device.
        """
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() >= 2:
                    std = parameter.shape[-1] ** -0.5 * (0.3 if writes_residual(name) else 1.0)
                    drawn = torch.empty(parameter.shape, dtype=parameter.dtype)
                    parameter.copy_(drawn.normal_(0.0, std, generator=generator))
                elif name.endswith("bias"):
                    parameter.zero_()
            self.final_norm.weight.copy_(target_norm * scale)

    def pair(self, hidden: Tensor, embeddings: Tensor) -> Tensor:
        """The projection's input [..., 2 * hidden_size]."""
        parts = self.token_norm(embeddings), self.hidden_norm(hidden)
        return torch.cat(parts[::-1] if self.target.trainable.hidden_first else parts, -1)

    def forward(
        self, hidden: Tensor, embeddings: Tensor, positions: Tensor, cache: ChainCache
    ) -> Tensor:
        """See `interface.ChainLayer`."""
        if self.target.trainable.drops_first_token:
            embeddings = embeddings * (positions != 0).to(embeddings.dtype)[:, None]
        x = self.projection(self.pair(hidden, embeddings))
        mask = chain_mask(x.shape[1], cache.step, x.device)[None, None]
        rows = positions[None].expand(len(x), -1)
        x = self.block(
            x,
            attention_mask=mask,
            position_ids=rows,
            past_key_values=cache,
            position_embeddings=self.rotary(x, rows),
        )
        return self.final_norm(x)

    def to_checkpoint(self) -> dict[str, Tensor]:
        """bf16 tensors on the CPU by full checkpoint name.

        Raises:
            ValueError: a weight is not finite.
        """
        tensors = {}
        for name, weight in self.state_dict().items():
            if not torch.isfinite(weight).all():
                raise ValueError(
                    f"{name} holds NaN or infinity: train anew, in another folder, at a lower rate."
                )
            for part, value in _unstacked(self.checkpoint_name(name), weight):
                dtype = torch.float32 if part.endswith(ROUTER_BIAS) else torch.bfloat16
                tensors[self.target.mtp_prefix + part] = value.detach().to(CPU, dtype).contiguous()
        return tensors

    def from_checkpoint(self, tensors: dict[str, Tensor]) -> None:
        """Takes weights by the names that `to_checkpoint` gives; others are ignored.

        Raises:
            RuntimeError: a weight is missing or of another shape.
        """
        prefix = self.target.mtp_prefix
        own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        stacked = _stacked(own)
        names = {self.checkpoint_name(name): name for name in self.state_dict()}
        self.load_state_dict({names[k]: v for k, v in stacked.items() if k in names})

    def checkpoint_name(self, name: str) -> str:
        """Our name -> the checkpoint's, below the layer's prefix."""
        token, hidden, final = self.target.family.norms
        outer = {
            "token_norm.weight": f"{token}.weight",
            "hidden_norm.weight": f"{hidden}.weight",
            "final_norm.weight": f"{final}.weight",
            "projection.weight": self.target.family.projection,
        }
        return outer.get(name, name.removeprefix("block."))


def writes_residual(name: str) -> bool:
    """Whether the matrix `name` adds to the residual stream."""
    return "o_proj" in name or "down_proj" in name


def _unstacked(name: str, weight: Tensor) -> list[tuple[str, Tensor]]:
    """One matrix for each expert and projection; anything else as it is."""
    if name not in STACKED:
        return [(name, weight)]
    projections = STACKED[name]
    return [
        (f"mlp.experts.{expert}.{projection}.weight", part)
        for expert, matrix in enumerate(weight)
        for projection, part in zip(projections, matrix.chunk(len(projections)), strict=True)
    ]


def _stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `_unstacked` over a whole layer; stacked tensors stay."""
    experts = sorted({int(match[1]) for name in tensors if (match := _EXPERT.fullmatch(name))})
    stacked = {name: tensor for name, tensor in tensors.items() if not _EXPERT.fullmatch(name)}
    if experts:
        for name, projections in STACKED.items():
            rows = [
                torch.cat([tensors[f"mlp.experts.{e}.{p}.weight"] for p in projections])
                for e in experts
            ]
            stacked[name] = torch.stack(rows)
    return stacked

"""A dense reference of MTP layers in plain torch around a decoder layer of ``transformers``."""

import copy
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.reference_heads import DenseTarget


class ReferenceMtp:
    """The whole text in every pass, no cache; the decoder layer is that of ``transformers``, as are target and rope."""

    def __init__(self, path: Path, target: DenseTarget, depth: int = 5) -> None:
        self.target, self.config, self.depth = target, target.model.config, depth
        first = self.config.num_hidden_layers
        stored = load_file(path / "model.safetensors")
        self.layers: list[dict[str, Tensor]] = []
        while f"model.layers.{first + len(self.layers)}.eh_proj.weight" in stored:
            prefix = f"model.layers.{first + len(self.layers)}."
            own = {name.removeprefix(prefix): t for name, t in stored.items() if name.startswith(prefix)}
            self.layers.append(own)
        self.blocks = [self._block(own) for own in self.layers]
        self._known: dict[tuple[int, ...], tuple[int, ...]] = {}

    def _block(self, own: dict[str, Tensor]) -> nn.Module:
        block = copy.deepcopy(self.target.model.model.layers[-1])
        parts = {name: t for name, t in own.items() if ".experts." not in name}
        state = {name: parts[name] for name in block.state_dict() if name in parts}
        experts = range(self.config.n_routed_experts)
        gate, up, down = (
            [own[f"mlp.experts.{e}.{name}_proj.weight"] for e in experts] for name in ("gate", "up", "down")
        )
        state["mlp.experts.gate_up_proj"] = torch.stack(
            [torch.cat(pair) for pair in zip(gate, up, strict=True)]
        )
        state["mlp.experts.down_proj"] = torch.stack(down)
        block.load_state_dict(state)
        return block

    @torch.inference_mode()
    def drafts(self, tokens: tuple[int, ...], k: int) -> tuple[int, ...]:
        """``k`` greedy drafts after ``tokens`` (at least two)."""
        if tokens not in self._known:
            self._known[tokens] = self._propose(tokens)
        return self._known[tokens][:k]

    def _propose(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        ids, hidden = self.rows(torch.tensor(tokens), self.hidden(*self.target.states(tokens)))
        num_rows, proposed = len(ids), list[int]()
        for step in range(self.depth):
            index = self.turn(step) % len(self.layers)
            out = self.run(index, ids, hidden, self.positions(num_rows, step))[-1:]
            proposed.append(int((self.norm(out, index, "shared_head.norm") @ self.lm_head(index).T).argmax()))
            hidden = torch.cat([hidden, self.recycled(out, index)])
            ids = torch.cat([ids, torch.tensor(proposed[-1:])])
        return tuple(proposed)

    def run(self, index: int, ids: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        table = self.layers[index].get("embed_tokens.weight", self.target.embedding)
        both = self.joined(self.norm(table[ids], index, "enorm"), self.norm(hidden, index, "hnorm"))
        stream = both @ self.layers[index]["eh_proj.weight"].T
        mask = torch.full((len(ids), len(ids)), float("-inf")).triu(1)
        rotation = self.target.model.model.rotary_emb(stream[None], positions[None])
        out = self.blocks[index](stream[None], attention_mask=mask[None, None], position_embeddings=rotation)
        return out[0] if isinstance(out, Tensor) else out[0][0]

    def rows(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return tokens[1:], hidden[:-1]

    def hidden(self, streams: list[Tensor], output: Tensor) -> Tensor:
        return output

    def joined(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        return torch.cat([embedded, hidden], -1)

    def recycled(self, out: Tensor, index: int) -> Tensor:
        return self.norm(out, index, "shared_head.norm")

    def positions(self, num_rows: int, num_drafted: int) -> Tensor:
        return torch.arange(num_rows + num_drafted)

    def turn(self, step: int) -> int:
        return step

    def lm_head(self, index: int) -> Tensor:
        return self.layers[index].get("shared_head.head.weight", self.target.lm_head)

    def norm(self, x: Tensor, index: int, name: str) -> Tensor:
        weight = self.layers[index][f"{name}.weight"]
        return nn.functional.rms_norm(x, x.shape[-1:], weight, self.config.rms_norm_eps)

"""Dense references of draft heads: the whole text in every pass, no cache, layers from ``transformers``.

A head is a class of small methods, so that a test can plant an error in one of them."""

import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from specgen.core.sequence import Request

AUX_KEY = "eagle_aux_hidden_state_layer_ids"
MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")


class DenseTarget:
    """The target by ``transformers``, in float32."""

    def __init__(self, path: Path) -> None:
        import transformers

        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        )
        self.embedding: Tensor = self.model.get_input_embeddings().weight
        self.lm_head: Tensor = self.model.get_output_embeddings().weight
        self.num_layers: int = self.model.config.num_hidden_layers
        self._known: dict[tuple[int, ...], tuple[list[Tensor], Tensor]] = {}
        self._newest: tuple[int, ...] = ()

    @torch.inference_mode()
    def states(self, tokens: tuple[int, ...]) -> tuple[list[Tensor], Tensor]:
        """The streams that enter layers 0 to L - 1 and leave the last, [T, Ht] each; and that after the final norm."""
        if tokens == self._newest[: len(tokens)]:  # no state depends on later tokens
            streams, output = self._known[self._newest]
            return [stream[: len(tokens)] for stream in streams], output[: len(tokens)]
        if tokens not in self._known:
            last: list[Tensor] = []
            hook = self.model.model.norm.register_forward_pre_hook(lambda _, inputs: last.append(inputs[0]))
            found = self.model.model(torch.tensor([tokens]), output_hidden_states=True)
            hook.remove()
            streams = [state[0] for state in (*found.hidden_states[:-1], last[0])]
            self._known[tokens] = streams, found.last_hidden_state[0]
        self._newest = tokens
        return self._known[tokens]

    @torch.inference_mode()
    def texts(
        self, requests: Sequence[Request], change: Callable[[Request, Tensor, Tensor], Tensor] | None = None
    ) -> dict[str, tuple[int, ...]]:
        """The greedy texts of ``requests`` by ``transformers``, all at once behind padding on the left.

        ``change`` makes the logits of a row out of its request, its tokens so far [1, T] and its logits [1, V].
        """
        prompts = [request.prompt_token_ids for request in requests]
        most = max(map(len, prompts))
        ids = torch.tensor([[0] * (most - len(prompt)) + list(prompt) for prompt in prompts])
        real = torch.tensor([[0] * (most - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        longest = max(request.sampling.max_tokens for request in requests)

        def changed(so_far: Tensor, logits: Tensor) -> Tensor:
            rows = zip(requests, prompts, so_far[:, None], logits[:, None], strict=True)
            return torch.cat([change(r, tokens[:, most - len(p) :], row) for r, p, tokens, row in rows])

        out = self.model.generate(
            ids,
            attention_mask=real,
            max_new_tokens=longest,
            do_sample=False,
            pad_token_id=0,
            logits_processor=[changed] if change else [],
        )
        texts = {}
        for request, tokens in zip(requests, out[:, most:].tolist(), strict=True):
            asked = tokens[: request.sampling.max_tokens]
            eos = self.model.generation_config.eos_token_id
            ends = (at + 1 for at, token in enumerate(asked) if token == eos)
            texts[request.id] = tuple(asked[: next(ends, None)])
        return texts

    @torch.inference_mode()
    def chosen(self, prompt: tuple[int, ...], text: tuple[int, ...]) -> tuple[int, ...]:
        """The greedy choice at the place of each token of ``text``, behind ``prompt`` and those before it."""
        output = self.states(prompt + text)[1][len(prompt) - 1 : -1]
        return tuple((output @ self.lm_head.T).argmax(-1).tolist())

    @torch.inference_mode()
    def greedy(self, prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
        """The greedy continuation of ``prompt``, which EOS does not end."""
        text = prompt
        for _ in range(num_tokens):
            text = (*text, int((self.states(text)[1][-1] @ self.lm_head.T).argmax()))
        return text[len(prompt) :]


class ReferenceHead(ABC):
    """What the heads have in common."""

    depth = 5  # drafts computed at once

    def __init__(self, path: Path, target: DenseTarget) -> None:
        self.target = target
        self.raw: dict[str, Any] = json.loads((path / "config.json").read_text())
        self.layer: dict[str, Any] = self.raw.get("transformer_layer_config", self.raw)
        stored = _stored(path)
        self.ids: Tensor | None = stored.get("d2t")
        self.t = {name.replace("midlayer.", "layers.0."): x.float() for name, x in stored.items()}
        self.embedding = self.t.get("embed_tokens.weight", target.embedding)
        self.num_layers: int = self.layer["num_hidden_layers"]
        self.layers = [self._layer(index) for index in range(self.num_layers)]
        kinds = self.layer.get("layer_types") or ["full_attention"] * self.num_layers
        self.windows = [self.layer["sliding_window"] if "sliding" in kind else None for kind in kinds]
        self._known: dict[tuple[int, ...], tuple[int, ...]] = {}

    @torch.inference_mode()
    def drafts(self, tokens: tuple[int, ...], k: int) -> tuple[int, ...]:
        """``k`` greedy drafts after ``tokens`` (at least two)."""
        if tokens not in self._known:
            self._known[tokens] = self.propose(tokens)
        return self._known[tokens][:k]

    @abstractmethod
    def propose(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """``depth`` drafts after ``tokens``."""

    @abstractmethod
    def hidden(self, streams: list[Tensor], output: Tensor) -> Tensor:
        """The head's hidden state at each position, [T, H], from what ``DenseTarget.states`` returns."""

    @abstractmethod
    def logits(self, out: Tensor) -> Tensor:
        """Over the draft vocabulary, from a row of what ``run`` returns."""

    def token(self, out: Tensor) -> int:
        draft = int(self.logits(out).argmax())
        return draft if self.ids is None else draft + int(self.ids[draft])

    def norm(self, x: Tensor, name: str) -> Tensor:
        return nn.functional.rms_norm(x, x.shape[-1:], self.t[f"{name}.weight"], self.layer["rms_norm_eps"])

    @cached_property
    def rotary(self) -> nn.Module:
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        return LlamaRotaryEmbedding(self._config)

    @cached_property
    def _config(self) -> Any:
        from transformers import LlamaConfig, Qwen3Config

        kind = Qwen3Config if "layers.0.self_attn.q_norm.weight" in self.t else LlamaConfig
        config = kind(**{name: value for name, value in self.layer.items() if name != "model_type"})
        config._attn_implementation = "eager"
        return config

    def _layer(self, index: int) -> Any:
        """A layer of ``transformers`` with the head's tensors; its linear maps are as wide as those say."""
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer
        from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

        qk_norm = "layers.0.self_attn.q_norm.weight" in self.t
        layer: Any = (Qwen3DecoderLayer if qk_norm else LlamaDecoderLayer)(self._config, index)
        prefix = f"layers.{index}."
        own = {name.removeprefix(prefix): x for name, x in self.t.items() if name.startswith(prefix)}
        own = {name: x for name, x in own.items() if "_conv." not in name}  # beside the layer
        for name, weight in own.items():
            if name.endswith("_proj.weight"):
                part, kind, _ = name.split(".")
                bias = f"{part}.{kind}.bias" in own
                setattr(layer.get_submodule(part), kind, nn.Linear(*weight.shape[::-1], bias=bias))
        missing, unknown = layer.load_state_dict(own, strict=False)
        # the first layer's norms of its inputs are applied in ``enter``
        assert index == 0 or not missing + unknown
        assert set(missing + unknown) <= {"input_layernorm.weight", "hidden_norm.weight"}
        return layer.eval().requires_grad_(False)


class ReferenceEagle(ReferenceHead):
    """Heads that read a token beside a state; ids are shifted left by one against the states, positions are not."""

    def propose(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """``depth`` drafts, each from a pass of its own over the text and the drafts before it."""
        ids, hidden = self.rows(torch.tensor(tokens), self.hidden(*self.target.states(tokens)))
        num_rows, proposed = len(ids), []
        for step in range(self.depth):
            last = self.run(ids, hidden, self.positions(num_rows, step))[-1:]
            proposed.append(self.token(last[0]))
            hidden = torch.cat([hidden, self.recycled(last)])
            ids = torch.cat([ids, torch.tensor(proposed[-1:])])
        return tuple(proposed)

    @abstractmethod
    def enter(self, ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream before the first layer, [rows, H], and the input of its attention."""

    def recycled(self, out: Tensor) -> Tensor:
        """The hidden state of the next draft's row."""
        return out

    def rows(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens and states of the rows of a text."""
        return tokens[1:], hidden[:-1]

    def positions(self, num_rows: int, num_drafted: int) -> Tensor:
        return torch.arange(num_rows + num_drafted)

    def run(self, ids: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        """One pass: what leaves the last layer, [rows, H]."""
        stream, inputs = self.enter(ids, hidden)
        rotation = self.rotary(stream[None], positions[None])
        for index, (layer, window) in enumerate(zip(self.layers, self.windows, strict=True)):
            if index > 0:
                inputs = layer.input_layernorm(stream)
            attended, _ = layer.self_attn(
                hidden_states=inputs[None],
                position_embeddings=rotation,
                attention_mask=self.mask(len(ids), window),
            )
            stream = stream + attended[0]
            stream = stream + layer.mlp(layer.post_attention_layernorm(stream))
        return stream

    def mask(self, num_rows: int, window: int | None) -> Tensor:
        """0 where a row may look, [1, 1, rows, rows]: at itself and before, not further back than the window."""
        seen = torch.ones(num_rows, num_rows, dtype=torch.bool).tril()
        if window is not None:
            seen &= torch.ones_like(seen).triu(1 - window)
        return torch.zeros(1, 1, num_rows, num_rows).masked_fill(~seen, float("-inf"))


class ReferenceEagle1(ReferenceEagle):
    """EAGLE-1: no norm but the one before the MLP, the target's final hidden states and vocabulary."""

    def hidden(self, streams: list[Tensor], output: Tensor) -> Tensor:
        return output

    def enter(self, ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.cat([self.embedding[ids], hidden], -1)
        stream = nn.functional.linear(both, self.t["fc.weight"], self.t.get("fc.bias"))
        return stream, stream

    def logits(self, out: Tensor) -> Tensor:
        return out @ self.target.lm_head.T


class ReferenceEagleLlama4(ReferenceEagle1):
    """EAGLE-1 with layers of a Llama-4: an input norm, attention in chunks, and a norm of what is fed back."""

    def __init__(self, path: Path, target: DenseTarget) -> None:
        super().__init__(path, target)
        self.chunk: int = self.layer["attention_chunk_size"]

    @cached_property
    def rotary(self) -> nn.Module:
        from transformers.models.llama4.modeling_llama4 import Llama4TextRotaryEmbedding

        return Llama4TextRotaryEmbedding(self._config)

    @cached_property
    def _config(self) -> Any:
        from transformers import Llama4TextConfig

        config = Llama4TextConfig(
            **{name: value for name, value in self.layer.items() if name != "model_type"}
        )
        config._attn_implementation = "eager"
        return config

    def _layer(self, index: int) -> Any:
        from transformers.models.llama4.modeling_llama4 import Llama4TextDecoderLayer

        layer, prefix = Llama4TextDecoderLayer(self._config, index), f"layers.{index}."
        layer.load_state_dict(
            {name.removeprefix(prefix): x for name, x in self.t.items() if name.startswith(prefix)}
        )
        return layer.eval().requires_grad_(False)

    def run(self, ids: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        stream, _ = self.enter(ids, hidden)
        rotation = self.rotary(stream[None], positions[None])
        mask = self.mask(positions)
        for layer in self.layers:
            stream = layer(stream[None], attention_mask=mask, position_embeddings=rotation)[0]
        return stream

    def mask(self, positions: Tensor) -> Tensor:  # type: ignore[override]
        """0 where a row may look, [1, 1, rows, rows]: at itself and before, in its own chunk."""
        chunks = positions // self.chunk
        seen = (positions[:, None] >= positions) & (chunks[:, None] == chunks)
        return torch.zeros(1, 1, *seen.shape).masked_fill(~seen, float("-inf"))

    def logits(self, out: Tensor) -> Tensor:
        lm_head = self.t.get("lm_head.weight", self.target.lm_head)
        return self.norm(out, "norm") @ lm_head.T

    def recycled(self, out: Tensor) -> Tensor:
        return self.norm(out, "norm")


class ReferenceEagle3(ReferenceEagle):
    """EAGLE3 and EAGLE 3.1, of any number of layers and features."""

    def __init__(self, path: Path, target: DenseTarget) -> None:
        super().__init__(path, target)
        nested = self.raw.get("eagle_config", {})
        self.reads_output = not nested.get("use_aux_hidden_state", True)
        depth = target.num_layers
        self.aux: list[int] = self.raw.get(AUX_KEY) or [2, depth // 2, depth - 3]
        if AUX_KEY in nested:  # outputs of layers, unless one of them is of a layer that does not exist
            outputs = nested[AUX_KEY]
            self.aux = outputs if max(outputs) == depth else [index + 1 for index in outputs]

    def hidden(self, streams: list[Tensor], output: Tensor) -> Tensor:
        return output if self.reads_output else self.fuse([streams[index] for index in self.aux])

    def fuse(self, features: list[Tensor]) -> Tensor:
        """[rows, Ht] each -> [rows, H]."""
        if self.raw.get("fc_norm"):
            features = [self.norm(feature, f"fc_norm.{index}") for index, feature in enumerate(features)]
        both = torch.cat(features, -1)
        if self.raw.get("norm_before_fc"):
            both = self.norm(both, "input_norm")
        return both @ self.t["fc.weight"].T

    def enter(self, ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        embedded = self.norm(self.embedding[ids], "layers.0.input_layernorm")
        normed = self.norm(hidden, "layers.0.hidden_norm")
        stream = normed if self.raw.get("norm_before_residual") else hidden
        return stream, torch.cat([embedded, normed], -1)

    def logits(self, out: Tensor) -> Tensor:
        return self.norm(out, "norm") @ self.t["lm_head.weight"].T

    def recycled(self, out: Tensor) -> Tensor:
        return self.norm(out, "norm") if self.raw.get("norm_output") else out


class ReferencePEagle(ReferenceEagle3):
    """P-EAGLE: after the text's rows, rows of the mask token and the mask's features; one pass for all drafts."""

    def propose(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        ids, hidden = self.rows(torch.tensor(tokens), self.hidden(*self.target.states(tokens)))
        num_rows, num_masks = len(ids), self.depth - 1
        ids = torch.cat([ids, torch.full((num_masks,), self.mask_token())])
        hidden = torch.cat([hidden, self.mask_state().expand(num_masks, -1)])
        out = self.run(ids, hidden, self.positions(num_rows, num_masks))
        return tuple(self.token(row) for row in out[num_rows - 1 :])

    def mask_token(self) -> int:
        return next(int(self.raw[key]) for key in MASK_KEYS if key in self.raw)

    def mask_state(self) -> Tensor:
        """The mask's features, fused as the target's are, [1, H]."""
        return self.fuse(list(self.t["mask_hidden"].view(1, -1).chunk(len(self.aux), -1)))


class ReferenceDFlash(ReferenceHead):
    """DFlash and DSpark: keys and values of the text from the target's features, and a block of masks behind it."""

    def __init__(self, path: Path, target: DenseTarget) -> None:
        super().__init__(path, target)
        self.settings = self.raw | self.raw.get("dflash_config", {})
        own_mask = path / "mask_embedding.pt"
        if own_mask.exists():
            self.embedding = self.embedding.clone()
            self.embedding[self.settings["mask_token_id"]] = torch.load(own_mask)["embedding"]
        speculators = "aux_hidden_state_layer_ids" in self.settings
        ids = self.settings["aux_hidden_state_layer_ids" if speculators else "target_layer_ids"]
        self.aux: list[int] = ids if speculators else [index + 1 for index in ids]
        dspark = self.raw["architectures"] == ["Qwen3DSparkModel"]
        self.anchor: bool = self.settings.get("sample_from_anchor", dspark)
        said = self.raw.get("is_causal", self.raw.get("dflash_config", {}).get("causal"))
        ahead = speculators and self.raw.get("sliding_window_non_causal", True)
        by_window = [window is not None and not ahead for window in self.windows]
        self.causal = by_window if said is None else [said] * self.num_layers
        self.kind: str = (
            self.settings.get("markov_head_type", "vanilla") if self.settings.get("markov_rank") else ""
        )

    @torch.inference_mode()
    def drafts(self, tokens: tuple[int, ...], k: int) -> tuple[int, ...]:
        """A row of a block may look at those behind it, so the first of five drafts is not the first of four."""
        if k != self.depth:
            self.depth, self._known = k, {}
        return super().drafts(tokens, k)

    def hidden(self, streams: list[Tensor], output: Tensor) -> Tensor:
        features = torch.cat([streams[index] for index in self.aux], -1)
        return self.norm(features @ self.t["fc.weight"].T, "hidden_norm")

    def context(self, states: Tensor, layer: Any) -> Tensor:
        """What keys and values of the text are made of, in every layer."""
        return states

    def text(self, tokens: tuple[int, ...]) -> Tensor:
        """The states of the tokens that the target has consumed: all but the newest."""
        return self.hidden(*self.target.states(tokens))[:-1]

    def block(self, newest: int) -> Tensor:
        """The ids of the rows."""
        masks = self.depth - 1 if self.anchor else self.depth
        return torch.tensor([newest] + masks * [self.settings["mask_token_id"]])

    def first(self, num_states: int) -> int:
        """The position of the first row."""
        return num_states

    def drafting(self, rows: Tensor) -> Tensor:
        """The rows that draft."""
        return rows if self.anchor else rows[1:]

    def seen(self, num_states: int, num_rows: int, index: int) -> Tensor:
        """Whether rows of the block see positions, those of the text first, [rows, text + rows]."""
        rows, columns = torch.arange(num_rows)[:, None] + num_states, torch.arange(num_states + num_rows)
        seen = torch.ones(num_rows, num_states + num_rows, dtype=torch.bool)
        if self.causal[index]:
            seen &= columns <= rows
        window = self.windows[index]
        return seen if window is None else seen & ((columns - rows).abs() < window)

    def propose(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        states, ids = self.text(tokens), self.block(tokens[-1])
        stream, first = self.scaled(self.embedding[ids]), self.first(len(states))
        positions = torch.cat((torch.arange(len(states)), first + torch.arange(len(ids))))
        rotation = self.rotary(stream[None], positions[None])
        for index, layer in enumerate(self.layers):
            rows = layer.input_layernorm(stream)
            seen = self.attend(states, self.convolved(rows, rows, index, "attention", 0), rotation, index)
            stream = stream + self.convolved(seen, rows, index, "attention", 1)
            rows = layer.post_attention_layernorm(stream)
            out = layer.mlp(self.convolved(rows, rows, index, "mlp", 0))
            stream = stream + self.convolved(out, rows, index, "mlp", 1)
        self.newest = tokens[-1]
        rows, before, proposed = self.drafting(self.norm(stream, "norm")), tokens[-1], []
        memory = torch.zeros(self.settings.get("markov_rank", 0))
        for row in rows:
            logits = self.capped(self.logits(row))
            if "selector_top_k" in self.settings:
                logits = self.selected(logits, row, before)
            if self.kind:
                known, memory = self.known(before, row, memory)
                logits = logits + known @ self.t["markov_head.markov_w2.weight"].T
            before = int(logits.argmax())
            before += 0 if self.ids is None else int(self.ids[before])
            proposed.append(before)
        return tuple(proposed)

    def scaled(self, embedded: Tensor) -> Tensor:
        return embedded * self.settings.get("input_embedding_scale", 1.0)

    def capped(self, logits: Tensor) -> Tensor:
        logits = logits * self.settings.get("output_multiplier", 1.0)
        cap = self.settings.get("final_logit_softcapping")
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def convolved(self, x: Tensor, by: Tensor, index: int, part: str, which: int) -> Tensor:
        """Row by row over the rows up to it in the block; ``by`` are the rows that weights depend on."""
        prefix = f"layers.{index}.{part}_conv."
        base = self.t.get(f"{prefix}base_kernel")
        if base is None:
            return x
        size = self.settings["conv_group_size"]
        own = by @ self.t[f"{prefix}kernel_projection.weight"].T
        own = own.view(len(x), 2, base.shape[1], -1).repeat_interleave(size, -1)
        out = torch.zeros_like(x)
        for row in range(len(x)):
            for back in range(min(row + 1, base.shape[1])):
                out[row] += (base[which, back] + own[row, which, back]) * x[row - back]
        return out

    def selected(self, logits: Tensor, row: Tensor, before: int) -> Tensor:
        """The scores of the candidates; all others are impossible."""
        first, ids = logits.topk(min(self.settings["selector_top_k"], len(logits)))
        targets = ids if self.ids is None else ids + self.ids[ids]
        mixed = self.t["candidate_selector.predecessor_codebook"][before]
        mixed = mixed * (self.t["candidate_selector.hidden_projection.weight"] @ row)
        scores = first + self.t["candidate_selector.successor_codebook"][targets] @ mixed
        return torch.full_like(logits, -torch.inf).scatter(0, ids, scores)

    def attend(self, states: Tensor, rows: Tensor, rotation: tuple[Tensor, Tensor], index: int) -> Tensor:
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        layer = self.layers[index].self_attn
        every = torch.cat((self.context(states, self.layers[index]), rows))

        def heads(x: Tensor, name: str) -> Tensor:
            x = getattr(layer, f"{name}_proj")(x).view(len(x), -1, layer.head_dim)
            norm = getattr(layer, f"{name}_norm", None)
            return (x if norm is None else norm(x)).transpose(0, 1)[None]

        q, k = apply_rotary_pos_emb(heads(every, "q"), heads(every, "k"), *rotation)
        out = nn.functional.scaled_dot_product_attention(
            q[:, :, len(states) :],
            k,
            heads(every, "v"),
            attn_mask=self.seen(len(states), len(rows), index),
            enable_gqa=True,
        )
        return layer.o_proj(out[0].transpose(0, 1).flatten(1))  # type: ignore[no-any-return]

    def known(self, before: int, row: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """What the Markov head makes of the token before, and its memory behind it."""
        known = self.t["markov_head.markov_w1.weight"][before]

        def mixed(name: str, *parts: Tensor) -> Tensor:
            weight, bias = (self.t[f"markov_head.{name}.{which}"] for which in ("weight", "bias"))
            return weight @ torch.cat(parts) + bias

        if self.kind == "gated":
            return mixed("gate_proj", row, known).sigmoid() * known, memory
        if self.kind == "rnn":
            gate, candidate, out = mixed("joint_proj", memory, known, row).chunk(3)
            return out.tanh(), gate.sigmoid() * memory + (1 - gate.sigmoid()) * candidate.tanh()
        return known, memory

    def logits(self, out: Tensor) -> Tensor:
        return out @ self.t.get("lm_head.weight", self.target.lm_head).T


def reference_head(path: Path, target: DenseTarget) -> ReferenceHead:
    """The reference of the head in ``path``, by its tensors."""
    names = _stored(path).keys()
    if "hidden_norm.weight" in names:
        return ReferenceDFlash(path, target)
    if "mask_hidden" in names:
        return ReferencePEagle(path, target)
    if any(".feed_forward." in name for name in names):
        return ReferenceEagleLlama4(path, target)
    eagle3 = any(name.endswith("hidden_norm.weight") for name in names)
    return (ReferenceEagle3 if eagle3 else ReferenceEagle1)(path, target)


def _stored(path: Path) -> dict[str, Tensor]:
    file = path / "model.safetensors"
    if file.exists():
        return dict(load_file(file))
    return dict(torch.load(path / "pytorch_model.bin", weights_only=True))


# --- MTP layers ---


# What DeepSeek has beside the decoder layer, and Qwen in its place, where norms lack the 1 that is added to them
_OF_QWEN = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head.norm",
}


class ReferenceMtp:
    """The whole text in every pass, no cache; the decoder layer is that of ``transformers``, as are target and rope."""

    def __init__(self, path: Path, target: DenseTarget) -> None:
        self.target, self.config, self.depth = target, target.model.config, 5
        first = self.config.num_hidden_layers
        stored = load_file(path / "model.safetensors")
        self.layers: list[dict[str, Tensor]] = []
        while f"model.layers.{first + len(self.layers)}.eh_proj.weight" in stored:
            prefix = f"model.layers.{first + len(self.layers)}."
            own = {name.removeprefix(prefix): t for name, t in stored.items() if name.startswith(prefix)}
            self.layers.append(own)
        if "mtp.fc.weight" in stored:
            self.layers.append(self._of_qwen(stored))
        self.blocks = [self._block(own) for own in self.layers]
        self._known: dict[tuple[int, ...], tuple[int, ...]] = {}

    def _of_qwen(self, stored: dict[str, Tensor]) -> dict[str, Tensor]:
        prefix = "mtp.layers.0."
        own = {name.removeprefix(prefix): t for name, t in stored.items() if name.startswith(prefix)}
        for qwen, name in _OF_QWEN.items():
            own[f"{name}.weight"] = stored[f"mtp.{qwen}.weight"] + int(qwen != "fc")
        return own

    def _block(self, own: dict[str, Tensor]) -> nn.Module:
        block = copy.deepcopy(self.target.model.model.layers[-1])
        parts = {name: t for name, t in own.items() if ".experts." not in name}
        state = {name: parts[name] for name in block.state_dict() if name in parts}
        if "mlp.gate.weight" in own:
            experts = range(len(own["mlp.gate.weight"]))
            gate, up, down = (
                [own[f"mlp.experts.{e}.{name}_proj.weight"] for e in experts]
                for name in ("gate", "up", "down")
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

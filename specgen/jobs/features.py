"""``specgen features``: a target's hidden states of the texts of finished runs, as trainers of draft heads read them.

The directory has the layout that speculators' trainer reads: a data set of ``datasets`` with ``input_ids``,
``loss_mask`` and ``seq_len``; ``token_freq.pt``, how often answers have a token, for ``--draft-vocab-size``; and of row
i ``hidden_states/hs_i.safetensors`` with ``token_ids`` ``[n]`` and ``hidden_states`` ``[n, layers, H]``. The last of
these layers is the residual stream behind the target's last one, before its final norm, which the trainer's own norm
and output weights turn into the target's logits.

Or that of SpecForge's offline training: text i is ``rows_0-2000/data_i.ckpt``, 2000 to a folder, by ``torch.save``:
``input_ids`` and ``loss_mask`` int64 ``[n]``; in bfloat16 ``aux_hidden_state`` ``[1, n, layers * H]`` and
``hidden_state`` ``[1, n, H]`` behind the final norm, as its trainer has the output weights alone. DFlash and DSpark
call these ``hidden_states`` and ``target_last_hidden_states``: the same tensors in the file, once.
"""

import hashlib
import io
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specgen.checkpoints.fingerprint import fingerprint
from specgen.config import EngineConfig, LayoutName, SamplingParams, UserError, require
from specgen.config.json_fields import load_json
from specgen.core.engine_core import never_stop
from specgen.engine.build import prefill
from specgen.engine.choices import resolve
from specgen.engine.loading import load_models, open_checkpoints
from specgen.models.eagle import default_aux_layers
from specgen.models.protocols import Target
from specgen.record.files import Rows, replacement
from specgen.record.interrupt import StoppedError
from specgen.record.progress import Progress
from specgen.record.provenance import FREE_IN_A_RUN, manifest
from specgen.record.results import directory, require_same
from specgen.report.display import several
from specgen.report.report import is_finished, load, requests_of, status_of
from specgen.text.tokenizer import Tokenizer

FILE = "features.json"
_REMEDY = "name another directory"
_TOGETHER = 2000  # files of SpecForge's in a folder


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A text: a prompt and what the target answered, of which a head is trained."""

    token_ids: list[int]
    num_prompt: int

    @property
    def is_answer(self) -> list[bool]:
        """Of each token, which are those of the loss."""
        return [position >= self.num_prompt for position in range(len(self.token_ids))]


@dataclass(frozen=True, kw_only=True)
class _Layout:
    file: Callable[[int], str]  # of a text, in the directory
    content: Callable[[Sample, Tensor, Tensor], bytes]  # with states [n, layers, H], the last normed [n, H]
    least: int = 1  # tokens of an answer
    dtype: torch.dtype | None = None  # of the states; None: the target's


def _for_speculators(sample: Sample, states: Tensor, normed: Tensor) -> bytes:
    from safetensors.torch import save

    del normed
    ids = torch.tensor(sample.token_ids)
    found: bytes = save({"token_ids": ids, "hidden_states": states.contiguous().cpu()})
    return found


def _for_specforge(sample: Sample, states: Tensor, normed: Tensor) -> bytes:
    own = partial(torch.clone, memory_format=torch.contiguous_format)  # else a file holds the whole pass
    read, last = (own(each[None]).cpu() for each in (states[:, :-1].flatten(1), normed))
    record = {
        "input_ids": torch.tensor(sample.token_ids),
        "loss_mask": torch.tensor(sample.is_answer).long(),
        "aux_hidden_state": read,
        "hidden_state": last,
        "hidden_states": read,
        "target_last_hidden_states": last,
    }
    torch.save(record, file := io.BytesIO())
    return file.getvalue()


def _grouped(number: int) -> str:
    first = number // _TOGETHER * _TOGETHER
    return f"rows_{first}-{first + _TOGETHER}/data_{number}.ckpt"


_LAYOUTS: dict[LayoutName, _Layout] = {
    "speculators": _Layout(
        file=lambda number: f"hidden_states/hs_{number}.safetensors", content=_for_speculators
    ),
    # Of a single token its readers can make no loss; its output weights, through which states go as they are read,
    # are in bfloat16 always.
    "specforge": _Layout(file=_grouped, content=_for_specforge, least=2, dtype=torch.bfloat16),
}


def dump_features(
    runs: Sequence[Path],
    output: Path,
    layers: Sequence[int],
    progress: Progress,
    until: Callable[[], bool] = never_stop,
    layout: LayoutName = "speculators",
    **settings: Any,  # noqa: ANN401, of ``EngineConfig``
) -> tuple[int, int]:
    """Write the features of all texts of ``runs``, or go on there; returns how many texts, and bytes of states.

    ``layers`` are those whose inputs are kept, counted from 0; empty: EAGLE3's. The target is as the first run has it,
    but for ``settings``. Once ``until`` is true, ``StoppedError``. ``UserError`` for a run that is not finished or of
    another target, and where the disk has no room.
    """
    made = load_json(runs[0] / "manifest.json", "name directories of specgen generate")["engine"]
    own = {name: made.get(name) for name in ("model", "lora", "dtype")}
    require(len({*layers}) == len(layers), f"layers is {', '.join(map(str, layers))}: name each once")
    asked = EngineConfig(**{**own, **settings}, drafter=None, num_spec_tokens=0)
    checkpoints = open_checkpoints(asked)
    config = resolve(asked, checkpoints)
    print_of = fingerprint(checkpoints["model"])
    for run in runs:
        _require_of(run, print_of)
    form = _LAYOUTS[layout]
    with directory(output, FILE) as path:
        models = load_models(config, checkpoints)
        target, most = models.target, models.target.config.num_layers
        require(
            target.config.delta is None,
            f"a {target.config.architecture} has recurrent states, which is not built here",
        )
        kept = (*(layers or default_aux_layers(most)), most)
        for layer in kept:
            require(0 <= layer <= most, f"layers has {layer}: the target has inputs of layers 0 to {most}")
        every = (sample for run in runs for sample in _samples(run, models.tokenizer))
        samples = [each for each in every if sum(each.is_answer) >= form.least]
        require(bool(samples), f"{runs[0]} has no answers: there is nothing to train on")
        width = len(kept) * target.config.hidden_size * (form.dtype or target.dtype).itemsize
        files = [path / form.file(number) for number in range(len(samples))]
        lengths = [len(each.token_ids) for each in samples]
        size, free = width * sum(lengths), shutil.disk_usage(path).free
        left = width * sum(n for n, file in zip(lengths, files, strict=True) if not _is_written(file))
        require(
            left < free or not left,
            f"the hidden states take {left / 1e9:,.1f} GB and the disk has {free / 1e9:,.1f} GB free",
        )
        require_same(
            path / FILE,
            manifest(
                engine=config,
                sampling=SamplingParams(),
                data={"runs": [str(run) for run in runs], "texts": _digest(samples), "layers": list(kept)}
                | ({} if layout == "speculators" else {"layout": layout}),
                fingerprints={"model": print_of},
            ),
            free=FREE_IN_A_RUN,
            remedy=_REMEDY,
        )
        progress.note(f"the hidden states of {several(len(samples), 'text')} take {size / 1e9:,.2f} GB")
        if layout == "speculators":
            _write_samples(path, samples)
        _work(files, target, config, samples, kept, form, progress, until)
    return len(samples), size


def _work(
    files: Sequence[Path],
    target: Target,
    config: EngineConfig,
    samples: Sequence[Sample],
    layers: tuple[int, ...],
    form: _Layout,
    progress: Progress,
    until: Callable[[], bool],
) -> None:
    """Whatever states of ``samples`` are not in their ``files`` yet."""
    waiting = [number for number, file in enumerate(files) if not _is_written(file)]
    progress.start("features", len(samples), len(samples) - len(waiting))
    for numbers in _packs(waiting, samples, config.max_prefill_tokens):
        texts = [samples[number].token_ids for number in numbers]
        hidden, inputs = prefill(config, target, texts, target.dtype, layers)
        lengths, of_layers = [len(text) for text in texts], inputs.view(len(inputs), len(layers), -1)
        found = zip(torch.split(of_layers, lengths), torch.split(hidden, lengths), strict=True)
        for number, pair in zip(numbers, found, strict=True):
            states, normed = (each.to(form.dtype or each.dtype) for each in pair)
            finite = bool(states.isfinite().all())
            require(finite, f"{files[number].name}: the target's hidden states are not finite (NaN)")
            files[number].parent.mkdir(exist_ok=True)
            with replacement(files[number]) as file:
                file.write(form.content(samples[number], states, normed))
            progress.advance()
        if until():
            raise StoppedError("interrupted; the same command goes on")
    progress.finish()


def _is_written(file: Path) -> bool:
    """Whether a text has its states; a copy that was broken off may have left an empty file."""
    return file.exists() and file.stat().st_size > 0


def _require_of(run: Path, model: str) -> None:
    """``UserError`` unless ``run`` is a finished run of the target with this fingerprint."""
    made = load_json(run / "manifest.json", "name directories of specgen generate")
    require(
        is_finished(run, status_of(run)),
        f"{run} is not finished: run its command again, which goes on where it stopped",
    )
    requests_of(run, load(run)[0])
    files = " and ".join(filter(None, (made["engine"]["model"], made["engine"].get("lora"))))
    require(
        made["fingerprints"]["model"] == model,
        f"{run} was made by other files of {files}: name the target with --model",
    )


def _samples(run: Path, tokenizer: Tokenizer) -> Iterator[Sample]:
    for name, row in Rows(run / "completions.jsonl").items():
        if not row["token_ids"]:
            continue
        prompt = row.get("prompt_token_ids")
        if prompt is None:
            found = (encode(row["prompt"]) for encode in (tokenizer.encode_rendered, tokenizer.encode_text))
            prompt = next((ids for ids in found if len(ids) == row["num_prompt_tokens"]), None)
        if prompt is None:
            raise UserError(
                f"{run}: the prompt of {name!r} was token ids, which its text does not give back: leave it out"
            )
        yield Sample(token_ids=[*prompt, *row["token_ids"]], num_prompt=len(prompt))


def _digest(samples: Sequence[Sample]) -> str:
    """Of all texts: what a run at the same path has answered anew has other states."""
    found = hashlib.sha256()
    for each in samples:
        found.update(f"{each.num_prompt} {each.token_ids}".encode())
    return found.hexdigest()


def _write_samples(path: Path, samples: Sequence[Sample]) -> None:
    """The data set beside the states, and how often answers have a token, if it is not there yet."""
    if all((path / name).exists() for name in ("token_freq.pt", "state.json", "dataset_info.json")):
        return
    from datasets import Dataset, disable_progress_bars

    # without it the trainer leaves --draft-vocab-size out
    frequencies = Counter(token for each in samples for token in each.token_ids[each.num_prompt :])
    with replacement(path / "token_freq.pt") as file:
        torch.save(dict(frequencies), file)
    disable_progress_bars()
    columns = {
        "input_ids": [each.token_ids for each in samples],
        "loss_mask": [each.is_answer for each in samples],
        "seq_len": [len(each.token_ids) for each in samples],
    }
    partial = path / "dataset.partial"
    Dataset.from_dict(columns).with_format("torch").save_to_disk(partial)
    for part in sorted(partial.iterdir()):  # state.json last: what is looked for is whole
        part.replace(path / part.name)
    partial.rmdir()


def _packs(numbers: Sequence[int], samples: Sequence[Sample], most: int) -> Iterator[list[int]]:
    """``numbers`` in passes of at most ``most`` tokens; a longer text has one of its own."""
    pack, size = list[int](), 0
    for number in numbers:
        length = len(samples[number].token_ids)
        if pack and size + length > most:
            yield pack
            pack, size = [], 0
        pack.append(number)
        size += length
    if pack:
        yield pack

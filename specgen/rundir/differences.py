"""In what two manifests differ, in words: the option with both values, the file with its size and date."""

from collections.abc import Container, Iterator, Mapping
from dataclasses import fields
from typing import Any

from specgen.config import EngineConfig, SamplingParams
from specgen.json_fields import OF_THE_MOMENT, flat

_OPTIONS = {  # by the field that keeps an option
    "data.dataset": "--dataset",
    "data.data_path": "--data-path",
    "data.num_prompts": "--num-prompts",
    "data.shard": "--shard",
    "steps": "--no-steps",
    "served_model_name": "--served-model-name",
    **{
        f"{part}.{each.name}": "--" + (each.metadata["name"] or each.name).replace("_", "-")
        for part, config in (("engine", EngineConfig), ("sampling", SamplingParams))
        for each in fields(config)
        if each.metadata
    },
}
_DEFAULTS = {"steps": True, "engine.kv_dtype": "model", "engine.tensor_parallel": 1}  # not recorded
_NAMED = 3  # files
_DIGESTS = ("fingerprints.model", "fingerprints.drafter", "data.sha256")


def differences(earlier: Mapping[str, Any], now: Mapping[str, Any], free: Container[str] = ()) -> list[str]:
    """What differs between two manifests, as ``--dtype float32 -> bfloat16``; the fields in ``free`` may.

    Of digests it says which files changed, where the manifests tell.
    """
    left, right = (
        dict(flat({k: v for k, v in each.items() if k not in OF_THE_MOMENT})) for each in (earlier, now)
    )
    unlike = [name for name in {**left, **right} if left.get(name) != right.get(name) and name not in free]
    return [
        _of_files(name, earlier, now) if name in _DIGESTS else _of_values(name, left, right)
        for name in unlike
        if not _follows(name, unlike, left, right)
    ]


def _follows(name: str, unlike: list[str], left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    """Whether another difference, which is listed, is why ``name`` differs."""
    if name == "data.sha256":
        return not {"data.dataset", "data.num_prompts"}.isdisjoint(unlike)
    drafters = left.get("engine.drafter"), right.get("engine.drafter")
    return name == "fingerprints.drafter" and None in drafters and "engine.num_spec_tokens" in unlike


def _of_values(name: str, left: Mapping[str, Any], right: Mapping[str, Any]) -> str:
    before, after = (each.get(name, _DEFAULTS.get(name)) for each in (left, right))
    return f"{_OPTIONS.get(name, name)} {_shown(before)} -> {_shown(after)}"


def _shown(value: object) -> str:
    return "not given" if value is None else str(value)


def _of_files(name: str, earlier: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The files whose content is another; of a drafter without files its name."""
    role = "prompts" if name == "data.sha256" else name.partition(".")[2]
    left, right = (each.get("files", {}).get(role, {}) for each in (earlier, now))
    if role == "drafter" and not (left and right):
        before, after = (each.get("engine", {}).get("drafter") for each in (earlier, now))
        if before != after:
            return f"--drafter {_shown(before)} -> {_shown(after)}"
    changed = list(_changed(left, right))
    if changed:
        more = f" and {len(changed) - _NAMED} more" if len(changed) > _NAMED else ""
        return f"files of the {role}: {', '.join(changed[:_NAMED])}{more}"
    if role == "prompts":
        return "the prompts: other rows, or rows read in another way (--prompt-field, --chat, --raw, --split)"
    return f"the content of the files of the {role}"


def _changed(left: Mapping[str, Any], right: Mapping[str, Any]) -> Iterator[str]:
    """A file per text; without SHA-256 it is identified by its size and date."""
    for name in {**left, **right}:
        if name not in right:
            yield f"{name} is gone"
        elif name not in left:
            yield f"{name} is new"
        elif left[name] != right[name] and _content(left[name]) != _content(right[name]):
            before, after = _state(left[name]), _state(right[name])
            yield f"{name} ({f'{before} -> {after}' if before != after else f'{after}, with other content'})"


def _content(file: Mapping[str, Any]) -> object:
    """What decides whether a file is the same; its date alone does not."""
    return file.get("sha256") or file


def _state(file: Mapping[str, Any]) -> str:
    return f"{file['bytes']:,} bytes of {file['changed'].removesuffix('+00:00')} UTC"

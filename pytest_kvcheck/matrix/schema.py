"""The form of a matrix file, as pydantic models. Every key is optional here: absence is judged when cells are
built, because a key may come from the file, its defaults, an engine's overlay or the cell.
"""

from __future__ import annotations

import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from pytest_kvcheck.cells import EngineName

VERSION = 1

# Greater sizes are typing errors, and no engine holds them in its 32-bit indices.
Size = Annotated[int, Field(ge=1, le=2**31 - 1)]
Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Algorithm = Literal["EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM"]


def _scalar_text(value: Any) -> Any:
    """An environment variable is text, but people write ``SGLANG_X: 1`` and ``true``."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int | float) else value


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, dict) else value


def _named(value: Any) -> Any:
    """``stress-concurrent`` and ``{stress-concurrent: {turns: 3}}`` are two forms of one entry."""
    if isinstance(value, str):
        return {value: {}}
    if isinstance(value, dict):
        return {name: {} if params is None else params for name, params in value.items()}
    return value


def _flags(value: Any) -> Any:
    """``attention-backend`` and ``--attention-backend`` name the same flag."""
    return {name.lstrip("-"): given for name, given in value.items()} if isinstance(value, dict) else value


def _folder(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


def _empty(value: Any) -> Any:
    """``baseline:`` with nothing behind it is a cell without settings of its own."""
    return {} if value is None else value


def _iso_date(value: Any) -> Any:
    if isinstance(value, datetime.date):
        return value
    try:
        return datetime.date.fromisoformat(value)
    except (TypeError, ValueError):
        return value


class _Form(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class ModelForm(_Form):
    """Weights: a folder relative to the matrix file, or a hub id."""

    path: str
    draft: str | None = None
    vocab_size: Size | None = None


class RetractForm(_Form):
    """Forced retraction every ``interval`` decode steps."""

    interval: Size = 3


class SpeculativeForm(_Form):
    """Speculative decoding; ``overlap`` is on for v2 unless it says otherwise, and never on for v1."""

    algorithm: Algorithm = "EAGLE"
    version: Literal["v1", "v2"] = "v2"
    overlap: bool = True
    steps: Size = 3
    draft_tokens: Annotated[int, Field(ge=2, le=1024)] = 4
    topk: Size = 1


class KnownForm(_Form):
    """A finding that is expected until a date because the engine is at fault.

    ``engine``: only there (null: on any), and only in releases ``before`` this one. ``sometimes``: it needs a
    race, so a run without it is no surprise. ``text``: only a finding whose headline or evidence has these
    words; K00 (a crash, what no kind describes) needs them.
    """

    kind: Annotated[str, Field(pattern=r"^K(0[0-9]|1[0-9]|2[0-5])$")]
    page: str
    until: Annotated[datetime.date, BeforeValidator(_iso_date)]
    engine: EngineName | None = None
    before: Annotated[str, Field(pattern=r"^(\d+\.\d+\.\d+)?$")] = ""
    sometimes: bool = False
    text: str = ""

    @model_validator(mode="after")
    def _enough(self) -> Self:
        if self.kind == "K00" and not self.text.strip():
            raise ValueError("K00 with the words of the finding as text")
        return self


class WorkloadForm(BaseModel):
    """A workload's parameters, which are checked against the workload itself, and its known findings."""

    model_config = ConfigDict(extra="allow")
    known: Annotated[list[KnownForm], BeforeValidator(_one_or_many)] = []


Workloads = Annotated[
    list[Annotated[dict[str, WorkloadForm], BeforeValidator(_named)]],
    Field(min_length=1),
    BeforeValidator(lambda value: ["all"] if value == "all" else value),
]
Args = Annotated[dict[str, Any], BeforeValidator(_flags)]
Known = Annotated[list[KnownForm], BeforeValidator(_one_or_many)]
Env = dict[str, Annotated[str, BeforeValidator(_scalar_text)] | None]
ModelRef = Annotated[ModelForm, BeforeValidator(_folder)]
Command = Annotated[list[str], Field(min_length=1)]


class FeaturesForm(_Form):
    """Engine-neutral features of a server. Sizes are in tokens."""

    streaming_session: bool = True
    page_size: Size = 1
    chunked_prefill: Size | None = 512
    mixed_chunk: bool = False
    context_length: Size = 4096
    pool_tokens: Size | None = 65536
    max_running: Size = 16
    retract: RetractForm | None = None
    speculative: SpeculativeForm | None = None
    prefix_cache: bool = True
    tp: Size = 1
    gpu_memory: Share | None = None
    strict: bool = True


class EngineForm(_Form):
    """What one engine needs beside the neutral features."""

    args: Args = {}
    env: Env = {}
    command: Command | None = None
    model: ModelRef | None = None
    features: FeaturesForm = FeaturesForm()


class CellForm(FeaturesForm):
    """One server configuration: features, raw settings, and what runs on it."""

    args: Args = {}
    env: Env = {}
    command: Command | None = None
    model: ModelRef | None = None
    workloads: Workloads = []
    exercise: Literal["required", "optional"] = "required"
    known: Known = []
    engines: dict[EngineName, EngineForm] = {}


class IncludeForm(CellForm):
    """A cell's settings for every combination that does not contradict them, or for a new one."""

    name: str | None = None
    cell: str | None = None


class ExcludeForm(FeaturesForm):
    """Values that a combination must have, all of them, to be left out."""

    cell: str | None = None


class AxesForm(_Form):
    """Features with several values each; cells are made for every combination."""

    streaming_session: Annotated[list[bool], Field(min_length=1)] = []
    page_size: Annotated[list[Size], Field(min_length=1)] = []
    chunked_prefill: Annotated[list[Size | None], Field(min_length=1)] = []
    mixed_chunk: Annotated[list[bool], Field(min_length=1)] = []
    context_length: Annotated[list[Size], Field(min_length=1)] = []
    pool_tokens: Annotated[list[Size | None], Field(min_length=1)] = []
    max_running: Annotated[list[Size], Field(min_length=1)] = []
    retract: Annotated[list[RetractForm | None], Field(min_length=1)] = []
    speculative: Annotated[list[SpeculativeForm | None], Field(min_length=1)] = []
    prefix_cache: Annotated[list[bool], Field(min_length=1)] = []
    tp: Annotated[list[Size], Field(min_length=1)] = []
    gpu_memory: Annotated[list[Share | None], Field(min_length=1)] = []
    strict: Annotated[list[bool], Field(min_length=1)] = []


class MatrixForm(_Form):
    """A matrix file."""

    kvcheck: Any = None  # judged before everything else, with words of its own
    family: str | None = None
    engine: EngineName = "reference"
    model: ModelRef | None = None
    command: Command | None = None
    defaults: CellForm = CellForm()
    cells: dict[str, Annotated[CellForm, BeforeValidator(_empty)]] = {}
    axes: AxesForm = AxesForm()
    include: list[IncludeForm] = []
    exclude: list[ExcludeForm] = []
    engines: dict[EngineName, EngineForm] = {}
    workloads: Workloads = []


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a matrix, for editors; the short forms that the loader takes are in it."""
    schema = MatrixForm.model_json_schema()
    name_or_map = {"anyOf": [{"type": "string"}, {"type": "object", "minProperties": 1, "maxProperties": 1}]}
    for form in (schema, *schema["$defs"].values()):
        properties = form.get("properties", {})
        if "known" in properties:
            many = properties["known"]
            properties["known"] = {"anyOf": [many["items"], {"type": "array", "items": many["items"]}]}
        if "workloads" in properties:
            properties["workloads"] = {"anyOf": [{"const": "all"}, {"type": "array", "items": name_or_map}]}
        if "model" in properties:
            properties["model"] = {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/ModelForm"}]}
        env = properties.get("env")
        if env is not None:
            env["additionalProperties"] = {"type": ["string", "number", "boolean", "null"]}
    cells = schema["properties"]["cells"]
    cells["additionalProperties"] = {"anyOf": [{"$ref": "#/$defs/CellForm"}, {"type": "null"}]}
    schema["properties"]["kvcheck"] = {"const": VERSION, "description": "the version of the format"}
    schema["required"] = ["kvcheck"]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}

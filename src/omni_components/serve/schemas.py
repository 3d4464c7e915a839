"""What clients send and get: OpenAI's image endpoint, with the fields that diffusion models add."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

MOST_SEED = 2**63 - 1  # what a torch generator takes
Text = Annotated[str, Field(max_length=100_000)]


class ImageRequest(BaseModel):
    """The body of ``POST /v1/images/generations``; the service's own limits are narrower than some of these."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: Annotated[Text, Field(min_length=1, description="What to draw.")]
    model: Annotated[Text | None, Field(description="The id of the model; may be left out.")] = None
    n: Annotated[int | None, Field(ge=1, le=1000, description="Pictures.")] = None
    size: Annotated[
        str | None,
        Field(pattern=r"^(auto|[1-9][0-9]{0,4}x[1-9][0-9]{0,4})$", description="WIDTHxHEIGHT, or auto."),
    ] = None
    seed: Annotated[
        int | None, Field(ge=0, le=MOST_SEED, description="Of the first picture; the next has the next.")
    ] = None
    negative_prompt: Annotated[Text | None, Field(description="What not to draw.")] = None
    num_inference_steps: Annotated[int | None, Field(ge=1, le=100_000)] = None
    guidance_scale: Annotated[float | None, Field(ge=0, le=100, allow_inf_nan=False)] = None
    response_format: Annotated[
        Literal["b64_json"] | None, Field(description="Pictures are not kept, so there is no url.")
    ] = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    output_compression: Annotated[int | None, Field(ge=0, le=100)] = None
    background: Literal["auto", "opaque"] | None = None
    quality: Annotated[
        Literal["auto", "low", "medium", "high", "standard", "hd"] | None,
        Field(description="Accepted; num_inference_steps says how well."),
    ] = None
    style: Annotated[Literal["vivid", "natural"] | None, Field(description="Accepted.")] = None
    moderation: Annotated[Literal["auto", "low"] | None, Field(description="Accepted.")] = None
    user: Annotated[Text | None, Field(description="Accepted; it is not kept.")] = None
    stream: Literal[False] | None = None
    partial_images: Literal[0] | None = None


class ImageDatum(BaseModel):
    """One picture."""

    b64_json: str
    seed: Annotated[int, Field(description="Gives the same picture again.")]


class ImageResponse(BaseModel):
    """The answer, one datum per picture."""

    created: int
    data: list[ImageDatum]
    output_format: Literal["png", "jpeg", "webp"]
    size: str


class ModelCard(BaseModel):
    """The model, as OpenAI lists it."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "omni-components"


class ModelList(BaseModel):
    """The one model that is served."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Status(BaseModel):
    """Of ``/health`` and ``/ready``."""

    status: Literal["ok", "draining", "stopped"]


class Invariant(BaseModel):
    """What ``ledger.check()`` says at this moment."""

    holds: bool
    problem: str | None = None


class ComponentState(BaseModel):
    """One component: where it is, and what it has cost."""

    name: str
    role: str
    resident: bool
    state: Literal["host", "arriving", "loading", "device", "evicting"]
    bytes: int
    pins: int
    loads: int
    evictions: int
    bytes_in: int
    bytes_out: int
    seconds: float
    waited: float


class Work(BaseModel):
    """Requests and pictures so far, and now."""

    waiting: int
    running: int
    max_queue: int
    requests: int
    pictures: int
    batches: int


class Residency(BaseModel):
    """The answer of ``GET /v1/residency``."""

    replica: Annotated[str | None, Field(description="Which copy of the service this is.")]
    model: str
    device: str
    offload: bool
    device_bytes: int
    peak_bytes: int
    predicted_peak: int
    invariant: Invariant
    components: list[ComponentState]
    work: Work


class ErrorFacts(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Every answer that is no success."""

    error: ErrorFacts
